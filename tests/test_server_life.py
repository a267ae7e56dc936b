"""The server's life: starting, full, failing, draining; and a real process to SIGTERM."""

import asyncio
import concurrent.futures
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from serving import run_server, solo
from tiny_model import write_model

from dflash_jax.config_keys import ConfigError
from dflash_jax.engine import EngineConfig
from dflash_jax.generate import LLM, load
from dflash_jax.request import Request, SamplingParams, Update

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=128, prefill_tokens=32)
SHORT = {"prompt": "a", "max_tokens": 2}
LONG = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


class Gate:
    """Holds every step of an engine until it is opened; fails them when told to."""

    def __init__(self, llm: LLM):
        self.llm, self.broken = llm, False
        self.entered, self.open = threading.Event(), threading.Event()
        self._step = llm.engine.step
        llm.engine.step = self.step  # pyright: ignore[reportAttributeAccessIssue]

    def step(self) -> list[Update]:
        self.entered.set()
        assert self.open.wait(60)
        if self.broken:
            raise RuntimeError("device lost")
        return self._step()


@pytest.fixture
def gate(folders) -> Gate:
    return Gate(load(*folders, engine=CONFIG))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_503_until_ready(gate):
    go = threading.Event()

    def prepare() -> LLM:
        assert go.wait(60)
        gate.open.set()
        return gate.llm

    with run_server(prepare, wait=False) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 503
        for path, body in (("/v1/completions", SHORT), ("/generate", {}), ("/tokenize", {})):
            response = server.post(path, body)
            assert response.status_code == 503
            assert "starting" in response.json()["error"]["message"]
            assert response.headers["retry-after"]
        assert server.get("/v1/models").status_code == 503
        go.set()
        wait_until(lambda: server.get("/ready").status_code == 200)
        assert server.post("/v1/completions", SHORT).status_code == 200


def test_a_model_that_does_not_load_is_said_on_health(caplog):
    def prepare() -> LLM:
        raise ValueError("no such model")

    with run_server(prepare) as server:
        (said,) = [r for r in caplog.records if r.levelname == "ERROR"]
        assert said.getMessage() == "cannot serve: no such model" and said.exc_info is None
        assert server.get("/health").status_code == 503
        assert "no such model" in server.get("/health").json()["failure"]
        assert server.post("/v1/completions", SHORT).status_code == 503


def test_429_when_rows_and_queue_are_full(gate):
    with run_server(lambda: gate.llm, max_queued=1) as server:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(server.post, "/v1/completions", SHORT) for _ in range(3)]
            wait_until(lambda: len(server.engine.live_ids()) == 3)
            response = server.post("/v1/completions", SHORT)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "rate_limit_error"
            two = server.post("/v1/completions", {**SHORT, "prompt": ["a", "b"]})
            assert two.status_code == 429
            assert server.get("/health").status_code == 200
            gate.open.set()
            assert [f.result().status_code for f in futures] == [200] * 3
        assert server.post("/v1/completions", SHORT).status_code == 200
        assert server.metric("dflash:requests_rejected_total") == 2


def test_an_id_in_use_is_refused(gate):
    with run_server(lambda: gate.llm) as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            body = {**SHORT, "request_id": "one"}
            future = pool.submit(server.post, "/v1/completions", body)
            wait_until(lambda: server.engine.live_ids() == ("one",))
            response = server.post("/v1/completions", body)
            assert response.status_code == 400 and "in use" in response.text
            gate.open.set()
            assert future.result().json()["id"] == "one"
        assert server.post("/v1/completions", body).status_code == 200


