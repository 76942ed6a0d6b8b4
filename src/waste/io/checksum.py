"""The one checksum of this project: XXH3, 64 bits, and its text form of 16 hexadecimal digits.

It guards against damage (a flipped bit, a torn write, a swapped file), not against an attacker:
whoever can write a container can also write checksums that fit.
"""

from __future__ import annotations

import re

import xxhash

from waste.io.buffers import Data, as_bytes

_HEX = re.compile(r"[0-9a-f]{16}")


class Hasher:
    """The checksum of bytes that arrive in pieces: any split gives the same value."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, data: Data) -> None:
        """Append `data`, a C-contiguous buffer."""
        self._state.update(as_bytes(data))

    @property
    def value(self) -> int:
        """The checksum of all bytes so far, in [0, 2**64)."""
        return self._state.intdigest()


def checksum(*parts: Data) -> int:
    """XXH3-64 (seed 0) of the parts one after another, in [0, 2**64)."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(as_bytes(parts[0]))
    hasher = Hasher()
    for part in parts:
        hasher.update(part)
    return hasher.value


def to_hex(value: int) -> str:
    """The text form: 16 lower-case hexadecimal digits, as manifests carry it."""
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} is not a 64-bit checksum")
    return f"{value:016x}"


def from_hex(text: str) -> int:
    """The inverse of `to_hex`; ValueError for anything it would not write."""
    if _HEX.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a checksum of 16 lower-case hexadecimal digits")
    return int(text, 16)
