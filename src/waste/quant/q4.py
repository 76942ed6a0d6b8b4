"""The format q4: 4-bit codes, one float16 scale per 128 weights of a row, 4.125 bits a weight.

weight = (code - 8) * scale, code in [0, 15]; the scale may be negative, which decides whether
the side of the code with one more step (-8) serves the negative or the positive weights. In a
strip group (see `strips`) vector i of 16 holds columns 8i to 8i+7: byte 4*row + q carries
column 8i + q in its low nibble and column 8i + 4 + q in its high one.
"""

from __future__ import annotations

import numpy as np

from waste.quant.format import Bytes, F32Array
from waste.quant.strips import GROUP, STRIP_ROWS, Codes, F16Array, StripFormat, inverse, to_scale, vanishing

# Scales tried per group, as multiples of the one that puts the largest weight on code -8. Below 1
# the largest is cut off for finer steps, above 1 the other end has room, -1 swaps the two ends.
# Picked greedily from 56 candidates on Gaussian, Student t, uniform and Laplace groups: the squared
# error stays within .3 % (uniform: .5 %) of that of all 56.
_CANDIDATES = (0.80, 0.86, 0.90, 0.96, 1.02, 1.06, 1.10, -1.0)


class Q4Format(StripFormat):
    """The candidate scale with the least squared error, refined by least squares."""

    name = "q4"
    code = 3
    bits = 4 + 16 / GROUP
    code_bits = 4
    max_code = 7

    def _quantise(self, flat: F32Array, largest: F32Array) -> tuple[F16Array, Codes]:
        gone = vanishing(largest)
        base = np.where(flat.max(axis=1) == largest, largest, -largest) / np.float32(-8)
        # One group a column from here on: a sum over each group is then a few additions of whole rows.
        columns = np.ascontiguousarray(flat.T)
        codes = np.empty_like(columns)
        best = np.full(len(flat), -1, np.float32)
        scale = np.zeros(len(flat), np.float32)
        for factor in _CANDIDATES:
            tried = base * np.float32(factor)
            fit, gain = self._fit(columns, np.divide(1, tried, out=np.zeros_like(tried), where=~gone), codes)
            better = gain > best
            best[better] = gain[better]
            scale[better] = fit[better]
        # Fitting once more to the codes that the fitted scale gives takes another .1 to .3 % off the error.
        scale, _ = self._fit(columns, np.divide(1, scale, out=np.zeros_like(scale), where=~gone & (scale != 0)), codes)
        stored = to_scale(scale)
        self._round(columns, inverse(stored), codes)
        return stored, np.ascontiguousarray(codes.astype(np.int8).T)

    def _fit(self, columns: F32Array, per_step: F32Array, codes: F32Array) -> tuple[F32Array, F32Array]:
        """Codes at 1 / `per_step`; the scale that fits them best, and the squared error it removes from |w|^2.

        For fixed codes q the best scale is (w.q) / (q.q), and the error left is |w|^2 - (w.q)^2 / (q.q).
        """
        self._round(columns, per_step, codes)
        along, square = _folded(columns * codes), _folded(codes * codes)
        fit = np.divide(along, square, out=np.zeros_like(along), where=square != 0)
        return fit, fit * along

    @staticmethod
    def _round(columns: F32Array, per_step: F32Array, codes: F32Array) -> None:
        np.multiply(columns, per_step, out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, -8, 7, out=codes)

    def _pack(self, codes: Codes) -> Bytes:
        strips, _, groups, _ = codes.shape
        nibbles = (codes + 8).view(np.uint8).reshape(strips, STRIP_ROWS, groups, GROUP // 8, 2, 4)
        both = nibbles[..., 0, :] | nibbles[..., 1, :] << 4
        return np.ascontiguousarray(both.transpose(0, 2, 3, 1, 4)).reshape(strips, groups, STRIP_ROWS * GROUP // 2)

    def _unpack(self, packed: Bytes) -> Codes:
        strips, groups, _ = packed.shape
        both = packed.reshape(strips, groups, GROUP // 8, STRIP_ROWS, 4).transpose(0, 3, 1, 2, 4)
        nibbles = np.stack((both & 15, both >> 4), axis=-2).astype(np.int8)  # (strips, 16, groups, 16, 2, 4)
        nibbles -= 8
        return nibbles.reshape(strips, STRIP_ROWS, groups, GROUP)


def _folded(terms: F32Array) -> F32Array:
    """(128, g) -> (g,) sums, always added in the same order: halves onto each other, seven times. Uses up `terms`.

    NumPy's own sums take the order that suits a machine's vectors, so another processor would write other bytes.
    Element by element, IEEE arithmetic leaves no choice.
    """
    half = GROUP // 2
    while half:
        terms[:half] += terms[half : 2 * half]
        half //= 2
    total: F32Array = terms[0]
    return total


Q4 = Q4Format()
