"""Cutting text into the pieces that BPE works on, by the checkpoint's own patterns."""

from __future__ import annotations

from collections.abc import Sequence

import regex  # type: ignore[import-untyped]

from waste.errors import UnsupportedError


class Pretokenizer:
    """Applies patterns in sequence, each as the `Split` pre-tokenizer with behaviour "Isolated" does.

    The engine is `regex` (version 1 syntax, for class intersections `[\\p{L}&&[^\\p{Han}]]`). Rust's `fancy-regex`,
    which `tiktoken` uses, keeps one backtracking state for each character of `\\s+(?!\\S)` and panics on a million
    spaces. Over all code points the cuts of the GLM, Kimi and DeepSeek patterns equal those of `tokenizers` 0.23 but
    for characters newer than its Unicode tables, which no vocabulary of today knows.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises UnsupportedError, naming the pattern, where one does not compile."""
        self._patterns = [_compile(pattern) for pattern in patterns]

    def split(self, text: str) -> list[str]:
        """The non-empty pieces of `text` in order; joined they are `text`."""
        pieces = [text] if text else []
        for pattern in self._patterns:
            pieces = [part for piece in pieces for part in _isolate(pattern, piece)]
        return pieces


def _compile(pattern: str) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern, regex.V1)
    except (regex.error, RecursionError, OverflowError) as error:
        detail = " ".join(str(error).split())
        raise UnsupportedError(f"pre-tokenizer pattern {pattern!r} cannot be used: {detail}") from error


def _isolate(pattern: regex.Pattern[str], text: str) -> list[str]:
    parts = []
    end = 0
    for match in pattern.finditer(text):
        start, stop = match.span()
        if start > end:
            parts.append(text[end:start])
        # An empty match is no piece, but it does cut what lies around it.
        if stop > start:
            parts.append(text[start:stop])
        end = stop
    if end < len(text):
        parts.append(text[end:])
    return parts
