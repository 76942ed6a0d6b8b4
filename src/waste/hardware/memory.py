"""RAM: how much there is, and how much this process may still use.

Linux: the least of MemAvailable and what every control group up the tree leaves: version 2 `memory.max`, and
`memory.high`, above which the system slows a group down until it shrinks; version 1 `memory.limit_in_bytes`. Page
cache inside a group is reclaimable, so it counts as free. Swap does not: it is slower than the drive with the experts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from waste.hardware.cgroups import Group, memory_groups, read_text

# Version 1 writes "no limit" as the largest multiple of the page size; no machine has 4 EiB.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Memory:
    """Bytes. `limit_bytes` is the tightest control-group limit, None where there is none below the machine's RAM.

    `limit_source` names what `available_bytes` was taken from: "MemAvailable", or "memory.max of control group '/a'".
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    limit_source: str = "MemAvailable"

    @property
    def most_bytes(self) -> int:
        """What this process could have if nothing else ran."""
        return self.total_bytes if self.limit_bytes is None else self.limit_bytes


@dataclass(frozen=True)
class _Limit:
    source: str
    limit_bytes: int
    free_bytes: int


def detect(root: Path = Path("/")) -> Memory:
    """Read the system's figures; `root` replaces the file system root in tests."""
    info = _meminfo(root / "proc/meminfo")
    total = info.get("MemTotal", _sysconf_total())
    available, source = min(_available(info, total), total), "MemAvailable"
    tightest: int | None = None
    for group in memory_groups(root):
        for limit in _limits(group):
            tightest = limit.limit_bytes if tightest is None else min(tightest, limit.limit_bytes)
            if limit.free_bytes < available:
                available, source = limit.free_bytes, limit.source
    return Memory(total, available, tightest if tightest is not None and tightest < total else None, source)


def resident_bytes() -> int:
    """What this process occupies now (RSS)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _meminfo(path: Path) -> dict[str, int]:
    values = {}
    for line in (read_text(path) or "").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isascii() and number[0].isdigit():
            values[name] = int(number[0]) * 1024
    return values


def _available(info: dict[str, int], total: int) -> int:
    """MemAvailable; in sandboxes without it what it is made of; all of the RAM where that is missing too."""
    if "MemAvailable" in info:
        return info["MemAvailable"]
    if "MemFree" not in info:
        return total
    # Cached counts tmpfs and shared memory too, which nothing can reclaim.
    cache = info.get("Cached", 0) + info.get("Buffers", 0) - info.get("Shmem", 0)
    return info["MemFree"] + max(0, cache)


def _sysconf_total() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 62


def _limits(group: Group) -> Iterator[_Limit]:
    """Every limit of one group, and what it leaves."""
    stat = group.table("memory.stat")
    if group.version == 2:
        used, caps = (
            group.number("memory.current"),
            [(file, group.number(file)) for file in ("memory.max", "memory.high")],
        )
    else:
        used = group.number("memory.usage_in_bytes")
        # The second one is the least limit up the tree, told even where the groups above cannot be seen. What
        # their other members use remains unknown.
        caps = [
            ("memory.limit_in_bytes", group.number("memory.limit_in_bytes")),
            ("hierarchical_memory_limit", stat.get("hierarchical_memory_limit")),
        ]
    for name, cap in caps:
        if cap is not None and used is not None and cap < _NO_LIMIT:
            free = max(0, cap - max(0, used - _reclaimable(group, stat)))
            yield _Limit(f"{name} of control group {group.name!r}", cap, free)


def _reclaimable(group: Group, stat: dict[str, int]) -> int:
    """Page cache of the group and of those below it.

    The two lists of file pages are what the kernel itself counts as such for MemAvailable. `file` (version 1:
    `cache`) is more: tmpfs, shared memory and locked files, none of which can be dropped.
    """
    prefix = "total_" if group.version == 1 else ""
    try:
        return stat[prefix + "inactive_file"] + stat[prefix + "active_file"]
    except KeyError:
        cache = stat.get("total_cache" if group.version == 1 else "file", 0)
        return max(0, cache - stat.get(prefix + "shmem", 0))
