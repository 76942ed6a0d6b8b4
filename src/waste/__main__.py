"""The `waste` command, and `python -m waste`.

The command line is imported inside: Ctrl-C in the 0.2 s that this takes ends as quietly as at any other time.
"""

import sys


def main() -> int:
    """Run the command line of this process; its exit code."""
    try:
        from waste.cli.app import main as run

        return run()
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python 3.11 makes a RuntimeError of what is raised while a class comes to be.
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        from waste.errors import ExitCode

        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
