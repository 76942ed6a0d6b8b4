"""The expert cache: from (layer, expert) to a record in a slot of VRAM or RAM, read from the drive on a miss.

A record is read straight into its slot, verified there, and computed from there; nothing is copied or repacked but
between tiers, which hold different experts. Books are kept by the thread that computes; readers only say when a read
has ended. The cache serves one forward pass at a time.

Ctrl-C may come between any two steps of the books. So a pass says when it begins and when it has ended; after one that
did neither end nor fail by name, the next finds an empty cache.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from waste.backends.base import Bytes, Record
from waste.container.layout import RecordLayout
from waste.container.reader import Bank
from waste.errors import WasteError
from waste.io.readers import Priority, Readers
from waste.tiers.bell import Bell
from waste.tiers.lookahead import Lookahead
from waste.tiers.policy import Key
from waste.tiers.slot import Origin, Pool, Slot, State
from waste.tiers.stats import CacheStats

# Reads for later that may be queued at once: enough to keep the drive at work while a layer is computed, few enough
# that a slot wanted now is soon found among them.
FILL_AHEAD = 64


class Wave:
    """Records of one layer, some perhaps still being read: a `with` block in which they stay where they are.

    Implements `waste.backends.base.Wave`.
    """

    __slots__ = ("_cache", "experts", "layer", "reading", "records")

    def __init__(self, cache: ExpertCache, layer: int, experts: Sequence[int]) -> None:
        self._cache = cache
        self.layer = layer
        self.experts = experts
        self.records: Sequence[Record] = ()
        self.reading: list[Slot] = []  # those that were not there on entering

    def __enter__(self) -> Wave:
        self._cache._acquire(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, WasteError):
            self._cache._release(self)
        else:
            self._cache.tear()  # the books may be half written: nothing is to be concluded from them

    def wait(self) -> None:
        """Until all reads have ended. Raises what one of them raised."""
        self._cache._wait(self.reading)

    def stalled(self, seconds: float) -> None:
        self._cache.stats.stall_s += seconds


class ExpertCache:
    """Experts of the given banks in memory. Implements `waste.layers.feed_forward.ExpertStore`."""

    def __init__(
        self,
        banks: Mapping[int, Bank],
        ram: Sequence[Pool],
        readers: Readers,
        *,
        vram: Sequence[Pool] = (),
        lookahead: Lookahead | None = None,
        experts: int,
        between_tokens: Callable[[ExpertCache], None] | None = None,
    ) -> None:
        """banks: by layer. ram: pools that together serve every layer, each with at least as many slots as a token
        needs experts; records are read into these. vram: pools that serve every layer, or none.
        lookahead: how many experts to predict; None: none. experts: in a layer.
        between_tokens: called with this cache after each decoded token, when no wave is open.
        """
        self.stats = CacheStats()
        self.lookahead = lookahead
        # How often each expert was asked for, by layer: what usage.json learns from.
        self.counts: dict[int, list[int]] = {layer: [0] * experts for layer in banks}
        self._banks = banks
        self._readers = readers
        self._between_tokens = between_tokens
        self._pools = (*vram, *ram)
        self._ram: dict[int, Pool] = {layer: pool for pool in ram for layer in pool.layers}
        self._vram: dict[int, Pool] = {layer: pool for pool in vram for layer in pool.layers}
        # Of every expert that is there or on its way. Records apart: in a layer without a miss nothing else is needed.
        self._records: dict[int, dict[int, Record]] = {layer: {} for layer in banks}
        self._slots: dict[int, dict[int, Slot]] = {layer: {} for layer in banks}
        self._unused: dict[int, set[int]] = {layer: set() for layer in banks}  # read ahead, not asked for yet
        self._held: list[Wave] = []  # waves whose records must stay
        self._reading = 0  # slots whose read has not been booked
        self._landed: deque[Slot] = deque()  # reads that have ended and are not booked yet
        self._arrival = Bell()
        self._filling: deque[Key] = deque()
        self._closed = False
        self._process = os.getpid()
        self._computing = 0  # the thread whose pass has begun and not ended; 0: none
        self._torn = False  # it never will
        # Reads of another generation than this have no place in the books any more; those under way still write.
        self._generation = 0
        self._writing: set[Slot] = set()

    # -- a forward pass

    def begin(self) -> None:
        """A forward pass begins. Everything it asks for lies between this and `end`, or `tear`.

        Raises WasteError once the cache is closed, while another thread's pass has not ended, and in a process that
        was forked since the cache was made: reads would never end there.
        """
        self.refuse_closed()
        if not self.of_this_process:
            raise WasteError(
                "this engine was opened before the process was forked, and its reader threads stayed there",
                hint="open the engine in the process that uses it",
            )
        me = threading.get_ident()
        if self._computing not in (0, me) and not self._torn:
            raise WasteError("another thread is evaluating on this engine", hint="one pass at a time")
        if self._torn or self._computing:
            self._start_over()
        self._computing = me

    def end(self) -> None:
        """It has ended, or failed with an error of its own: the books are as they should be."""
        self._computing = 0

    def tear(self) -> None:
        """It was stopped anywhere, perhaps in the middle of the books."""
        self._torn = True

    @property
    def of_this_process(self) -> bool:
        """Whether this process made the cache, and not one that it was forked from."""
        return os.getpid() == self._process

    def _start_over(self) -> None:
        """Forget every expert, every wave and every read. The counts stay."""
        self._torn = True  # until this, too, has come to its end
        self._generation += 1
        while self._writing:  # into slots that will be given away
            time.sleep(0.001)
        for tables in (self._slots, self._records, self._unused):
            for table in tables.values():
                table.clear()
        self._held.clear()
        self._landed.clear()
        self._filling.clear()
        self._reading = 0
        for pool in self._pools:
            pool.start_over()
        self._computing, self._torn = 0, False

    # -- what it asks

    def layout(self, layer: int) -> RecordLayout:
        return self._banks[layer].layout

    def waves(self, layer: int, experts: Sequence[int]) -> list[AbstractContextManager[Wave]]:
        """Residents first, so that nothing wanted is evicted for something else wanted."""
        self.refuse_closed()
        most = self._ram[layer].capacity
        if len(experts) <= most:
            return [Wave(self, layer, experts)] if experts else []
        records = self._records[layer]
        waiting = sorted(experts, key=lambda expert: expert not in records)
        return [Wave(self, layer, waiting[begin : begin + most]) for begin in range(0, len(waiting), most)]

    def wanted_ahead(self, layer: int) -> int:
        """How many experts of `layer`, the next one, to predict now; 0: none, as where all of them have slots."""
        if self.lookahead is None or len(self._records[layer]) == len(self.counts[layer]):
            return 0
        return self.lookahead.width

    def prefetch(self, layer: int, experts: Sequence[int], likely: int) -> None:
        """Begin to read those of the first `likely` of `experts`, the likeliest first, that are not on their way yet.

        None of `experts` leaves for it.
        """
        records, pool = self._records[layer], self._ram[layer]
        pinned: set[Key] | None = None
        for expert in experts[:likely]:
            if expert in records:
                continue
            # A pool that does not hold what two tokens ask of its layers has nothing to give away for a guess: 52 slots
            # for 88 uses a token lost 16 % to it (LEARNED: lookahead). What the layer will want has room, too.
            if len(pool.background) + 2 * pool.floor * len(pool.layers) > pool.capacity:
                break
            if pinned is None:
                pinned = self._pinned() | {(layer, wanted) for wanted in experts}
            slot = self._empty_slot(pool, pinned, wait=False)
            if slot is None:
                break
            self._read(slot, layer, expert, Origin.AHEAD)

    def token(self, seconds: float) -> None:
        """One token has been decoded, in `seconds`: the moment for what must not happen in the middle of one."""
        for pool in self._pools:
            pool.policy.token()
        if self.lookahead is not None:
            self.lookahead.token(seconds)
        if self._between_tokens is not None:
            self._between_tokens(self)

    # -- around it

    def fill(self, keys: Iterable[Key]) -> None:
        """Read these in the background, in this order, as long as there are empty slots. Nothing is evicted for it."""
        self._filling = deque(keys)
        self._fill()

    def resident(self) -> dict[Key, str]:
        """The tier of every expert that is there."""
        return {
            (layer, expert): slot.pool.tier
            for layer, slots in self._slots.items()
            for expert, slot in slots.items()
            if slot.state is State.READY
        }

    @property
    def depth(self) -> int:
        """Reads in flight that the drives like best, the most of any drive."""
        return max((self._readers.depth(bank.drive) for bank in self._banks.values()), default=0)

    @property
    def ram_bytes(self) -> int:
        """What the slots in RAM take, once they are all full."""
        return sum(pool.capacity * pool.slot_bytes for pool in self._pools if pool.tier == "ram")

    def settle(self) -> None:
        """Until no read is under way."""
        self._filling.clear()
        while self._reading:
            self._await_landing()
            self._settle()

    def drop(self) -> None:
        """Forget every expert and what the policies learned, as if the cache had just been made; the counts stay.

        Not while a pass is under way; errors as `begin`.
        """
        self.begin()
        self.settle()
        self._start_over()

    def shrink(self, share: float) -> int:
        """Give back `share` of the slots in RAM that are in use, and the promise of all that never were: memory is
        short as it is. Never below what one layer's token needs. Returns the bytes given back.

        Between tokens: waves that have been made may need what is given back.
        """
        given = 0
        for pool in self._pools:
            if pool.tier != "ram":
                continue
            pool.give_up_unused()
            for _ in range(min(int(share * pool.capacity) or 1, pool.capacity - pool.floor)):
                slot = self._empty_slot(pool, self._pinned(), wait=False)
                if slot is None:
                    break
                given += pool.retire(slot)
            if pool.resized():
                for layer, slots in self._slots.items():  # an exchange may have brought some of another pool's layers
                    for expert, slot in slots.items():
                        if slot.pool is pool and slot.state is State.READY:
                            pool.policy.admitted(layer, expert, demanded=True)
        return given

    def refuse_closed(self) -> None:
        """Raises WasteError once the cache is closed."""
        if self._closed:
            raise WasteError("this engine is closed", hint="open it again, or keep it open as long as its sessions")

    def close(self) -> None:
        """End all reads. Waves that are entered later are refused."""
        self._closed = True
        self._filling.clear()
        if self.of_this_process:
            self._readers.close()

    # -- waves

    def _acquire(self, wave: Wave) -> None:
        """Hold the records of a wave and begin to read those that are not there."""
        self.refuse_closed()
        if self._landed:
            self._settle()
        layer, experts = wave.layer, wave.experts
        records = self._records[layer]
        self._held.append(wave)
        try:
            found = [records[expert] for expert in experts]
        except KeyError:
            found = []
        if len(found) < len(experts) or self._reading or self._vram or self._unused[layer]:
            try:
                self._begin(wave)
            except WasteError:
                self._release(wave)
                raise
        else:
            wave.records = found
            self.stats.ram_hits += len(found)
            self._ram[layer].policy.used(layer, experts)
        counts = self.counts[layer]
        for expert in experts:
            counts[expert] += 1
        if self._filling:
            self._fill()

    def _begin(self, wave: Wave) -> None:
        """The careful way in: something is missing, on its way, in another tier, or was read ahead."""
        layer, slots, stats = wave.layer, self._slots[wave.layer], self.stats
        self._cancel_predictions(wave)
        missing = []
        there: dict[int, tuple[Pool, list[int]]] = {}
        for expert in wave.experts:
            slot = slots.get(expert)
            if slot is None:
                missing.append(expert)
                continue
            if slot.state is State.READY:
                there.setdefault(id(slot.pool), (slot.pool, []))[1].append(expert)
                continue
            wave.reading.append(slot)
            if slot.origin is Origin.DEMAND:  # another wave that is still open has begun it
                stats.misses += 1
                continue
            stats.late += 1
            slot.pool.background.pop(slot, None)
            if slot.ticket is not None:
                self._readers.hasten(slot.ticket, Priority.DEMAND)
        for pool, experts in there.values():
            pool.policy.used(layer, experts)
            if pool.tier == "vram":
                stats.vram_hits += len(experts)
            else:
                stats.ram_hits += len(experts)
        if missing:
            pool, pinned = self._ram[layer], self._pinned()
            for expert in missing:
                slot = self._empty_slot(pool, pinned, wait=True)
                assert slot is not None
                wave.reading.append(slot)
                stats.misses += 1
                self._read(slot, layer, expert, Origin.DEMAND)
        records = self._records[layer]
        wave.records = [records[expert] for expert in wave.experts]

    def _release(self, wave: Wave) -> None:
        self._held.remove(wave)
        for slot in wave.reading:
            if slot.landed and slot.state is State.READING:
                self._book(slot, demanded=True)
        if self._vram:
            self._promote(wave)

    def _wait(self, slots: Sequence[Slot]) -> None:
        began = time.perf_counter()
        while not all(slot.landed for slot in slots):
            self._arrival.wait()
        self.stats.stall_s += time.perf_counter() - began
        for slot in slots:
            if slot.failure is not None:
                raise slot.failure

    def _pinned(self) -> set[Key]:
        return {(wave.layer, expert) for wave in self._held for expert in wave.experts}

    # -- slots

    def _empty_slot(self, pool: Pool, pinned: set[Key], *, wait: bool) -> Slot | None:
        """A slot of `pool` that nothing is in: one that was free, that of a read for later, that of a victim.

        Without `wait` None when all are pinned or being read; with it, one of those reads is waited for.
        """
        while True:
            slot = pool.take() or self._cancelled(pool, Origin.FILL)
            if slot is not None:
                return slot
            slots = self._slots
            held = sum(
                1 for layer, e in pinned if (s := slots[layer].get(e)) and s.pool is pool and s.state is State.READY
            )
            if pool.ready > held:
                layer, expert = pool.policy.victim(pinned)
                slot = slots[layer][expert]
                self.stats.evictions += 1
                self._vacate(slot)
                return slot
            if not wait:
                return None
            slot = self._cancelled(pool, Origin.AHEAD)
            if slot is not None:
                return slot
            self._await_landing()
            self._settle()

    def _vacate(self, slot: Slot) -> None:
        """Take a record that is ready out of the books; the policy knows already."""
        layer, expert = slot.layer, slot.expert
        del self._slots[layer][expert], self._records[layer][expert]
        if expert in self._unused[layer]:
            self._unused[layer].discard(expert)
            self.stats.prefetch_wasted += 1
        slot.pool.ready -= 1
        slot.clear()

    def _cancelled(self, pool: Pool, origin: Origin) -> Slot | None:
        """The slot of a read for later that had not begun, and now never will: the last that was asked for."""
        for slot in reversed(pool.background):
            if slot.origin is origin and slot.ticket is not None and self._readers.cancel(slot.ticket):
                self._abandon(slot)
                return slot
        return None

    def _cancel_predictions(self, wave: Wave) -> None:
        """What was predicted for this layer has come true or has not; reads for the latter that can be saved, are."""
        layer, pool = wave.layer, self._ram[wave.layer]
        unused = self._unused[layer]
        if not unused:
            return
        came_true = unused.intersection(wave.experts)
        self.stats.prefetch_useful += len(came_true)
        unused -= came_true
        for slot in [slot for slot in pool.background if slot.layer == layer and slot.expert in unused]:
            if slot.origin is Origin.AHEAD and slot.ticket is not None and self._readers.cancel(slot.ticket):
                self._abandon(slot)
                pool.put(slot)
        self.stats.prefetch_wasted += len(unused)
        unused.clear()

    def _abandon(self, slot: Slot) -> None:
        """Reading -> empty."""
        del self._slots[slot.layer][slot.expert], self._records[slot.layer][slot.expert]
        self._unused[slot.layer].discard(slot.expert)
        slot.pool.background.pop(slot, None)
        slot.pool.reading -= 1
        self._reading -= 1
        slot.clear()

    # -- reads

    def _read(self, slot: Slot, layer: int, expert: int, origin: Origin) -> None:
        """Empty -> reading."""
        bank, pool, generation = self._banks[layer], slot.pool, self._generation
        nbytes = bank.layout.stride
        record = slot.begin(layer, expert, nbytes, origin)
        self._slots[layer][expert], self._records[layer][expert] = slot, record
        pool.reading += 1
        self._reading += 1
        if origin is not Origin.DEMAND:
            pool.background[slot] = None
            if origin is Origin.AHEAD:
                self._unused[layer].add(expert)

        # Announced first and asked second: who starts over waits for it, or it does nothing.
        def read() -> int:
            self._writing.add(slot)
            if generation != self._generation:
                return 0
            bank.read(expert, record.data)
            return nbytes

        def done(failure: BaseException | None) -> None:
            if generation == self._generation:
                slot.ended(failure)
                self._landed.append(slot)
            self._writing.discard(slot)
            self._arrival.ring()

        try:
            slot.ticket = self._readers.submit(read, done, drive=bank.drive, priority=_PRIORITY[origin])
        except WasteError:  # anything else may have come when the read had been begun
            self._abandon(slot)
            pool.put(slot)
            raise

    def _await_landing(self) -> None:
        began = time.perf_counter()
        while not self._landed:
            self._arrival.wait()
        self.stats.stall_s += time.perf_counter() - began

    def _settle(self) -> None:
        """Book the reads that have ended, but for those of a wave that is still open and will do it itself."""
        while self._landed:
            slot = self._landed.popleft()
            if slot.state is not State.READING or not slot.landed:
                continue  # booked when its wave was left
            if slot.failure is None or not any(slot in wave.reading for wave in self._held):
                self._book(slot, demanded=slot not in slot.pool.background)
            # Otherwise whoever waits for it must find what went wrong; it is booked when the wave is left.

    def _book(self, slot: Slot, *, demanded: bool) -> None:
        """Reading -> ready, or empty where the read failed."""
        stats, pool = self.stats, slot.pool
        if slot.failure is not None:
            if slot.expert in self._unused[slot.layer]:
                stats.prefetch_wasted += 1
            self._abandon(slot)
            pool.put(slot)
            return
        assert slot.record is not None
        stats.reads += 1
        stats.bytes_read += slot.record.nbytes
        stats.prefetch_reads += slot.origin is Origin.AHEAD
        stats.fill_reads += slot.origin is Origin.FILL
        slot.state, slot.ticket = State.READY, None
        pool.background.pop(slot, None)
        pool.reading -= 1
        self._reading -= 1
        pool.ready += 1
        pool.policy.admitted(slot.layer, slot.expert, demanded=demanded)

    def _fill(self) -> None:
        """Keep some reads for later queued while slots are free."""
        filling = self._filling
        while filling:
            layer, expert = filling[0]
            pool = self._ram[layer]
            if len(pool.background) >= FILL_AHEAD:
                return
            filling.popleft()
            if expert not in self._records[layer]:
                slot = pool.take()
                if slot is not None:
                    self._read(slot, layer, expert, Origin.FILL)

    # -- between tiers

    def _promote(self, wave: Wave) -> None:
        """What a wave used in RAM moves to VRAM; what has to leave there comes down in its place."""
        layer = wave.layer
        pool = self._vram[layer]
        pinned = self._pinned() | {(layer, expert) for expert in wave.experts}
        for expert in wave.experts:
            lower = self._slots[layer].get(expert)
            if lower is None or lower.pool is pool or lower.state is not State.READY:
                continue
            if any(expert in held.experts and held.layer == layer for held in self._held):
                continue
            upper = self._room_above(pool, pinned)
            if upper is None:
                return
            self._exchange(upper, lower)
            self.stats.promotions += 1

    def _room_above(self, pool: Pool, pinned: set[Key]) -> Slot | None:
        """A slot of a faster tier: empty, or still full of a victim that the policy has given up."""
        slot = pool.take()
        if slot is not None:
            return slot
        held = sum(1 for layer, e in pinned if (s := self._slots[layer].get(e)) and s.pool is pool)
        if pool.ready <= held:
            return None
        layer, expert = pool.policy.victim(pinned)
        return self._slots[layer][expert]

    def _exchange(self, upper: Slot, lower: Slot) -> None:
        """The expert of `lower` moves up; that of `upper`, if there is one, comes down where its record fits."""
        assert lower.record is not None
        nbytes = lower.record.nbytes
        up = (lower.layer, lower.expert)
        lower.pool.policy.removed(*up)
        if upper.record is not None and upper.record.nbytes > lower.pool.slot_bytes:
            self.stats.evictions += 1  # it was of another layer, one with larger records
            self._vacate(upper)
        if upper.state is State.READY:
            assert upper.record is not None
            down, fallen = (upper.layer, upper.expert), upper.record.data.copy()
            self._put(upper, up, lower.record.data)
            self._put(lower, down, fallen)
            lower.pool.policy.admitted(*down, demanded=True)  # the best of what is not above
        else:
            upper.pool.ready += 1
            self._put(upper, up, lower.record.data[:nbytes])
            lower.pool.ready -= 1
            lower.clear()
            lower.pool.put(lower)
        upper.pool.policy.admitted(*up, demanded=True)

    def _put(self, slot: Slot, key: Key, data: Bytes) -> None:
        """`data` is the record of `key`, and now in `slot`."""
        layer, expert = key
        record = slot.begin(layer, expert, len(data), Origin.DEMAND)
        record.data[:] = data
        slot.ended(None)
        slot.state = State.READY
        self._slots[layer][expert], self._records[layer][expert] = slot, record


_PRIORITY = {Origin.DEMAND: Priority.DEMAND, Origin.AHEAD: Priority.AHEAD, Origin.FILL: Priority.FILL}
