"""What the machine could do in the same minute: how fast its memory is read, and its drives.

Memory: every thread of the run streams through memory of its own, larger than the caches together; bytes per second of
the threads' CPU time. Kernels do nothing better with weights than read them once. Drive: random records of the model's
own banks, by the readers that the engine uses.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import numpy as np

from waste.bench.machine import cache_bytes
from waste.container.reader import Bank
from waste.hardware.memory import detect
from waste.io.buffers import aligned
from waste.io.readers import Priority, Readers
from waste.io.throttle import Throttle
from waste.kernels import _cpu

# Software prefetches help or hurt by level and machine; the limit is the best of these.
AHEADS = (0, 2048, 4096, 8192)

_LEAST_BYTES = 256 << 20
_SHARE = 0.25  # of the memory that is free, at most
# Reads that are asked for at a time: more than any drive is given at once (waste.io.depth).
_IN_FLIGHT = 32
_READ_BYTES = 32 << 20  # by each thread for one sample: 3 ms


def read_rate(addresses: Sequence[int], nbytes: int, ahead: int) -> float:
    """Bytes per second of one thread for each address, all at the same time, each reading `nbytes` from there on."""
    spent = [0.0] * len(addresses)
    start = threading.Barrier(len(addresses))

    def read(which: int) -> None:
        start.wait()
        spent[which] = _cpu.read_stream(addresses[which], nbytes, 1, ahead)[1]

    crew = [threading.Thread(target=read, args=(which,)) for which in range(len(addresses))]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return sum(nbytes / each for each in spent)


def memory_rate(threads: int) -> float:
    """Bytes per second at which `threads` threads read memory together."""
    room = int(_SHARE * detect().available_bytes)
    wanted = max(2 * cache_bytes()["L3"], _LEAST_BYTES, threads * _READ_BYTES)
    memory = aligned(max(threads << 20, min(wanted, room)))
    memory.fill(1)  # untouched pages would all be the same one
    each = min(_READ_BYTES, len(memory) // threads) // 4096 * 4096
    best = 0.0
    for turn, ahead in enumerate(AHEADS):
        # Every turn reads what was touched longest ago.
        begin = turn * threads * each % (len(memory) - threads * each + 1) // 4096 * 4096
        first = memory.ctypes.data + begin
        best = max(best, read_rate([first + which * each for which in range(threads)], each, ahead))
    return best


def drive_rate(banks: Sequence[Bank], simulated_bytes_per_s: float | None, seconds: float) -> float:
    """Bytes per second of random records, read and verified by as many threads as the drives like, for so long.

    `simulated_bytes_per_s`: as if the drives gave no more. Raises what a read raises.
    """
    throttle = None if simulated_bytes_per_s is None else Throttle(simulated_bytes_per_s)
    rng = np.random.default_rng()  # other records every time, so that no cache of the drive knows them
    buffers = threading.local()
    arrived: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()

    def start(readers: Readers) -> None:
        bank = banks[int(rng.integers(len(banks)))]
        expert = int(rng.integers(bank.experts))
        nbytes = bank.layout.stride

        def read() -> int:
            room = getattr(buffers, "room", None)
            if room is None or len(room) < nbytes:
                room = buffers.room = aligned(nbytes)
            bank.read(expert, room[:nbytes])
            return nbytes

        readers.submit(read, lambda failure: arrived.put((nbytes, failure)), drive=bank.drive, priority=Priority.DEMAND)

    total = 0
    with Readers(limit=throttle) as readers:
        began = time.perf_counter()
        for _ in range(_IN_FLIGHT):
            start(readers)
        took = 0.0
        while took < seconds:
            nbytes, failure = arrived.get()
            if failure is not None:
                raise failure
            total += nbytes
            took = time.perf_counter() - began
            start(readers)
    return total / took
