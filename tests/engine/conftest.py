"""Engines over the shared containers, and a recorder of discrete choices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from waste.backends.base import Routing, Selection
from waste.engine.engine import Engine


class Recorder:
    """Collects routing and selections by layer, in token order."""

    def __init__(self) -> None:
        self.experts: dict[int, list[np.ndarray]] = {}
        self.positions: dict[int, list[np.ndarray]] = {}

    def routing(self, layer: int, start: int, routing: Routing) -> None:
        self.experts.setdefault(layer, []).extend(np.sort(routing.ids, axis=1))

    def selection(self, layer: int, start: int, tokens: int, selection: Selection | None) -> None:
        rows = self.positions.setdefault(layer, [])
        for i in range(tokens):
            if selection is None:
                rows.append(np.arange(start + i + 1))
            else:
                rows.append(selection.positions[selection.offsets[i] : selection.offsets[i + 1]])


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session", params=["cpu", "reference"])
def exact_engine(request: pytest.FixtureRequest, exact_nano: Path) -> Iterator[Engine]:
    with Engine.open(exact_nano, ram="4GiB", backend=request.param, threads=1) as engine:
        yield engine
