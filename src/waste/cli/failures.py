"""From an exception to what the user reads: one line, one hint, one exit code. The only place that decides it."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import typer

from waste.errors import ExitCode, WasteError

TERMINATED = 143  # 128 + SIGTERM, what shells report
PIPE_CLOSED = 141  # 128 + SIGPIPE: the reader left; what `cat` would end with

_NO_RESOURCE = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EROFS}


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt it is no Exception, so that nothing below swallows it."""


@dataclass(frozen=True)
class Failure:
    """What is printed and returned. `shown` is text to print as it is (a help page) instead of an error line."""

    exit_code: int
    message: str = ""
    hint: str | None = None
    shown: str | None = None


def signal_behind(error: Exception) -> KeyboardInterrupt | Terminated | None:
    """The signal that `error` is made of, if it is: Python 3.11 wraps what is raised while a class comes to be."""
    cause = error.__cause__
    return cause if isinstance(cause, KeyboardInterrupt | Terminated) else None


def describe(error: BaseException) -> Failure:
    """The failure behind `error`; whatever is not expected here is a bug of ours."""
    match error:
        case WasteError():
            return Failure(error.exit_code, error.message, error.hint)
        case typer.TyperException():
            return _usage(error)
        case typer.Abort():
            return Failure(ExitCode.INTERRUPTED)
        case MemoryError():
            return Failure(ExitCode.RESOURCE, "out of memory", "give it less with --ram or --ctx")
        case OSError() if error.errno is not None and error.strerror:
            where = f"{error.filename!r}: " if error.filename is not None else ""
            code = ExitCode.RESOURCE if error.errno in _NO_RESOURCE else ExitCode.INPUT
            return Failure(code, f"{where}{error.strerror}")
    return Failure(
        ExitCode.BUG,
        f"bug in waste, please report: {type(error).__name__}: {error}{_place(error)}",
        "WASTE_DEBUG=1 shows the traceback to put into the report",
    )


def _place(error: BaseException) -> str:
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _usage(error: typer.TyperException) -> Failure:
    """A mistake Typer found: its words, our two lines."""
    message = error.format_message()
    if message.lstrip().startswith("Usage:"):  # no arguments at all: the help page is the message
        return Failure(error.exit_code, shown=message + "\n")
    hints = []
    possibilities = getattr(error, "possibilities", None)
    if possibilities:
        message = error.message
        hints.append(f"did you mean {' or '.join(sorted(possibilities))}?")
    context = getattr(error, "ctx", None)
    command = "waste" if context is None else context.command_path
    hints.append(f"`{command} --help` shows what there is")
    message = " ".join(message.split())
    return Failure(error.exit_code, message[:1].lower() + message[1:].rstrip("."), " ".join(hints))
