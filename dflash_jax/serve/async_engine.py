"""One thread owns the engine; the event loop talks to it through a queue.

Requests and aborts go in between two steps, updates come out after each. The loop's side is
``submit`` and ``Submission``; nothing there waits for the device.

Every request runs under an id of its own, never used twice: a client that leaves during a step and
comes back under its old id must not be handed what that step still makes for the first one.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Literal, NamedTuple, Protocol

from dflash_jax.embedded import EmbeddedModelError
from dflash_jax.engine import Engine
from dflash_jax.request import Request, Update
from dflash_jax.serve.errors import ApiError
from dflash_jax.tokenizer import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

Status = Literal["starting", "ready", "draining", "failed", "stopped"]


class Served(Protocol):
    """What the server needs of a loaded model: ``dflash_jax.generate.LLM`` is one."""

    engine: Engine
    tokenizer: PreTrainedTokenizerFast | None
    name: str
    defaults: dict


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The scheduler after the last step, for metrics: read by any thread."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    free_pages: int = 0

    @classmethod
    def of(cls, engine: Engine) -> "Snapshot":
        scheduler = engine.scheduler
        pages = sum(a.num_pages - 1 for a in scheduler.allocators)
        free = sum(a.num_free for a in scheduler.allocators)
        return cls(len(scheduler.running), len(scheduler.waiting), pages, free)


@dataclasses.dataclass(frozen=True)
class _Add:
    request: Request
    added: asyncio.Future[None]


@dataclasses.dataclass(frozen=True)
class _Abort:
    engine_id: str


class _Stop:
    pass


class Submission:
    """The updates of one or more requests that were submitted together, as they come."""

    def __init__(self, owner: "AsyncEngine", engine_ids: dict[str, str]):
        """``engine_ids``: the engine's id of each request, by the client's."""
        self._owner = owner
        self._open = engine_ids
        self.updates: asyncio.Queue[Update | ApiError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Ends when every request has. Raises ApiError when the engine fails or shuts down."""
        while self._open:
            update = await self.updates.get()
            if isinstance(update, ApiError):
                raise update
            if update.request_id not in self._open:
                continue  # on its way when the request was stopped
            if update.finish_reason is not None:
                del self._open[update.request_id]
            yield update

    def stop(self, request_id: str) -> None:
        """End one request here and free what it holds within one step."""
        engine_id = self._open.pop(request_id, None)
        if engine_id is not None:
            self._owner.release(engine_id)

    def close(self) -> None:
        """End whatever is still open; always call it."""
        for request_id in tuple(self._open):
            self.stop(request_id)


class _Live(NamedTuple):
    client_id: str
    submission: Submission


