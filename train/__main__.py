"""``python -m train RECIPE | regenerate | evaluate | report | plan | bench``: see train/README.md."""

import sys

from train.cli.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
