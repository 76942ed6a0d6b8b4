"""What the benchmarks in this folder measure with: one thread's CPU time, spreads, and the rate it copies memory at."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from waste.bench.spread import Spread

__all__ = ["Spread", "copy_rate", "seconds"]


def seconds(work: Callable[[], object]) -> float:
    """CPU time of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def copy_rate() -> float:
    """GB/s that this thread reads and writes copying 64 MiB, the best of five."""
    source = np.ones(1 << 24, np.float32)
    target = np.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: np.copyto(target, source)) for _ in range(5)) / 1e9
