"""A simulated drive: no byte comes earlier than its rate allows, latencies overlap, idle time is not saved up."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste.errors import UsageError
from waste.io.throttle import Throttle


class Time:
    """A clock that only sleeping moves on, each time by a share of what was asked for."""

    def __init__(self, share: float = 1.0) -> None:
        self.now = 100.0
        self.share = share

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += max(seconds * self.share, 1e-6)


JOBS = st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 10_000_000), st.floats(0, 0.3)), min_size=1, max_size=30)


@given(JOBS, st.floats(1e5, 1e9), st.floats(0, 0.1), st.sampled_from([1.0, 0.5]))
def test_every_job_ends_when_that_drive_would_have_ended_it(
    jobs: list[tuple[float, int, float]], rate: float, latency: float, share: float
) -> None:
    """One after another: an idle time, bytes, and the time the real read took."""
    time = Time(share)
    drive = Throttle(rate, latency, clock=time.clock, sleep=time.sleep)
    first, total, free = time.now, 0, 0.0
    for idle, nbytes, real in jobs:
        time.now += idle
        began = drive.now()
        time.now += real
        drive.wait(nbytes, began)
        free = max(began, free) + nbytes / rate
        total += nbytes
        assert time.now >= began + nbytes / rate + latency - 1e-9
        assert time.now >= first + total / rate - 1e-9
        # And no later than it must, give or take the last of the sleeps.
        assert time.now <= max(free + latency, began + real) + 1e-5


@given(st.lists(st.integers(1, 10_000_000), min_size=1, max_size=20), st.floats(1e5, 1e9), st.floats(0, 0.1))
def test_jobs_in_flight_together_share_the_rate_and_overlap_their_latencies(
    sizes: list[int], rate: float, latency: float
) -> None:
    time = Time()
    drive = Throttle(rate, latency, clock=time.clock, sleep=time.sleep)
    began = drive.now()
    for nbytes in sizes:
        drive.wait(nbytes, began)  # all began before the first one ended
    assert time.now == pytest.approx(began + sum(sizes) / rate + latency)


def test_a_drive_slower_than_the_simulated_one_waits_for_nothing() -> None:
    time = Time()
    drive = Throttle(1e9, clock=time.clock, sleep=lambda seconds: pytest.fail("slept"))
    began = drive.now()
    time.now += 1.0
    drive.wait(10**9, began)


def test_idle_time_is_lost() -> None:
    time = Time()
    drive = Throttle(1e6, clock=time.clock, sleep=time.sleep)
    drive.wait(1_000_000, drive.now())
    time.now += 3600
    began = drive.now()
    drive.wait(1_000_000, began)
    assert time.now == pytest.approx(began + 1)


def test_threads_share_one_drive() -> None:
    """With a clock that stands still each thread's first sleep tells when its job ends: no two jobs overlap."""
    ends: list[float] = []
    lock = threading.Lock()
    local = threading.local()

    def sleep(seconds: float) -> None:
        with lock:
            ends.append(seconds)
        local.late = True

    drive = Throttle(1000, clock=lambda: 1e9 if getattr(local, "late", False) else 0.0, sleep=sleep)
    threads = [threading.Thread(target=drive.wait, args=(500, 0.0)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == pytest.approx([0.5 * (i + 1) for i in range(20)])


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_impossible_drives_are_usage_errors(rate: float) -> None:
    with pytest.raises(UsageError, match="drive"):
        Throttle(rate)


@pytest.mark.parametrize("latency", [-1e-9, float("inf"), float("nan")])
def test_impossible_latencies_are_usage_errors(latency: float) -> None:
    with pytest.raises(UsageError, match="latency"):
        Throttle(1.0, latency)
