"""`python -m waste` is the `waste` command."""

import sys

from waste.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
