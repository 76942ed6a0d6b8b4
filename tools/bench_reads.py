"""How fast records are read: the reader threads beside a plain loop and a C++ program, and what checksums cost.

    python tools/bench_reads.py                       on a file of 2 GiB in /tmp, deleted afterwards
    python tools/bench_reads.py --file big.bin        on a file there is; --json for everything

Random records of three sizes, read past the page cache at several depths. All arms take turns round by round in the
same minute, beside a loop that reads 8 MiB after 8 MiB: a shared drive changes from second to second, so the share of
that loop's rate says more than GB/s. Medians with the 10th and 90th percentile; CPU time is the whole process's.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from stopwatch import Spread

from waste.io.buffers import aligned
from waste.io.checksum import Hasher, checksum
from waste.io.direct import DirectFile
from waste.io.readers import Priority, Readers
from waste.io.throttle import Throttle

RECORDS = (32 << 10, 1 << 20, 12 << 20)
DEPTHS = (1, 4, 8)
SEQUENTIAL = 8 << 20
SLOTS = 24  # records are read into so many places in turn
PIECES = (1 << 20, 2 << 20, 4 << 20)

# Threads take record numbers from a counter and read: nothing less could read the same at the same depth.
CPP = r"""
#include <atomic>
#include <cstdint>
#include <thread>
#include <unistd.h>
#include <vector>
extern "C" int64_t read_records(int fd, const int64_t* offsets, int64_t count, int64_t nbytes, char* slots,
                                int64_t nslots, int depth) {
    std::atomic<int64_t> next{0}, failed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < depth; ++i)
        threads.emplace_back([&] {
            for (int64_t job; (job = next++) < count;)
                if (pread(fd, slots + job % nslots * nbytes, nbytes, offsets[job]) != nbytes) ++failed;
        });
    for (auto& thread : threads) thread.join();
    return failed;
}
"""


@dataclass
class Arm:
    """One way of reading records of one size at one depth."""

    record_bytes: int
    depth: int
    name: str
    run: Callable[[list[int]], None]
    gb_per_s: list[float] = field(default_factory=list)
    of_loop: list[float] = field(default_factory=list)
    cpu_ms_per_gb: list[float] = field(default_factory=list)


class Bench:
    """The file, the slots and all arms."""

    def __init__(self, path: Path, native: ctypes.CDLL, seconds: float) -> None:
        self.file = DirectFile(path)
        self.size = path.stat().st_size
        self.slots = aligned(SLOTS * max(RECORDS))
        self.slots[:] = 1  # pages are taken on first touch: not while the clock runs
        self.native = native
        self.fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.file.direct else 0))
        self.rng = np.random.default_rng(1)
        self.rate = self.loop(0.5)
        self.bytes_each = int(self.rate * seconds)

    def loop(self, seconds: float) -> float:
        """Bytes a second of one thread that reads 8 MiB after 8 MiB from a random place on."""
        at = int(self.rng.integers(self.size // SEQUENTIAL)) * SEQUENTIAL
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            at = at if at + SEQUENTIAL <= self.size else 0
            # Through the same memory as the records: one buffer of 8 MiB stays in the cache, and looks 20 % faster.
            begin = done % (len(self.slots) // SEQUENTIAL * SEQUENTIAL)
            self.file.read_into(self.slots[begin : begin + SEQUENTIAL], at, where="loop")
            at, done = at + SEQUENTIAL, done + SEQUENTIAL
        return done / (time.perf_counter() - began)

    def sample(self, arm: Arm) -> None:
        """One round of an arm, with the loop before and after it."""
        count = max(2 * arm.depth, self.bytes_each // arm.record_bytes)
        offsets = (self.rng.integers(self.size // arm.record_bytes, size=count) * arm.record_bytes).tolist()
        before = self.loop(0.1)
        wall, cpu = time.perf_counter(), time.process_time()
        arm.run(offsets)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        nbytes = count * arm.record_bytes
        arm.gb_per_s.append(nbytes / wall / 1e9)
        arm.of_loop.append(nbytes / wall / ((before + self.loop(0.1)) / 2))
        arm.cpu_ms_per_gb.append(1e3 * cpu / (nbytes / 1e9))

    def arms(self, record: int, depth: int) -> list[Arm]:
        found = [
            Arm(record, depth, "C++ threads", lambda offsets: self._native(record, depth, offsets)),
            Arm(record, depth, "readers", lambda offsets: self._readers(record, depth, offsets, self._plain)),
            Arm(
                record, depth, "readers, hash after", lambda offsets: self._readers(record, depth, offsets, self._whole)
            ),
        ]
        for piece in PIECES if record > max(PIECES) else ():
            read = self._pieces(piece)
            name = f"readers, hash each {piece >> 20} MiB"
            found.append(Arm(record, depth, name, lambda o, read=read: self._readers(record, depth, o, read)))
        return found

    def _native(self, record: int, depth: int, offsets: list[int]) -> None:
        numbers = np.array(offsets, np.int64)
        failed = self.native.read_records(
            self.fd,
            numbers.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(len(numbers)),
            ctypes.c_int64(record),
            self.slots.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(SLOTS),
            depth,
        )
        if failed:
            raise OSError(f"{failed} reads failed")

    def _readers(self, record: int, depth: int, offsets: list[int], read: Callable[[np.ndarray, int], int]) -> None:
        """All jobs are submitted at once, as a wave of experts is."""
        over, left = threading.Event(), len(offsets)
        count, lock, failures = itertools.count(1), threading.Lock(), []

        def done(error: BaseException | None) -> None:
            with lock:
                if error is not None:
                    failures.append(error)
                if next(count) == left:
                    over.set()

        with Readers(depth=depth) as readers:
            for job, offset in enumerate(offsets):
                begin = job % SLOTS * record
                slot = self.slots[begin : begin + record]
                readers.submit(lambda s=slot, o=offset: read(s, o), done, drive=0, priority=Priority.DEMAND)
            over.wait()
        if failures:
            raise failures[0]

    def _plain(self, slot: np.ndarray, offset: int) -> int:
        self.file.read_into(slot, offset, where="bench")
        return len(slot)

    def _whole(self, slot: np.ndarray, offset: int) -> int:
        self.file.read_into(slot, offset, where="bench")
        checksum(slot)
        return len(slot)

    def _pieces(self, piece: int) -> Callable[[np.ndarray, int], int]:
        def read(slot: np.ndarray, offset: int) -> int:
            hasher = Hasher()
            for begin in range(0, len(slot), piece):
                part = slot[begin : begin + piece]
                self.file.read_into(part, offset + begin, where="bench")
                hasher.update(part)
            return len(slot)

        return read


def climb(bench: Bench, record: int, seconds: float) -> dict[str, float]:
    """The depth that the readers find by themselves, always with more waiting than can begin, and the rate of the last
    half of the time beside that of the loop right after."""
    lock, moved, late = threading.Lock(), [0], [0]
    half = time.perf_counter() + seconds / 2
    offsets = (bench.rng.integers(bench.size // record, size=1 << 16) * record).tolist()
    jobs = itertools.count()

    def read() -> int:
        job = next(jobs)
        begin = job % SLOTS * record
        bench.file.read_into(bench.slots[begin : begin + record], offsets[job % len(offsets)], where="bench")
        return record

    with Readers() as readers:

        def done(error: BaseException | None) -> None:
            with lock:
                moved[0] += 1
                late[0] += time.perf_counter() > half
            if time.perf_counter() < half + seconds / 2:
                readers.submit(read, done, drive=0, priority=Priority.DEMAND)

        for _ in range(40):
            readers.submit(read, done, drive=0, priority=Priority.DEMAND)
        time.sleep(seconds)
        depth = readers.depth(0)
        rate = late[0] * record / (time.perf_counter() - half)
    return {"record_bytes": record, "depth": depth, "gb_per_s": rate / 1e9, "of_loop": rate / bench.loop(0.5)}


def simulated(bench: Bench, record: int, gb_per_s: float, seconds: float) -> dict[str, float]:
    """How near the rate of a simulated drive comes to what was asked for, over files in the page cache."""
    with DirectFile(bench.file.path, direct=False) as file:
        count = max(16, int(gb_per_s * 1e9 * seconds / record))
        span = min(bench.size, 256 << 20) // record
        left, over, lock = [count], threading.Event(), threading.Lock()
        view = bench.slots

        def read(job: int) -> int:
            # A plain pread: read_into would have the system forget what it has cached.
            begin = job % SLOTS * record
            return os.preadv(file._fd, [view[begin : begin + record].data], job % span * record)

        def done(error: BaseException | None) -> None:
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    over.set()

        for job in range(span):
            read(job)
        with Readers(limit=Throttle(gb_per_s * 1e9), depth=8) as readers:
            began = time.perf_counter()
            for job in range(count):
                readers.submit(lambda j=job: read(j), done, drive=0, priority=Priority.DEMAND)
            over.wait()
            rate = count * record / (time.perf_counter() - began)
    return {"record_bytes": record, "asked_gb_per_s": gb_per_s, "gb_per_s": rate / 1e9}


def overhead_us(jobs: int = 20_000, wave: int = 8) -> dict[str, float]:
    """Microseconds of a job that reads nothing, in waves of `wave`: wall time, and CPU time of who submits."""
    over, left = threading.Event(), [0]
    lock = threading.Lock()

    def done(error: BaseException | None) -> None:
        with lock:
            left[0] -= 1
            if left[0] == 0:
                over.set()

    submitting = 0.0
    with Readers() as readers:
        began = time.perf_counter()
        for _ in range(jobs // wave):
            left[0] = wave
            over.clear()
            before = time.thread_time()
            for _ in range(wave):
                readers.submit(lambda: 0, done, drive=0, priority=Priority.DEMAND)
            submitting += time.thread_time() - before
            over.wait()
        wall = time.perf_counter() - began
    return {"wall_us": 1e6 * wall / jobs, "submit_us": 1e6 * submitting / jobs}


def build(folder: Path) -> ctypes.CDLL:
    source, library = folder / "reads.cpp", folder / "reads.so"
    source.write_text(CPP)
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def fill(path: Path, nbytes: int) -> None:
    block = np.random.default_rng(0).integers(0, 256, 64 << 20, np.uint8)
    with path.open("wb") as file:
        for begin in range(0, nbytes, len(block)):
            block[:8] = np.frombuffer(begin.to_bytes(8, "little"), np.uint8)
            file.write(block[: nbytes - begin].data)
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="an existing file of some GiB")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where to make one otherwise")
    parser.add_argument("--gib", type=float, default=2, help="of how many GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one sample")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="waste-reads-", dir=options.folder) as folder:
        path = options.file
        if path is None:
            path = Path(folder) / "records.bin"
            fill(path, int(options.gib * (1 << 30)))
        bench = Bench(path, build(Path(folder)), options.seconds)
        depths = [int(depth) for depth in options.depths.split(",")]
        arms = [arm for record in RECORDS for depth in depths for arm in bench.arms(record, depth)]
        for _ in range(options.rounds):
            for arm in arms:
                bench.sample(arm)
        found = {
            "job": overhead_us(),
            "climbs": [climb(bench, record, 40 * options.seconds) for record in RECORDS],
            "simulated": [
                simulated(bench, record, rate, 5 * options.seconds) for record in RECORDS for rate in (0.5, 2.0, 7.0)
            ],
        }
        report(bench, arms, found, options.json)


def report(bench: Bench, arms: list[Arm], found: dict[str, Any], as_json: bool) -> None:
    rows = []
    for arm in arms:
        figures = {name: asdict(Spread.of(getattr(arm, name))) for name in ("gb_per_s", "of_loop", "cpu_ms_per_gb")}
        rows.append({"record_bytes": arm.record_bytes, "depth": arm.depth, "arm": arm.name, **figures})
    if as_json:
        machine = {"load_average": os.getloadavg()[0], "kernel": platform.release(), "direct": bench.file.direct}
        print(json.dumps({"machine": machine, "rows": rows, **found}, indent=1))
        return
    print(f"direct reads: {bench.file.direct}; load average {os.getloadavg()[0]:.1f}; {platform.release()}")
    job = found["job"]
    print(f"a job that reads nothing: {job['wall_us']:.1f} us, of which {job['submit_us']:.1f} us submitting\n")
    print("| record | depth | arm | GB/s | share of a plain loop | CPU ms per GB |\n|---|---|---|---|---|---|")
    for arm in arms:
        cells = (
            f"{arm.record_bytes >> 10} KiB",
            str(arm.depth),
            arm.name,
            Spread.of(arm.gb_per_s).text(2),
            Spread.of(arm.of_loop).text(2),
            Spread.of(arm.cpu_ms_per_gb).text(0),
        )
        print(f"| {' | '.join(cells)} |")
    print("\n| record | depth found | GB/s | share of a plain loop |\n|---|---|---|---|")
    for row in found["climbs"]:
        print(f"| {row['record_bytes'] >> 10} KiB | {row['depth']} | {row['gb_per_s']:.2f} | {row['of_loop']:.2f} |")
    print("\n| record | simulated drive, GB/s | GB/s |\n|---|---|---|")
    for row in found["simulated"]:
        print(f"| {row['record_bytes'] >> 10} KiB | {row['asked_gb_per_s']:.1f} | {row['gb_per_s']:.2f} |")


if __name__ == "__main__":
    main()