class AsyncEngine:
    """Runs ``prepare`` (load, compile, self-test) and then the engine on a thread of its own."""

    def __init__(
        self,
        prepare: Callable[[], Served],
        *,
        max_queued: int,
    ):
        self.status: Status = "starting"
        self.failure: str | None = None
        self.snapshot = Snapshot()
        self._prepare, self._max_queued = prepare, max_queued
        self._served: Served | None = None
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._live: dict[str, _Live] = {}  # by the engine's id
        self._engine_ids = map(str, itertools.count())
        self._adding: set[asyncio.Future[None]] = set()
        self._idle, self.settled = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        # A daemon, so that a compilation that nobody waits for cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # The event loop's side

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def served(self) -> Served:
        """The loaded model. Raises ApiError 503 unless requests are being admitted."""
        if self.status == "failed":
            raise ApiError(503, f"the engine has failed: {self.failure}", code="engine_failed")
        if self.status != "ready" or self._served is None:
            raise ApiError(503, f"the server is {self.status}", code=self.status, retry_after=5)
        return self._served

    @property
    def busy(self) -> bool:
        """Whether the thread still runs; a compilation cannot be interrupted."""
        return self._thread.is_alive()

    def check_room(self, requests: int) -> None:
        """Raises ApiError: 400 for more requests than ever fit, 429 while they do not, 503."""
        capacity = self.served.engine.config.max_num_seqs + self._max_queued
        if requests > capacity:
            raise ApiError(400, f"{requests} prompts at once; accepted: {capacity}", param="prompt")
        if len(self._live) + requests > capacity:
            raise ApiError(
                429,
                f"the server is full: {len(self._live)} requests are running or waiting",
                code="queue_full",
                retry_after=1,
            )

    async def submit(self, requests: list[Request]) -> Submission:
        """Admit all or none. Raises ApiError: 400 for what cannot run, 429 when full, 503."""
        self.check_room(len(requests))
        assert self._loop is not None
        engine_ids = {request.id: next(self._engine_ids) for request in requests}
        submission = Submission(self, engine_ids)
        added = [self._loop.create_future() for _ in requests]
        for request, future in zip(requests, added, strict=True):
            engine_id = engine_ids[request.id]
            self._live[engine_id] = _Live(request.id, submission)
            self._inbox.put(_Add(dataclasses.replace(request, id=engine_id), future))
        self._idle.clear()
        self._adding.update(added)
        outcomes: list[BaseException | None] = []
        try:
            outcomes = await asyncio.gather(*added, return_exceptions=True)
        finally:
            self._adding.difference_update(added)
            error = next((e for e in outcomes if e is not None), None)
            if error is not None or not outcomes:  # refused, or the client is gone already
                submission.close()
        if error is not None:
            raise error
        return submission

    def release(self, engine_id: str) -> None:
        """Forget a request and have the engine drop it before its next step."""
        if self._live.pop(engine_id, None) is not None:
            self._inbox.put(_Abort(engine_id))
        self._note_idle()

    def abort(self, request_id: str) -> bool:
        """End a request from outside: whoever waits for it sees finish reason "abort"."""
        found = next((item for item in self._live.items() if item[1].client_id == request_id), None)
        if found is None:
            return False
        engine_id, live = found
        self.release(engine_id)
        live.submission.updates.put_nowait(Update(request_id, (), finish_reason="abort"))
        return True

    def live_ids(self) -> tuple[str, ...]:
        """The clients' ids of what runs or waits."""
        return tuple(live.client_id for live in self._live.values())

    async def drain(self, timeout: float) -> bool:
        """Admit nothing more, let requests finish for ``timeout`` seconds, stop the thread.

        False when some had to be cut off.
        """
        starting = self.status == "starting"
        if self.status != "failed":
            self.status = "draining"
        self._inbox.put(_Stop())  # acted on once nothing is left to run
        finished = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            finished = False
            self._fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        if not starting:
            await asyncio.to_thread(self._thread.join, 10.0)
        if self.status != "failed":
            self.status = "stopped"
        return finished

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            live = self._live.get(update.request_id)
            if live is None:  # its client has left
                continue
            if update.finish_reason is not None:
                del self._live[update.request_id]
            live.submission.updates.put_nowait(
                dataclasses.replace(update, request_id=live.client_id)
            )
        self._note_idle()

    def _fail_all(self, error: ApiError) -> None:
        for engine_id, live in tuple(self._live.items()):
            self.release(engine_id)
            live.submission.updates.put_nowait(error)

    def _note_idle(self) -> None:
        if not self._live:
            self._idle.set()

    def _become_ready(self) -> None:
        if self.status == "starting":
            self.status = "ready"
        self.settled.set()

    def _become_failed(self, reason: str) -> None:
        self.status, self.failure = "failed", reason
        error = ApiError(500, f"the engine has failed: {reason}", code="engine_failed")
        for future in self._adding:
            if not future.done():
                future.set_exception(error)
        self._fail_all(error)
        self.settled.set()

    # The engine thread's side

    def _run(self) -> None:
        try:
            self._served = self._prepare()
            self._tell(self._become_ready)
            self._serve(self._served.engine)
        except Exception as error:  # the boundary: every waiting request is told, and /health
            if self._served is None and isinstance(error, ValueError | EmbeddedModelError):
                logger.error("cannot serve: %s", error)  # what there is to mend, in its own words
                logger.debug("raised here", exc_info=error)
            else:
                logger.exception("the engine has failed")
            reason = f"{type(error).__name__}: {error}"
            self._tell(lambda: self._become_failed(reason))

    def _serve(self, engine: Engine) -> None:
        stopping = False
        while True:
            for command in self._commands(wait=not engine.has_work and not stopping):
                if isinstance(command, _Stop):
                    stopping = True
                else:
                    self._act(engine, command)
            if stopping and not engine.has_work:
                return
            updates = engine.step()
            self.snapshot = Snapshot.of(engine)
            if updates:
                self._tell(lambda updates=updates: self._deliver(updates))

    def _commands(self, wait: bool) -> list[_Add | _Abort | _Stop]:
        commands = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._inbox.get_nowait())
        return commands

    def _act(self, engine: Engine, command: _Add | _Abort) -> None:
        if isinstance(command, _Abort):
            engine.abort(command.engine_id)
            return
        try:
            engine.add(command.request)
        except ValueError as error:
            self._answer(command.added, ApiError(400, str(error), param="prompt"))
        else:
            self._answer(command.added, None)

    def _answer(self, future: asyncio.Future[None], error: ApiError | None) -> None:
        def settle():
            if future.done():  # its client is gone
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._tell(settle)

    def _tell(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback)
