"""Token ids to text while they arrive, without broken characters."""

from __future__ import annotations

import codecs

from waste.tokenizer.bpe import Tokenizer


class StreamDecoder:
    """Law: the pieces, joined with what `flush` returns, are `Tokenizer.decode` of all ids at once.

    Every piece is valid text, a whole character comes no later than with the id that completes it, and nothing is
    taken back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that is certain once `token_id` is known; often empty inside a character."""
        if token_id in self._skipped:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        # Python's decoder waits for a third byte after ED A0 to ED BF, half a surrogate: no byte can make it text.
        held, _ = self._decoder.getstate()
        if held[:1] == b"\xed" and held[1:2] >= b"\xa0":
            text += self._decoder.decode(b"", final=True)
        return text

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that was cut off. The decoder can be used again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
