"""The format q6: 6-bit codes of the rotated weights, one float16 scale per 128 of a row, 6.125 bits a weight.

weight = (code - 32) * scale, code in [0, 63]; the scale may be negative, which decides the side that has one step
more. After the scales of a strip group (see `rotated`) come 8 times three vectors of 64 bytes, for 16 columns each.
Block j, byte 4*row + q:

    first   column 16j + q in the low nibble, 16j + 4 + q in the high one: the low 4 bits of the codes
    second  16j + 8 + q and 16j + 12 + q likewise
    third   the high 2 bits of the four codes, that of column 16j + 4i + q in bits 2i and 2i + 1

so that one shift and one select by bits per 64 weights make bytes of them, in the order q4 has.
"""

from __future__ import annotations

from waste.quant.rotated import RotatedFormat

Q6 = RotatedFormat("q6", 7, 6)
