"""What a tokenizer is, apart from any file format: pieces with ranks, patterns, added tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from waste.errors import InputError

# Ids index rows of an embedding. The largest published vocabularies have about 260,000 rows; the bound only keeps a
# damaged file from asking for tables of absurd size.
MAX_ID = (1 << 24) - 1
# The longest pieces of published vocabularies are runs of a few hundred spaces or dashes.
MAX_PIECE_BYTES = 4096

# The bytes that occur in valid UTF-8. Vocabularies may lack the other thirteen: no text contains them.
UTF8_BYTES = frozenset(range(0xC0)) | frozenset(range(0xC2, 0xF5))


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched as text before any pre-tokenisation; the flags mean what they mean in `tokenizers`.

    `special` tokens are left out by `decode(..., skip_special=True)`. `lstrip` and `rstrip` swallow white space on that
    side of a match; `single_word` matches only where no word character touches it; tokens that are not `normalized`
    are matched before those that are.
    """

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class TokenizerSpec:
    """A byte-level BPE tokenizer in the one form this package encodes with.

    `ranks` maps the bytes of a piece to its id, which is also its merge priority (smaller merges first). `patterns` are
    applied one after another; each cuts every piece of the one before into its matches and what lies between them.
    `decode_only` are ids with bytes that no text encodes to. `warnings` are one-line remarks of the reader; they are
    not stored.
    """

    ranks: Mapping[bytes, int]
    patterns: tuple[str, ...]
    added: tuple[AddedToken, ...]
    decode_only: Mapping[int, bytes]
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: the rows an embedding needs at least."""
        ids = [*self.ranks.values(), *self.decode_only, *(token.id for token in self.added)]
        return 1 + max(ids)

    def check(self, source: str) -> None:
        """Raise InputError, naming `source`, unless ids, pieces and added tokens fit together."""
        owners: dict[int, str] = {}
        for piece, rank in self.ranks.items():
            _check_id(rank, piece, owners, source)
        for rank, piece in self.decode_only.items():
            _check_id(rank, piece, owners, source)
        for token in self.added:
            _check_id(token.id, _utf8(token.content, source), owners, source)
        contents = [token.content for token in self.added]
        if len(set(contents)) != len(contents):
            twice = next(c for c in contents if contents.count(c) > 1)
            raise InputError(f"{source}: added token {twice!r} occurs twice")
        missing = sorted(byte for byte in UTF8_BYTES if bytes([byte]) not in self.ranks)
        if missing:
            raise InputError(
                f"{source}: no piece for byte 0x{missing[0]:02x} ({len(missing)} missing), so not every text has ids"
            )


def _check_id(value: int, piece: bytes, owners: dict[int, str], source: str) -> None:
    if not piece:
        raise InputError(f"{source}: id {value} has an empty piece")
    if len(piece) > MAX_PIECE_BYTES:
        raise InputError(
            f"{source}: the piece of id {value} has {len(piece)} bytes, at most {MAX_PIECE_BYTES} expected"
        )
    if not 0 <= value <= MAX_ID:
        raise InputError(f"{source}: id {value} of {piece!r} is outside 0..{MAX_ID}")
    if value in owners:
        raise InputError(f"{source}: id {value} belongs to both {owners[value]} and {piece!r}")
    owners[value] = repr(piece)


def _utf8(text: str, source: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{source}: added token {text!r} is not valid Unicode") from error
