"""Engines over the shared containers, caches of any size for them, and a recorder of discrete choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from waste.backends.base import Routing, Selection
from waste.engine.engine import Engine
from waste.events import ignore
from waste.tiers.build import TierBudget, build
from waste.tiers.cache import ExpertCache
from waste.tiers.options import TierOptions


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


QUIET = TierOptions(policy="lru", lookahead=0, fill=False, learn=False)


@pytest.fixture
def cache_of() -> Iterator[Callable[..., ExpertCache]]:
    """cache_of(engine, slots, vram_slots, options): a cache of exactly so many slots in all, without usage counts."""
    made = []

    def make(engine: Engine, slots: int, vram: int = 0, options: TierOptions = QUIET) -> ExpertCache:
        banks = {i: engine.container.bank(i, direct=options.direct) for i in engine.config.moe_layers}
        stride = engine.budget.slot_bytes
        router = engine.config.router
        cache = build(
            banks,
            TierBudget(slots * stride, vram * stride),
            options,
            experts=router.experts,
            top_k=router.top_k,
            usage=None,
            between_tokens=None,
            on_event=ignore,
        )
        made.append((cache, banks))
        return cache

    yield make
    for cache, banks in made:
        cache.close()
        for bank in banks.values():
            bank.close()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session", params=["cpu", "reference"])
def exact_engine(request: pytest.FixtureRequest, exact_nano: Path) -> Iterator[Engine]:
    with Engine.open(exact_nano, ram="4GiB", backend=request.param, threads=1) as engine:
        yield engine
