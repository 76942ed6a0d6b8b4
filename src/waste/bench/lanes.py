"""Where a token's time goes: a backend with a clock at every stage border, added up by lane.

A clock is read when a stage begins and when it ends. The time of a stage belongs to its lane, the time between two
stages to Python. Of both, what the cache says that it stood still for (`stall_s`) is the wait for the drive. So the
lanes are all of the time between the first border and the last, each part counted once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

STAGES = {
    "embed": "trunk",
    "rms_norm": "trunk",
    "add": "trunk",
    "add_norm": "trunk",
    "linear": "trunk",
    "hc_expand": "trunk",
    "hc_pre": "trunk",
    "hc_post": "trunk",
    "hc_seam": "trunk",
    "hc_mean": "trunk",
    "mlp": "trunk",
    "kda": "attention",
    "mla_project": "attention",
    "index": "attention",
    "mla_attend": "attention",
    "route": "router",
    "experts": "experts",
    "expert_group": "experts",
    "combine": "experts",
    "sample": "sampling",
}
_MEETS_THE_DRIVE = ("experts", "expert_group")

# In the order of a report. `wait` is for the drive.
LANES = ("trunk", "attention", "experts", "router", "sampling", "wait", "python")


class Lanes:
    """Nanoseconds by stage since the last `reset`.

    stalled: the seconds that the cache has stood still so far. clock: nanoseconds, of wall time unless asked otherwise.
    """

    def __init__(
        self, stalled: Callable[[], float] = lambda: 0.0, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.spent: dict[str, int] = {}
        self.calls = 0
        self._stalled = stalled
        self._clock = clock
        # Of each stage since `begin`, booked at the `end`: between two stages of nano-glm there is no time for more
        # than that (LEARNED: stage-clocks). The stalls are those before and after it, None where nobody asked.
        self._log: list[tuple[str, int, int, float | None, float]] = []
        self._began = 0
        self._stall = 0.0
        self.reset()

    def reset(self) -> None:
        self.spent.clear()
        self.spent.update(dict.fromkeys((*STAGES, "wait", "python"), 0))
        self.calls = 0

    def begin(self) -> None:
        """A token, or a prompt, begins."""
        self._log.clear()
        self._stall = self._stalled()
        self._began = self._clock()

    def end(self) -> None:
        """And ends: what came after the last stage was Python, or a wait."""
        now, stall = self._clock(), self._stalled()
        last, known = self._began, self._stall
        spent = self.spent
        for stage, began, ended, before, after in self._log:
            spent["python"] += began - last
            spent[stage] += ended - began
            last = ended
            if before is not None:
                self._wait("python", before - known)
                self._wait(stage, after - before)
                known = after
        spent["python"] += now - last
        self._wait("python", stall - known)
        self.calls += len(self._log)
        self._log.clear()

    def _wait(self, where: str, seconds: float) -> None:
        """Of the time booked to `where`, so much was a wait for the drive."""
        waited = round(1e9 * seconds)
        self.spent[where] -= waited
        self.spent["wait"] += waited

    def clocked(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with clocks around it, as `stage`."""
        log, clock, stalled = self._log.append, self._clock, self._stalled

        def timed(*args: Any) -> Any:
            began = clock()
            result = function(*args)
            log((stage, began, clock(), None, 0.0))
            return result

        def timed_with_waits(*args: Any) -> Any:
            before = stalled()
            began = clock()
            result = function(*args)
            ended = clock()
            log((stage, began, ended, before, stalled()))
            return result

        return timed_with_waits if stage in _MEETS_THE_DRIVE else timed

    def seconds(self) -> dict[str, float]:
        """By lane, all of LANES."""
        total = dict.fromkeys(LANES, 0)
        for stage, spent in self.spent.items():
            total[STAGES.get(stage, stage)] += spent
        return {lane: spent / 1e9 for lane, spent in total.items()}


class TimedOps:
    """A backend (`waste.backends.base.Ops`) that tells `lanes` of each of its stages."""

    def __init__(self, ops: Any, lanes: Lanes) -> None:
        self._ops = ops
        for stage in STAGES:
            if hasattr(ops, stage):
                setattr(self, stage, lanes.clocked(stage, getattr(ops, stage)))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        setattr(self, name, found)  # the next time it is here
        return found


def clock_s(calls: int = 4000) -> float:
    """Seconds that the clocks around one stage take: the best of some rounds, by CPU time.

    At least: between the stages of a model this code is not in the nearest cache any more, and takes 0.7 us instead
    of 0.3 (LEARNED: stage-clocks).
    """
    lanes = Lanes()

    def empty() -> None:
        pass

    timed = lanes.clocked("sample", empty)
    best = {timed: math.inf, empty: math.inf}
    for _ in range(5):
        for function in best:
            began = time.thread_time_ns()
            for _ in range(calls):
                function()
            lanes.begin()  # forgets them
            best[function] = min(best[function], (time.thread_time_ns() - began) / calls)
    return max(0.0, best[timed] - best[empty]) / 1e9
