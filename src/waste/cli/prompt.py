"""Where the prompt comes from, and what may be in it: argument, `--file`, pipe or `-`; UTF-8 text, kept as it is.

Piped text comes first, then files, then the argument, a blank line between them. The whole of a pipe or file
is the prompt; one final newline is dropped, nothing else is touched.
"""

from __future__ import annotations

import codecs
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from waste.cli.environment import Environment
from waste.errors import InputError, UsageError
from waste.units import format_bytes

# A pipe that stays silent this long is probably one nobody meant to open; then we say what we wait for.
PATIENCE_S = 10.0

# No context holds more; a wrong file is refused before it fills the memory.
MAX_BYTES = 64 << 20

STDIN = "-"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class PromptSources:
    """What the command line said. `text` is None where it said nothing, `-` where it asked for stdin."""

    text: str | None
    files: Sequence[str] = ()
    read_stdin: bool = True


def read_prompt(
    sources: PromptSources, env: Environment, on_wait: Callable[[str], None], *, patience_s: float = PATIENCE_S
) -> str | None:
    """The prompt, or None where there is no source at all (a terminal and no argument).

    `on_wait` gets one line when stdin says nothing for `patience_s`. Raises UsageError for an empty prompt
    and for text that is not UTF-8 (naming the byte), InputError for files that cannot be read.
    """
    wants_stdin = sources.text == STDIN or STDIN in sources.files
    if wants_stdin and not sources.read_stdin:
        raise UsageError("'-' reads the prompt from stdin, and --no-stdin forbids it")
    parts = []
    if wants_stdin or (sources.read_stdin and not env.stdin.isatty()):
        parts.append(decode_text(_read_stdin(env.stdin, on_wait, patience_s), "stdin"))
    elif sources.text is None and not sources.files:
        return None
    parts += [decode_text(_read_file(name), repr(name)) for name in sources.files if name != STDIN]
    if sources.text is not None and sources.text != STDIN:
        parts.append(_argument(sources.text))
    parts = [part for part in parts if part.strip()]
    if not parts:
        raise UsageError("the prompt is empty", hint="waste run MODEL 'your question', or pipe a text into it")
    return "\n\n".join(parts)


def decode_text(data: bytes, name: str) -> str:
    """`data` as text: UTF-8, a leading byte order mark and one final newline dropped, CRLF kept.

    Raises UsageError naming the first offending byte; `name` is said as it is, quotes included.
    """
    if data.startswith(_UTF16):
        raise UsageError(
            f"{name} is UTF-16, expected UTF-8: byte 0x{data[0]:02x} at offset 0",
            hint="convert it: iconv -f UTF-16 -t UTF-8",
        )
    skipped = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    try:
        text = data[skipped:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = skipped + error.start
        raise UsageError(
            f"{name} is not UTF-8: byte 0x{data[at]:02x} at offset {at}",
            hint="if it is Latin-1: iconv -f LATIN1 -t UTF-8",
        ) from None
    _refuse_nul(text, data, name)
    for newline in ("\r\n", "\n"):
        if text.endswith(newline):
            return text.removesuffix(newline)
    return text


def _refuse_nul(text: str, data: bytes, name: str) -> None:
    if "\0" in text:
        raise UsageError(f"{name} is not text: byte 0x00 at offset {data.index(0)}", hint="is it a binary file?")


def _argument(text: str) -> str:
    """The argument, taken literally: no escapes, no trimming."""
    # Python smuggles in as surrogates the bytes that the locale cannot read: all of them in an ASCII one, so that
    # only the bytes themselves tell whether they are UTF-8.
    data = text.encode("utf-8", "surrogateescape")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise UsageError(f"the prompt argument is not UTF-8: byte 0x{data[at]:02x} at offset {at}") from None


def _read_file(name: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return _bounded(file, repr(name))
    except OSError as error:
        raise InputError(f"cannot read the prompt file {name!r}: {error.strerror}") from None


def _read_stdin(stdin: BinaryIO, on_wait: Callable[[str], None], patience_s: float) -> bytes:
    """All of stdin. Whoever sends the first byte will send the rest."""
    message = "waiting for the prompt on stdin (end it with Ctrl-D, or use --no-stdin)"
    try:
        with announced(message, on_wait, patience_s):
            first = stdin.read(1)
    except OSError as error:
        raise InputError(f"cannot read stdin: {error.strerror}") from None
    return first + _bounded(stdin, "stdin") if first else b""


@contextlib.contextmanager
def announced(message: str, on_wait: Callable[[str], None], patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Call `on_wait` with `message` when the body takes longer. A thread, so that any kind of stream will do."""
    timer = threading.Timer(patience_s, on_wait, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _bounded(file: BinaryIO, name: str) -> bytes:
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name} is longer than {format_bytes(MAX_BYTES)}, too long for a prompt")
    return data
