"""The expert cache: from (layer, expert) to a record in a slot, read from the container on a miss.

One arena of equal slots. A record is read straight into its slot, verified there, and computed from
there; nothing is copied or repacked. The cache serves one forward pass at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waste.backends.base import Bytes, Record
from waste.container.layout import RecordLayout
from waste.container.reader import Bank
from waste.errors import WasteError
from waste.io.buffers import aligned
from waste.tiers.policy import Key, Lru, Policy

# os.preadv releases the GIL; four readers keep a drive busy and cost nothing when there is one miss.
READERS = 4


@dataclass
class CacheStats:
    """Counted since the cache was made. A use of an expert is a hit or a miss, never both."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0


@dataclass
class Read:
    """A record being read into its slot."""

    slot: int
    record: Record
    future: Future[None] | None = None


class Arrivals:
    """A wave of records, some of them perhaps still being read. Implements `waste.backends.base.Wave`."""

    def __init__(self, records: Sequence[Record], reads: Mapping[int, Read] | None = None) -> None:
        """reads: by expert, those that are being read."""
        self.records = records
        self.arrived: npt.NDArray[np.int32] | None = None
        self._futures: list[Future[None]] = []
        if reads:
            self.arrived = flags = np.ones(len(records), np.int32)
            for i, record in enumerate(records):
                read = reads.get(record.expert)
                if read is not None and read.future is not None:
                    flags[i] = 0
                    self._futures.append(read.future)
                    read.future.add_done_callback(_Flag(flags, i))

    def wait(self) -> None:
        """Until all reads have ended. Raises what one of them raised."""
        failures = [failure for failure in map(_failure, self._futures) if failure is not None]
        if failures:
            raise failures[0]


class _Flag:
    """Sets one flag when a read ends: from the reader's thread, or at once if that was before."""

    def __init__(self, flags: npt.NDArray[np.int32], index: int) -> None:
        self._flags, self._index = flags, index

    def __call__(self, read: Future[None]) -> None:
        self._flags[self._index] = 1 if not read.cancelled() and read.exception() is None else -1


class _Held:
    """The `with` block of a wave. A class: entered in every layer of every token, twice as fast as a generator."""

    __slots__ = ("_cache", "experts", "layer", "reads")

    def __init__(self, cache: ExpertCache, layer: int, experts: Sequence[int]) -> None:
        self._cache = cache
        self.layer = layer
        self.experts = experts
        self.reads: dict[int, Read] = {}  # by expert

    def __enter__(self) -> Arrivals:
        return self._cache._acquire(self)

    def __exit__(self, *_: object) -> None:
        self._cache._release(self)


class ExpertCache:
    """`slots` records of the given banks in memory. Implements `waste.layers.feed_forward.ExpertStore`."""

    def __init__(self, banks: Mapping[int, Bank], slots: int, policy: Policy | None = None) -> None:
        """banks: layer -> bank. slots >= 1; the arena is slots times the largest record."""
        self.stats = CacheStats()
        self._banks = banks
        self._slot_bytes = max((bank.layout.stride for bank in banks.values()), default=0)
        self._arena: Bytes = aligned(max(1, slots * self._slot_bytes))
        self._slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of: dict[Key, int] = {}
        self._records: dict[int, dict[int, Record]] = {layer: {} for layer in banks}  # of residents, by expert
        self._policy: Policy = policy or Lru()
        self._held: list[_Held] = []  # waves whose records must stay
        self._closed = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="waste-read")

    def layout(self, layer: int) -> RecordLayout:
        return self._banks[layer].layout

    def waves(self, layer: int, experts: Sequence[int]) -> list[AbstractContextManager[Arrivals]]:
        """Residents first, so that nothing wanted is evicted for something else wanted."""
        if self._closed:
            raise _closed()
        if len(experts) <= self._slots:
            return [self.pinned(layer, experts)] if experts else []
        records = self._records[layer]
        waiting = sorted(experts, key=lambda expert: expert not in records)
        return [
            self.pinned(layer, waiting[begin : begin + self._slots]) for begin in range(0, len(waiting), self._slots)
        ]

    def pinned(self, layer: int, experts: Sequence[int]) -> AbstractContextManager[Arrivals]:
        """The records of at most `slots` experts, safe from eviction inside the block; reads begin at once."""
        return _Held(self, layer, experts)

    def _acquire(self, held: _Held) -> Arrivals:
        """Hold the records of a wave and begin to read those that are not resident."""
        layer, experts, records = held.layer, held.experts, self._records[held.layer]
        self._held.append(held)
        try:
            found = [records[expert] for expert in experts]
        except KeyError:
            found = []
        if len(found) < len(experts):
            try:
                return self._begin(held)
            except BaseException:
                self._release(held)
                raise
        self.stats.hits += len(found)
        self._policy.used(layer, experts)
        return Arrivals(found)

    def _release(self, held: _Held) -> None:
        try:
            if held.reads:
                self._finish(held)
        finally:
            self._held.remove(held)

    def close(self) -> None:
        self._closed = True
        self._readers.shutdown(wait=True, cancel_futures=True)

    def _begin(self, held: _Held) -> Arrivals:
        """Start reading what is missing of a wave into slots."""
        layer, records, bank = held.layer, self._records[held.layer], self._banks[held.layer]
        there = [expert for expert in held.experts if expert in records]
        self.stats.hits += len(there)
        self._policy.used(layer, there)
        pinned = {(wave.layer, expert) for wave in self._held for expert in wave.experts}
        held.reads = reads = {}  # given back with the wave, should this fail half-way
        for expert in held.experts:
            if expert not in records:
                slot = self._take_slot(pinned)
                begin = slot * self._slot_bytes
                reads[expert] = Read(slot, Record.of(expert, self._arena[begin : begin + bank.layout.stride]))
        try:
            for expert, read in reads.items():
                read.future = self._readers.submit(bank.read, expert, read.record.data)
        except RuntimeError as error:
            if self._closed:  # of an executor that was shut down
                raise _closed() from error
            raise
        return Arrivals([reads[e].record if e in reads else records[e] for e in held.experts], reads)

    def _finish(self, held: _Held) -> None:
        """Book what was read. Slots of reads that failed go back, others stay."""
        layer, records = held.layer, self._records[held.layer]
        for expert, read in held.reads.items():
            if read.future is not None and _failure(read.future) is None:
                self._slot_of[layer, expert] = read.slot
                records[expert] = read.record
                self._policy.used(layer, (expert,))
                self.stats.misses += 1
                self.stats.bytes_read += read.record.nbytes
            else:
                self._free.append(read.slot)

    def _take_slot(self, pinned: Collection[Key]) -> int:
        if self._free:
            return self._free.pop()
        layer, expert = victim = self._policy.victim(pinned)
        del self._records[layer][expert]
        return self._slot_of.pop(victim)


def _failure(read: Future[None]) -> BaseException | None:
    """What the read raised, None if nothing, once it has ended.

    A read that `close` cancels has ended too. `concurrent.futures.wait` waits for it for ever: there it ends when a
    worker takes it from the queue, where it no longer is.
    """
    try:
        return read.exception()
    except CancelledError:
        return _closed()


def _closed() -> WasteError:
    return WasteError("this engine is closed", hint="open it again, or keep it open as long as its sessions")
