"""Rows made up for tests, and engines with room for some of the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from waste.bench.row import Row, _kinds
from waste.engine.engine import Engine

_EXAMPLES: dict[Any, Any] = {str: "a text", int: 3, float: 2.5, bool: False, list[float]: [0.5, 0.25]}


def make_row(**changes: Any) -> Row:
    """A row with a value of the right kind in every member, but for `changes`."""
    values = {name: _EXAMPLES.get(kind) for name, kind in _kinds().items()}
    return Row(**{**values, "schema": "waste.bench/1", "test": "decode", "arm": "", "drive_note": "", **changes})


@pytest.fixture
def row() -> Callable[..., Row]:
    return make_row


@pytest.fixture
def engine_with(default_nano: Path) -> Callable[..., AbstractContextManager[Engine]]:
    """`engine_with(slots)`: nano-glm with room for so many of its 224 experts."""

    @contextmanager
    def opened(slots: int, **options: Any) -> Iterator[Engine]:
        with Engine.open(default_nano, ram="4GiB", threads=1, **options) as large:
            ram = large.budget.fixed_bytes + slots * large.budget.slot_bytes + large.budget.slot_bytes // 2
            with large.sibling(ram=ram, threads=1) as engine:
                assert engine.budget.slots == slots
                yield engine

    return opened
