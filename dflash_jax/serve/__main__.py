"""Serve a target with its DFlash draft: ``python -m dflash_jax.serve [--model X --draft Y]``."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Generator, Sequence

import jax
import uvicorn
from prometheus_client import disable_created_metrics

from dflash_jax.compilation_cache import keep_compilations
from dflash_jax.generate import HONOURED_DEFAULTS, LLM, load
from dflash_jax.serve.api import ApiConfig
from dflash_jax.serve.app import create_app
from dflash_jax.serve.args import ServeArgs, parse_args
from dflash_jax.serve.async_engine import AsyncEngine
from dflash_jax.serve.metrics import Metrics
from dflash_jax.serve.selftest import SelfTest, canned_prompt, run_self_test

logger = logging.getLogger("dflash_jax.serve")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.print_config:
        print(json.dumps(args.public(), indent=2))
        return 0
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if args.log_level != "debug":
        logging.getLogger("jax").setLevel(logging.WARNING)  # it lists the backends it does not find
    disable_created_metrics()  # a second series for every counter, of use to nobody
    keep_compilations(args.compilation_cache_dir)
    return asyncio.run(serve(args))


async def serve(args: ServeArgs) -> int:
    """Until a signal. 0: stopped as asked; 1: the engine failed, at start or later."""

    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listener = socket.create_server((args.host, args.port), family=family, backlog=2048)
    except OSError as error:
        logger.error("cannot listen on %s, port %d: %s", args.host, args.port, error)
        return 1

    def prepare() -> LLM:
        llm, self_test = start_up(args)
        metrics.self_test(self_test)
        metrics.watch_compilations()
        return llm

    engine = AsyncEngine(prepare, max_queued=args.max_queued_requests)
    metrics = Metrics(lambda: engine.snapshot)
    config = ApiConfig(
        model_name=args.served_model_name,
        api_key=args.api_key,
        max_request_bytes=args.max_request_bytes,
        info=args.public(),
    )
    server = Server(
        uvicorn.Config(
            create_app(engine, metrics, config),
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_now() -> None:
        if stop.is_set():  # asked twice
            server.force_exit = True
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_now)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    settled = asyncio.create_task(engine.settled.wait())
    await asyncio.wait((serving, stopping, settled), return_when=asyncio.FIRST_COMPLETED)
    if engine.status == "ready":
        logger.info("ready: http://%s:%d", args.host, listener.getsockname()[1])
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    logger.info("stopping: running requests get %g s", args.shutdown_timeout)
    if not await engine.drain(args.shutdown_timeout):
        logger.warning("requests were cut off: --shutdown-timeout has passed")
    server.should_exit = True
    await serving
    logger.info("stopped")
    status = 1 if engine.status == "failed" else 0
    if engine.busy:
        # Still compiling, or a device that hangs: the interpreter would abort under the thread.
        logging.shutdown()
        os._exit(status)
    return status


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would stop listening before requests are done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def start_up(args: ServeArgs) -> tuple[LLM, SelfTest]:
    """Load, compile and test, a log line a phase. Raises ValueError on what cannot be served."""
    platform = jax.default_backend()
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    logger.info("loading %s in %s on %s", args.model or "the embedded pair", dtype, platform)
    started = time.perf_counter()
    llm = load(
        args.model,
        args.draft,
        dtype=dtype,
        data_parallel=args.data_parallel_size,
        model_parallel=args.tensor_parallel_size,
        engine=args.engine_config(),
    )
    if llm.tokenizer is None:
        raise ValueError(f"{llm.name} has no tokenizer, and the API speaks text")
    if args.chat_template is not None:
        llm.tokenizer.chat_template = args.chat_template.read_text(encoding="utf-8")
    engine = llm.engine
    speculation = f"b = {engine.block_size}" if engine.block_size > 1 else "plain decoding"
    logger.info(
        "loaded %s in %.1f s: %s, context %d, %d requests at once",
        llm.name, time.perf_counter() - started, speculation, engine.max_model_len,
        engine.config.max_num_seqs,
    )  # fmt: skip
    for name in HONOURED_DEFAULTS:  # load has warned of the others
        if name in llm.defaults:
            value = llm.defaults[name]
            logger.info("generation_config.json: %s = %s is the default of requests", name, value)
    started = time.perf_counter()
    engine.warm_up(lambda line: logger.info("%s", line))
    logger.info("compiled everything in %.1f s", time.perf_counter() - started)
    return llm, run_self_test(engine, canned_prompt(llm.tokenizer))


if __name__ == "__main__":
    sys.exit(main())
