"""Splitting what a model writes into reasoning and answer, while it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from waste.tokenizer import StreamDecoder, Tokenizer

Kind = Literal["reasoning", "answer"]


@dataclass(frozen=True)
class Piece:
    """Some text of one kind. Pieces follow each other without gaps; markers are not among them."""

    kind: Kind
    text: str


class ReasoningSplitter:
    """Token ids in, pieces out. It splits at marker *ids*: the text "</think>" in an answer is text.

    Law: per kind, the texts joined are the decoded ids of each stretch between markers, joined.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        think_open: int | None,
        think_close: int | None,
        *,
        starts_inside: bool,
        skip_special: bool = False,
    ) -> None:
        """`starts_inside`: the prompt ended within reasoning. With None for both markers everything is answer."""
        self._open = think_open
        self._close = think_close
        self._inside = starts_inside and think_close is not None
        self._decoder = StreamDecoder(tokenizer, skip_special=skip_special)

    @property
    def inside_reasoning(self) -> bool:
        """Whether the next id is reasoning. True at the end of a stream: the reasoning was never closed."""
        return self._inside

    def feed(self, token_id: int) -> list[Piece]:
        """The pieces that are certain once `token_id` is known: none or one."""
        if token_id in (self._open, self._close):
            rest = self.flush()
            self._inside = token_id == self._open
            return rest
        return self._pieces(self._decoder.feed(token_id))

    def flush(self) -> list[Piece]:
        """What is left of a character that was cut off, at the end or before a marker."""
        return self._pieces(self._decoder.flush())

    def _pieces(self, text: str) -> list[Piece]:
        return [Piece("reasoning" if self._inside else "answer", text)] if text else []
