"""Finding added tokens in text, by the rules of the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import regex  # type: ignore[import-untyped]

from waste.tokenizer.spec import AddedToken

# Unicode White_Space. Not str.isspace(), which adds U+001C..U+001F.
WHITE_SPACE = frozenset(
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
# A word character as Unicode TR 18 (and Rust's `regex`) defines \w.
_WORD = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]", regex.V1)

Segment = str | int


class AddedTokens:
    """Splits text at added tokens: leftmost first, at one place the longest, in two passes.

    The first pass finds the tokens that are not `normalized`, the second looks for the others in what is left. (They
    differ in more than order only where a normalizer exists, and those are refused when a tokenizer is read.)
    """

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        tokens = list(tokens)
        self._by_content = {token.content: token for token in tokens}
        passes = ([t.content for t in tokens if t.normalized is flag] for flag in (False, True))
        self._passes = [_alternatives(contents) for contents in passes if contents]
        used = {char for token in tokens for char in token.content}
        # Stands for a character that may not be part of a match.
        self._blank = next(chr(code) for code in range(0xF0000, 0x110000) if chr(code) not in used)

    def split(self, text: str, untrusted: Sequence[tuple[int, int]] = ()) -> list[Segment]:
        """Added-token ids and the text between them; only white space taken by lstrip and rstrip is lost.

        No token is found that touches one of the `untrusted` half-open ranges of character positions, which must be
        ascending and disjoint. White space and word characters count on both sides of their borders.
        """
        view = text
        if untrusted:
            parts = []
            end = 0
            for start, stop in untrusted:
                parts += [text[end:start], self._blank * (stop - start)]
                end = stop
            view = "".join([*parts, text[end:]])
        segments: list[tuple[str, str] | int] = [(text, view)]
        for pattern in self._passes:
            segments = [
                part
                for segment in segments
                for part in ([segment] if isinstance(segment, int) else self._find(pattern, *segment))
            ]
        return [segment if isinstance(segment, int) else segment[0] for segment in segments]

    def _find(self, pattern: re.Pattern[str], text: str, view: str) -> list[tuple[str, str] | int]:
        found: list[tuple[str, str] | int] = []
        end = 0
        for match in pattern.finditer(view):
            start, stop = match.span()
            token = self._by_content[match.group()]
            if token.single_word and (
                (start > 0 and _WORD.match(text, start - 1)) or (stop < len(text) and _WORD.match(text, stop))
            ):
                continue
            if token.lstrip:
                while start > end and text[start - 1] in WHITE_SPACE:
                    start -= 1
                start = max(start, end)
            if token.rstrip:
                while stop < len(text) and text[stop] in WHITE_SPACE:
                    stop += 1
            # A token that begins with white space may have matched inside what rstrip took before it. The library
            # emits it all the same where something is left of it; where less than nothing is, it crashes.
            if start > stop:
                continue
            if start > end:
                found.append((text[end:start], view[end:start]))
            if start < stop:
                found.append(token.id)
            end = stop
        if end < len(text):
            found.append((text[end:], view[end:]))
        return found


def _alternatives(contents: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(content) for content in sorted(contents, key=len, reverse=True)))
