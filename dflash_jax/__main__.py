"""``python -m dflash_jax generate | bench | info``; ``--help`` with each lists its flags."""

import argparse
import logging
import sys
from collections.abc import Sequence

from dflash_jax.cli import bench, generate, info
from dflash_jax.cli.args import BenchArgs, GenerateArgs, InfoArgs
from dflash_jax.embedded import EmbeddedModelError
from dflash_jax.flags import add_flags, build

COMMANDS = {
    "generate": (generate.run, GenerateArgs, "continue a prompt"),
    "bench": (bench.run, BenchArgs, "measure plain and speculative decoding, beside the ceiling"),
    "info": (info.run, InfoArgs, "say what a pair is, and what it would run on"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 2: the user's to mend, one message on stderr saying what; 130: interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax",
        description="DFlash speculative decoding for JAX.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, (_, args_class, summary) in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name, help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False
        )
        add_flags(parsers[name], args_class)
    namespace = parser.parse_args(argv)
    run, args_class, _ = COMMANDS[namespace.command]
    args = build(parsers[namespace.command], args_class, namespace)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("dflash_jax").setLevel(logging.INFO)  # a download takes a while: say so
    try:
        return run(args)
    except (ValueError, EmbeddedModelError) as error:  # ours are all one of these two
        print(f"python -m dflash_jax {namespace.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
