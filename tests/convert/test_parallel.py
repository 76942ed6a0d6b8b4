"""Results in order, memory bounded, failures in their turn: laws of the converter's work on several threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from waste.convert.parallel import Job, in_order


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def slow(value: int, seconds: float) -> int:
    time.sleep(seconds)
    return value


def test_results_come_in_the_order_of_their_jobs(pool: ThreadPoolExecutor) -> None:
    rng = random.Random(0)
    jobs = (Job(1, partial(slow, i, rng.random() / 200)) for i in range(100))
    assert list(in_order(jobs, pool, 4, 1000)) == list(range(100))
    assert list(in_order(iter(()), pool, 4, 1000)) == []


@pytest.mark.parametrize("bound", [0, 10, 25, 1000])
def test_what_is_under_way_stays_within_the_bound(pool: ThreadPoolExecutor, bound: int) -> None:
    """Held from the start of a job until its result is used; a larger job runs alone, one more is read ahead."""
    rng = random.Random(bound)
    sizes = [rng.randrange(0, 31) for _ in range(200)]
    started: set[int] = set()
    used = 0
    lock = threading.Lock()
    worst: list[list[int]] = []

    def run(i: int) -> int:
        with lock:
            started.add(i)
            worst.append(sizes[used : max(started) + 1])
        return i

    for result in in_order((Job(size, partial(run, i)) for i, size in enumerate(sizes)), pool, 4, bound):
        with lock:
            used = result + 1
    assert started == set(range(200))
    assert all(len(held) <= 1 or sum(held) <= bound for held in worst)
    assert max(map(len, worst)) <= 4 + 2
    if bound == 1000:
        assert max(map(len, worst)) > 1


def test_jobs_are_not_taken_before_there_is_room(pool: ThreadPoolExecutor) -> None:
    taken = 0

    def jobs() -> Iterator[Job[int]]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield Job(10, partial(int, 7))

    results = in_order(jobs(), pool, 4, 30)
    for used in range(20):  # each result makes room for one job more, and one is always waiting
        next(results)
        assert taken == used + 3 + 1
    results.close()
    assert taken == 19 + 3 + 1


def test_failures_come_in_their_turn(pool: ThreadPoolExecutor) -> None:
    """A job that fails at once and an iterator that fails still earlier wait for what was before them."""

    def fail() -> int:
        raise KeyError("job")

    def jobs(broken: bool) -> Iterator[Job[int]]:
        yield Job(1, partial(slow, 0, 0.05))
        yield Job(1, partial(slow, 1, 0.05))
        if broken:
            yield Job(1, fail)
        raise ValueError("iterator")

    for broken, kind in ((True, KeyError), (False, ValueError)):
        results = in_order(jobs(broken), pool, 4, 1000)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(kind):
            next(results)
        assert list(results) == []
