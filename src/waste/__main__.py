"""The `waste` command, and `python -m waste`.

The command line is imported inside: Ctrl-C in the 0.2 s that this takes ends as quietly as at any other time.
"""

import sys


def main() -> int:
    """Run the command line of this process; its exit code."""
    try:
        from waste.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        from waste.errors import ExitCode

        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
