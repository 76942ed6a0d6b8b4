"""The memory of a tier: where slots lie, what they cost before they are used, and that it can be given back."""

from __future__ import annotations

import ctypes
import errno
import gc
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste.events import Event, Notice
from waste.tiers import arena as module
from waste.tiers.arena import Arena, ArenaSlot

PAGE = 4096
blocks_of_slots = st.lists(st.tuples(st.integers(1, 9).map(lambda pages: pages * PAGE), st.integers(0, 7)), max_size=5)


def smaps(name: str) -> int:
    """Bytes of this process by the page tables; the counters of /proc/self/statm lag behind by some pages a core."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def all_slots(arena: Arena) -> list[ArenaSlot]:
    return [slot for slots in arena.slots for slot in slots]


@given(blocks=blocks_of_slots)
def test_slots_lie_on_pages_and_share_no_byte(blocks: list[tuple[int, int]]) -> None:
    arena = Arena(blocks)
    slots = all_slots(arena)
    assert [len(s) for s in arena.slots] == [count for _, count in blocks]
    assert [slot.index for slot in slots] == list(range(len(slots)))
    assert [slot.data.shape for slot in slots] == [(stride,) for stride, count in blocks for _ in range(count)]
    assert all(slot.address == slot.data.ctypes.data and slot.address % PAGE == 0 for slot in slots)
    for slot in slots:
        assert not slot.data.any()
        slot.data[:] = 1 + slot.index
    for slot in slots:
        assert (slot.data == 1 + slot.index).all()
    # Nothing is lost between them: the arena is the sum of its slots.
    assert arena.nbytes == sum(slot.data.nbytes for slot in slots)


@given(blocks=blocks_of_slots)
def test_each_slot_has_a_flag_of_its_own(blocks: list[tuple[int, int]]) -> None:
    arena = Arena(blocks)
    for slot in all_slots(arena):
        ctypes.c_int32.from_address(slot.flag_address).value = slot.index - 7
    assert arena.arrived.dtype == np.int32
    assert arena.arrived.tolist() == [index - 7 for index in range(len(arena.arrived))]


def test_slots_are_a_sequence() -> None:
    slots = Arena([(2 * PAGE, 3), (PAGE, 5)]).slots[1]
    assert [slot.index for slot in slots] == [3, 4, 5, 6, 7]
    assert slots[-1].address == slots[4].address == slots[0].address + 4 * PAGE
    assert [slot.index for slot in slots[1:4]] == [4, 5, 6]
    for position in (5, -6):
        with pytest.raises(IndexError):
            slots[position]


@pytest.mark.parametrize("blocks", [[(PAGE + 1, 1)], [(0, 1)], [(-PAGE, 1)], [(PAGE, -1)]])
def test_senseless_blocks_are_refused(blocks: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="block"):
        Arena(blocks)


def test_forty_thousand_slots_cost_nothing_until_they_are_used() -> None:
    """Neither Python objects, nor pages: 1.1 GiB are reserved, and one slot of them is written to."""
    before = smaps("Rss")
    tracemalloc.start()
    try:
        arena = Arena([(7 * PAGE, 40_000)])
        python = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert python < 40_000 * 4 + (16 << 10)  # the flags
    arena.slots[0][39_999].data[:] = 1
    assert smaps("Rss") - before < 6 << 20  # a huge page or two


@pytest.mark.parametrize(("stride", "count"), [(3 << 20, 12), (7 * PAGE, 500), (2 << 20, 8)])
@pytest.mark.parametrize("lock", [False, True], ids=["plain", "locked"])
def test_what_is_given_back_leaves_the_process_and_comes_back_empty(stride: int, count: int, lock: bool) -> None:
    arena = Arena([(PAGE, 1), (stride, count)], lock=lock)
    slots = arena.slots[1]
    for slot in slots:
        slot.data[:] = 1 + slot.index % 200
    full = smaps("Rss")
    for i in (2, 3, 6):
        arena.give_back(slots[i])
    assert 3 * stride - (256 << 10) <= full - smaps("Rss") <= 3 * stride + (256 << 10)
    for i, slot in enumerate(slots):
        assert (slot.data == (0 if i in (2, 3, 6) else 1 + slot.index % 200)).all()
    slots[3].data[:] = 77
    assert (slots[3].data == 77).all()
    arena.give_back(slots[3])
    arena.give_back(slots[3])  # twice is no harm
    assert not slots[3].data.any()
    left = smaps("Rss")
    for slot in slots:
        arena.give_back(slot)
    assert left - smaps("Rss") >= (count - 3) * stride - (256 << 10)


def test_views_outlive_the_arena() -> None:
    slot = Arena([(PAGE, 2)]).slots[0][1]
    slot.data[:] = 3
    assert (slot.data == 3).all()


def test_the_memory_goes_with_the_arena_and_waits_for_no_collector() -> None:
    """A reference in a circle would keep gigabytes until the collector happens to run."""
    gc.disable()
    try:
        arena = Arena([(1 << 20, 32), (2 << 20, 4)], lock=True)
        for slots in arena.slots:
            for slot in slots:
                slot.data[:] = 1
        full = smaps("Rss")
        del arena, slots, slot
        assert full - smaps("Rss") >= 39 << 20
    finally:
        gc.enable()


# As an unprivileged user with a small limit: in a process of its own, as neither can be taken back.
REFUSED = """
import os, resource, sys
from waste.tiers.arena import Arena

resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[1]), int(sys.argv[1])))
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
arena = Arena([(4096, 1000), (8192, 500)], lock=True, on_event=lambda event: print(event.message))
print(arena.locked)
for slots in arena.slots:
    for slot in slots:
        slot.data[:] = 5
        arena.give_back(slot)
"""


@pytest.mark.parametrize(("limit", "allowed"), [(64 << 10, "64.0 KiB"), (0, "0 B")])
def test_a_refused_lock_is_one_notice_that_says_what_to_raise(limit: int, allowed: str) -> None:
    done = subprocess.run([sys.executable, "-c", REFUSED, str(limit)], capture_output=True, text=True, check=True)
    notice, locked = done.stdout.splitlines()
    assert locked == "False"
    assert f"not locked in memory: 7.81 MiB are wanted, RLIMIT_MEMLOCK allows {allowed}; `ulimit -l 8000`" in notice


def test_a_lock_refused_for_another_reason_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_call", lambda name, *_: errno.EPERM if name == "mlock2" else 0)
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (module.resource.RLIM_INFINITY,) * 2)
    events: list[Event] = []
    assert not Arena([(PAGE, 2)], lock=True, on_event=events.append).locked
    assert len(events) == 1
    assert isinstance(events[0], Notice)
    assert "(Operation not permitted)" in events[0].message and "allows any" in events[0].message


Calls = list[tuple[str, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """(name, number of what is advised) of every call of the system, in order."""
    real: Callable[..., int] = module._call
    made: Calls = []

    def call(name: str, address: int, nbytes: int, *more: int) -> int:
        made.append((name, more[0] if more else 0))
        return real(name, address, nbytes, *more)

    monkeypatch.setattr(module, "_call", call)
    return made


COLD, DONTNEED, NOHUGEPAGE, DONTNEED_LOCKED = 20, 4, 15, 24


def test_huge_pages_are_taken_apart_and_not_made_again(calls: Calls) -> None:
    """Else the system keeps a huge page whole as long as any part of it is in use, or makes another of what is left."""
    arena = Arena([(1 << 20, 8)])
    for i in (1, 3):
        arena.give_back(arena.slots[0][i])
    once = [("madvise", NOHUGEPAGE)]
    assert calls == once + [("madvise", COLD), ("madvise", DONTNEED)] * 2


@pytest.mark.parametrize("missing", [("mlock2",), ("mlock2", "madvise")])
def test_older_systems_lock_and_give_back_too(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, missing: tuple[str, ...]
) -> None:
    """Without locking on fault, and without giving back what is locked: it is unlocked first."""
    spy = module._call

    def call(name: str, address: int, nbytes: int, *more: int) -> int:
        refused = name in missing and more in ((1,), (DONTNEED_LOCKED,))
        return errno.EINVAL if refused else spy(name, address, nbytes, *more)

    monkeypatch.setattr(module, "_call", call)
    arena = Arena([(PAGE, 16)], lock=True)
    if not arena.locked:
        pytest.skip("this user may lock less than 64 KiB")
    slot = arena.slots[0][3]
    slot.data[:] = 9
    calls.clear()
    arena.give_back(slot)
    assert not slot.data.any()
    if "madvise" in missing:
        assert calls == [("madvise", NOHUGEPAGE), ("munlock", 0), ("madvise", COLD), ("madvise", DONTNEED)]
    else:
        assert calls == [("madvise", NOHUGEPAGE), ("madvise", DONTNEED_LOCKED)]


def test_locked_memory_is_locked_as_it_is_used() -> None:
    before = smaps("Locked")
    arena = Arena([(1 << 20, 4)], lock=True)
    if not arena.locked:
        pytest.skip("this user may lock less than 4 MiB")
    assert smaps("Locked") - before < 1 << 20
    arena.slots[0][1].data[:] = 1
    assert smaps("Locked") - before >= 1 << 20