def test_a_retry_sees_nothing_of_the_request_it_replaces(gate):
    """The first client leaves during a step and comes back under its id, with another prompt."""
    sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)

    with run_server(lambda: gate.llm) as server:

        async def leave_and_retry() -> list[Update]:
            first = await server.engine.submit([Request("one", (5, 6, 7), sampling)])
            await asyncio.to_thread(gate.entered.wait, 60)
            first.close()
            retry = asyncio.create_task(server.engine.submit([Request("one", (8, 9), sampling)]))
            await asyncio.sleep(0)  # it is registered, and waits for the step to end
            assert server.engine.live_ids() == ("one",)
            gate.open.set()
            return [update async for update in await retry]

        updates = asyncio.run_coroutine_threadsafe(leave_and_retry(), server.loop).result(60)
    assert {update.request_id for update in updates} == {"one"}
    tokens, reason = solo(gate.llm, (8, 9), max_new_tokens=5, ignore_eos=True)
    assert [token for update in updates for token in update.tokens] == tokens
    assert updates[-1].finish_reason == reason
    assert solo(gate.llm, (5, 6, 7), max_new_tokens=1)[0] != tokens[:1]


def test_a_failing_step_fails_its_requests_and_health(gate):
    with run_server(lambda: gate.llm) as server:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            bodies = [SHORT, {**LONG, "stream": True}, LONG]
            futures = [pool.submit(server.post, "/v1/completions", b) for b in bodies]
            wait_until(lambda: len(server.engine.live_ids()) == 3)
            gate.broken = True
            gate.open.set()
            answers = [f.result() for f in futures]
        for answer, body in zip(answers, bodies, strict=True):
            assert "device lost" in answer.text
            assert answer.status_code == 500 or body.get("stream")
        assert server.get("/health").status_code == 503
        assert "device lost" in server.get("/health").json()["failure"]
        response = server.post("/v1/completions", SHORT)
        assert response.status_code == 503 and "device lost" in response.text


def test_the_key_is_asked_for_everywhere_but_health(gate):
    gate.open.set()
    with run_server(lambda: gate.llm, api_key="schlüssel") as server:
        for headers in (
            {},
            {"Authorization": "Bearer no"},
            {"Authorization": "schlüssel".encode()},
        ):
            for path in ("/v1/models", "/metrics", "/server_info", "/nowhere"):
                response = server.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert "schl" not in response.text
            assert server.post("/v1/completions", SHORT, headers=headers).status_code == 401
        key = {"Authorization": "Bearer schlüssel".encode()}
        assert server.post("/v1/completions", SHORT, headers=key).status_code == 200
        assert server.get("/health").status_code == server.get("/ready").status_code == 200


def test_draining_refuses_new_requests_and_finishes_old_ones(gate):
    with (
        run_server(lambda: gate.llm) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(server.post, "/v1/completions", LONG)
        wait_until(server.engine.live_ids)
        drained = asyncio.run_coroutine_threadsafe(server.engine.drain(30), server.loop)
        wait_until(lambda: server.get("/health").json()["status"] == "draining")
        response = server.post("/v1/completions", SHORT)
        assert response.status_code == 503 and "draining" in response.text
        gate.open.set()
        assert future.result().json()["usage"]["completion_tokens"] == 100
        assert drained.result()


def test_draining_cuts_off_what_takes_too_long(gate):
    with run_server(lambda: gate.llm) as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(server.post, "/v1/completions", LONG)
            wait_until(server.engine.live_ids)
            drained = asyncio.run_coroutine_threadsafe(server.engine.drain(0.1), server.loop)
            answer = future.result()
            gate.open.set()
        assert answer.status_code == 503 and "shutting down" in answer.text
        assert not drained.result()
        gate.llm.engine.scheduler.check_integrity()


def with_generation_config(folders, folder: Path, values: object) -> tuple[Path, Path]:
    target, draft = folders
    shutil.copytree(target, folder / "target")
    (folder / "target" / "generation_config.json").write_text(json.dumps(values))
    return folder / "target", draft


def test_what_the_checkpoint_asks_for_and_does_not_get_is_warned_of(folders, tmp_path, caplog):
    values = {
        "temperature": 0.6, "top_p": None, "do_sample": True, "repetition_penalty": 1.05,
        "length_penalty": 1.0, "no_repeat_ngram_size": 0, "eos_token_id": 2, "use_cache": True,
        "_from_model_config": True, "output_scores": False, "max_length": 20,
    }  # fmt: skip
    llm = load(*with_generation_config(folders, tmp_path, values), engine=CONFIG)
    assert llm.defaults == {
        "temperature": 0.6, "do_sample": True, "repetition_penalty": 1.05, "length_penalty": 1.0,
        "no_repeat_ngram_size": 0,
    }  # fmt: skip
    told = [r.message for r in caplog.records if "not honoured" in r.message]
    assert len(told) == 1 and "repetition_penalty = 1.05" in told[0]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_k": 5.5}, "top_k must be of type int, got 5.5"),
        ({"do_sample": "yes"}, "do_sample must be of type bool, got 'yes'"),
    ],
)
def test_a_bad_generation_config_is_one_error_at_load(folders, tmp_path, values, reason):
    paths = with_generation_config(folders, tmp_path, values)
    with pytest.raises(ConfigError, match=rf"generation_config.json: {reason}"):
        load(*paths, engine=CONFIG)


