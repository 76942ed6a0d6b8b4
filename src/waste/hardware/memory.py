"""RAM: how much there is, and how much this process may still use.

Linux: the least of MemAvailable and what every control group up the tree leaves (v2 `memory.max`, v1
`memory.limit_in_bytes`). Page cache inside a group is reclaimable, so it counts as free.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Bytes. `limit_bytes` is the tightest control-group limit, None where there is none."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


def detect(root: Path = Path("/")) -> Memory:
    """Read the system's figures; `root` replaces the file system root in tests."""
    info = _meminfo(root / "proc/meminfo")
    total = info.get("MemTotal", _sysconf_total())
    available = min(info.get("MemAvailable", total), total)
    limit: int | None = None
    for maximum, used in _group_limits(root):
        limit = maximum if limit is None else min(limit, maximum)
        available = min(available, max(0, maximum - used))
    return Memory(total, available, limit if limit is not None and limit < total else None)


def resident_bytes() -> int:
    """What this process occupies now (RSS)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _meminfo(path: Path) -> dict[str, int]:
    values = {}
    try:
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, rest = line.partition(":")
            number = rest.split()
            if number and number[0].isdigit():
                values[name] = int(number[0]) * 1024
    except OSError:
        pass
    return values


def _sysconf_total() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 62


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each group from this process's up to the root."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        else:
            continue
        parts = [p for p in group.split("/") if p and p != ".."]
        for depth in range(len(parts), -1, -1):
            limit = _group_limit(mount.joinpath(*parts[:depth]), *names)
            if limit is not None:
                found.append(limit)
    return found


def _group_limit(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> tuple[int, int] | None:
    try:
        limit = int((directory / limit_name).read_text(encoding="ascii"))
        usage = int((directory / usage_name).read_text(encoding="ascii"))
        stat = (directory / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
    cache = next((int(v) for k, _, v in (line.partition(" ") for line in stat.splitlines()) if k == cache_name), 0)
    return limit, max(0, usage - cache)
