"""The middle of some samples, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """The middle of some samples, and where all but the lowest and the highest tenth lie."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """ValueError without samples."""
        if not samples:
            raise ValueError("no samples")
        p10, median, p90 = np.percentile(np.asarray(samples, np.float64), (10, 50, 90))
        return Spread(float(median), float(p10), float(p90))

    def text(self, digits: int = 1) -> str:
        """`12.3 (11.8-12.9)`"""
        return f"{self.median:.{digits}f} ({self.p10:.{digits}f}-{self.p90:.{digits}f})"
