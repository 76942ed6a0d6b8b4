"""The world a command runs in: streams and environment variables. Tests replace it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from waste.cli import config


@dataclass(frozen=True)
class Environment:
    """Handed to every command as `ctx.obj`. `stdin` is binary: a prompt is checked before it is text."""

    environ: Mapping[str, str]
    stdin: BinaryIO
    stdout: TextIO
    stderr: TextIO

    @staticmethod
    def of_process() -> Environment:
        """The real one. A stream the caller closed (`>&-`) reads as empty and swallows what is written."""
        stdin = sys.stdin.buffer if sys.stdin is not None else io.BytesIO()
        stdout, stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
        if isinstance(stdout, io.TextIOWrapper):
            # Into a pipe or a file the text is UTF-8 whatever the locale, and a path keeps its bytes. A terminal
            # that cannot show a character gets a question mark rather than an error in mid-answer.
            if stdout.isatty():
                stdout.reconfigure(errors="replace")
            else:
                stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="\n")
        return Environment(config.environment(), stdin, stdout, stderr)


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")  # lives as long as the process
