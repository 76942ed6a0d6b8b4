"""Number formats: importing this package registers all of them, `get` finds one by name."""

from __future__ import annotations

from waste.quant import dense, q4, q6, q8, wt
from waste.quant.format import QuantFormat, get, names, register

__all__ = ["QuantFormat", "get", "names", "register"]

# In order of their codes; the order is that of `names` and of help texts.
register(dense.F32)
register(dense.BF16)
register(q8.Q8)
register(q4.Q4)
register(wt.WT2)
register(wt.WT3)
register(wt.WT4)
register(q6.Q6)
