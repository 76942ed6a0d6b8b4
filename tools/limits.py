"""The machine that a benchmark runs on: its caches, how fast it reads from each of them, and an arena to stream from.

Read bandwidth is bytes per second of a thread's CPU time, taken inside the native loop (`_cpu.read_stream`): the
yardstick for kernels, which do nothing better with memory than read it once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from stopwatch import Spread

from waste.bench.limits import AHEADS
from waste.bench.limits import read_rate as read_together
from waste.bench.machine import cache_bytes, huge_pages
from waste.hardware.brief import look
from waste.hardware.memory import detect
from waste.io.buffers import aligned
from waste.kernels import _cpu, isa

_LEAST_ARENA = 512 << 20
_ARENA_SHARE = 0.25  # of the memory that is free


def huge_bytes() -> int:
    """Bytes of this process that lie in huge pages now; 0 where the system does not say."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("AnonHugePages")), 0)


class Arena:
    """Distinct memory to stream weights from, larger than the caches; whoever asks next gets what was read longest ago.

    Its bytes are random but for bit 6, which is clear: so they are finite numbers of small magnitude in every format,
    as float32, as bf16 and as the float16 scales of strips, wherever those lie. Kernels take the same time for all.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        """nbytes: at least 64 MiB; None: four times L3, at least 512 MiB, at most a quarter of the free memory."""
        if nbytes is None:
            room = int(_ARENA_SHARE * detect().available_bytes)
            nbytes = min(max(4 * cache_bytes()["L3"], _LEAST_ARENA), room)
        self.bytes = aligned(max(nbytes, 64 << 20) >> 21 << 21)
        piece = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8) & 0xBF
        for at in range(0, len(self.bytes), len(piece)):
            self.bytes[at : at + len(piece)] = piece[: len(self.bytes) - at]
        self._at = 0

    def take(self, nbytes: int) -> int:
        """Where the next `nbytes` lie, as an offset on 4096 bytes. ValueError for more than there are."""
        if nbytes > len(self.bytes):
            raise ValueError(f"{nbytes} bytes of an arena of {len(self.bytes)}")
        begin = self._at if self._at + nbytes <= len(self.bytes) else 0
        self._at = begin + -(-nbytes // 4096) * 4096
        return begin

    def weight(self, fmt: Any, rows: int, cols: int) -> _cpu.Weight:
        """The next matrix of format `fmt` (a `QuantFormat`)."""
        begin = self.take(fmt.nbytes(rows, cols))
        return _cpu.Weight(self.bytes.ctypes.data + begin, fmt.code, rows, cols, self.bytes)


def read_rate(arena: Arena, nbytes: int, ahead: int, passes: int = 1) -> float:
    """GB/s at which this thread reads the next `nbytes` of the arena, `passes` times over."""
    address = arena.bytes.ctypes.data + arena.take(nbytes)
    return nbytes * passes / _cpu.read_stream(address, nbytes, passes, ahead)[1] / 1e9


def shared_read_rate(arena: Arena, nbytes: int, ahead: int, threads: int) -> float:
    """GB/s of `threads` threads together, each reading `nbytes` of its own at the same time."""
    places = [arena.bytes.ctypes.data + arena.take(nbytes) for _ in range(threads)]
    return read_together(places, nbytes, ahead) / 1e9


@dataclass(frozen=True)
class Level:
    """Read bandwidth of one level, GB/s and thread."""

    name: str
    nbytes: int  # that were read over and over, or in turn
    rate: Spread
    ahead: int  # bytes of software prefetch that were best


def cache_levels(arena: Arena, rounds: int = 7) -> list[Level]:
    """L1, L2 and L3: two thirds of the first, half of the second, and of the third what is clearly beyond L2."""
    sizes = cache_bytes()
    l3 = min(8 * sizes["L2"], sizes["L3"] // 4)
    levels = []
    for name, nbytes in (("L1", sizes["L1"] * 2 // 3), ("L2", sizes["L2"] // 2), ("L3", l3)):
        nbytes = nbytes // 4096 * 4096
        passes = max(1, (64 << 20) // nbytes)
        address = arena.bytes.ctypes.data + arena.take(nbytes)
        rates: dict[int, list[float]] = {ahead: [] for ahead in AHEADS}
        for _ in range(rounds):
            for ahead, found in rates.items():
                found.append(nbytes * passes / _cpu.read_stream(address, nbytes, passes, ahead)[1] / 1e9)
        ahead = _fastest(rates)
        levels.append(Level(name, nbytes, Spread.of(rates[ahead]), ahead))
    return levels


def best_ahead(arena: Arena, nbytes: int = 64 << 20, rounds: int = 5) -> int:
    """The prefetch distance that reads memory fastest."""
    rates: dict[int, list[float]] = {ahead: [] for ahead in AHEADS}
    for _ in range(rounds):
        for ahead, found in rates.items():
            found.append(read_rate(arena, nbytes, ahead))
    return _fastest(rates)


def _fastest(rates: dict[int, list[float]]) -> int:
    return max(rates, key=lambda ahead: Spread.of(rates[ahead]).median)


def description() -> dict[str, Any]:
    """This machine and its state, as plain values."""
    brief = look(Path.cwd())
    return {
        "cpu": brief.cpu,
        "cores": brief.cores,
        "usable_threads": brief.usable_threads,
        "instruction_sets": list(brief.instruction_sets),
        "kernels_for": list(isa.usable()),
        "cache_bytes": cache_bytes(),
        "huge_pages": huge_pages(),
        "load_average": round(os.getloadavg()[0], 2),
    }
