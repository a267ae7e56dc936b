"""A real server on 127.0.0.1 in a thread of the test process, over a tiny pair."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import httpx
import openai
import uvicorn

from dflash_jax.generate import LLM
from dflash_jax.request import Request, SamplingParams
from dflash_jax.serve.api import ApiConfig
from dflash_jax.serve.app import create_app
from dflash_jax.serve.async_engine import AsyncEngine
from dflash_jax.serve.metrics import Metrics

MODEL = "tiny"


@dataclasses.dataclass
class Running:
    url: str
    engine: AsyncEngine
    metrics: Metrics
    loop: asyncio.AbstractEventLoop

    def post(self, path: str, body: object, **options) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300, trust_env=False, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return httpx.get(self.url + path, timeout=300, trust_env=False, **options)

    def openai(self, **options) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(trust_env=False)
        return openai.OpenAI(
            base_url=self.url + "/v1", api_key="none", max_retries=0, http_client=http, **options
        )

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(
            float(x.rpartition(" ")[2]) for x in lines if x.partition("{")[0].split(" ")[0] == name
        )


@contextlib.contextmanager
def run_server(
    prepare: Callable[[], LLM], *, max_queued: int = 64, wait: bool = True, **config
) -> Iterator[Running]:
    """Serve until the block ends; ``wait``: until the engine is ready (or has failed)."""
    started = threading.Event()
    running: list[Running] = []
    servers: list[uvicorn.Server] = []
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        engine = AsyncEngine(lambda: watch(prepare), max_queued=max_queued)
        metrics = Metrics(lambda: engine.snapshot)
        unwatch: list[Callable[[], None]] = []

        def watch(prepare):
            llm = prepare()
            unwatch.append(metrics.watch_compilations())
            return llm

        app = create_app(engine, metrics, ApiConfig(model_name=MODEL, **config))
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=5)
        )
        servers.append(server)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        if wait:
            await engine.settled.wait()
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        port = server.servers[0].sockets[0].getsockname()[1]
        running.append(Running(f"http://127.0.0.1:{port}", engine, metrics, loop))
        started.set()
        await ended.wait()
        await engine.drain(5.0)
        server.should_exit = True
        await serving
        for end in unwatch:
            end()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(120), "the server did not start"
    try:
        yield running[0]
    finally:
        stop[0]()
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


def solo(llm: LLM, ids: tuple[int, ...], **sampling) -> tuple[list[int], str | None]:
    """The engine's own output, alone: (token ids, finish reason)."""
    llm.engine.add(Request("solo", tuple(ids), SamplingParams(**sampling)))
    tokens, reason = [], None
    for update in llm.engine.run():
        tokens += update.tokens
        reason = update.finish_reason or reason
    return tokens, reason
