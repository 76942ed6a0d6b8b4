"""The expert cache: from (layer, expert) to a record in a slot, read from the container on a miss.

One arena of equal slots. A record is read straight into its slot, verified there, and computed from
there; nothing is copied or repacked. The cache serves one forward pass at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
        """Until all are there. Raises what a read raised."""
        wait(self._futures)
        for future in self._futures:
            if future.cancelled():
                raise _closed()
            future.result()


class _Flag:
    """Sets one flag when a read ends: from the reader's thread, or at once if that was before."""

    def __init__(self, flags: npt.NDArray[np.int32], index: int) -> None:
        self._flags, self._index = flags, index

    def __call__(self, read: Future[None]) -> None:
        self._flags[self._index] = 1 if not read.cancelled() and read.exception() is None else -1


class _Pinned:
    """The `with` block of a wave. A class: entered in every layer of every token, twice as fast as a generator."""

    __slots__ = ("_cache", "_keys", "_reads")

    def __init__(self, cache: ExpertCache, layer: int, experts: Sequence[int]) -> None:
        self._cache = cache
        self._keys = [(layer, expert) for expert in experts]
        self._reads: Mapping[Key, Read] = {}

    def __enter__(self) -> Arrivals:
        try:
            arrivals, self._reads = self._cache._acquire(self._keys)
        except BaseException:
            self._cache._release(self._keys, {})
            raise
        return arrivals

    def __exit__(self, *_: object) -> None:
        self._cache._release(self._keys, self._reads)


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
        self._records: dict[Key, Record] = {}  # of residents
        self._policy: Policy = policy or Lru()
        self._pinned: set[Key] = set()
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
        waiting = sorted(experts, key=lambda expert: (layer, expert) not in self._records)
        return [
            self.pinned(layer, waiting[begin : begin + self._slots]) for begin in range(0, len(waiting), self._slots)
        ]

    def pinned(self, layer: int, experts: Sequence[int]) -> AbstractContextManager[Arrivals]:
        """The records of at most `slots` experts, safe from eviction inside the block; reads begin at once."""
        return _Pinned(self, layer, experts)

    def _acquire(self, keys: Sequence[Key]) -> tuple[Arrivals, dict[Key, Read]]:
        """Pin `keys` and begin to read those that are not resident."""
        self._pinned.update(keys)
        records = self._records
        there = [key for key in keys if key in records]
        self.stats.hits += len(there)
        self._policy.used(there)
        if len(there) == len(keys):
            return Arrivals([records[key] for key in keys]), {}
        reads = self._begin([key for key in keys if key not in records])
        found = [reads[key].record if key in reads else records[key] for key in keys]
        return Arrivals(found, {key[1]: read for key, read in reads.items()}), reads

    def _release(self, keys: Sequence[Key], reads: Mapping[Key, Read]) -> None:
        if reads:
            self._finish(reads)
        self._pinned.difference_update(keys)

    def close(self) -> None:
        self._closed = True
        self._readers.shutdown(wait=True, cancel_futures=True)

    def _begin(self, keys: Sequence[Key]) -> dict[Key, Read]:
        """Start reading `keys` into slots."""
        reads = {}
        for key in keys:
            slot = self._take_slot()
            begin = slot * self._slot_bytes
            bank = self._banks[key[0]]
            reads[key] = Read(slot, Record.of(key[1], self._arena[begin : begin + bank.layout.stride]))
        for key, read in reads.items():
            read.future = self._readers.submit(self._banks[key[0]].read, key[1], read.record.data)
        return reads

    def _finish(self, reads: Mapping[Key, Read]) -> None:
        """Book what was read. Slots of reads that failed go back, others stay."""
        for key, read in reads.items():
            assert read.future is not None
            if not read.future.cancelled() and read.future.exception() is None:
                self._slot_of[key] = read.slot
                self._records[key] = read.record
                self._policy.used((key,))
                self.stats.misses += 1
                self.stats.bytes_read += read.record.nbytes
            else:
                self._free.append(read.slot)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        victim = self._policy.victim(self._pinned)
        del self._records[victim]
        return self._slot_of.pop(victim)


def _closed() -> WasteError:
    return WasteError("this engine is closed", hint="open it again, or keep it open as long as its sessions")
