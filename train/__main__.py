"""``python -m train RECIPE or command``: see train/README.md."""

import sys

if __name__ == "__main__":
    try:
        from train.cli.commands import main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("train", "dflash_jax", ""):
            raise
        print(
            f"python -m train: error: {error.name} is not installed; training wants the extra "
            'train: pip install -e ".[train]"',
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(main(sys.argv[1:]))
