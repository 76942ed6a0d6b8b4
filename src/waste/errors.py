"""What can go wrong, and the exit code each kind of failure ends with."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the `waste` command. Part of its interface: scripts branch on them."""

    DONE = 0
    NO = 1  # it ran, and the answer is no: does not fit, does not match, unsupported
    USAGE = 2  # the command line or a setting is wrong
    INPUT = 3  # an input is missing or damaged
    RESOURCE = 4  # a resource is missing or too small: memory, disk space, a device
    BUG = 70  # a fault of waste itself
    INTERRUPTED = 130


class WasteError(Exception):
    """A failure the user can act on: `message` names the thing, the expected and the found.

    `hint` says what to do next, a command where one exists. Both are one line.
    """

    exit_code = ExitCode.NO

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UnsupportedError(WasteError):
    """A model, format or option that is understood but cannot be served."""


class UsageError(WasteError):
    """A flag, setting or prompt that makes no sense."""

    exit_code = ExitCode.USAGE


class InputError(WasteError):
    """A file is missing, truncated, damaged or not what it should be."""

    exit_code = ExitCode.INPUT


class ResourceError(WasteError):
    """Too little memory or disk space, or no such device."""

    exit_code = ExitCode.RESOURCE
