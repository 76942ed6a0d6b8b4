"""How the bytes for records are shared between the tiers, and what a refusal says to do about it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste.engine.budget import tier_budget
from waste.errors import ResourceError
from waste.events import Event
from waste.hardware import memory
from waste.planner.footprint import Budget

MIB = 1 << 20
TOP_K, SLOT = 4, 3 * MIB
FIXED = Budget(0, 50 * MIB, 40 * MIB, 5 * MIB, 10 * MIB, SLOT, 0).fixed_bytes


def budget(room: int) -> Budget:
    """One that leaves `room` bytes for experts."""
    return Budget(FIXED + room, 50 * MIB, 40 * MIB, 5 * MIB, 10 * MIB, SLOT, room // SLOT)


def share(budget: Budget, vram: str | int | None) -> tuple[int, int]:
    events: list[Event] = []
    found = tier_budget(budget, vram, TOP_K, events.append)
    assert len(events) == (found.vram_bytes > 0)  # that VRAM is host memory is said
    return found.ram_bytes, found.vram_bytes


@pytest.mark.parametrize("vram", [None, 0])
def test_without_a_faster_tier_ram_has_all(vram: int | None) -> None:
    assert share(budget(100 * MIB), vram) == (100 * MIB, 0)


@given(vram=st.integers(1, TOP_K * SLOT - 1))
def test_a_tier_that_cannot_hold_what_a_token_uses_is_refused_with_what_can(vram: int) -> None:
    with pytest.raises(ResourceError, match=r"a VRAM tier of .* is too small") as refusal:
        share(budget(200 * MIB), vram)
    found = re.fullmatch(r"--vram (\d+KiB), or no --vram", refusal.value.hint or "")
    assert found, refusal.value.hint
    assert share(budget(200 * MIB), found[1])[1] == TOP_K * SLOT


@given(room=st.integers(TOP_K * SLOT, 200 * MIB), vram=st.integers(TOP_K * SLOT, 200 * MIB))
def test_what_is_refused_is_what_leaves_no_room_and_the_hint_helps(room: int, vram: int) -> None:
    most = room - TOP_K * SLOT
    if vram <= most:
        assert share(budget(room), vram) == (room - vram, vram)
        return
    with pytest.raises(ResourceError) as refusal:
        share(budget(room), vram)
    found = re.fullmatch(r"(?:no --vram|--vram (\d+MiB)), or --ram (\d+)MiB", refusal.value.hint or "")
    assert found, refusal.value.hint
    larger = int(found[2]) * MIB
    assert larger - budget(room).ram_bytes <= vram - most + 2 * MIB
    share(replace(budget(room), ram_bytes=larger), vram)
    if found[1]:
        assert share(budget(room), found[1])[1] > most - 2 * MIB
    else:
        assert most < TOP_K * SLOT + 2 * MIB


def test_a_hint_names_no_more_ram_than_there_is() -> None:
    most = memory.detect().most_bytes
    for wanted, said in ((100 * MIB, True), (2 * most, False)):
        with pytest.raises(ResourceError) as refusal:
            share(budget(50 * MIB), wanted)
        assert ("--ram" in (refusal.value.hint or "")) == said
