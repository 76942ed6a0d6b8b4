"""The expert cache against a plain dictionary: right records in any order of arrival, honest counts, no lost slot."""

from __future__ import annotations

import threading
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.container.layout import RecordLayout
from waste.errors import InputError, ResourceError, WasteError
from waste.io.readers import Priority
from waste.planner.footprint import BOOK_BYTES
from waste.tiers import cache as cache_module
from waste.tiers.arena import Arena
from waste.tiers.cache import ExpertCache, Wave
from waste.tiers.lookahead import Lookahead
from waste.tiers.policy import POLICIES, Fifo, Lru, Policy
from waste.tiers.slot import Pool

LAYERS, EXPERTS, TOP_K = 3, 10, 4
NARROW = RecordLayout.of("f32", "f32", "f32", 8, 4)
WIDE = RecordLayout.of("f32", "f32", "f32", 64, 32)


@dataclass
class FakeBank:
    """A bank whose record is filled with a number that names layer and expert."""

    layer: int
    layout: RecordLayout = NARROW
    broken: set[int] = field(default_factory=set)
    reads: list[int] = field(default_factory=list)
    drive: int = 0

    def read(self, expert: int, buffer: np.ndarray) -> None:
        assert buffer.shape == (self.layout.stride,)
        self.reads.append(expert)
        buffer[:] = name_of(self.layer, expert)
        if expert in self.broken:
            raise InputError(f"bank {self.layer} expert {expert} is damaged")


class Silent(FakeBank):
    def read(self, expert: int, buffer: np.ndarray) -> None:
        pass


def name_of(layer: int, expert: int) -> int:
    return (16 * layer + expert) % 251 + 1


@dataclass
class Job:
    read: Callable[[], int]
    done: Callable[[BaseException | None], None]
    priority: Priority


