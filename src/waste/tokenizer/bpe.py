"""The tokenizer: text to ids with or without control tokens, ids to text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tiktoken

from waste.errors import UsageError
from waste.tokenizer.added import AddedTokens, Segment
from waste.tokenizer.pretokenize import Pretokenizer
from waste.tokenizer.spec import TokenizerSpec


class Tokenizer:
    """Byte-level BPE over the ids of one model.

    Without `markup` no text, whatever it says, encodes to an added token: `<|user|>` becomes ordinary bytes.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        """Raises InputError where the spec is inconsistent, UnsupportedError where a pattern does not compile."""
        spec.check("tokenizer")
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.added_ids = frozenset(token.id for token in spec.added)
        self.special_ids = frozenset(token.id for token in spec.added if token.special)
        self._pretokenizer = Pretokenizer(spec.patterns)
        self._added = AddedTokens(spec.added)
        self._id_of = {token.content: token.id for token in spec.added}
        # Pieces are cut by us (see Pretokenizer), so the pattern given to the library takes each one whole.
        self._bpe = tiktoken.Encoding(
            "waste", pat_str=r"(?s).+", mergeable_ranks=dict(spec.ranks), special_tokens={}
        ).encode_ordinary
        self._bytes = {rank: piece for piece, rank in spec.ranks.items()}
        self._bytes.update(spec.decode_only)
        self._bytes.update((token.id, token.content.encode()) for token in spec.added)

    def encode(self, text: str, *, markup: bool = False) -> list[int]:
        """The ids of `text`; with `markup` added tokens are recognised, without it never.

        Raises UsageError where `text` holds a lone surrogate (text that was not valid UTF-8): replacing it would
        silently change a prompt.
        """
        _check_unicode(text)
        if not markup:
            return self._encode_plain(text)
        return self._encode_segments(self._added.split(text))

    def encode_mixed(self, text: str, untrusted: Sequence[tuple[int, int]]) -> list[int]:
        """As `encode` with markup, but no added token is recognised that touches an `untrusted` range.

        Ranges are half-open, in characters, ascending and disjoint. Where nothing in them looks like (a part of) an
        added token the result equals `encode(text, markup=True)`: they are no borders for pieces.
        """
        _check_unicode(text)
        return self._encode_segments(self._added.split(text, untrusted))

    def segments(self, text: str, untrusted: Sequence[tuple[int, int]] = ()) -> list[Segment]:
        """The added-token ids that encoding finds in `text`, in order, and the texts between them."""
        return self._added.split(text, untrusted)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Ids without text add nothing."""
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id; empty for ids without text, be they holes or beyond the vocabulary."""
        return self._bytes.get(token_id, b"")

    def id_of(self, content: str) -> int | None:
        """The id of the added token with exactly this content, or None."""
        return self._id_of.get(content)

    def unused_ids(self, rows: int) -> list[int]:
        """The ids below `rows` that have no text, ascending: to be masked when sampling."""
        return [i for i in range(rows) if i not in self._bytes]

    def _encode_segments(self, segments: list[Segment]) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, int):
                ids.append(segment)
            else:
                ids += self._encode_plain(segment)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pretokenizer.split(text):
            ids += self._bpe(piece)
        return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UsageError(
            f"the text has half a character (lone surrogate U+{code:04X}) at position {error.start}",
            hint="give the text as valid UTF-8",
        ) from error
