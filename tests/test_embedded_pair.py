"""The main job with the real model: the embedded pair through the library, and served to openai."""

import concurrent.futures
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

import dflash_jax
from dflash_jax.generate import LLM
from dflash_jax.serve.args import ServeArgs

pytestmark = pytest.mark.slow  # fetches 98 MB and compiles a 30-layer model

QUESTION = "What is the capital of France?"
OTHERS = (
    "List three fruits.",
    "What is 12 times 7?",
    "Who wrote Hamlet?",
    "Name a planet.",
    "Write a haiku about the sea.",
    "Explain gravity to a child.",
    "Write a Python function that adds two numbers.",
    "What is the boiling point of water?",
)
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def llm() -> LLM:
    config = dflash_jax.EngineConfig(max_num_seqs=1, max_model_len=512, prefill_tokens=128)
    return dflash_jax.load(engine=config)


def test_speculation_speaks_the_targets_own_text_and_accepts_drafts(llm: LLM) -> None:
    config = dflash_jax.EngineConfig(
        max_num_seqs=1, max_model_len=512, prefill_tokens=128, speculation=False
    )
    plain = dflash_jax.load(engine=config)
    for question in OTHERS[:4]:
        chat = [{"role": "user", "content": question}]
        for temperature in (0.0, 0.8):
            settings = {"max_new_tokens": 40, "temperature": temperature, "seed": 3}
            speculative = llm.generate(chat, **settings)
            assert speculative.output_ids == plain.generate(chat, **settings).output_ids
    # Acceptance is a test: a wrong tap, RoPE or norm would leave the text right and tau at 1.
    count = llm.generate([{"role": "user", "content": "Count from 1 to 20."}], max_new_tokens=64)
    assert count.tau > 1.5, count.statistics


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[openai.OpenAI]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    flags = ["--port", str(port), "--max-model-len", "512", "--max-num-batched-tokens", "128"]
    command = [sys.executable, "-m", "dflash_jax.serve", *flags]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[1]
        )
    try:
        _wait_until_ready(server, f"http://127.0.0.1:{port}/ready", log)
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", timeout=300) as client:
            yield client
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()


def _wait_until_ready(server: subprocess.Popen, url: str, log: Path) -> None:
    until = time.monotonic() + 900
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text())


def ask(client: openai.OpenAI, question: str, **settings) -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=32, **settings
    )
    return answer.choices[0].message.content or ""


def test_the_capital_of_france_is_paris_streamed_and_not(client: openai.OpenAI) -> None:
    whole = ask(client, QUESTION, temperature=0)
    assert "Paris" in whole
    with client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=32,
        temperature=0,
        stream=True,
    ) as stream:
        pieces = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert "".join(pieces) == whole


def test_eight_at_once_equal_their_solo_runs(client: openai.OpenAI) -> None:
    """Faults 15, 32 and 33 with the real model."""
    settings = [{"temperature": 0.7 * (i % 2), "seed": i} for i in range(len(OTHERS))]
    solo = [ask(client, q, **s) for q, s in zip(OTHERS, settings, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(len(OTHERS)) as pool:
        together = list(pool.map(lambda q, s: ask(client, q, **s), OTHERS, settings))
    assert together == solo


def test_the_default_is_the_embedded_pair() -> None:
    assert (ServeArgs().model, ServeArgs().draft) == (None, None)
