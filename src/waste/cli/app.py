"""The `waste` command: its subcommands, and how every end of a run becomes an exit code."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Annotated

import typer

from waste.cli import bench, config, convert, failures, info, run
from waste.cli.environment import Environment
from waste.cli.output import Output, OutputClosed, discard
from waste.errors import ExitCode

HELP = """\
\b
waste run "In the beginning"                   the bundled example answers
waste convert zai-org/GLM-5.3-Flash glm.waste  make a container of a checkpoint
waste info glm.waste                           what it is and what it needs
waste bench glm.waste                          tokens per second, and what they are made of
cat notes.txt | waste run glm.waste "summarise"

Runs mixture-of-experts models that do not fit into memory: the experts stay on disk and are read when a token
needs them.
"""

EPILOG = """\
\b
Settings: flag > WASTE_* variable > waste.toml > user config > default; `waste info --config` shows them.
Exit codes: 0 done, 1 the answer is no, 2 usage, 3 input missing or damaged, 4 too little memory or disk,
70 a bug in waste, 130 interrupted (143 by SIGTERM), 141 the reader of the output went away.
"""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"waste {version('waste')}")
        raise typer.Exit


def build(*, front: bool = True) -> typer.Typer:
    """The Typer application; `front`: with the options that stand before any subcommand (help, completion)."""
    # Plain help, no Rich: it would take another 0.1 s to import, and it folds long lines when there is no terminal.
    app = typer.Typer(
        name="waste",
        help=HELP,
        epilog=EPILOG,
        no_args_is_help=True,
        add_help_option=front,
        add_completion=front,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_options)
    app.command("run", help=run.HELP, short_help=run.SHORT)(run.run)
    app.command("convert", help=convert.HELP, short_help=convert.SHORT, no_args_is_help=True)(convert.convert)
    app.command("bench", help=bench.HELP, short_help=bench.SHORT)(bench.bench)
    app.command("info", help=info.HELP, short_help=info.SHORT)(info.info)
    return app


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What stands before the subcommand; the help text is `HELP`."""


def main(argv: Sequence[str] | None = None, env: Environment | None = None) -> int:
    """Run one command line and return its exit code. `env` replaces the process's streams in tests."""
    try:
        env = env or Environment.of_process()
        with _terminable():
            return _run(list(sys.argv[1:] if argv is None else argv), env)
    except KeyboardInterrupt:  # while something was already being cleaned up
        return ExitCode.INTERRUPTED
    except failures.Terminated:
        return failures.TERMINATED


def _run(argv: list[str], env: Environment) -> int:
    out = Output(env)
    try:
        # Typer evaluates the front options, and imports pydantic for it (0.15 s), even when a subcommand's help is
        # all that is wanted.
        app = build(front=not argv or argv[0].startswith("-"))
        code = app(args=argv, prog_name="waste", standalone_mode=False, obj=out)
        return code if isinstance(code, int) else ExitCode.DONE
    except OutputClosed:
        return failures.PIPE_CLOSED
    except SystemExit as end:  # Typer's way out of shell completion, and of its own help when `head` has left
        if isinstance(end.__context__, BrokenPipeError):
            discard(env)
            return failures.PIPE_CLOSED
        return end.code if isinstance(end.code, int) else ExitCode.DONE
    except (KeyboardInterrupt, failures.Terminated) as signalled:
        return _signalled(signalled, out)
    except Exception as error:
        signal_behind = failures.signal_behind(error)
        if signal_behind is not None:
            return _signalled(signal_behind, out)
        if config.wants_debug(env.environ):
            import traceback

            traceback.print_exception(error, file=env.stderr)
        failure = failures.describe(error)
        if failure.shown is not None:
            env.stderr.write(failure.shown)
        elif failure.message:
            out.failure(failure.message, failure.hint)
        if isinstance(error, OSError):
            discard(env)  # it may have been stdout itself, with text left in its buffer
        return failure.exit_code


def _signalled(signalled: KeyboardInterrupt | failures.Terminated, out: Output) -> int:
    out.interrupted()
    return failures.TERMINATED if isinstance(signalled, failures.Terminated) else ExitCode.INTERRUPTED


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: through its `finally` clauses, with what was written flushed."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise failures.Terminated

    if threading.current_thread() is not threading.main_thread():  # signals are not ours to set there
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
