"""What the benchmarks in this folder measure with: one thread's CPU time, spreads, and the rate it copies memory at."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


def seconds(work: Callable[[], object]) -> float:
    """CPU time of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


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


def copy_rate() -> float:
    """GB/s that this thread reads and writes copying 64 MiB, the best of five."""
    source = np.ones(1 << 24, np.float32)
    target = np.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: np.copyto(target, source)) for _ in range(5)) / 1e9
