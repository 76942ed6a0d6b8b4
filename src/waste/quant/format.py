"""What a number format is: one class each, found by name, knowing its own bytes.

A format turns a float32 matrix (rows, cols) into one blob in *kernel layout* and back.
The blob is what lies in a container, what is read into a slot and what kernels compute
from: there is no repacking anywhere. `nbytes` is exact and depends on the shape alone,
so planner, converter, container check and engine agree by construction.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from waste.errors import UsageError

F32Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class QuantFormat(Protocol):
    """One number format. Stateless; instances live in the registry."""

    name: str  # as on the command line: "q8"
    code: int  # as in records and kernels; never reused
    bits: float  # per weight, scales included, for shapes that need no padding

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of an encoded (rows, cols) matrix, padding included."""
        ...

    def encode(self, weight: F32Array) -> Bytes:
        """weight: (rows, cols) float32, finite -> (nbytes,) uint8 in kernel layout."""
        ...

    def decode(self, blob: Bytes, rows: int, cols: int) -> F32Array:
        """The inverse: (nbytes,) uint8 -> (rows, cols) float32."""
        ...


_FORMATS: dict[str, QuantFormat] = {}


def register(fmt: QuantFormat) -> None:
    """Add a format; its name and code must be new."""
    assert fmt.name not in _FORMATS
    assert all(known.code != fmt.code for known in _FORMATS.values())
    _FORMATS[fmt.name] = fmt


def get(name: str) -> QuantFormat:
    """The format called `name`; UsageError lists the known ones."""
    if name not in _FORMATS:
        raise UsageError(f"unknown number format {name!r}", hint=f"one of {', '.join(_FORMATS)}")
    return _FORMATS[name]


def names() -> tuple[str, ...]:
    """All registered formats, in order of registration."""
    return tuple(_FORMATS)
