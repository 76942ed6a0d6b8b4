"""Work on several threads: results in order, memory bounded, failures where one thread would have met them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

# Jobs under way beyond one for each thread, so that none waits while a result is written and the next job is read.
_SPARE = 2


@dataclass(frozen=True)
class Job(Generic[T_co]):
    """`run`, for any thread, and the bytes it holds from now until its result is used up."""

    nbytes: int
    run: Callable[[], T_co]


def in_order(jobs: Iterator[Job[T_co]], pool: ThreadPoolExecutor, threads: int, bound: int) -> Iterator[T_co]:
    """The results of `jobs` in their order. `pool` has `threads` threads.

    Jobs are taken from their iterator, in this thread, while those under way hold at most `bound` bytes together; one
    that is larger runs alone. What a job raises is raised when its turn comes, and so is what the iterator raises.
    """
    running: deque[tuple[int, Future[T_co]]] = deque()
    held = 0
    waiting = _next(jobs)
    try:
        while waiting is not None or running:
            while waiting is not None and (
                not running or (len(running) < threads + _SPARE and held + waiting.nbytes <= bound)
            ):
                running.append((waiting.nbytes, pool.submit(waiting.run)))
                held += waiting.nbytes
                waiting = _next(jobs)
            nbytes, future = running.popleft()
            yield future.result()
            held -= nbytes
    finally:
        for _, future in running:
            future.cancel()


def _next(jobs: Iterator[Job[T_co]]) -> Job[T_co] | None:
    try:
        return next(jobs, None)
    except Exception as error:
        failure = error

    def fail() -> T_co:
        raise failure

    return Job(0, fail)
