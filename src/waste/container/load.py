"""Tensor files into memory: read by several threads straight to where the tensors stay, verified on the way.

The file is cut into blocks that are read past the page cache, each to its own place in one page-aligned buffer, in any
order. The calling thread follows: it takes the checksum of what has arrived without a gap, tensor by tensor, while the
rest is still being read. Nothing is copied afterwards and nothing repacked; a tensor is a view into the buffer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from waste.container.document import AGAIN
from waste.container.layout import TRUNK_ALIGN, Bytes, align_up
from waste.container.manifest import TensorEntry
from waste.errors import InputError
from waste.events import OnEvent, Progress, ignore
from waste.io.buffers import aligned
from waste.io.checksum import Hasher, to_hex
from waste.io.direct import DIRECT_ALIGN, DirectFile
from waste.io.files import regular_size, shown
from waste.io.readers import Priority, Readers
from waste.io.throttle import Throttle

# Reads of 8 MiB let a drive run at full speed with two in flight (2.3 GB/s, 2.0 with four to eight). But a read into
# memory that nobody has touched first waits for the system to clear it, and the drive waits too: of what plain readers
# get, two threads load at .76, four at .91, six at .92 (LEARNED: trunk-load).
BLOCK = 8 << 20
READERS = 6

Arrivals = SimpleQueue[tuple[int, BaseException | None]]  # block numbers, and what their reads raised


@dataclass(frozen=True)
class LoadReport:
    """How a file came into memory."""

    nbytes: int  # that were read
    seconds: float  # from opening the file to the last checksum
    drive_s: float  # of them until the last byte was there; the others went into checksums that came after it
    direct: bool  # past the page cache; else `seconds` may say nothing about the drive

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Loaded:
    """Tensors in memory, each (nbytes,) uint8, and how they came there."""

    tensors: dict[str, Bytes]
    report: LoadReport


def load_tensors(
    path: Path,
    entries: Sequence[TensorEntry],
    on_event: OnEvent = ignore,
    *,
    direct: bool = True,
    limit: Throttle | None = None,
) -> Loaded:
    """The tensors `entries`, by ascending offset, of the file at `path`: views into one buffer, on 64 bytes, verified.

    Other tensors are not read, but for what lies in one block with these. Reports `Progress("load", ...)` in bytes of
    what is read, from the calling thread. `direct`: past the page cache, where that is possible; `limit`: a slower
    drive to simulate.
    Raises InputError naming the file, and the tensor where one is damaged: of several faults the first in the file.
    ResourceError when the memory is not to be had.
    """
    began = time.perf_counter()
    base = entries[0].offset // DIRECT_ALIGN * DIRECT_ALIGN
    buffer = aligned(padded_end(entries[-1]) - base)
    with DirectFile(path, direct=direct, on_event=on_event) as file:
        load = _Load(file, buffer, base, entries, on_event)
        load.run(limit)
        past = file.direct
    report = LoadReport(load.total, time.perf_counter() - began, load.last_arrival - began, past)
    return Loaded({e.name: buffer[e.offset - base : e.offset - base + e.nbytes] for e in entries}, report)


class _Load:
    """One file on its way into memory."""

    def __init__(
        self, file: DirectFile, buffer: Bytes, base: int, entries: Sequence[TensorEntry], on_event: OnEvent
    ) -> None:
        """`buffer` takes what lies in the file from `base` on."""
        self._file = file
        self._buffer = buffer
        self._base = base
        self._entries = entries
        self._on_event = on_event
        self._blocks = _blocks(base, entries)
        self.total = sum(end - begin for begin, end in self._blocks)
        self.last_arrival = 0.0
        self._hasher = Hasher()
        self._current = 0  # which entry is being verified
        self._verified = entries[0].offset  # how far

    def run(self, limit: Throttle | None) -> None:
        """Read and verify everything."""
        arrivals: Arrivals = SimpleQueue()
        arrived: dict[int, BaseException | None] = {}
        read = complete = 0  # bytes that are there; blocks without a gap
        # Left by an error or an interrupt: blocks that have not begun never will, those under way end within one read.
        with Readers(limit=limit, depth=READERS) as readers:
            for index, (begin, end) in enumerate(self._blocks):
                arrive = partial(self._arrive, arrivals, index)
                readers.submit(
                    partial(self._read, begin, end), arrive, drive=self._file.drive, priority=Priority.DEMAND
                )
            while complete < len(self._blocks):
                index, error = arrivals.get()
                self.last_arrival = time.perf_counter()
                arrived[index] = error
                # Whatever the order of arrival, faults are told in the order of the file.
                while complete in arrived:
                    failure = arrived.pop(complete)
                    if failure is not None:
                        raise failure
                    self._verify(self._blocks[complete][1])
                    complete += 1
                begin, end = self._blocks[index]
                read += end - begin
                self._on_event(Progress("load", read, self.total))

    @staticmethod
    def _arrive(arrivals: Arrivals, index: int, error: BaseException | None) -> None:
        arrivals.put((index, error))

    def _read(self, begin: int, end: int) -> int:
        piece = self._buffer[begin - self._base : end - self._base]
        self._file.read_into(piece, begin, where=shown(self._file.path))
        return end - begin

    def _verify(self, end: int) -> None:
        """Take in the bytes before `end`, which are all there; InputError for a tensor that is not what it was."""
        while self._current < len(self._entries):
            entry = self._entries[self._current]
            begin, upto = max(self._verified, entry.offset), min(end, padded_end(entry))
            if begin < upto:
                self._hasher.update(self._buffer[begin - self._base : upto - self._base])
                self._verified = upto
            if upto < padded_end(entry):
                return
            if self._hasher.value != entry.checksum:
                raise damaged(f"{shown(self._file.path)}, tensor {entry.name!r}", entry.checksum, self._hasher.value)
            self._hasher = Hasher()
            self._current += 1


def _blocks(base: int, entries: Sequence[TensorEntry]) -> list[tuple[int, int]]:
    """(begin, end) in the file of all blocks, counted from `base`, that hold something of `entries`."""
    last = padded_end(entries[-1])
    wanted: dict[int, None] = {}
    for entry in entries:
        first, final = (entry.offset - base) // BLOCK, (padded_end(entry) - 1 - base) // BLOCK
        wanted.update(dict.fromkeys(range(first, final + 1)))
    return [(base + i * BLOCK, min(base + (i + 1) * BLOCK, last)) for i in wanted]


def padded_end(entry: TensorEntry) -> int:
    """Where a tensor's padding ends: at the next tensor, or the end of the file."""
    return align_up(entry.offset + entry.nbytes, TRUNK_ALIGN)


def check_size(path: Path, expected: int) -> None:
    """InputError unless there is a file of `expected` bytes at `path`."""
    found = regular_size(path)
    if found != expected:
        fault = "is cut short" if found < expected else "is too long"
        raise InputError(f"{shown(path)} {fault}: expected {expected} bytes, found {found}", hint=AGAIN)


def damaged(where: str, expected: int, found: int) -> InputError:
    """The error for bytes whose checksum is `found`."""
    return InputError(
        f"{where} is damaged: expected checksum {to_hex(expected)}, its bytes give {to_hex(found)}", hint=AGAIN
    )
