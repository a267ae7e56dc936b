"""``python -m train RECIPE``: prompts in, a draft out, in three stages with files between them.

regenerate  the target answers every prompt          -> WORK/answers.jsonl
train       the draft learns the answers             -> WORK/draft, WORK/train.jsonl
evaluate    real decoding on the evaluation prompts  -> WORK/evaluation.json
"""

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

import dflash_jax
from dflash_jax.checkpoint import CheckpointError, export_draft
from dflash_jax.config_keys import ConfigError
from dflash_jax.decoder import Pair
from dflash_jax.embedded import EmbeddedModelError
from dflash_jax.generate import LLM
from dflash_jax.resolve import ResolveError
from dflash_jax.speculative import DraftSampling
from dflash_jax.tokenizer import TokenizerError
from train.answers import skipped_path
from train.cli import commands
from train.evaluate import EvaluationFile, Setting, evaluate_settings, one_line
from train.initial import draft_from_target, random_draft
from train.loop import TrainingDiverged, train
from train.packing import pack
from train.prompts import Prompt, clean_self_written, drop_contaminated, wording
from train.questions import Question
from train.recipes import RECIPES, Recipe
from train.regenerate import regenerate, self_written_prompts
from train.samples import DataError, read_samples

STAGES = ("regenerate", "train", "evaluate")
ANSWERS, DRAFT = "answers.jsonl", "draft"  # what one stage leaves for the next
# (b is the draft's over this, how draft tokens are taken, temperatures)
EVALUATED: tuple[tuple[int, DraftSampling, tuple[float, ...]], ...] = (
    (1, "argmax", (0.0, 1.0)),
    (1, "coupled", (1.0,)),
    (2, "argmax", (0.0,)),
    (4, "argmax", (0.0,)),
)
EXPECTED = (
    ConfigError,
    CheckpointError,
    TokenizerError,
    ResolveError,
    EmbeddedModelError,
    DataError,
    TrainingDiverged,
)
"""Errors whose message says all; anything else keeps its traceback."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 2 and one line that says why, where the run cannot be done."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in commands.COMMANDS:
        sys.exit(commands.main(arguments[0], arguments[1:]))
    parser = _parser()
    options = parser.parse_args(arguments)
    recipe = RECIPES[options.recipe]
    try:
        prompts, held_out = _inputs(options)
        options.work.mkdir(parents=True, exist_ok=True)
        if "regenerate" in options.stage:
            _regenerate(recipe, options, prompts, held_out)
        if "train" in options.stage:
            _train(recipe, options)
        if "evaluate" in options.stage:
            _evaluate(recipe, options, held_out)
    except EXPECTED as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--work", type=Path, required=True, help="where everything is written")
    parser.add_argument("--prompts", type=Path, help="JSONL of {id, source, text}")
    parser.add_argument("--evaluation", type=Path, help="JSONL of {id, source, text}")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--target", type=Path, help="the target's files, if not the recipe's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=_positive, default=math.inf, help="budget of each stage")
    parser.add_argument("--max-new-tokens", type=_natural, default=256, help="of the evaluation")
    return parser


def _load(recipe: Recipe, options: argparse.Namespace, **kwargs) -> LLM:
    return dflash_jax.load(options.target or recipe.target, dtype=options.dtype, **kwargs)


def _inputs(options: argparse.Namespace) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts, evaluation prompts), read before anything slow begins.

    Raises DataError naming what a stage would miss.
    """
    needed = {
        "regenerate": options.prompts or "--prompts",
        "train": None if "regenerate" in options.stage else options.work / ANSWERS,
        "evaluate": options.evaluation or "--evaluation",
    }
    for stage in options.stage:
        missing = needed[stage]
        if isinstance(missing, str):
            raise DataError(f"the stage {stage} needs {missing}")
        if missing is not None and not missing.is_file():
            raise DataError(f"the stage {stage} needs {missing}, which is no file")
    draft = options.work / DRAFT
    if "evaluate" in options.stage and "train" not in options.stage and not draft.is_dir():
        raise DataError(f"the stage evaluate needs {draft}, which the stage train writes")
    return _read_prompts(options.prompts), _read_prompts(options.evaluation)


