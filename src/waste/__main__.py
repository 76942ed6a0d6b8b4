"""The `waste` command, and `python -m waste`.

The command line is imported inside: Ctrl-C in the 0.2 s that this takes ends as quietly as at any other time. So does
Ctrl-C while the interpreter shuts down: everything has been said and written by then, and Python would print where the
signal found it.
"""

import signal
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
    finally:
        # In no function of its own: its first step is one where a signal is noticed.
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:  # it came just before, and none can come after
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except ValueError:  # not the main thread: signals are not ours to set
            pass


if __name__ == "__main__":
    sys.exit(main())
