"""What wt2, wt3, wt4 and q6 share: strips of the rotated matrix, encoded and decoded by native code.

Rows are padded to 16 and columns to 128, with zeros. Every 128 columns of a row are rotated: 64 or so fixed sign
flips, then the orthonormal Hadamard transform. That makes any group look Gaussian, whatever its outliers, and x . w
stays what it is when x is rotated, too. Strips and groups then lie as in `strips`: per strip of 16 rows and group
of 128, 16 float16 scales and the codes.

A scale is stored 256 times too large, in every tensor. So a blob needs no header, strips stay independent of each
other (the whole is its pieces joined), and scales of groups with an rms from 6e-6 to 3e3 keep all 11 bits; weights
of trained models are around 1e-2. Below that range scales lose bits, and below 3e-9 they are 0; groups above it are
refused. A factor for each tensor would shift the range, at the price of reading the tensor twice.
"""

from __future__ import annotations

import numpy as np

from waste.errors import InputError
from waste.kernels import encode as native
from waste.quant.dense import check_blob, check_matrix
from waste.quant.format import Bytes, F32Array
from waste.quant.strips import GROUP, SCALE_BYTES, STRIP_ROWS

SCALE_FACTOR = 256


class RotatedFormat:
    """`code_bits` a weight and a float16 scale per row and group."""

    def __init__(self, name: str, code: int, code_bits: int) -> None:
        self.name = name
        self.code = code
        self.code_bits = code_bits
        self.bits = code_bits + 16 / GROUP

    @property
    def group_bytes(self) -> int:
        """Bytes of one strip group: scales and codes of 16 x 128 weights."""
        return SCALE_BYTES + STRIP_ROWS * GROUP * self.code_bits // 8

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of an encoded (rows, cols) matrix, padding included."""
        return -(-rows // STRIP_ROWS) * -(-cols // GROUP) * self.group_bytes

    def encode(self, weight: F32Array, importance: F32Array | None = None) -> Bytes:
        """(rows, cols) float32 -> (nbytes,) uint8, with the least squared error the encoder finds.

        importance: what the squared error in each rotated column counts, (cols padded to 128,) float32, >= 0.
        ValueError when not a finite float32 matrix or not such importance, InputError for weights beyond the
        largest scale. Releases the GIL.
        """
        check_matrix(weight)
        if importance is not None and not (np.isfinite(importance).all() and (importance >= 0).all()):
            raise ValueError("importance must be finite and not negative")
        made = native.encode(weight, self.code, self.nbytes(*weight.shape), importance)
        if made.bad and not np.isfinite(weight).all():
            raise ValueError("weights must be finite")
        if made.bad or made.saturated:
            peak = float(np.abs(weight).max())
            raise InputError(f"weights of magnitude up to {peak:.6g} are too large for {self.name}")
        return made.blob

    def decode(self, blob: Bytes, rows: int, cols: int) -> F32Array:
        """(nbytes,) uint8 -> (rows, cols) float32, rotated back. ValueError when the sizes differ."""
        check_blob(blob, self.nbytes(rows, cols))
        return native.decode(np.ascontiguousarray(blob), self.code, rows, cols)
