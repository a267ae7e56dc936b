"""Answers in OpenAI's and SGLang's shapes, whole and as server-sent events."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_jax.serve.answers import Answer
from dflash_jax.serve.errors import ApiError
from dflash_jax.text import Delta

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts what was returned, stop and EOS tokens included."""
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


class OpenAIShape:
    """Objects of one answer: the same id, time and model on all of them."""

    def __init__(self, answer_id: str, model: str, *, chat: bool):
        self.chat, self.id, self.model = chat, answer_id, model
        self.created = int(time.time())

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for i, answer in enumerate(answers):
            message = {"role": "assistant", "content": answer.text}
            content = {"message": message} if self.chat else {"text": answer.text}
            end = {"logprobs": None, "finish_reason": answer.finish_reason}
            choices.append({"index": i, **content, **end})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._object(kind, choices), "usage": usage(answers)}

    async def events(
        self,
        deltas: AsyncIterator[tuple[int, Delta]],
        answers: Sequence[Answer],
        *,
        include_usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        """The role first (chat), then a chunk a step that has text, the reason with the last."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        extra = {"usage": None} if include_usage else {}

        def chunk(i: int, text: str, reason: str | None, role: dict[str, str]) -> bytes:
            content = {"delta": {**role, "content": text}} if self.chat else {"text": text}
            choice = {"index": i, **content, "logprobs": None, "finish_reason": reason}
            return event({**self._object(kind, [choice]), **extra})

        if self.chat:
            for i in range(len(answers)):
                yield chunk(i, "", None, {"role": "assistant"})
        async for i, delta in deltas:
            if delta.text or delta.finish_reason is not None:
                yield chunk(i, delta.text, delta.finish_reason, {})
        if include_usage:
            yield event({**self._object(kind, []), "usage": usage(answers)})
        yield DONE


def native(answer: Answer) -> dict[str, Any]:
    """SGLang's object. ``spec_accept_length`` is SGLang's figure: completion tokens over verify
    steps, prefill's token included."""
    reason: dict[str, Any] | None = None
    if answer.finish_reason is not None:
        reason = {"type": answer.finish_reason}
        if answer.finish_reason == "length":
            reason["length"] = len(answer.tokens)
    return {
        "text": answer.text,
        "output_ids": answer.tokens,
        "meta_info": {
            "id": answer.request_id,
            "finish_reason": reason,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.tokens),
            "cached_tokens": 0,
            "e2e_latency": answer.seconds,
            "spec_verify_ct": answer.cycles,
            "spec_accept_length": len(answer.tokens) / answer.cycles if answer.cycles else 0.0,
            "spec_draft_token_num": answer.drafted,
            "spec_accept_token_num": answer.accepted,
        },
    }


async def native_events(
    deltas: AsyncIterator[tuple[int, Delta]], answers: Sequence[Answer], *, many: bool
) -> AsyncGenerator[bytes, None]:
    """As SGLang streams: every event has all the text so far."""
    async for i, delta in deltas:
        if delta.text or delta.finish_reason is not None:
            yield event({**native(answers[i]), **({"index": i} if many else {})})
    yield DONE


class EventStream(Response):
    """Sends events as they come; calls ``close`` at the end, at once when the client goes."""

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events):
                await unless_disconnected(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:  # the status is sent already: the error is the last event
            body = event(error.body())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Any) -> Any:
    """The result of ``work``, which is cancelled (and None returned) when the client goes first."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
