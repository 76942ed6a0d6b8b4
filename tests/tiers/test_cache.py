"""The expert cache against a plain dictionary: same records, least-recently-used order, honest counts."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.container.layout import RecordLayout
from waste.errors import InputError, WasteError
from waste.tiers.cache import Arrivals, ExpertCache


@dataclass
class FakeBank:
    """A bank whose record is filled with a number that names layer and expert."""

    layer: int
    layout: RecordLayout = field(default_factory=lambda: RecordLayout.of("f32", "f32", "f32", 8, 4))
    broken: set[int] = field(default_factory=set)
    reads: list[int] = field(default_factory=list)

    def read(self, expert: int, buffer: np.ndarray) -> None:
        self.reads.append(expert)
        buffer[:] = (16 * self.layer + expert) % 251
        if expert in self.broken:
            raise InputError(f"bank {self.layer} expert {expert} is damaged")


def use(cache: ExpertCache, layer: int, experts: list[int]) -> None:
    """Acquire `experts` and check that every record is the right one while it is held."""
    seen = []
    for wave in cache.waves(layer, experts):
        with wave as arrivals:
            arrivals.wait()
            assert arrivals.arrived is None or arrivals.arrived.all()
            for record in arrivals.records:
                assert (record.data == (16 * layer + record.expert) % 251).all()
                seen.append(record.expert)
    assert sorted(seen) == sorted(experts)


requests = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True)), max_size=30
)


@settings(deadline=None)
@given(slots=st.integers(1, 12), work=requests)
def test_every_request_gets_its_records_whatever_the_size(slots: int, work) -> None:
    banks = {i: FakeBank(i) for i in range(3)}
    cache = ExpertCache(banks, slots)
    for layer, experts in work:
        use(cache, layer, experts)
    uses = sum(len(experts) for _, experts in work)
    reads = sum(len(bank.reads) for bank in banks.values())
    assert cache.stats.misses == reads
    assert cache.stats.hits == uses - reads
    assert cache.stats.bytes_read == reads * banks[0].layout.stride
    cache.close()


@settings(deadline=None)
@given(slots=st.integers(1, 12), work=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=80))
def test_misses_are_those_of_least_recently_used(slots: int, work) -> None:
    cache = ExpertCache({i: FakeBank(i) for i in range(3)}, slots)
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


def test_a_failed_read_is_reported_and_loses_no_slot() -> None:
    bank = FakeBank(0, broken={3})
    cache = ExpertCache({0: bank}, 4)
    for _ in range(10):
        with pytest.raises(InputError, match="expert 3"):
            use(cache, 0, [1, 2, 3, 4])
    bank.broken.clear()
    use(cache, 0, [1, 2, 3, 4])
    assert bank.reads.count(1) == 1  # what had arrived was kept
    cache.close()


def test_records_held_are_not_evicted() -> None:
    cache = ExpertCache({0: FakeBank(0), 1: FakeBank(1)}, 4)
    with cache.pinned(0, [0, 1, 2]) as held:
        for expert in range(6):
            with cache.pinned(1, [expert]):
                pass
        held.wait()
        assert all((record.data == record.expert).all() for record in held.records)
    cache.close()


def test_a_record_held_twice_is_held_until_both_let_go() -> None:
    cache = ExpertCache({0: FakeBank(0), 1: FakeBank(1)}, 2)
    use(cache, 0, [5])
    with cache.pinned(0, [5]) as held:
        with cache.pinned(0, [5]):
            pass
        for expert in range(6):
            use(cache, 1, [expert])
        assert (held.records[0].data == 5).all()
    use(cache, 1, [7, 8])
    assert not (held.records[0].data == 5).all()  # now its slot may go
    cache.close()


@dataclass
class SlowBank(FakeBank):
    """Reads wait for their turn."""

    turn: dict[int, threading.Event] = field(default_factory=lambda: {e: threading.Event() for e in range(16)})

    def read(self, expert: int, buffer: np.ndarray) -> None:
        assert self.turn[expert].wait(30)
        super().read(expert, buffer)


def until(arrivals: Arrivals, expected: list[int]) -> None:
    """Flags are set by the readers' threads, so a moment after the read."""
    for _ in range(3000):
        if arrivals.arrived.tolist() == expected:
            return
        time.sleep(0.01)
    raise AssertionError(arrivals.arrived.tolist())


