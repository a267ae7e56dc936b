"""Which command is which."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dflash_jax.embedded import EmbeddedModelError
from dflash_jax.flags import add_flags, build
from train.checkpoints import CheckpointError
from train.cli import bench, evaluate, plan, recipe, regenerate, report
from train.loop import TrainingDiverged
from train.recipes import RECIPES

Command = tuple[Callable[[Any], int], type, str]

COMMANDS: dict[str, Command] = {
    "regenerate": (regenerate.run, regenerate.RegenerateArgs, "let the target answer prompts"),
    "evaluate": (evaluate.run, evaluate.EvaluateArgs, "measure a draft by real decoding"),
    "report": (report.run, report.ReportArgs, "write what a run reached as one HTML page"),
    "plan": (plan.run, plan.PlanArgs, "compile a recipe's step for TPUs that are not there"),
    "bench": (bench.run, bench.BenchArgs, "time a recipe's step, with random weights"),
}


def main(argv: Sequence[str]) -> int:
    """0: done; 2: the user's to mend, one message on stderr saying what; 1: the run itself failed,
    likewise; 130: interrupted; 143: a signal ended training, and the same command goes on."""
    commands = {
        **COMMANDS,
        **{
            name: (partial(recipe.run, name), recipe.RunArgs, _headline(name))
            for name in sorted(RECIPES)
        },
    }
    choose = argparse.ArgumentParser(
        prog="python -m train",
        description="Train a DFlash draft for a target. Every command has its own --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:12} {summary}" for name, (*_, summary) in commands.items()),
        allow_abbrev=False,
    )
    choose.add_argument("command", choices=commands, metavar="RECIPE or command")
    name = choose.parse_args(argv[:1]).command
    run, args_class, summary = commands[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m train {name}", description=f"{summary}.", allow_abbrev=False
    )
    add_flags(parser, args_class)
    args = build(parser, args_class, parser.parse_args(argv[1:]))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("dflash_jax").setLevel(logging.INFO)  # a download takes a while: say so
    try:
        return run(args)
    except (ValueError, OSError, EmbeddedModelError, CheckpointError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except (TrainingDiverged, FloatingPointError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _headline(name: str) -> str:
    """The first line of a recipe's module."""
    module = sys.modules[f"train.recipes.{name.replace('-', '_').replace('.', '_')}"]
    return (module.__doc__ or name).splitlines()[0].rstrip(".")
