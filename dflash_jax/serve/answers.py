"""A choice of an answer as it grows: updates in, text deltas and counts out."""

import time
from collections.abc import AsyncIterator, Sequence

from dflash_jax.request import Update
from dflash_jax.serve.async_engine import Submission
from dflash_jax.serve.metrics import Metrics
from dflash_jax.text import Delta, TextStream


class Answer:
    """What one request has returned so far. Everything counts returned tokens only."""

    def __init__(self, request_id: str, prompt_tokens: int, stream: TextStream):
        self.request_id, self.prompt_tokens = request_id, prompt_tokens
        self.text, self.tokens = "", list[int]()
        self.cycles = self.drafted = self.accepted = 0
        self.finish_reason: str | None = None
        self.started = self.last = time.perf_counter()
        self._stream = stream

    @property
    def seconds(self) -> float:
        return self.last - self.started

    def take(self, update: Update, metrics: Metrics) -> Delta:
        delta = self._stream.feed(update.tokens, update.finish_reason)
        now, count = time.perf_counter(), len(delta.tokens)
        if count:
            metrics.generation_tokens.inc(count)
            if self.tokens:
                metrics.inter_token.observe((now - self.last) / count)
            else:
                metrics.prompt_tokens.inc(self.prompt_tokens)
                metrics.first_token.observe(now - self.started)
            self.last = now
        if update.committed is not None:
            # Cut where the output ends: what was accepted beyond is nobody's.
            accepted = min(update.committed - 1, count)
            self.cycles += 1
            self.drafted += update.drafted
            self.accepted += accepted
            metrics.cycle(update.drafted, accepted, count)
        self.text += delta.text
        self.tokens += delta.tokens
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            metrics.finished.labels(delta.finish_reason).inc()
            metrics.end_to_end.observe(self.seconds)
        return delta


async def deltas(
    submission: Submission, answers: Sequence[Answer], metrics: Metrics
) -> AsyncIterator[tuple[int, Delta]]:
    """(index, delta) of every answer until all have ended; frees everything however it is left."""
    index = {answer.request_id: i for i, answer in enumerate(answers)}
    try:
        async for update in submission:
            i = index[update.request_id]
            delta = answers[i].take(update, metrics)
            if delta.finish_reason is not None and update.finish_reason is None:
                submission.stop(update.request_id)  # a stop string, which the engine cannot see
            yield i, delta
    finally:
        submission.close()
        metrics.aborted.inc(sum(answer.finish_reason is None for answer in answers))