class Drive:
    """Readers whose reads end when a test says so, or, `at_once`, as soon as they are asked for."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.waiting: list[Job] = []
        self.begun: list[Job] = []
        self.closed = False
        self.asked: list[Priority] = []

    def submit(self, read, done, *, drive: int, priority: Priority) -> Job:
        if self.closed:
            raise WasteError("this engine is closed")
        job = Job(read, done, priority)
        self.asked.append(priority)
        self.waiting.append(job)
        if self.at_once:
            self.finish(job)
        return job

    def start(self, job: Job) -> None:
        """From now on it cannot be cancelled."""
        self.waiting.remove(job)
        self.begun.append(job)

    def finish(self, job: Job) -> None:
        if job in self.waiting:
            self.start(job)
        self.begun.remove(job)
        try:
            job.read()
        except Exception as error:
            job.done(error)
        else:
            job.done(None)

    def finish_all(self) -> None:
        for job in [*self.begun, *self.waiting]:
            self.finish(job)

    def hasten(self, job: Job, priority: Priority) -> None:
        job.priority = min(job.priority, priority)

    def cancel(self, job: Job) -> bool:
        if job not in self.waiting:
            return False
        self.waiting.remove(job)
        return True

    def close(self) -> None:
        self.closed = True
        for job in self.waiting:
            job.done(WasteError("this engine is closed"))
        self.waiting.clear()


def pools(tier: str, slots: int, *, policy: str = "lru", apart: bool = False, layouts: Sequence[RecordLayout] = ()):
    """One pool for all layers, or one for each."""
    layouts = layouts or [NARROW] * LAYERS
    parts = [(i,) for i in range(LAYERS)] if apart else [tuple(range(LAYERS))]
    arena = Arena([(max(layouts[i].stride for i in part), slots) for part in parts])
    make = POLICIES[policy]
    return [
        Pool(tier, part, arena, memory, make, min(TOP_K, slots))
        for part, memory in zip(parts, arena.slots, strict=True)
    ]


def small(
    slots: int,
    drive: Drive | None = None,
    *,
    vram: int = 0,
    banks=None,
    policy: str = "lru",
    apart: bool = False,
    above_apart: bool = False,
):
    """A cache over fake banks of three layers. apart: each layer has slots of its own."""
    banks = banks or {i: FakeBank(i) for i in range(LAYERS)}
    layouts = [banks[i].layout for i in range(LAYERS)]
    above = pools("vram", vram, policy=policy, apart=above_apart, layouts=layouts) if vram else ()
    ram = pools("ram", slots, policy=policy, apart=apart, layouts=layouts)
    return ExpertCache(banks, ram, drive or Drive(), vram=above, experts=EXPERTS)


def check(wave: Wave) -> None:
    for record in wave.records:
        assert (record.data == name_of(wave.layer, record.expert)).all()
        assert record.nbytes == len(record.data)


def use(cache: ExpertCache, layer: int, experts: Sequence[int]) -> None:
    """Acquire `experts` and check that every record is the right one while it is held."""
    seen = []
    for part in cache.waves(layer, experts):
        with part as wave:
            wave.wait()
            check(wave)
            seen += [record.expert for record in wave.records]
    assert sorted(seen) == sorted(experts)


def whole(cache: ExpertCache) -> None:
    """Nothing is held or read; every slot is free or ready; the books agree with each other."""
    cache.settle()
    assert not cache._held and cache._reading == 0
    for pool in cache._pools:
        mine = [slot for slots in cache._slots.values() for slot in slots.values() if slot.pool is pool]
        assert pool.reading == 0 and not pool.background
        assert len(mine) == pool.ready
        places = {slot.memory.index for slot in (*mine, *pool._free)}
        assert len(places) == len(mine) + len(pool._free)
        assert len(places) + pool._most - pool._made == pool.capacity
    for layer, slots in cache._slots.items():
        assert slots.keys() == cache._records[layer].keys()
        for expert, slot in slots.items():
            assert (slot.memory.data[: slot.record.nbytes] == name_of(layer, expert)).all()


expert_sets = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=8, unique=True)
requests = st.lists(st.tuples(st.integers(0, LAYERS - 1), expert_sets), max_size=30)


@settings(deadline=None)
@given(
    slots=st.integers(1, 12),
    vram=st.integers(0, 6),
    work=requests,
    policy=st.sampled_from(sorted(POLICIES)),
    apart=st.booleans(),
    above_apart=st.booleans(),
)
def test_every_request_gets_its_records_whatever_the_size(slots, vram, work, policy, apart, above_apart) -> None:
    banks = {i: FakeBank(i, WIDE if i == 1 else NARROW) for i in range(LAYERS)}
    cache = small(slots, vram=vram, banks=banks, policy=policy, apart=apart, above_apart=above_apart)
    for layer, experts in work:
        use(cache, layer, experts)
    whole(cache)
    uses = sum(len(experts) for _, experts in work)
    reads = sum(len(bank.reads) for bank in banks.values())
    stats = cache.stats
    assert (stats.misses, stats.reads) == (reads, reads)
    assert (stats.hits, stats.uses) == (uses - reads, uses)
    assert stats.bytes_read == sum(len(bank.reads) * bank.layout.stride for bank in banks.values())
    for i in range(LAYERS):
        asked = [expert for layer, experts in work if layer == i for expert in experts]
        assert cache.counts[i] == np.bincount(asked, minlength=EXPERTS).tolist()
    cache.close()


@settings(deadline=None)
@given(slots=st.integers(1, 12), work=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=80))
def test_misses_are_those_of_least_recently_used(slots: int, work) -> None:
    cache = small(slots)
    model: OrderedDict[tuple[int, int], None] = OrderedDict()
    misses = 0
    for key in work:
        use(cache, key[0], [key[1]])
        if key not in model:
            misses += 1
            if len(model) == slots:
                model.popitem(last=False)
        model[key] = None
        model.move_to_end(key)
    assert cache.stats.misses == misses
    cache.close()


@settings(deadline=None)
@given(
    vram=st.integers(1, 6),
    ram=st.integers(1, 6),
    work=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=80),
)
def test_two_tiers_hold_what_one_of_their_sum_would(vram: int, ram: int, work) -> None:
    """Least recently used in both: they are exclusive, and what falls out of the upper is the best of the lower.

    One slot of RAM is always needed for what comes from the drive, before it moves up.
    """
    cache = small(ram, vram=vram)
    one = small(ram + vram)
    for layer, expert in work:
        use(cache, layer, [expert])
        use(one, layer, [expert])
        tiers = cache.resident()
        assert len(set(tiers)) == len(tiers)
        assert (layer, expert) in tiers and tiers[layer, expert] == "vram"  # promoted on its first use
    assert cache.stats.misses >= one.stats.misses
    whole(cache)
    cache.close()
    one.close()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, LAYERS - 1), expert_sets),
        st.tuples(st.just("ahead"), st.integers(0, LAYERS - 1), expert_sets),
        st.tuples(st.just("begin"), st.integers(0, 20), st.just([])),
        st.tuples(st.just("finish"), st.integers(0, 20), st.just([])),
        st.tuples(st.just("break"), st.integers(0, LAYERS - 1), expert_sets),
        st.tuples(st.just("mend"), st.just(0), st.just([])),
        st.tuples(st.just("fill"), st.just(0), expert_sets),
        st.tuples(st.just("shrink"), st.just(0), st.just([])),
        st.tuples(st.just("drop"), st.just(0), st.just([])),
    ),
    max_size=60,
)


def test_what_comes_down_to_a_place_too_small_for_it_leaves_memory() -> None:
    """Above all layers share slots of the largest record; below each has slots of its own size."""
    banks = {i: FakeBank(i, WIDE if i == 1 else NARROW) for i in range(LAYERS)}
    cache = small(2, vram=1, banks=banks, apart=True)
    use(cache, 1, [0])
    assert cache.resident() == {(1, 0): "vram"}
    use(cache, 0, [0])
    assert cache.resident() == {(0, 0): "vram"}
    assert cache.stats.evictions == 1
    use(cache, 2, [0])  # narrow for narrow: they change places
    assert cache.resident() == {(2, 0): "vram", (0, 0): "ram"}
    use(cache, 1, [0])
    whole(cache)
    assert cache.stats.evictions == 1
    assert len(banks[1].reads) == 2


class Hurried(Drive):
    """A drive that ends its reads only when somebody has to wait."""

    def __init__(self) -> None:
        super().__init__(at_once=False)


@settings(deadline=None, max_examples=300)
@given(slots=st.integers(1, 24), vram=st.integers(0, 5), work=steps, policy=st.sampled_from(sorted(POLICIES)))
def test_reads_ahead_failures_and_any_order_of_arrival_change_no_record(slots, vram, work, policy) -> None:
    """Whatever is read ahead, cancelled, late or broken: a wave gets its records or the error of one of its own."""
    drive = Hurried()
    banks = {i: FakeBank(i) for i in range(LAYERS)}
    cache = small(slots, drive, vram=vram, banks=banks, policy=policy)
    await_landing = cache._await_landing

    def hurry() -> None:
        drive.finish_all()
        await_landing()

    cache._await_landing = hurry  # type: ignore[method-assign]
    for what, number, experts in work:
        if what == "use":
            for part in cache.waves(number, experts):
                failure = ""
                try:
                    with part as wave:
                        drive.finish_all()
                        wave.wait()
                        check(wave)
                except InputError as error:
                    failure = error.message
                assert failure in ("", *(f"bank {number} expert {e} is damaged" for e in part.experts))
        elif what == "ahead":
            cache.prefetch(number, experts, 5)
        elif what == "begin" and drive.waiting:
            drive.start(drive.waiting[number % len(drive.waiting)])
        elif what == "finish" and drive.begun:
            drive.finish(drive.begun[number % len(drive.begun)])
        elif what == "break":
            banks[number].broken.update(experts)
        elif what == "mend":
            for bank in banks.values():
                bank.broken.clear()
        elif what == "fill":
            cache.fill((layer, expert) for layer in range(LAYERS) for expert in experts)
        elif what == "shrink":
            cache.shrink(0.2)
        elif what == "drop":
            cache.drop()
    whole(cache)
    stats = cache.stats
    assert stats.prefetch_useful + stats.prefetch_wasted <= drive.asked.count(Priority.AHEAD)
    assert stats.reads <= sum(len(bank.reads) for bank in banks.values())
    cache.close()


def test_a_failed_read_is_reported_and_loses_no_slot() -> None:
    banks = {0: FakeBank(0, broken={3}), 1: FakeBank(1), 2: FakeBank(2)}
    cache = small(4, banks=banks)
    for _ in range(10):
        with pytest.raises(InputError, match="expert 3"):
            use(cache, 0, [1, 2, 3, 4])
    banks[0].broken.clear()
    use(cache, 0, [1, 2, 3, 4])
    assert banks[0].reads.count(1) == 1  # what had arrived was kept
    whole(cache)
    cache.close()


def test_a_prediction_that_cannot_be_read_is_nobodys_error() -> None:
    banks = {0: FakeBank(0, broken={3}), 1: FakeBank(1), 2: FakeBank(2)}
    cache = small(26, banks=banks)
    cache.prefetch(0, [2, 3, 8], 2)
    use(cache, 0, [1, 2])
    assert (cache.stats.prefetch_useful, cache.stats.prefetch_wasted) == (1, 1)
    banks[0].broken.clear()
    use(cache, 0, [3])  # read again
    whole(cache)
    cache.close()


def test_records_held_are_not_evicted() -> None:
    cache = small(4)
    with cache.waves(0, [0, 1, 2])[0] as held:
        for expert in range(6):
            use(cache, 1, [expert])
        held.wait()
        check(held)
    cache.close()


def test_a_record_held_twice_is_held_until_both_let_go() -> None:
    cache = small(2)
    use(cache, 0, [5])
    with cache.waves(0, [5])[0] as held:
        with cache.waves(0, [5])[0]:
            pass
        for expert in range(6):
            use(cache, 1, [expert])
        check(held)
        data = held.records[0].data
    use(cache, 1, [7, 8])
    assert not (data == name_of(0, 5)).all()  # now its slot may go
    cache.close()


def test_a_record_that_another_wave_is_reading_is_read_once() -> None:
    drive = Drive(at_once=False)
    banks = {i: FakeBank(i) for i in range(LAYERS)}
    cache = small(4, drive, banks=banks)
    with cache.waves(0, [1, 2])[0] as first, cache.waves(0, [2, 3])[0] as second:
        drive.finish_all()
        for wave in (first, second):
            wave.wait()
            check(wave)
    assert sorted(banks[0].reads) == [1, 2, 3]
    whole(cache)
    cache.close()


def flags(wave: Wave) -> list[int]:
    """What native code sees."""
    import ctypes

    return [ctypes.c_int32.from_address(record.arrived).value if record.arrived else 1 for record in wave.records]


def test_a_wave_is_entered_before_its_reads_end_and_tells_each_arrival() -> None:
    drive = Drive(at_once=False)
    banks = {0: FakeBank(0, broken={4}), 1: FakeBank(1), 2: FakeBank(2)}
    cache = small(4, drive, banks=banks)
    with cache.waves(0, [1])[0]:
        drive.finish_all()
    with cache.waves(0, [1, 2, 3, 4])[0] as wave:
        assert flags(wave) == [1, 0, 0, 0]
        two, three, four = drive.waiting
        drive.finish(three)
        assert flags(wave) == [1, 0, 1, 0]
        drive.finish(four)
        assert flags(wave) == [1, 0, 1, -1]
        drive.finish(two)
        with pytest.raises(InputError, match="expert 4"):
            wave.wait()
    assert (cache.stats.ram_hits, cache.stats.misses, cache.stats.reads) == (1, 4, 3)
    whole(cache)
    cache.close()


def test_leaving_a_wave_early_leaves_its_reads_alone() -> None:
    """Their slots are not given away while a read may still write to them, and what they bring is kept."""
    drive = Drive(at_once=False)
    cache = small(4, drive)
    with cache.waves(0, [5, 6])[0]:
        pass
    slots = {id(cache._slots[0][e]) for e in (5, 6)}
    for expert in (1, 2):
        with cache.waves(1, [expert])[0] as wave:
            assert not slots & {id(slot) for slot in wave.reading}
            drive.finish(drive.waiting[-1])
    drive.finish_all()
    use(cache, 0, [5, 6])
    assert cache.stats.ram_hits == 2
    whole(cache)
    cache.close()


def test_what_is_predicted_is_counted_as_it_comes_true() -> None:
    drive = Drive(at_once=False)
    cache = small(28, drive)
    cache.prefetch(1, [1, 2, 3, 4], 4)
    drive.finish(drive.waiting[0])  # 1 is there in time
    drive.start(drive.waiting[0])  # 2 is late, 3 and 4 have not begun
    with cache.waves(1, [1, 2, 3])[0] as wave:
        assert [job.priority for job in drive.waiting] == [Priority.DEMAND]  # 3 hastened, 4 cancelled
        drive.finish_all()
        wave.wait()
        check(wave)
    stats = cache.stats
    assert (stats.ram_hits, stats.late, stats.misses) == (1, 2, 0)
    assert (stats.prefetch_useful, stats.prefetch_wasted, stats.prefetch_reads) == (3, 0, 3)
    whole(cache)
    cache.close()


def test_filling_evicts_nothing_and_gives_way() -> None:
    drive = Drive(at_once=False)
    banks = {i: FakeBank(i) for i in range(LAYERS)}
    cache = small(4, drive, banks=banks)
    with cache.waves(0, [0, 1])[0]:
        drive.finish_all()
    cache.fill((1, expert) for expert in range(8))
    assert len(drive.waiting) == 2
    with cache.waves(2, [0, 1])[0] as wave:  # takes the slots of both, which had not begun
        assert [job.priority for job in drive.waiting] == [Priority.DEMAND] * 2
        drive.finish_all()
        wave.wait()
    assert set(cache.resident()) == {(0, 0), (0, 1), (2, 0), (2, 1)}
    assert cache.stats.evictions == 0
    whole(cache)
    cache.close()


@pytest.mark.parametrize("torn", [False, True])
def test_what_was_dropped_leaves_nothing_behind_whatever_came_before(torn: bool) -> None:
    drive = Drive()
    cache = small(4, drive, vram=2, policy="lfu")
    for _ in range(9):
        use(cache, 0, [1, 2])
        use(cache, 0, [3, 4])
        cache.token(0.0)
    if torn:
        drive.at_once = False
        cache.begin()
        with pytest.raises(KeyboardInterrupt), cache.waves(0, [5])[0]:
            raise KeyboardInterrupt
        drive.waiting.clear()  # as if the interrupt had come before the read was asked for
    cache.drop()
    assert cache.resident() == {}
    drive.at_once = True
    before = cache.stats.misses
    for experts in ([5, 6], [7, 8], [9], [1]):  # nothing is preferred for what it was before
        use(cache, 0, experts)
    assert set(cache.resident()) == {(0, expert) for expert in (5, 6, 7, 8, 9, 1)}
    assert cache.stats.misses - before == 6
    whole(cache)


def test_what_is_read_ahead_and_asked_for_before_it_comes_is_a_demand_to_the_policy() -> None:
    """Also where its arrival is noticed while room is made for others of its wave."""
    drive = Drive(at_once=False)
    cache = small(2, drive, policy="lru")
    told: list[tuple[int, bool]] = []
    pool = cache._pools[0]
    admitted = pool.policy.admitted
    pool.policy.admitted = lambda layer, expert, *, demanded: (  # type: ignore[method-assign]
        told.append((expert, demanded)),
        admitted(layer, expert, demanded=demanded),
    )[1]
    cache.fill([(0, 1), (1, 9)])
    drive.start(drive.waiting[1])
    landing = threading.Timer(0.05, lambda: (drive.start(drive.waiting[0]), drive.finish_all()))
    landing.start()
    with cache.waves(0, [1, 2])[0] as wave:  # 2 waits for the place of (1, 9)
        landing.join()
        drive.finish_all()
        wave.wait()
        check(wave)
    assert dict(told)[1] is True
    assert dict(told)[9] is False
    whole(cache)


def test_nothing_is_predicted_for_a_layer_that_is_there() -> None:
    cache = small(3 * EXPERTS)
    cache.lookahead = Lookahead(TOP_K, EXPERTS, 3)
    assert cache.wanted_ahead(1) == 3
    use(cache, 1, range(EXPERTS - 1))
    assert cache.wanted_ahead(1) == 3
    use(cache, 1, [EXPERTS - 1])
    assert (cache.wanted_ahead(1), cache.wanted_ahead(2)) == (0, 3)


def test_shrinking_stops_where_a_token_still_fits() -> None:
    cache = small(20)
    for layer in range(LAYERS):
        use(cache, layer, [0, 1, 2, 3, 4, 5])
    for _ in range(100):
        cache.shrink(0.1)
        whole(cache)
    assert [pool.capacity for pool in cache._pools] == [TOP_K]
    use(cache, 0, list(range(8)))  # in waves
    whole(cache)
    cache.close()


def test_shrinking_gives_back_what_is_in_use_and_ends_the_growth() -> None:
    cache = small(40)
    for layer in range(LAYERS):
        use(cache, layer, range(8))
    assert cache.shrink(0.25) == 6 * NARROW.stride
    assert (cache._pools[0].capacity, len(cache.resident())) == (18, 18)
    for layer in range(LAYERS):
        use(cache, layer, range(EXPERTS))
    assert len(cache.resident()) == 18
    whole(cache)


def test_a_pool_that_no_longer_holds_every_expert_gets_a_policy_that_listens() -> None:
    def make(capacity: int) -> Policy:
        return (Fifo if capacity >= LAYERS * EXPERTS else Lru)(capacity)

    parts = tuple(range(LAYERS))
    arena, above = Arena([(NARROW.stride, LAYERS * EXPERTS)]), Arena([(NARROW.stride, 2)])
    pool = Pool("ram", parts, arena, arena.slots[0], make, TOP_K)
    vram = Pool("vram", parts, above, above.slots[0], Lru, TOP_K)
    cache = ExpertCache({i: FakeBank(i) for i in parts}, [pool], Drive(), vram=[vram], experts=EXPERTS)
    for layer in parts:
        use(cache, layer, range(EXPERTS))
    assert type(pool.policy) is Fifo
    cache.shrink(0.5)
    assert type(pool.policy) is Lru
    kept = pool.policy
    cache.shrink(0.1)
    assert pool.policy is kept
    for step in range(100):
        use(cache, step % LAYERS, [step % 7, 9 - step % 3])
    whole(cache)


def test_nothing_that_is_predicted_leaves_for_a_prediction() -> None:
    cache = small(24)
    use(cache, 1, [0, 1, 2, 3])  # used longest ago of all
    for layer in (0, 2):
        use(cache, layer, range(EXPERTS))
    cache.prefetch(1, [0, 1, 2, 3, 9], 5)
    cache.settle()
    assert {(1, expert) for expert in (0, 1, 2, 3, 9)} <= cache.resident().keys()
    whole(cache)


@pytest.mark.parametrize("more", [-1, 0, 3])
def test_predictions_leave_room_for_two_tokens(more: int) -> None:
    drive = Drive(at_once=False)
    cache = small(2 * TOP_K * LAYERS + more, drive)
    for layer in (1, 2):
        cache.prefetch(layer, range(EXPERTS), EXPERTS)
    assert len(drive.waiting) == more + 1
    for job in list(drive.waiting):
        drive.start(job)  # none can be taken back
    with cache.waves(0, list(range(TOP_K)))[0]:
        assert len(drive.waiting) == TOP_K
        drive.finish_all()
    whole(cache)


def test_a_prediction_that_leaves_before_its_layer_asks_was_wasted() -> None:
    cache = small(2 * TOP_K * LAYERS)
    cache.prefetch(1, [1], 1)
    cache.settle()
    assert cache.resident() == {(1, 1): "ram"}
    cache.shrink(0.7)
    use(cache, 0, range(EXPERTS))
    assert (1, 1) not in cache.resident()
    use(cache, 1, [1])
    assert (cache.stats.prefetch_useful, cache.stats.prefetch_wasted) == (0, 1)


def test_only_so_many_reads_queue_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "FILL_AHEAD", 5)
    drive = Drive(at_once=False)
    cache = small(LAYERS * EXPERTS, drive)
    cache.fill([(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)])
    while drive.waiting:
        assert len(drive.waiting) <= 5
        drive.finish_all()
        with cache.waves(0, [0])[0]:
            pass
    assert len(cache.resident()) == LAYERS * EXPERTS


@pytest.mark.parametrize("where", ["for a slot", "for a record"])
def test_time_spent_waiting_counts_as_a_stall(where: str) -> None:
    drive = Drive(at_once=False)
    cache = small(1, drive)
    if where == "for a slot":
        cache.fill([(1, 0)])
        drive.start(drive.waiting[0])
    landing = threading.Timer(0.05, drive.finish_all)
    landing.start()
    with cache.waves(0, [0])[0] as wave:
        if where == "for a slot":
            landing.join()
            assert cache.stats.stall_s > 0.01
            drive.finish_all()
        wave.wait()
    landing.join()
    assert cache.stats.stall_s > 0.01
    whole(cache)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("resident", [0.25, 0.5, 0.98])
def test_the_books_take_no_more_than_the_plan_sets_aside(policy: str, resident: float) -> None:
    layers, experts = 8, 128
    rng = np.random.default_rng(7)
    drive = Drive()
    tracemalloc.start()
    try:
        parts = tuple(range(layers))
        slots = int(resident * layers * experts)
        arena = Arena([(NARROW.stride, slots)])
        pool = Pool("ram", parts, arena, arena.slots[0], POLICIES[policy], TOP_K)
        banks = {i: Silent(i) for i in parts}
        before = tracemalloc.get_traced_memory()[0]
        cache = ExpertCache(banks, [pool], drive, experts=experts)
        for _ in range(150):
            for layer in parts:
                with cache.waves(layer, sorted(rng.choice(experts, 8, replace=False).tolist()))[0]:
                    pass
            drive.asked.clear()
            cache.token(0.0)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert pool.ready == slots
    assert peak < BOOK_BYTES * layers * experts


def test_no_work_per_miss_grows_with_the_slots() -> None:
    """Lines of Python that a miss runs, counted: the same in a full cache of 400 slots and of 40,000."""
    import sys

    def lines(slots: int, policy: str) -> int:
        banks = {0: FakeBank(0)}
        arena = Arena([(NARROW.stride, slots)])
        pool = Pool("ram", (0,), arena, arena.slots[0], POLICIES[policy], TOP_K)
        cache = ExpertCache(banks, [pool], Drive(), experts=2 * slots)
        for begin in range(0, slots, 4):
            with cache.waves(0, list(range(begin, begin + 4)))[0]:
                pass
            cache.token(0.0)
        count = 0

        def tracer(frame, event, arg):
            nonlocal count
            count += event == "line"
            return tracer

        sys.settrace(tracer)
        try:
            for begin in range(slots, slots + 200, 4):
                with cache.waves(0, list(range(begin, begin + 4)))[0]:
                    pass
        finally:
            sys.settrace(None)
        assert cache.stats.misses == slots + 200
        return count

    for policy in POLICIES:
        few, many = lines(400, policy), lines(40_000, policy)
        assert many <= 1.1 * few, f"{policy}: {few} lines with 400 slots, {many} with 40,000"


def test_closing_ends_a_wave_whose_reads_still_queue() -> None:
    """They are cancelled before a reader has taken them: whoever waits is told, and does not wait for ever."""
    drive = Drive(at_once=False)
    cache = small(8, drive)
    entered, ended = threading.Event(), []

    def forward() -> None:
        try:
            with cache.waves(0, list(range(8)))[0] as wave:
                entered.set()
                wave.wait()
        except WasteError as error:
            ended.append(error.message)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    assert entered.wait(30)
    cache.close()
    thread.join(30)
    assert ended == ["this engine is closed"]
    whole(cache)


def test_closing_ends_waves_that_are_entered_later() -> None:
    cache = small(2)
    first, second = cache.waves(0, [0, 1, 2, 3])
    with first as wave:
        wave.wait()
    cache.close()
    with pytest.raises(WasteError, match="closed"), second:
        pass
    whole(cache)
    with pytest.raises(WasteError, match="closed"):
        cache.waves(0, [1])


def test_a_wave_that_cannot_begin_loses_no_slot() -> None:
    """As when the system refuses a thread."""
    drive = Drive()
    banks = {i: FakeBank(i) for i in range(LAYERS)}
    cache = small(4, drive, banks=banks)
    submit, calls = drive.submit, iter([True, False])

    def refusing(*args, **named):
        if next(calls):
            return submit(*args, **named)
        raise ResourceError("no thread for reading")

    drive.submit = refusing  # type: ignore[method-assign]
    with pytest.raises(ResourceError), cache.waves(0, [1, 2, 3, 4])[0]:
        pass
    drive.submit = submit  # type: ignore[method-assign]
    whole(cache)
    use(cache, 0, [1, 2, 3, 4])
    assert banks[0].reads.count(1) == 1  # it had been read when the other failed
    cache.close()


def test_the_policy_is_told_what_the_cache_does() -> None:
    """Admitted and gone in turn, used only while resident: what any policy may rely on."""

    class Strict(Lru):
        def __init__(self, capacity):
            super().__init__(capacity)
            self.resident = set()

        def used(self, layer, experts):
            experts = list(experts)
            assert all((layer, expert) in self.resident for expert in experts)
            super().used(layer, experts)

        def admitted(self, layer, expert, *, demanded):
            assert (layer, expert) not in self.resident
            self.resident.add((layer, expert))
            super().admitted(layer, expert, demanded=demanded)

        def victim(self, pinned):
            key = super().victim(pinned)
            assert key not in pinned
            self.resident.remove(key)
            return key

        def removed(self, layer, expert):
            self.resident.remove((layer, expert))
            super().removed(layer, expert)

    rng = np.random.default_rng(3)
    ram, vram = pools("ram", 9), pools("vram", 5)
    for pool in (*ram, *vram):
        pool._make_policy = Strict
        pool.start_over()
    cache = ExpertCache({i: FakeBank(i) for i in range(LAYERS)}, ram, Drive(), vram=vram, experts=EXPERTS)
    for step in range(300):
        layer = step % LAYERS
        use(cache, layer, rng.choice(EXPERTS, TOP_K, replace=False).tolist())
        cache.prefetch((layer + 1) % LAYERS, rng.choice(EXPERTS, 3, replace=False).tolist(), 3)
        if step == 200:
            cache.shrink(0.3)
        if step == 250:
            cache.drop()
    for pool in (*ram, *vram):
        assert len(pool.policy.resident) == pool.ready
    whole(cache)
    cache.close()


# -- passes that are stopped anywhere


def stopped(cache: ExpertCache, layer: int, experts: Sequence[int]) -> None:
    """A pass that Ctrl-C ends while its reads are on their way."""
    cache.begin()
    with pytest.raises(KeyboardInterrupt), cache.waves(layer, experts)[0]:
        raise KeyboardInterrupt
    cache.tear()


def test_a_read_that_has_not_begun_when_its_pass_is_stopped_never_writes() -> None:
    drive = Drive(at_once=False)
    banks = {i: FakeBank(i) for i in range(LAYERS)}
    cache = small(4, drive, banks=banks)
    stopped(cache, 0, [1, 2, 3, 4])
    drive.start(drive.waiting[0])  # a thread has it, and has not come further
    cache.begin()
    late = [*drive.begun, *drive.waiting]
    with cache.waves(1, [5, 6, 7, 8])[0] as wave:
        for job in [job for job in drive.waiting if job not in late]:
            drive.finish(job)
        wave.wait()
        for job in late:
            drive.finish(job)
        check(wave)
    cache.end()
    assert banks[0].reads == []
    whole(cache)
    cache.close()


def test_the_next_pass_waits_for_reads_that_are_being_written() -> None:
    class Slow(FakeBank):
        def read(self, expert: int, buffer: np.ndarray) -> None:
            inside.set()
            assert go_on.wait(30)
            super().read(expert, buffer)

    inside, go_on, begun = threading.Event(), threading.Event(), threading.Event()
    drive = Drive(at_once=False)
    banks = {0: Slow(0), 1: FakeBank(1), 2: FakeBank(2)}
    cache = small(4, drive, banks=banks)
    stopped(cache, 0, [1])
    reader = threading.Thread(target=drive.finish, args=(drive.waiting[0],))
    reader.start()
    assert inside.wait(30)

    def following() -> None:
        cache.begin()
        begun.set()
        drive.at_once = True
        use(cache, 1, [5, 6, 7, 8])
        cache.end()

    thread = threading.Thread(target=following)
    thread.start()
    assert not begun.wait(0.05)
    go_on.set()
    for ended in (thread, reader):
        ended.join(30)
    assert begun.is_set() and set(cache.resident()) == {(1, 5), (1, 6), (1, 7), (1, 8)}
    whole(cache)
    cache.close()


@pytest.mark.parametrize("vram", [0, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_after_a_stopped_pass_the_cache_is_empty_and_whole_and_its_counts_go_on(policy: str, vram: int) -> None:
    cache = small(9, vram=vram, policy=policy)
    for layer in range(LAYERS):
        use(cache, layer, [0, 1, 2, 3])
    cache.shrink(0.3)
    capacity = [pool.capacity for pool in cache._pools]
    stopped(cache, 1, [4, 5])
    cache.begin()
    assert cache.resident() == {} and [pool.capacity for pool in cache._pools] == capacity
    for layer in range(LAYERS):
        use(cache, layer, [3, 4, 5, 6])
    cache.end()
    whole(cache)
    assert cache.counts[1] == [1, 1, 1, 2, 2, 2, 1, 0, 0, 0]
    cache.close()


def test_a_pass_that_failed_by_name_keeps_what_is_there() -> None:
    cache = small(9)
    cache.begin()
    use(cache, 0, [1, 2])
    cache.end()
    cache.begin()
    assert set(cache.resident()) == {(0, 1), (0, 2)}
    cache.end()
    cache.close()


def test_two_threads_do_not_compute_at_once() -> None:
    cache = small(4)
    cache.begin()
    refused = []

    def other() -> None:
        try:
            cache.begin()
        except WasteError as error:
            refused.append(error.message)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(30)
    assert refused == ["another thread is evaluating on this engine"]
    use(cache, 0, [1, 2])
    cache.end()
    cache.close()
