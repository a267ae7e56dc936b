"""Which command is which."""

import argparse
import logging
import sys
from collections.abc import Sequence

from dflash_jax.embedded import EmbeddedModelError
from dflash_jax.flags import add_flags, build
from train.cli import evaluate, regenerate, report
from train.cli.evaluate import EvaluateArgs
from train.cli.regenerate import RegenerateArgs
from train.cli.report import ReportArgs

COMMANDS = {
    "regenerate": (regenerate.run, RegenerateArgs, "let the target answer prompts"),
    "evaluate": (evaluate.run, EvaluateArgs, "measure a draft by real decoding"),
    "report": (report.run, ReportArgs, "write what a run reached as one HTML page"),
}


def main(name: str, argv: Sequence[str]) -> int:
    """0: done; 2: the user's to mend, one message on stderr saying what; 130: interrupted."""
    run, args_class, summary = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m train {name}",
        description=f"{summary.capitalize()}.",
        allow_abbrev=False,
    )
    add_flags(parser, args_class)
    args = build(parser, args_class, parser.parse_args(argv))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("dflash_jax").setLevel(logging.INFO)  # a download takes a while: say so
    try:
        return run(args)
    except (ValueError, EmbeddedModelError) as error:  # ours are all one of these two
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
