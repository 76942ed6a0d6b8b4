"""Whether memory has become short while a model runs: asked between tokens, answered from figures a second old at most.

A process that pages loses far more than a smaller cache costs: field runs were healthy with 72 % of the RAM in use
and eight times slower at 81 %, while the hit rate still rose (design, section 6). Three signs are watched, each of
which some machines lack: memory that is left, time lost waiting for memory (PSI), and major faults.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from waste.hardware import memory
from waste.hardware.cgroups import Group, memory_groups, read_text
from waste.units import format_bytes

# A look takes 0.9 ms where two control-group trees are mounted: 0.1 % of the time at once a second. Between looks
# `check` takes 0.1 us.
INTERVAL_S = 1.0

# Left below this, it is nearly too late: MemAvailable already counts the cache that the system can drop. 24 GiB of RAM
# begin to be reclaimed at 0.37 % (the low watermarks of /proc/zoneinfo); ten times that is what another program can
# take between two looks. A choice by those figures, not a measurement; beyond 2 GiB it would idle on large machines.
FLOOR_SHARE, FLOOR_MOST_BYTES = 0.04, 2 << 30

# Percent of the last ten seconds in which some, or all, of the group's threads waited for memory. Idle and busy
# machines with memory to spare show 0.00; a fleet's out-of-memory daemon kills at 60 (systemd-oomd's default), so a
# tenth lost is past any doubt and long before that.
SOME_PERCENT, FULL_PERCENT = 10.0, 5.0

# The system's own figure counts every container that thrashes inside its own limit, which no shrinking of ours can
# help. It is believed only while less is left than at the collapse: 100 - 81 %.
SYSTEM_SHARE = 0.19

# Each is a read from swap or of a program's page, 0.1 ms from a good drive and more from others: at 200 a second
# 2 % of the time or more. A program that was just started has a second of thousands, hence two checks in a row.
FAULTS_PER_S, FAULT_CHECKS = 200.0, 2

# Until ten seconds have passed, PSI still tells of the time before the cache shrank.
SETTLE_S = 10.0


@dataclass(frozen=True)
class Pressure:
    """Memory is short, and the cache should shrink. `reason` says why, with the figures: one line without a full stop.

    `short_bytes`: how much more should be free; 0 where that is not known, as for time lost.
    """

    reason: str
    short_bytes: int


class PressureWatch:
    """Ask `check` as often as you like; not from several threads at once."""

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        clock: Callable[[], float] = time.monotonic,
        major_faults: Callable[[], int] | None = None,
    ) -> None:
        """`root`, `clock` (seconds) and `major_faults` (of this process so far) are replaced in tests."""
        self._root = root
        self._clock = clock
        self._major_faults = major_faults or _major_faults
        self._own = next(filter(_tells_pressure, memory_groups(root)), None)
        self._looked_s = clock()
        self._faults = self._major_faults()
        self._fast_checks = 0
        self._settled_s = self._looked_s

    def check(self) -> Pressure | None:
        """None while all is well, and within `INTERVAL_S` of the last look."""
        now = self._clock()
        passed = now - self._looked_s
        if passed < INTERVAL_S:
            return None
        self._looked_s = now
        faults, self._faults = self._faults, self._major_faults()
        rate = (self._faults - faults) / passed
        self._fast_checks = self._fast_checks + 1 if rate >= FAULTS_PER_S else 0

        found = memory.detect(self._root)
        short = self._floor(found)
        if short is None and now >= self._settled_s:
            short = self._stalls(found) or self._faulting(rate)
        if short is not None:
            self._settled_s = now + SETTLE_S
            self._fast_checks = 0
        return short

    def _floor(self, found: memory.Memory) -> Pressure | None:
        floor = min(int(FLOOR_SHARE * found.most_bytes), FLOOR_MOST_BYTES)
        if found.available_bytes >= floor:
            return None
        left, whole = format_bytes(found.available_bytes), format_bytes(found.most_bytes)
        # Twice the floor: at the floor itself the next allocation of anybody would be the next verdict.
        return Pressure(
            f"{left} of {whole} of memory are left ({found.limit_source}), {format_bytes(floor)} should be",
            2 * floor - found.available_bytes,
        )

    def _stalls(self, found: memory.Memory) -> Pressure | None:
        if self._own is not None:
            lost = _lost(self._own.text("memory.pressure"))
            if lost is not None:
                return Pressure(f"this process's control group waited for memory for {lost}", 0)
        if found.available_bytes < SYSTEM_SHARE * found.most_bytes:
            lost = _lost(read_text(self._root / "proc/pressure/memory"))
            if lost is not None:
                left = format_bytes(found.available_bytes)
                return Pressure(f"this machine waited for memory for {lost}, {left} are left", 0)
        return None

    def _faulting(self, rate: float) -> Pressure | None:
        if self._fast_checks < FAULT_CHECKS:
            return None
        return Pressure(f"{rate:.0f} pages a second have to be read back from the drive (major faults)", 0)


def _tells_pressure(group: Group) -> bool:
    """Whether the group has a figure of its own. The topmost one's is the system's; it has no `cgroup.type`."""
    return (
        group.version == 2 and (group.directory / "cgroup.type").exists() and group.text("memory.pressure") is not None
    )


def _lost(text: str | None) -> str | None:
    """How much of the last ten seconds was lost, where that is too much; the kernel's file of PSI figures."""
    limits = {"some": SOME_PERCENT, "full": FULL_PERCENT}
    worst = None
    for kind, percent in re.findall(r"^(some|full) avg10=(\d{1,3}\.\d+) ", text or "", re.MULTILINE):
        if float(percent) >= limits[kind]:
            worst = f"{percent} % of the last 10 s ({kind})"
    return worst


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