class Process:
    """``python -m dflash_jax.serve`` with its log."""

    def __init__(self, *flags: str):
        port = () if "--port" in flags else ("--port", "0")
        command = [sys.executable, "-m", "dflash_jax.serve", *port, *flags]
        root = Path(__file__).parents[1]
        self.log: list[str] = []
        self.popen = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr:
            self.log += self.popen.stderr

    def url(self) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.popen.poll() is None:
            for line in self.log:
                if "ready: http" in line:
                    return line.rpartition("ready: ")[2].strip()
            time.sleep(0.05)
        raise AssertionError("".join(self.log))

    def end(self) -> tuple[int, str]:
        code = self.popen.wait(60)
        self._reader.join(10)
        return code, "".join(self.log)


def test_a_process_from_start_to_sigterm(folders, request):
    """SIGTERM while an answer streams: it is finished, and the exit status is 0."""
    target, draft = folders
    cache = request.config.cache.mkdir("serve_xla")
    process = Process(
        "--model", str(target), "--draft", str(draft), "--max-num-seqs", "1",
        "--chunked-prefill-size", "32", "--max-model-len", "512", "--api-key", "hush",
        "--served-model-name", "tiny", "--compilation-cache-dir", str(cache),
    )  # fmt: skip
    try:
        url = process.url()
        headers = {"Authorization": "Bearer hush"}
        body = {"prompt": "a", "max_tokens": 450, "ignore_eos": True, "stream": True, "seed": 1}
        with (
            httpx.Client(trust_env=False, headers=headers, timeout=60) as client,
            client.stream("POST", url + "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            first = next(lines)
            process.popen.send_signal(signal.SIGTERM)
            rest = [first, *lines]
        events = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
        code, log = process.end()
    finally:
        process.popen.kill()
        process.popen.wait()
    assert code == 0, log
    assert "hush" not in log
    assert "speculation equals plain decoding" in log
    for phase in ("loading", "loaded", "compiled prefill", "ready", "stopping", "stopped"):
        assert phase in log


def test_sigterm_while_starting_exits_0(folders, tmp_path):
    target, draft = folders
    process = Process(
        "--model", str(target), "--draft", str(draft), "--compilation-cache-dir", str(tmp_path)
    )  # fmt: skip
    try:
        wait_until(lambda: any("requests at once" in line for line in process.log))
        process.popen.send_signal(signal.SIGTERM)
        code, log = process.end()
    finally:
        process.popen.kill()
        process.popen.wait()
    assert code == 0, log


def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = Process("--port", str(taken.getsockname()[1]))
        code, log = process.end()
    assert code == 1
    assert "cannot listen on 127.0.0.1" in log and "Traceback" not in log


def test_a_process_that_cannot_load_exits_1(tmp_path):
    process = Process("--model", str(tmp_path), "--compilation-cache-dir", str(tmp_path / "c"))
    try:
        code, log = process.end()
    finally:
        process.popen.kill()
        process.popen.wait()
    assert code == 1
    assert str(tmp_path) in log
