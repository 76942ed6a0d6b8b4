"""Engines on one trunk: what they share stays open while any of them needs it, and nothing stays after that."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

from waste.engine.engine import Engine
from waste.errors import WasteError
from waste.tiers.options import TierOptions

OPTIONS = TierOptions(fill=False, lookahead=0)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"vram": 1000},
        {"vram": "1TiB"},
        {"ram": "1KiB"},
        {"tiers": TierOptions(policy="none such")},
        {"tiers": TierOptions(drive_bytes_per_s=-1.0)},
    ],
)
def test_an_engine_that_cannot_be_opened_leaves_no_file_open(exact_nano: Path, wrong: dict[str, Any]) -> None:
    with Engine.open(exact_nano, threads=1, tiers=OPTIONS):
        pass  # whatever is opened once in a process
    gc.disable()
    try:
        before = open_files()
        with pytest.raises(WasteError):
            Engine.open(exact_nano, threads=1, **wrong)
        assert open_files() == before
    finally:
        gc.enable()


def test_siblings_share_open_banks_unless_they_read_them_in_another_way(exact_nano: Path) -> None:
    with Engine.open(exact_nano, threads=1, tiers=OPTIONS) as engine:
        before = open_files()
        logits = engine.session().eval([1, 2, 3])
        with engine.sibling() as same, engine.sibling(tiers=TierOptions(direct=False)) as cached:
            assert open_files() == before + len(engine.banks)
            assert not any(bank.direct for bank in cached.banks.values())
            assert (same.session().eval([1, 2, 3]) == logits).all()
            assert (cached.session().eval([1, 2, 3]) == logits).all()
        assert open_files() == before
        engine.cache.drop()
        assert (engine.session().eval([1, 2, 3]) == logits).all()  # from banks that a sibling has not closed
    assert open_files() < before


def test_a_closed_sibling_keeps_no_memory(exact_nano: Path) -> None:
    with Engine.open(exact_nano, threads=1, tiers=OPTIONS) as engine:
        sibling = engine.sibling()
        sibling.session().eval([1, 2, 3])
        arena = weakref.ref(sibling.cache._pools[0]._arena)
        sibling.close()
        sibling.close()
        del sibling
        gc.collect()
        assert arena() is None


def test_a_closed_engine_has_no_siblings(exact_nano: Path) -> None:
    with Engine.open(exact_nano, threads=1, tiers=OPTIONS) as engine:
        sibling = engine.sibling()
    for late in (engine.sibling, sibling.sibling, lambda: sibling.session().eval([1])):
        with pytest.raises(WasteError, match="closed"):
            late()
