"""The expert cache: from (layer, expert) to a record in a slot, read from the container on a miss.

One arena of equal slots. A record is read straight into its slot, verified there, and computed from
there; nothing is copied or repacked. The cache serves one forward pass at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from waste.backends.base import Bytes
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
        self._policy: Policy = policy or Lru()
        self._pinned: set[Key] = set()
        self._closed = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="waste-read")

    def layout(self, layer: int) -> RecordLayout:
        return self._banks[layer].layout

    def waves(
        self, layer: int, experts: Sequence[int]
    ) -> Iterator[AbstractContextManager[Sequence[tuple[int, Bytes]]]]:
        """Residents first, so that nothing wanted is evicted for something else wanted."""
        if self._closed:
            raise WasteError("this engine is closed", hint="open it again, or keep it open as long as its sessions")
        resident = [e for e in experts if (layer, e) in self._slot_of]
        waiting = resident + [e for e in experts if (layer, e) not in self._slot_of]
        for begin in range(0, len(waiting), self._slots):
            yield self.pinned(layer, waiting[begin : begin + self._slots])

    @contextmanager
    def pinned(self, layer: int, experts: Sequence[int]) -> Iterator[Sequence[tuple[int, Bytes]]]:
        """The records of at most `slots` experts, resident and safe from eviction inside the block."""
        keys = [(layer, e) for e in experts]
        self._pinned.update(keys)
        try:
            missing = []
            for key in keys:
                if key in self._slot_of:
                    self.stats.hits += 1
                    self._policy.used(key)
                else:
                    missing.append(key)
            self._read(missing)
            yield [(expert, self._record(key)) for expert, key in zip(experts, keys, strict=True)]
        finally:
            self._pinned.difference_update(keys)

    def close(self) -> None:
        self._closed = True
        self._readers.shutdown(wait=True, cancel_futures=True)

    def _record(self, key: Key) -> Bytes:
        begin = self._slot_of[key] * self._slot_bytes
        return self._arena[begin : begin + self._banks[key[0]].layout.stride]

    def _read(self, keys: Sequence[Key]) -> None:
        """Fetch `keys` into slots. When a read fails, slots of reads that failed go back, others stay."""
        if not keys:
            return
        jobs = []
        for key in keys:
            slot = self._take_slot()
            begin = slot * self._slot_bytes
            bank = self._banks[key[0]]
            jobs.append((key, slot, bank, self._arena[begin : begin + bank.layout.stride]))
        if len(jobs) == 1:
            key, slot, bank, buffer = jobs[0]
            outcomes = [_attempt(bank, key[1], buffer)]
        else:
            outcomes = list(self._readers.map(lambda job: _attempt(job[2], job[0][1], job[3]), jobs))
        for (key, slot, bank, _), failure in zip(jobs, outcomes, strict=True):
            if failure is None:
                self._slot_of[key] = slot
                self._policy.used(key)
                self.stats.misses += 1
                self.stats.bytes_read += bank.layout.stride
            else:
                self._free.append(slot)
        for failure in outcomes:
            if failure is not None:
                raise failure

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        victim = self._policy.victim(self._pinned)
        return self._slot_of.pop(victim)


def _attempt(bank: Bank, expert: int, buffer: Bytes) -> Exception | None:
    """Read one record; the failure, if any, is returned so that the others can be booked first."""
    try:
        bank.read(expert, buffer)
    except Exception as failure:
        return failure
    return None
