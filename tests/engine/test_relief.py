"""Memory that becomes short while a model runs: slots go back to the system, once it is said, and answers stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from waste.engine.engine import Engine
from waste.engine.relief import SHARE, Relief
from waste.events import Event, Notice
from waste.hardware.pressure import Pressure
from waste.io.buffers import PAGE
from waste.tiers.options import TierOptions


class Watch:
    """Reports `pressure` whenever it is asked."""

    def __init__(self, pressure: Pressure | None) -> None:
        self.pressure = pressure

    def check(self) -> Pressure | None:
        return self.pressure


def bytes_in_memory(array: np.ndarray) -> int:
    """What of its pages is in memory, by the page tables (the kernel's admin-guide/mm/pagemap)."""
    first, last = array.ctypes.data // PAGE, -(-(array.ctypes.data + array.nbytes) // PAGE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first)), "<u8")
    return PAGE * int(np.count_nonzero(entries >> 63))


@pytest.mark.parametrize("vram", [0, 4 << 20])
def test_under_pressure_memory_goes_back_and_no_bit_changes(exact_nano: Path, vram: int) -> None:
    ids = [i * 7919 % 4000 for i in range(40)]
    said: list[Event] = []
    options = TierOptions(fill=False, lookahead=0)
    with Engine.open(exact_nano, threads=1, vram=vram, tiers=options) as engine:
        with engine.sibling() as calm:
            session = calm.session()
            session.eval(ids)
            expected = [session.eval([i]) for i in ids]
        cache, watch = engine.cache, Watch(None)
        cache._between_tokens = Relief(watch, said.append).check  # type: ignore[arg-type]
        session = engine.session()
        session.eval(ids)
        arena = cache._ram[min(cache._ram)]._arena
        before, held = bytes_in_memory(arena.memory), len(cache.resident())
        watch.pressure = Pressure("a test says so", 0)
        for i, logits in zip(ids, expected, strict=True):
            assert np.array_equal(session.eval([i]), logits)
        after, left = bytes_in_memory(arena.memory), len(cache.resident())
        assert left < held / 2
        assert after < before - 0.8 * (held - left) * engine.budget.slot_bytes
    assert len(said) == 1
    assert isinstance(said[0], Notice)
    assert "memory is short (a test says so)" in said[0].message


@pytest.mark.parametrize(("short", "share"), [(0, SHARE), (1 << 20, None), (1 << 40, 0.5)])
def test_as_much_is_given_back_as_is_short_but_half_at_most(short: int, share: float | None) -> None:
    asked: list[float] = []

    class Cache:
        ram_bytes = 10 << 20

        def shrink(self, share: float) -> int:
            asked.append(share)
            return 0

    said: list[Event] = []
    Relief(Watch(Pressure("x", short)), said.append).check(Cache())  # type: ignore[arg-type]
    assert asked == [0.1 if share is None else share]
    assert not said  # nothing was given
