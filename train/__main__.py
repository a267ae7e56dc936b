"""``python -m train RECIPE``: prompts in, a draft out, in three stages with files between them.

regenerate  the target answers every prompt          -> WORK/answers.jsonl
train       the draft learns the answers             -> WORK/draft, WORK/train.jsonl
evaluate    real decoding on the evaluation prompts  -> WORK/evaluation.json
"""

import argparse
import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

import dflash_jax
from dflash_jax.checkpoint import export_draft
from dflash_jax.decoder import Pair
from dflash_jax.engine import Engine
from dflash_jax.generate import LLM
from dflash_jax.request import SamplingParams
from dflash_jax.speculative import DraftSampling
from train.data import pack, read_samples
from train.evaluate import evaluate
from train.initial import draft_from_target, random_draft
from train.loop import train
from train.prompts import Prompt, clean_self_written
from train.recipes import RECIPES, Recipe
from train.regenerate import regenerate, self_written_prompts

STAGES = ("regenerate", "train", "evaluate")
# (block size, how draft tokens are taken, temperatures), the shipped setting first
EVALUATED: tuple[tuple[int, DraftSampling, tuple[float, ...]], ...] = (
    (16, "argmax", (0.0, 1.0)),
    (16, "coupled", (1.0,)),
    (8, "argmax", (0.0,)),
    (4, "argmax", (0.0,)),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    recipe = RECIPES[options.recipe]
    options.work.mkdir(parents=True, exist_ok=True)
    if "regenerate" in options.stage:
        _regenerate(recipe, options)
    if "train" in options.stage:
        _train(recipe, options)
    if "evaluate" in options.stage:
        _evaluate(recipe, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--work", type=Path, required=True, help="where everything is written")
    parser.add_argument("--prompts", type=Path, help="JSONL of {id, source, text}")
    parser.add_argument("--evaluation", type=Path, help="JSONL of {id, source, text}")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--target", type=Path, help="the target's files, if not the recipe's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=math.inf, help="budget of each stage")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of the evaluation")
    return parser


def _load(recipe: Recipe, options: argparse.Namespace, **kwargs) -> LLM:
    return dflash_jax.load(options.target or recipe.target, dtype=options.dtype, **kwargs)


def _read_prompts(path: Path) -> list[Prompt]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]


def _regenerate(recipe: Recipe, options: argparse.Namespace) -> None:
    engine = dataclasses.replace(recipe.engine, speculation=False)
    llm = _load(recipe, options, engine=engine)
    started = time.perf_counter()
    prompts = _read_prompts(options.prompts)
    held_out = _read_prompts(options.evaluation) if options.evaluation else []
    if recipe.self_written:
        texts = self_written_prompts(llm, recipe.self_written, seed=1, seconds=options.seconds / 6)
        seen = {prompt.text for prompt in (*prompts, *held_out)}
        own = clean_self_written(texts, seen)
        print(f"self-written prompts: {len(texts)} whole, {len(own)} kept")
        prompts += [Prompt(f"self/{i}", "self-written", text) for i, text in enumerate(own)]
    out = options.work / "answers.jsonl"
    random.Random(recipe.loop.seed).shuffle(prompts)  # a budget that ends early cuts all sources
    kinds = len(recipe.answers)
    for number, sampling in enumerate(recipe.answers):
        left = options.seconds - (time.perf_counter() - started)
        share = prompts[number::kinds]
        written = regenerate(llm, share, out, sampling=sampling, seconds=left / (kinds - number))
        print(f"answers at T = {sampling.temperature}: {written} tokens -> {out}")


def _train(recipe: Recipe, options: argparse.Namespace) -> None:
    llm = _load(
        recipe,
        options,
        engine=dflash_jax.EngineConfig(max_num_seqs=1, max_model_len=32, speculation=False),
    )
    target = llm.pair.target_config
    pair = Pair.of(target, recipe.draft_config(target), llm.pair.sharding, llm.pair.dtype)
    assert pair.draft is not None and pair.draft_config is not None
    answers = options.work / "answers.jsonl"
    rows = pack(
        read_samples(answers, vocab_size=target.vocab_size),
        recipe.row_length,
        seed=recipe.loop.seed,
    )
    supervised = int(rows.loss_mask.sum())
    print(f"{rows.tokens.shape[0]} rows of {recipe.row_length}, {supervised} supervised tokens")
    target_params = llm.engine.params.target
    start = draft_from_target if recipe.initial == "target" else random_draft
    draft = train(
        pair,
        target_params,
        start(pair, target_params, recipe.loop.seed),
        rows,
        dataclasses.replace(recipe.loop, seconds=min(options.seconds, recipe.loop.seconds)),
        log=options.work / "train.jsonl",
    )
    export_draft(options.work / "draft", pair.draft_config, draft, jnp.bfloat16)
    print(f"exported {options.work / 'draft'}")


def _evaluate(recipe: Recipe, options: argparse.Namespace) -> None:
    by_source: dict[str, list[str]] = {}
    for prompt in _read_prompts(options.evaluation):
        by_source.setdefault(prompt.source, []).append(prompt.text)
    llm = _load(recipe, options, draft=options.work / "draft", engine=recipe.evaluation)
    results = []
    for block_size, draft_sampling, temperatures in EVALUATED:
        engine = dataclasses.replace(
            recipe.evaluation, block_size=block_size, draft_sampling=draft_sampling
        )
        llm = LLM(
            Engine(llm.pair, llm.engine.params, engine), llm.tokenizer, llm.name, llm.defaults
        )
        for temperature, (source, texts) in itertools.product(temperatures, by_source.items()):
            sampling = SamplingParams(
                temperature=temperature, max_new_tokens=options.max_new_tokens
            )
            result = evaluate(llm, texts, sampling)
            settings = {
                "source": source,
                "block_size": block_size,
                "temperature": temperature,
                "draft_sampling": draft_sampling,
            }
            results.append({**settings, **result.json()})
            (options.work / "evaluation.json").write_text(json.dumps(results, indent=1) + "\n")
            print(
                f"b {block_size} T {temperature} {draft_sampling} {source}: tau {result.tau:.3f} "
                f"(raw {result.raw_tau:.3f}, {result.looping:.0%} looping)",
                flush=True,
            )


if __name__ == "__main__":
    main()
