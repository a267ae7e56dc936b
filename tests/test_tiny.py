"""The tiny recipe: its target as a folder that everything opens, and a whole run until served."""

import dataclasses
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from serving import run_server

import dflash_jax
from dflash_jax import EngineConfig, SamplingParams
from dflash_jax.checkpoint import export_draft
from dflash_jax.decoder import Pair
from dflash_jax.sharding import Sharding, make_mesh
from train.byte_tokenizer import MASK, VOCAB_SIZE
from train.evaluate import Evaluation, evaluate, untrained
from train.features import RowsWithFeatures
from train.initial import draft_from_target
from train.loop import train
from train.mesh import training_sharding
from train.packing import pack
from train.questions import Question
from train.recipes.recipe import Recipe
from train.recipes.tiny import TINY
from train.regenerate import regenerate
from train.samples import read_samples
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
def test_a_whole_run_accepts_two_tokens_a_cycle_at_both_temperatures(tmp_path: Path) -> None:
    """Acceptance lengths on held-out files, loops aside; an untrained draft's beside them."""
    started = time.perf_counter()
    make_target(TARGET, target := tmp_path / "target", Sharding(make_mesh()))
    questions, held_out = TARGET.inputs()
    answer(TINY, target, questions, tmp_path / "answers.jsonl")
    draft = train_draft(TINY, target, tmp_path)
    trained = dflash_jax.load(target, draft, engine=TINY.evaluation)
    after, before = (judge(llm, held_out) for llm in (trained, untrained(trained, seed=0)))
    for temperature in (0.0, 1.0):
        tau, start = after[temperature].tau, before[temperature].tau
        looping = after[temperature].looping
        print(f"T = {temperature}: tau {tau:.2f}, {looping:.0%} looping, untrained {start:.2f}")
        assert tau >= 2 and start < 1.3
    print(f"the whole run: {time.perf_counter() - started:.0f} s")

    serve = run_server(lambda: dflash_jax.load(target, draft, engine=TINY.evaluation))
    with serve as server, server.openai() as client:
        reply = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": held_out[0].messages[0]["content"]}],
            max_tokens=32,
            temperature=0,
        )
    assert reply.usage is not None and reply.usage.completion_tokens == 32
    assert reply.choices[0].message.content


def answer(recipe: Recipe, target: Path, questions: list[Question], out: Path) -> None:
    engine = dataclasses.replace(recipe.engine, speculation=False)
    llm = dflash_jax.load(target, engine=engine)
    for number, sampling in enumerate(recipe.answers):
        share = questions[number :: len(recipe.answers)]
        assert regenerate(llm, share, out, sampling=sampling).answers > 0.9 * len(share)


def train_draft(recipe: Recipe, target: Path, work: Path) -> Path:
    small = EngineConfig(max_num_seqs=1, max_model_len=32, speculation=False)
    llm = dflash_jax.load(target, engine=small)
    config, params = llm.pair.target_config, llm.engine.params.target
    draft_config = recipe.draft_config(config)
    pair = Pair.of(config, draft_config, training_sharding(1), llm.pair.dtype)
    samples = read_samples([work / "answers.jsonl"], vocab_size=config.vocab_size)
    rows = RowsWithFeatures(pack(samples, recipe.row_length, seed=recipe.loop.seed))
    start = draft_from_target(pair, params, recipe.loop.seed)
    trained = train(pair, params, start, rows, recipe.loop)
    export_draft(work / "draft", draft_config, trained.draft, jnp.float32)
    return work / "draft"


def judge(llm: dflash_jax.LLM, questions: list[Question]) -> dict[float, Evaluation]:
    """By temperature. One engine runs both, so that it is compiled once."""
    length = TINY.answers[0].max_new_tokens
    return {
        temperature: evaluate(llm, questions, SamplingParams(temperature, max_new_tokens=length))
        for temperature in (0.0, 1.0)
    }
