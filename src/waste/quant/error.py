"""How much a number format loses on a given matrix."""

from __future__ import annotations

import math

import numpy as np

from waste.quant.format import F32Array, QuantFormat

# Rows measured at a time, so that the float64 copies stay small; a multiple of every strip height.
_ROWS = 256


def relative_error(weight: F32Array, fmt: QuantFormat) -> float:
    """|decode(encode(W)) - W| / |W| in the Frobenius norm, summed in float64; 0 for a zero matrix.

    weight: (rows, cols) float32, finite. Errors as `fmt.encode`.
    """
    lost = total = 0.0
    for begin in range(0, weight.shape[0], _ROWS):
        rows = weight[begin : begin + _ROWS]
        back = fmt.decode(fmt.encode(rows), *rows.shape)
        exact = rows.astype(np.float64)
        lost += float(np.square(back - exact).sum())
        total += float(np.square(exact).sum())
    return math.sqrt(lost / total) if total else 0.0
