"""``python -m train RECIPE or command``: see train/README.md."""

import sys

from train.cli.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
