"""The formats wt2, wt3 and wt4: window trellis codes of 2, 3 and 4 bits, 2.125, 3.125 and 4.125 bits a weight.

A code adds B bits to a ring; the weight at its place is an entry of a table of 64, chosen by the 6 bits that begin
there and so overlap with its neighbours'. That is vector quantisation at the price of a scalar lookup: relative
errors on Gaussian weights of .284, .149 and .079 where scalar codes leave .338, .181 and .101.

After the scales of a strip group (see `rotated`) come 4 * B vectors of 64 bytes. Byte 4*row + q of all of them makes
up the ring of the columns 4m + q, m = 0 .. 31; code m belongs to column 4m + q, and its window is codes m, m + 1, ...,
lowest bits first, code 0 following code 31. Vector t holds, lowest bits first,

    wt2  codes 4t to 4t + 3
    wt4  codes 2t and 2t + 1
    wt3  in the low 6 bits of three vectors codes c0 c1 | c2 c3 | c4 c5; in their high 2 bits, joined, c6 c7

The search is in kernels/csrc/cpu/encode_strip.hpp, the tables in wt_tables.hpp there.
"""

from __future__ import annotations

from waste.quant.rotated import RotatedFormat

WT2 = RotatedFormat("wt2", 4, 2)
WT3 = RotatedFormat("wt3", 5, 3)
WT4 = RotatedFormat("wt4", 6, 4)
