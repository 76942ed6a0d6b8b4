"""A slower drive than there is: reads that end no earlier than a drive of a given rate would have ended them.

The reads themselves are real, so a simulated drive runs through the same code as any other. Nothing can be simulated
that is faster than the drive below; for that, let the files lie in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from waste.errors import UsageError


class Throttle:
    """One drive that all threads share: it moves `bytes_per_s` and answers `latency_s` after that. Thread-safe.

    Jobs use the drive one after another in the order in which they come here, each from when it began or the one
    before was through: n bytes end at max(began, free) + n / bytes_per_s + latency_s. Latencies overlap, so a depth
    above one hides them, as on a drive. Time in which nothing was asked for is lost, not saved up.
    """

    def __init__(
        self,
        bytes_per_s: float,
        latency_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """UsageError unless the rate is positive and finite, and the latency not negative."""
        if not 0 < bytes_per_s < float("inf"):
            raise UsageError(
                f"a drive of {bytes_per_s} bytes a second", hint="give a rate such as 2GB, 10^9 bytes a second"
            )
        if not 0 <= latency_s < float("inf"):
            raise UsageError(f"a drive with a latency of {latency_s} s")
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = float("-inf")  # when the drive has moved all it was asked for

    def now(self) -> float:
        """The time by this drive's clock, in seconds: when a job begins."""
        return self._clock()

    def wait(self, nbytes: int, began: float) -> None:
        """Sleep until the drive has delivered the `nbytes` of a job that began at `began` (by `now`)."""
        with self._lock:
            self._free_at = max(began, self._free_at) + nbytes / self.bytes_per_s
            end = self._free_at + self.latency_s
        # Sleeping may end a little early on some systems; the law holds all the same.
        while (left := end - self._clock()) > 0:
            self._sleep(left)
