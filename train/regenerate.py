"""Answers by the target itself, through our own engine: what a draft must learn to predict."""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_jax.engine import Engine
from dflash_jax.generate import LLM
from dflash_jax.request import FinishReason, Request, SamplingParams
from dflash_jax.statistics import loop_start
from train.answers import AnswerFile
from train.questions import Question

FEWEST = 2  # tokens of an answer: a block learns from two supervised ones in a row


@dataclasses.dataclass
class Written:
    """What a call of ``regenerate`` did: ``tokens`` are the target's own, ``left`` the questions
    that time did not reach, ``before`` those that were done already."""

    answers: int = 0
    tokens: int = 0
    skipped: int = 0
    left: int = 0
    before: int = 0


def regenerate(
    llm: LLM,
    questions: Sequence[Question],
    out: Path,
    *,
    sampling: SamplingParams,
    template_variables: Mapping[str, Any] | None = None,
    conversations: bool = False,
    seconds: float = math.inf,
) -> Written:
    """Append an answer line to ``out`` for every question that is not done there yet.

    Lines: {"id", "source", "input_ids", "loss_mask", "finish_reason"} and, on demand,
    "conversations" as text. An answer that loops is cut where its loop begins
    (docs/dflash.md, section 6), so that a draft does not learn loops; its reason is "loop".
    Each question draws with its own seed, made of ``sampling.seed`` (None: 0) and its id. After
    ``seconds`` no further question is started. Questions that do not fit or that the chat template
    refuses, and answers too short to learn from, go to ``out``.skipped with the reason.
    Raises DataError on a file that is no answer file or that another process writes.
    """
    assert llm.tokenizer is not None
    with AnswerFile(out) as file:
        waiting = [question for question in questions if question.id not in file.done]
        written = Written(before=len(questions) - len(waiting))
        asked: dict[str, tuple[Question, tuple[int, ...]]] = {}

        def requests() -> Iterator[Request]:
            """Encoded one by one while the device works: a million chats take minutes."""
            for question in waiting:
                try:
                    ids = _fitting(llm, question, sampling.max_new_tokens, template_variables)
                except ValueError as error:
                    file.skip(question.id, question.source, str(error))
                    written.skipped += 1
                    progress.ended()
                    continue
                asked[question.id] = question, ids
                seeded = dataclasses.replace(sampling, seed=question.seed(sampling.seed or 0))
                yield Request(question.id, ids, seeded)

        with (
            _Progress(len(waiting)) as progress,
            contextlib.closing(
                run_all(llm.engine, requests(), seconds=seconds, on_tokens=progress.tokens)
            ) as ended,
        ):
            for id, answer, reason in ended:
                question, ids = asked.pop(id)
                loop = loop_start(answer)
                kept = answer[:loop]
                progress.ended()
                if len(kept) < FEWEST:
                    file.skip(id, question.source, f"an answer of {len(kept)} tokens")
                    written.skipped += 1
                    continue
                record = {
                    "source": question.source,
                    "input_ids": [*ids, *kept],
                    "loss_mask": [0] * len(ids) + [1] * len(kept),
                    "finish_reason": reason if loop is None else "loop",
                }
                if conversations:
                    text = llm.tokenizer.decode(kept, skip_special_tokens=True)
                    turn = {"role": "assistant", "content": text}
                    record["conversations"] = [*question.messages, turn]
                    record |= {"tools": question.tools} if question.tools else {}
                file.write(id, record)
                written.answers += 1
                written.tokens += len(kept)
    written.left = len(waiting) - written.answers - written.skipped
    return written


def _fitting(
    llm: LLM,
    question: Question,
    max_new_tokens: int,
    template_variables: Mapping[str, Any] | None,
) -> tuple[int, ...]:
    """Raises ValueError on a question that leaves no room for a whole answer."""
    ids = question.encode(llm, template_variables)
    room = llm.engine.max_model_len - max_new_tokens
    if not 1 <= len(ids) <= room:
        raise ValueError(f"a prompt of {len(ids)} tokens, where 1 to {room} fit")
    return ids


def run_all(
    engine: Engine,
    requests: Iterable[Request],
    *,
    seconds: float = math.inf,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Generator[tuple[str, list[int], FinishReason]]:
    """Run requests at full batch; yields (id, output ids, finish reason) as each one ends.

    ``on_tokens`` hears how many tokens every step made. Closed early, it frees what it holds.
    """
    started = time.perf_counter()
    pending = iter(requests)
    answers: dict[str, list[int]] = {}
    slots = engine.config.max_num_seqs
    exhausted = False
    try:
        while True:
            # Prefill many at once: a refill of every freed slot would prefill almost empty batches.
            refill = len(answers) <= slots - max(slots // 8, 1)
            while refill and not exhausted and len(answers) < slots:
                over = time.perf_counter() - started > seconds
                request = None if over else next(pending, None)
                if request is None:
                    exhausted = True
                    break
                engine.add(request)
                answers[request.id] = []
            if not engine.has_work:
                return
            made = 0
            for update in engine.step():
                answers[update.request_id] += update.tokens
                made += len(update.tokens)
                if update.finish_reason is not None:
                    answer = answers.pop(update.request_id)
                    yield update.request_id, answer, update.finish_reason
            on_tokens(made)
    finally:
        for request_id in answers:
            engine.abort(request_id)


class _Progress:
    """A bar of answers on stderr, with tokens and their rate; in a log file a line now and then."""

    def __init__(self, total: int):
        every = 0.5 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(
            total=total, unit=" answers", mininterval=every, miniters=0, dynamic_ncols=True
        )
        self._tokens, self._started = 0, time.perf_counter()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def ended(self) -> None:
        self._bar.update(1)

    def tokens(self, count: int) -> None:
        self._tokens += count
        rate = self._tokens / (time.perf_counter() - self._started)
        self._bar.set_postfix_str(f"{self._tokens} tokens, {rate:.0f} tok/s", refresh=False)
        self._bar.update(0)  # the bar itself decides whether it is time to show it


def self_written_prompts(llm: LLM, count: int, *, seed: int, seconds: float) -> list[str]:
    """User turns that the target writes itself, from its own chat template's prefix at T = 1."""
    assert llm.tokenizer is not None
    marker = "@@user@@"
    rendered = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False
    )
    # The template writes its own special tokens; the tokenizer would put a second BOS before them.
    opening = llm.tokenizer(str(rendered).partition(marker)[0], add_special_tokens=False)
    prefix = tuple(opening["input_ids"])
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=100)
    requests = [
        Request(f"self/{i}", prefix, dataclasses.replace(sampling, seed=seed + i))
        for i in range(count)
    ]
    texts = []
    for _, answer, _ in run_all(llm.engine, requests, seconds=seconds):
        if answer[-1] in llm.pair.target_config.eos_token_ids:  # a whole turn, not a cut one
            texts.append(str(llm.tokenizer.decode(answer[:-1])).strip())
    return texts
