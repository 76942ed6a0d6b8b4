"""The format q8: signed 8-bit codes, one float16 scale per 128 weights of a row, 8.125 bits a weight.

weight = code * scale, code in [-127, 127]. In a strip group (see `strips`) vector j of 32
holds columns 4j to 4j+3: byte 4*row + q is the code of (row, column 4j + q).
"""

from __future__ import annotations

import numpy as np

from waste.quant.format import Bytes, F32Array
from waste.quant.strips import GROUP, STRIP_ROWS, Codes, F16Array, StripFormat, inverse, to_scale, vanishing


class Q8Format(StripFormat):
    """Round to nearest, the largest weight of a group at code 127."""

    name = "q8"
    code = 2
    bits = 8 + 16 / GROUP
    code_bits = 8
    max_code = 127

    def _quantise(self, flat: F32Array, largest: F32Array) -> tuple[F16Array, Codes]:
        # The scale is rounded to float16 first and the codes follow from the rounded one. A scale
        # rounded down (by at most 2^-11) puts the largest weight at 127.06, so nothing is clipped
        # by more than that.
        scale = to_scale(np.where(vanishing(largest), np.float32(0), largest / np.float32(127)))
        codes = flat * inverse(scale)[:, None]
        np.rint(codes, out=codes)
        np.clip(codes, -127, 127, out=codes)
        return scale, codes.astype(np.int8)

    def _pack(self, codes: Codes) -> Bytes:
        strips, _, groups, _ = codes.shape
        vectors = codes.reshape(strips, STRIP_ROWS, groups, GROUP // 4, 4).transpose(0, 2, 3, 1, 4)
        return np.ascontiguousarray(vectors).view(np.uint8).reshape(strips, groups, STRIP_ROWS * GROUP)

    def _unpack(self, packed: Bytes) -> Codes:
        strips, groups, _ = packed.shape
        vectors = packed.view(np.int8).reshape(strips, groups, GROUP // 4, STRIP_ROWS, 4)
        return vectors.transpose(0, 3, 1, 2, 4).reshape(strips, STRIP_ROWS, groups, GROUP)


Q8 = Q8Format()
