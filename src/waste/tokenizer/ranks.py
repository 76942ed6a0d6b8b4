"""The rank file: one `base64(bytes) rank` per line, as `tiktoken` reads and writes it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from waste.errors import InputError


def parse_ranks(data: bytes, source: str) -> dict[bytes, int]:
    """Pieces and their ranks. Raises InputError, naming `source` and the line, where a line is not of that form."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        fields = line.split(b" ")
        try:
            if len(fields) != 2 or not fields[1].isdigit() or len(fields[1]) > 9:
                raise ValueError("not two fields")
            piece = base64.b64decode(fields[0], validate=True)
        except (ValueError, binascii.Error) as error:
            raise InputError(
                f"{source} line {number} is not 'base64 rank': {line[:60].decode('ascii', 'replace')!r}"
            ) from error
        if piece in ranks:
            raise InputError(f"{source} line {number}: piece {piece!r} occurs twice")
        ranks[piece] = int(fields[1])
    if not ranks:
        raise InputError(f"{source} holds no pieces ({len(data)} bytes)")
    return ranks


def format_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """The file for `ranks`, lines in the order of rank."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(piece), rank) for piece, rank in ordered)
