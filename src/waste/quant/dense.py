"""The formats f32 and bf16: row-major, little-endian, no scales and no padding."""

from __future__ import annotations

import numpy as np

from waste.errors import InputError
from waste.quant.format import Bytes, F32Array


class F32Format:
    """Four bytes a weight, exact."""

    name = "f32"
    code = 0
    bits = 32.0

    def nbytes(self, rows: int, cols: int) -> int:
        """4 * rows * cols."""
        return 4 * rows * cols

    def encode(self, weight: F32Array) -> Bytes:
        """(rows, cols) float32 -> (nbytes,) uint8. ValueError when not a finite float32 matrix."""
        check_matrix(weight)
        if not np.isfinite(weight).all():
            raise ValueError("weights must be finite")
        return np.ascontiguousarray(weight, "<f4").view(np.uint8).reshape(-1).copy()

    def decode(self, blob: Bytes, rows: int, cols: int) -> F32Array:
        """(nbytes,) uint8 -> (rows, cols) float32, a copy. ValueError when the sizes differ."""
        check_blob(blob, self.nbytes(rows, cols))
        return np.frombuffer(blob.tobytes(), "<f4").astype(np.float32).reshape(rows, cols)


class Bf16Format:
    """The upper half of a float32, rounded to nearest, ties to even: 8 significant bits."""

    name = "bf16"
    code = 1
    bits = 16.0

    def nbytes(self, rows: int, cols: int) -> int:
        """2 * rows * cols."""
        return 2 * rows * cols

    def encode(self, weight: F32Array) -> Bytes:
        """(rows, cols) float32 -> (nbytes,) uint8.

        ValueError when not a finite float32 matrix, InputError for a weight that rounds to infinity.
        """
        check_matrix(weight)
        if not np.isfinite(weight).all():
            raise ValueError("weights must be finite")
        bits = np.ascontiguousarray(weight).view(np.uint32)
        # Just below one half is added, or exactly one half where the last kept bit is odd. A finite
        # pattern is at most 0x7f7fffff without its sign, so the sum cannot leave 32 bits.
        rounded = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2")
        if ((rounded & 0x7F80) == 0x7F80).any():
            raise InputError(f"a weight of {np.abs(weight).max():.6g} is too large for {self.name}")
        return rounded.reshape(-1).view(np.uint8)

    def decode(self, blob: Bytes, rows: int, cols: int) -> F32Array:
        """(nbytes,) uint8 -> (rows, cols) float32. ValueError when the sizes differ."""
        check_blob(blob, self.nbytes(rows, cols))
        bits = np.frombuffer(blob.tobytes(), "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(rows, cols)


def check_matrix(weight: F32Array) -> None:
    """ValueError unless `weight` is a float32 matrix."""
    if weight.ndim != 2 or weight.dtype != np.float32:
        raise ValueError(f"expected a float32 matrix, found {weight.dtype} with shape {weight.shape}")


def check_blob(blob: Bytes, nbytes: int) -> None:
    """ValueError unless `blob` is (nbytes,) uint8."""
    if blob.shape != (nbytes,) or blob.dtype != np.uint8:
        raise ValueError(f"expected {nbytes} bytes, found {blob.dtype} with shape {blob.shape}")


F32 = F32Format()
BF16 = Bf16Format()
