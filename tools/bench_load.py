"""How fast a trunk comes into memory, beside plain readers of the same bytes in the same minute.

    python tools/bench_load.py big.waste                    medians of 5 rounds
    python tools/bench_load.py big.waste --readers 2,4,8 --block-mib 4,8

plain   what a drive benchmark does: as many threads read past the page cache, each into a small buffer that it uses
        again, and nobody looks at the bytes
fresh   the same reads, every byte to its own place in memory that was never touched: what the system adds
load    what an engine does: as fresh, and every byte is verified

The three take turns. Direct reads do not use the page cache, so there is nothing to drop. CPU seconds are those of the
whole process: where other programs keep the cores busy, they tell why `load` waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from stopwatch import Spread

from waste.container import load
from waste.container.reader import Container
from waste.io.buffers import aligned
from waste.io.direct import DirectFile
from waste.models.embedding import streams_embedding
from waste.models.spec import EMBEDDING, TRUNK_FILE
from waste.models.stored import stored_config

ARMS = ("plain", "fresh", "load")
MIB = 1 << 20


class Trunk:
    """The part of a container's trunk file that an engine loads."""

    def __init__(self, place: Path) -> None:
        self._container = Container.open(place)
        manifest = self._container.manifest
        self._skip = (EMBEDDING,) if streams_embedding(stored_config(manifest), manifest) else ()
        wanted = [entry for entry in manifest.tensors_of(TRUNK_FILE) if entry.name not in self._skip]
        self._begin, self._end = wanted[0].offset // 4096 * 4096, load.padded_end(wanted[-1])
        self._path = place / TRUNK_FILE
        self.nbytes = self._end - self._begin
        self.direct = True

    def arm(self, name: str, readers: int, block: int) -> None:
        """Bring the bytes in once."""
        if name == "load":
            load.READERS, load.BLOCK = readers, block
            self.direct = self._container.load(TRUNK_FILE, skip=self._skip).report.direct
        else:
            self._read(readers, block, aligned(self.nbytes) if name == "fresh" else None)

    def _read(self, readers: int, block: int, memory: np.ndarray[Any, Any] | None) -> None:
        places = itertools.count(0, block)
        with DirectFile(self._path) as file, ThreadPoolExecutor(readers) as pool:

            def work() -> None:
                own = aligned(block)
                while (at := next(places)) < self.nbytes:
                    count = min(block, self.nbytes - at)
                    target = own[:count] if memory is None else memory[at : at + count]
                    file.read_into(target, self._begin + at, where=str(self._path))

            for future in [pool.submit(work) for _ in range(readers)]:
                future.result()


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the clock, and CPU seconds of the process."""
    cpu, began = _cpu_seconds(), time.perf_counter()
    work()
    return time.perf_counter() - began, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(trunk: Trunk, readers: int, mib: int, rounds: int) -> dict[str, Any]:
    """A row: GB/s and CPU milliseconds per GB of each arm, and the share of `plain` that `load` reaches."""
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    cpu: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        for name in ARMS:
            wall, spent = timed(lambda name=name: trunk.arm(name, readers, mib * MIB))  # type: ignore[misc]
            seconds[name].append(wall)
            cpu[name].append(spent)
    row: dict[str, Any] = {"readers": readers, "block_mib": mib}
    for name in ARMS:
        row[f"{name}_gb_per_s"] = Spread.of([trunk.nbytes / s / 1e9 for s in seconds[name]])
        row[f"{name}_cpu_ms_per_gb"] = Spread.of([s * 1e12 / trunk.nbytes for s in cpu[name]])
    row["share"] = Spread.of([p / w for p, w in zip(seconds["plain"], seconds["load"], strict=True)])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("container", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", default=str(load.READERS), help="numbers of threads, as 2,4,8")
    parser.add_argument("--block-mib", default=str(load.BLOCK // MIB), help="sizes of reads, as 4,8,16")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()

    trunk = Trunk(chosen.container)
    settings = itertools.product(map(int, chosen.readers.split(",")), map(int, chosen.block_mib.split(",")))
    rows = [measure(trunk, readers, mib, chosen.rounds) for readers, mib in settings]
    if chosen.json:
        plain = [{key: vars(v) if isinstance(v, Spread) else v for key, v in row.items()} for row in rows]
        print(json.dumps({"nbytes": trunk.nbytes, "direct": trunk.direct, "rounds": chosen.rounds, "rows": plain}))
        return
    way = "past" if trunk.direct else "through"
    print(f"{trunk.nbytes / MIB:.0f} MiB {way} the page cache, {chosen.rounds} rounds\n")
    print(
        "| readers | block MiB | plain GB/s | fresh GB/s | load GB/s | load of plain | CPU ms/GB plain, fresh, load |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        rates = " | ".join(row[f"{name}_gb_per_s"].text(2) for name in ARMS)
        cpu = ", ".join(f"{row[f'{name}_cpu_ms_per_gb'].median:.0f}" for name in ARMS)
        print(f"| {row['readers']} | {row['block_mib']} | {rates} | {row['share'].text(2)} | {cpu} |")


if __name__ == "__main__":
    main()
