"""Matrices into the rotated formats and back, natively: what the number formats wt2, wt3, wt4 and q6 are made with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waste.kernels import _cpu, isa
from waste.kernels.arrays import f32, f32_out, u8

F32Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Encoded:
    """A blob, and how many of its strip groups (16 rows by 128 columns) cannot be trusted."""

    blob: Bytes
    bad: int  # NaN, infinities or weights beyond 1e18; zeros are written
    saturated: int  # a scale beyond the largest float16, clipped


def encode(
    weight: F32Array,
    fmt: int,
    nbytes: int,
    importance: F32Array | None = None,
    *,
    threads: int = 1,
    instruction_set: str | None = None,
) -> Encoded:
    """weight: (rows, cols) float32 -> (nbytes,) uint8 in format number `fmt`.

    `importance`: weights >= 0 of the squared errors in each rotated column, (cols padded to 128,) float32. Neither
    `threads` nor the instruction set changes a byte. ValueError for anything that is not as described,
    UnsupportedError for an instruction set this processor lacks. Releases the GIL.
    """
    blob = np.empty(nbytes, np.uint8)
    rows, cols = weight.shape
    if weight.size == 0:
        return Encoded(blob, 0, 0)
    weight = np.ascontiguousarray(weight)
    at = 0 if importance is None else f32(importance, "importance", "columns", -(-cols // 128) * 128)
    code = isa.code_of(instruction_set)
    pool = _cpu.Pool(threads)
    bad, saturated = _cpu.encode(
        pool,
        f32(weight, "weight", "rows cols", rows, cols),
        fmt,
        rows,
        cols,
        at,
        code,
        u8(blob, "blob", "bytes", nbytes),
    )
    return Encoded(blob, bad, saturated)


def decode(blob: Bytes, fmt: int, rows: int, cols: int, *, threads: int = 1) -> F32Array:
    """(nbytes,) uint8, of the right size -> (rows, cols) float32. Releases the GIL."""
    weight = np.empty((rows, cols), np.float32)
    if weight.size:
        matrix = _cpu.Weight(u8(blob, "blob", "bytes", len(blob)), fmt, rows, cols, blob)
        _cpu.decode(_cpu.Pool(threads), matrix, f32_out(weight, "weight", "rows cols", rows, cols))
    return weight
