"""The strip layout that q8 and q4 share: 16 rows side by side, 128 columns to a float16 scale.

    rows padded to 16, columns to 128, with zeros
    blob  = strips in order, one per 16 rows
    strip = strip groups in order, one per 128 columns
    strip group = 16 float16 scales (row order), then the codes: vectors of 64 bytes in which
                  byte 4*row + q belongs to `row`, so that one vector feeds 16 rows at once

A strip depends on its own rows alone: encoding a matrix in pieces of a multiple of 16 rows and
joining the blobs gives the blob of the whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from waste.errors import InputError
from waste.quant.dense import check_blob, check_matrix
from waste.quant.format import Bytes, F32Array

F16Array = npt.NDArray[np.float16]
Codes = npt.NDArray[np.int8]

STRIP_ROWS = 16
GROUP = 128
SCALE_BYTES = 2 * STRIP_ROWS
F16_MAX = 65504.0
_F16_TINY = 2.0**-14  # the smallest normal float16
_F16_ULP = 2.0**-24  # the distance of subnormal ones

# Weights encoded at a time: the block and its temporaries stay in the second-level cache.
_BLOCK_WEIGHTS = 1 << 16


class StripFormat(ABC):
    """A format of signed integer codes times a float16 scale per row and group, in strip layout."""

    name: str
    code: int
    bits: float
    code_bits: int
    max_code: int  # the largest magnitude that codes of both signs reach

    @property
    def group_bytes(self) -> int:
        """Bytes of one strip group: scales and codes of 16 x 128 weights."""
        return SCALE_BYTES + STRIP_ROWS * GROUP * self.code_bits // 8

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of an encoded (rows, cols) matrix, padding included."""
        return -(-rows // STRIP_ROWS) * -(-cols // GROUP) * self.group_bytes

    def encode(self, weight: F32Array) -> Bytes:
        """(rows, cols) float32 -> (nbytes,) uint8.

        ValueError when not a finite float32 matrix, InputError for weights beyond the largest scale.
        """
        check_matrix(weight)
        rows, cols = weight.shape
        strips, groups = -(-rows // STRIP_ROWS), -(-cols // GROUP)
        blob = np.empty((strips, groups, self.group_bytes), np.uint8)
        step = max(1, _BLOCK_WEIGHTS // max(STRIP_ROWS * GROUP * groups, 1))
        for begin in range(0, strips, step):
            end = min(begin + step, strips)
            block = _padded(weight[begin * STRIP_ROWS : end * STRIP_ROWS], (end - begin) * STRIP_ROWS, groups * GROUP)
            flat = block.reshape(-1, GROUP)
            scale, codes = self._quantise(flat, self._largest(flat))
            strip_scale = scale.reshape(end - begin, STRIP_ROWS, groups).transpose(0, 2, 1).astype("<f2", order="C")
            blob[begin:end, :, :SCALE_BYTES] = strip_scale.view(np.uint8)
            blob[begin:end, :, SCALE_BYTES:] = self._pack(codes.reshape(end - begin, STRIP_ROWS, groups, GROUP))
        return blob.reshape(-1)

    def decode(self, blob: Bytes, rows: int, cols: int) -> F32Array:
        """(nbytes,) uint8 -> (rows, cols) float32. ValueError when the sizes differ."""
        check_blob(blob, self.nbytes(rows, cols))
        strips, groups = -(-rows // STRIP_ROWS), -(-cols // GROUP)
        parts = blob.reshape(strips, groups, self.group_bytes)
        scale = np.ascontiguousarray(parts[..., :SCALE_BYTES]).view("<f2").astype(np.float32)  # (strips, groups, 16)
        weight = self._unpack(parts[..., SCALE_BYTES:]).astype(np.float32)  # (strips, 16, groups, 128)
        weight *= scale.transpose(0, 2, 1)[..., None]
        padded: F32Array = weight.reshape(strips * STRIP_ROWS, groups * GROUP)
        return padded[:rows, :cols].copy()

    def _largest(self, flat: F32Array) -> F32Array:
        """(n, 128) weights -> (n,) largest magnitudes; refuses what no scale can hold."""
        largest: F32Array = np.maximum(flat.max(axis=1), -flat.min(axis=1))
        limit = F16_MAX * self.max_code
        peak = float(largest.max(initial=0.0))
        if not np.isfinite(peak):
            raise ValueError("weights must be finite")
        if peak > limit:
            raise InputError(
                f"a weight of magnitude {peak:.6g} is too large for {self.name}, which ends at {limit:.6g}"
            )
        return largest

    @abstractmethod
    def _quantise(self, flat: F32Array, largest: F32Array) -> tuple[F16Array, Codes]:
        """(n, 128) weights and their (n,) largest magnitudes -> (n,) scales and (n, 128) signed codes."""

    @abstractmethod
    def _pack(self, codes: Codes) -> Bytes:
        """(strips, 16, groups, 128) signed codes -> (strips, groups, code bytes)."""

    @abstractmethod
    def _unpack(self, packed: Bytes) -> Codes:
        """The inverse of `_pack`."""


def to_scale(wanted: F32Array) -> F16Array:
    """The float16 scale to store for each wanted one: the nearest, but subnormal ones rounded away from zero.

    There float16 has few bits, and a scale far below the wanted one would cut off the largest
    weights; one above costs at most its own half in error. Zero stays zero.
    """
    nearest = np.clip(wanted, -F16_MAX, F16_MAX).astype(np.float16)
    small = np.abs(wanted) < _F16_TINY
    if small.any():
        ulps = np.abs(wanted[small].astype(np.float64)) / _F16_ULP
        nearest[small] = np.copysign(np.ceil(ulps) * _F16_ULP, wanted[small]).astype(np.float16)
    return nearest


def vanishing(largest: F32Array) -> npt.NDArray[np.bool_]:
    """Groups so small that every code would round to zero even under the smallest scale."""
    return largest <= _F16_ULP / 2


def inverse(scale: F16Array) -> F32Array:
    """1 / scale as float32, and 0 where the scale is 0."""
    wide = scale.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)


def _padded(part: F32Array, rows: int, cols: int) -> F32Array:
    """`part` with zeros up to (rows, cols), contiguous; `part` itself where nothing is missing."""
    if part.shape == (rows, cols):
        return np.ascontiguousarray(part)
    block = np.zeros((rows, cols), np.float32)
    block[: part.shape[0], : part.shape[1]] = part
    return block
