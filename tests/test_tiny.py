"""The tiny recipe: its target as a folder that everything opens, and a whole run until served."""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from training_process import start

import dflash_jax
from dflash_jax import EngineConfig
from dflash_jax.sharding import Sharding, make_mesh
from train.byte_tokenizer import MASK, VOCAB_SIZE
from train.metrics import read_records
from train.recipes.tiny import TINY
from train.target import TargetRecipe, make_target

assert isinstance(TINY.target, TargetRecipe)
TARGET: TargetRecipe = TINY.target


def test_questions_come_from_files_that_the_target_does_not_read() -> None:
    questions, held_out = TARGET.inputs()
    assert (len(questions), len(held_out)) == (TARGET.questions, TARGET.held_out)
    read = {path.name for path in TARGET.text.files("read")}
    asked, judged = ({q.id.partition(":")[0] for q in some} for some in (questions, held_out))
    assert not read & asked and not read & judged and not asked & judged


def test_what_the_recipe_states_fits_together() -> None:
    draft = TINY.draft_config(TARGET.config)
    assert (draft.target_layer_ids, draft.num_layers) == ((0, 1), 2)
    assert (draft.mask_token_id, draft.vocab_size) == (MASK, VOCAB_SIZE)
    longest = TARGET.passage_bytes + max(s.max_new_tokens for s in TINY.answers)
    assert longest <= TINY.row_length and longest < (TINY.engine.max_model_len or 0)


def test_a_target_becomes_a_folder_with_its_tokenizer(tmp_path: Path) -> None:
    steps = dataclasses.replace(TARGET.language_model, steps=2, batch_rows=2, row_length=32)
    recipe = dataclasses.replace(TARGET, language_model=steps)
    lines: list[str] = []
    make_target(recipe, tmp_path, Sharding(make_mesh()), report=lines.append)
    assert lines[0].endswith("bytes of encodings") and lines[-1].startswith("target: step 2 loss")
    llm = dflash_jax.load(tmp_path, engine=EngineConfig(max_num_seqs=1, max_model_len=32))
    assert llm.pair.target_config == TARGET.config
    chat, text = ([{"role": "user", "content": "# é\n"}], "# é\n")
    assert llm.encode(chat) == llm.encode(text) == tuple("# é\n".encode())
    assert len(llm.generate(chat, max_new_tokens=4, ignore_eos=True).output_ids) == 4


@pytest.mark.slow
def test_the_command_makes_a_pair_that_accepts_two_tokens_a_cycle(tmp_path: Path) -> None:
    """At both temperatures, on files that neither model has read, loops aside; an untrained draft's
    acceptance beside it. Then the pair is served, and asked."""
    out, log = tmp_path / "out", tmp_path / "log.txt"
    started = time.perf_counter()
    process = start(["train", "tiny", "--work", out], log)
    assert process.wait(900) == 0, log.read_text()
    seconds = time.perf_counter() - started
    print(log.read_text(), f"the whole run: {seconds:.0f} s", sep="\n")
    assert seconds < 600  # three minutes on two quiet cores
    results = json.loads((out / "evaluation.json").read_text())["results"]
    tau = {(result["label"], result["temperature"]): result["tau"] for result in results}
    for temperature in (0.0, 1.0):
        assert tau["trained", temperature] >= 2 and tau["untrained", temperature] < 1.3
    curve = [record for record in read_records(out / "train.jsonl") if "loss" in record]
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    assert (out / "report.html").is_file()

    _, held_out = TARGET.inputs()
    with serve(["--target", out / "target", "--draft", out / "draft"], tmp_path) as client:
        (model,) = client.models.list()
        reply = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": held_out[0].messages[0]["content"]}],
            max_tokens=32,
            temperature=0,
        )
    assert reply.usage is not None and reply.usage.completion_tokens == 32
    assert reply.choices[0].message.content


@contextlib.contextmanager
def serve(flags: list[object], folder: Path) -> Iterator[openai.OpenAI]:
    """A client of ``python -m dflash_jax.serve`` that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [*flags, "--port", port, "--max-model-len", 256, "--max-num-batched-tokens", 128]
    server = start(["dflash_jax.serve", *flags], log := folder / "serve.txt")
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 300
        while not is_ready(url):
            assert server.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        http = openai.DefaultHttpxClient(trust_env=False)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
            yield client
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