def test_a_wave_is_entered_before_its_reads_end_and_tells_each_arrival() -> None:
    bank = SlowBank(0, broken={4})
    cache = ExpertCache({0: bank}, 4)
    bank.turn[1].set()
    use(cache, 0, [1])
    with cache.pinned(0, [1, 2, 3, 4]) as arrivals:
        until(arrivals, [1, 0, 0, 0])
        bank.turn[3].set()
        until(arrivals, [1, 0, 1, 0])
        bank.turn[4].set()
        until(arrivals, [1, 0, 1, -1])
        bank.turn[2].set()
        with pytest.raises(InputError, match="expert 4"):
            arrivals.wait()
    assert (cache.stats.hits, cache.stats.misses) == (1, 3)
    cache.close()


def test_leaving_a_wave_early_waits_for_its_reads() -> None:
    """Their slots could be given away otherwise, with a read still writing to them."""
    bank = SlowBank(0)
    cache = ExpertCache({0: bank}, 2)
    timer = threading.Timer(0.1, lambda: [event.set() for event in bank.turn.values()])
    with cache.pinned(0, [5, 6]):
        timer.start()
    assert sorted(bank.reads) == [5, 6]
    assert cache.stats.misses == 2
    use(cache, 0, [5, 6])
    assert cache.stats.misses == 2
    cache.close()


def whole(cache: ExpertCache, slots: int) -> None:
    """Nothing is held, and every slot is free or has a resident."""
    assert not cache._held
    assert sorted([*cache._free, *cache._slot_of.values()]) == list(range(slots))


def test_closing_ends_a_wave_whose_reads_still_queue() -> None:
    """They are cancelled before a reader has taken them: whoever waits is told, and does not wait for ever."""
    bank = SlowBank(0)
    cache = ExpertCache({0: bank}, 8)

    entered, ended = threading.Event(), []

    def forward() -> None:
        try:
            with cache.pinned(0, list(range(8))) as arrivals:
                entered.set()
                arrivals.wait()
        except WasteError as error:
            ended.append(error)

    threads = [threading.Thread(target=work, daemon=True) for work in (forward, cache.close)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    for _ in range(3000):
        if cache._readers._work_queue.qsize() <= 1:  # emptied, but for the word to end
            break
        time.sleep(0.01)
    for event in bank.turn.values():
        event.set()
    for thread in threads:
        thread.join(30)
    assert [error.message for error in ended] == ["this engine is closed"]
    assert len(bank.reads) < 8
    whole(cache, 8)


def test_closing_ends_waves_that_are_entered_later() -> None:
    cache = ExpertCache({0: FakeBank(0)}, 2)
    first, second = cache.waves(0, [0, 1, 2, 3])
    with first as arrivals:
        arrivals.wait()
    cache.close()
    with pytest.raises(WasteError, match="closed"), second:
        pass
    whole(cache, 2)


def test_a_wave_that_cannot_begin_loses_no_slot() -> None:
    """As Ctrl-C or a thread that the system refuses may stop it."""
    bank = FakeBank(0)
    cache = ExpertCache({0: bank}, 4)
    use(cache, 0, [0, 1])
    submit, calls = cache._readers.submit, iter([True, False])

    def refusing(*args: object) -> object:
        if next(calls):
            return submit(*args)
        raise KeyboardInterrupt

    cache._readers.submit = refusing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), cache.pinned(0, [1, 2, 3, 4]):
        pass
    cache._readers.submit = submit  # type: ignore[method-assign]
    whole(cache, 4)
    use(cache, 0, [1, 2, 3, 4])
    assert bank.reads.count(2) == 1  # it had been read when the other failed
    cache.close()
