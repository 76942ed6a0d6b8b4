"""The machine and the versions that a row was measured with, as plain values."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from waste.hardware.brief import look

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_USUAL_L3 = 32 << 20


@dataclass(frozen=True)
class Machine:
    """What stays the same while a benchmark runs, and the load it began with."""

    time: str  # of the start, UTC, ISO 8601
    waste_version: str
    python_version: str
    numpy_version: str
    system: str
    cpu: str
    cores: int
    usable_threads: int
    instruction_sets: str
    l3_bytes: int
    huge_pages: str
    ram_total_bytes: int
    ram_available_bytes: int
    ram_limit_bytes: int | None
    load_average: float


def look_around() -> Machine:
    """This machine, now."""
    brief = look(Path.cwd())
    return Machine(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        waste_version=version("waste"),
        python_version=platform.python_version(),
        numpy_version=version("numpy"),
        system=brief.system,
        cpu=brief.cpu,
        cores=brief.cores,
        usable_threads=brief.usable_threads,
        instruction_sets=", ".join(brief.instruction_sets),
        l3_bytes=cache_bytes()["L3"],
        huge_pages=huge_pages(),
        ram_total_bytes=brief.ram.total_bytes,
        ram_available_bytes=brief.ram.available_bytes,
        ram_limit_bytes=brief.ram.limit_bytes,
        load_average=round(os.getloadavg()[0], 2),
    )


def cache_bytes() -> dict[str, int]:
    """Sizes of L1 (data), L2 and L3 of the first core, by name; usual values where the system does not say."""
    found = {"L1": 32 << 10, "L2": 1 << 20, "L3": _USUAL_L3}
    for index in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and f"L{level}" in found and size.endswith("K"):
            found[f"L{level}"] = int(size[:-1]) << 10
    return found


def huge_pages() -> str:
    """When this system backs memory with huge pages: always, madvise (then we get them) or never."""
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]


class PeakMemory:
    """The most memory that this process has occupied since `reset`, or, where that is refused, since it began."""

    def reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
        except OSError:
            return

    def bytes(self) -> int:
        """0 where the system does not say."""
        try:
            text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0
        return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM:")), 0)