def _read_prompts(path: Path | None) -> list[Prompt]:
    """Raises DataError naming the first line that is no prompt."""
    if path is None:
        return []
    if not path.is_file():
        raise DataError(f"{path} is no file")
    prompts = []
    # Lines of bytes: str.splitlines would also split at U+2028 within a text.
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            prompt = Prompt(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}:{number}: {error}; expected id, source and text") from error
        if not all(isinstance(value, str) for value in vars(prompt).values()):
            raise DataError(f"{path}:{number}: id, source and text must be strings")
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path} is empty")
    return prompts


def _natural(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def _regenerate(
    recipe: Recipe, options: argparse.Namespace, prompts: list[Prompt], held_out: list[Prompt]
) -> None:
    engine = dataclasses.replace(recipe.engine, speculation=False)
    llm = _load(recipe, options, engine=engine)
    started = time.perf_counter()
    if recipe.self_written:
        texts = self_written_prompts(llm, recipe.self_written, seed=1, seconds=options.seconds / 6)
        clean = clean_self_written(texts, {wording(p.text) for p in (*prompts, *held_out)})
        own = [Prompt(f"self/{i}", "self-written", text) for i, text in enumerate(clean)]
        own, _ = drop_contaminated(own, {"evaluation": held_out})
        print(f"self-written prompts: {len(texts)} whole, {len(own)} kept")
        prompts = [*prompts, *own]
    out = options.work / ANSWERS
    partial = out.with_suffix(".partial")  # a stage that dies leaves the last whole answers alone
    for stale in (partial, skipped_path(partial)):
        stale.unlink(missing_ok=True)
    # A budget that ends early cuts all sources.
    prompts = random.Random(recipe.loop.seed).sample(prompts, len(prompts))
    kinds = len(recipe.answers)
    for number, sampling in enumerate(recipe.answers):
        left = options.seconds - (time.perf_counter() - started)
        share = [Question.of_text(**vars(prompt)) for prompt in prompts[number::kinds]]
        budget = left / (kinds - number)
        written = regenerate(llm, share, partial, sampling=sampling, seconds=budget)
        print(f"answers at T = {sampling.temperature}: {written}")
    partial.replace(out)
    skipped_path(partial).replace(skipped_path(out))
    print(f"wrote {out}")


def _train(recipe: Recipe, options: argparse.Namespace) -> None:
    llm = _load(
        recipe,
        options,
        engine=dflash_jax.EngineConfig(max_num_seqs=1, max_model_len=32, speculation=False),
    )
    target = llm.pair.target_config
    pair = Pair.of(target, recipe.draft_config(target), llm.pair.sharding, llm.pair.dtype)
    assert pair.draft_config is not None
    rows = pack(
        read_samples([options.work / ANSWERS], vocab_size=target.vocab_size),
        recipe.row_length,
        seed=recipe.loop.seed,
    )[:]
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
    export_draft(options.work / DRAFT, pair.draft_config, draft, jnp.bfloat16)
    print(f"exported {options.work / DRAFT}")


def _evaluate(recipe: Recipe, options: argparse.Namespace, held_out: list[Prompt]) -> None:
    questions = [Question.of_text(**vars(prompt)) for prompt in held_out]
    llm = _load(recipe, options, draft=options.work / DRAFT, engine=recipe.evaluation)
    settings = [
        Setting(max(recipe.block_size // fraction, 2), temperature, draft_sampling)
        for fraction, draft_sampling, temperatures in EVALUATED
        for temperature in temperatures
    ]
    shared = {"target": llm.name, "draft": DRAFT, "max_new_tokens": options.max_new_tokens}
    file = EvaluationFile(options.work / "evaluation.json", shared)
    for result in evaluate_settings(
        llm, questions, settings, recipe.evaluation, max_new_tokens=options.max_new_tokens
    ):
        file.add(result)
        print(one_line(result), flush=True)


if __name__ == "__main__":
    main()
