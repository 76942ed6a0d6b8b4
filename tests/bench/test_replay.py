"""Replay against the cache itself, and the optimum against an exhaustive search."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.bench.replay import OPTIMUM, Pass, forward_passes, optimum, replay, simulate
from waste.bench.trace import Chunk, Mark, RoutingTrace, Steps, TraceHeader
from waste.container.layout import RecordLayout
from waste.errors import ResourceError, UsageError
from waste.tiers.arena import Arena
from waste.tiers.cache import ExpertCache
from waste.tiers.partition import Partition, divide
from waste.tiers.policy import POLICIES, Lru
from waste.tiers.slot import Pool

LAYERS = (2, 3, 7)


def random_trace(
    seed: int, tokens: int = 60, experts: int = 16, top_k: int = 3, chunk: int = 5, layers: tuple[int, ...] = LAYERS
) -> RoutingTrace:
    """A prompt, steps with a skew, another prompt, more steps."""
    rng = np.random.default_rng(seed)
    head = TraceHeader("x", layers, experts, top_k, (4096,) * len(layers))
    skew = rng.normal(0, 1, (1, len(layers), experts))

    def draw(n: int) -> np.ndarray:
        return np.argsort(skew + rng.gumbel(size=(n, len(layers), experts)), axis=-1)[..., :top_k].astype(np.uint8)

    return RoutingTrace(
        head,
        (
            Chunk(0, draw(chunk)),
            Steps(chunk, draw(tokens)),
            Mark("next"),
            Chunk(0, draw(chunk)),
            Steps(5, draw(tokens)),
        ),
    )


@dataclass
class Bank:
    layout: RecordLayout = field(default_factory=lambda: RecordLayout.of("f32", "f32", "f32", 8, 4))
    drive: int = 0

    def read(self, expert: int, buffer: np.ndarray) -> None:
        pass


class AtOnce:
    """Readers whose reads end as soon as they begin."""

    def submit(self, read, done, *, drive: int, priority: object) -> None:
        read()
        done(None)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("division", ["pooled", "layered"])
@pytest.mark.parametrize("slots", [3, 5, 10, 20, 40, 48])
@pytest.mark.parametrize("layers", [LAYERS, (2,)])
def test_it_counts_what_the_cache_counts(slots: int, layers: tuple[int, ...], division, policy: str) -> None:
    """Chunks of more experts than slots included; one layer has residents left when the next chunk comes."""
    slots = min(slots, 16 * len(layers))
    trace = random_trace(slots, layers=layers, chunk=8)
    head = trace.header
    stride = Bank().layout.stride
    parts = divide(slots * stride, dict.fromkeys(layers, stride), head.experts, head.top_k, division=division)
    arena = Arena([(part.stride, part.slots) for part in parts])
    pools = [
        Pool("ram", part.layers, arena, memory, POLICIES[policy], head.top_k)
        for part, memory in zip(parts, arena.slots, strict=True)
    ]
    cache = ExpertCache({layer: Bank() for layer in layers}, pools, AtOnce(), experts=head.experts)
    for step, sets in forward_passes(trace):
        for layer, experts in zip(layers, sets, strict=True):
            for wave in cache.waves(layer, experts):
                with wave:
                    wave.wait()
        if step:
            cache.token(0.0)
    (row,) = replay(trace, [slots], policies=[policy], division=division)
    assert (row.hits, row.uses - row.hits) == (cache.stats.hits, cache.stats.misses)
    cache.close()


def most_hits(passes: list[Pass], layers: tuple[int, ...], slots: int) -> int:
    """By dynamic programming over all sets that a cache may hold."""
    best = {frozenset(): 0}
    for _, sets in passes:
        for layer, experts in zip(layers, sets, strict=True):
            wanted = frozenset((layer, e) for e in experts)
            after: dict[frozenset, int] = {}
            for held, hits in best.items():
                others = held - wanted
                room = slots - len(wanted)
                for keep in itertools.combinations(sorted(others), min(room, len(others))):
                    state = wanted | frozenset(keep)
                    after[state] = max(after.get(state, -1), hits + len(held & wanted))
            best = after
    return max(best.values())


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), slots=st.integers(2, 6), layers=st.integers(1, 2))
def test_the_optimum_is_that_of_an_exhaustive_search(seed: int, slots: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    draw = lambda: [sorted(rng.choice(5, 2, replace=False).tolist()) for _ in range(layers)]  # noqa: E731
    passes: list[Pass] = [(True, draw()) for _ in range(10)]
    names = tuple(range(layers))
    assert optimum(passes, names, [Partition(names, 1, slots)]).hits == most_hits(passes, names, slots)


@pytest.mark.parametrize("division", ["pooled", "layered"])
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), chunk=st.integers(2, 12))
def test_no_policy_beats_the_optimum(division, seed: int, chunk: int) -> None:
    """Chunks with more experts than slots included."""
    trace = random_trace(seed, tokens=25, chunk=chunk)
    rows = replay(trace, [3, 9, 12, 20, 30, 48], division=division)
    for slots in {row.slots for row in rows}:
        found = {row.policy: row.hits for row in rows if row.slots == slots}
        assert max(found.values()) == found[OPTIMUM]
        assert len({row.uses for row in rows}) == 1


def test_a_cache_that_holds_everything_misses_each_expert_once() -> None:
    trace = random_trace(1)
    different = sum(len(set().union(*(sets[i] for _, sets in forward_passes(trace)))) for i in range(len(LAYERS)))
    for row in replay(trace, shares=[1.0]):
        assert row.uses - row.hits == different
        assert row.share_resident == 1


def test_partitions_are_apart() -> None:
    """Counts of a division are the sums of its partitions, each replayed alone."""
    trace = random_trace(2)
    passes = list(forward_passes(trace))
    parts = [Partition((2, 7), 4096, 9), Partition((3,), 4096, 6)]
    for run in (lambda p, n, q: simulate(p, n, q, Lru), optimum):
        whole = run(passes, LAYERS, parts)
        alone = [
            run(
                [(step, [sets[LAYERS.index(layer)] for layer in part.layers]) for step, sets in passes],
                part.layers,
                [part],
            )
            for part in parts
        ]
        assert (whole.hits, whole.uses) == (sum(t.hits for t in alone), sum(t.uses for t in alone))


def test_rows_tell_steps_from_chunks_and_shares_from_slots() -> None:
    trace = random_trace(3)
    rows = replay(trace, shares=[0.25, 0.5], policies=["lru", OPTIMUM])
    assert [(row.policy, row.slots, row.share_resident) for row in rows] == [
        (name, n, n / 48) for n in (12, 24) for name in ("lru", OPTIMUM)
    ]
    assert {row.step_uses for row in rows} == {120 * 3 * 3}
    assert all(row.step_uses < row.uses and row.step_hits <= row.hits for row in rows)
    assert {row.tokens for row in rows} == {130}
    assert [row.slots for row in replay(trace, [12, 24], policies=["lru"])] == [12, 24]


def test_odd_questions_are_refused() -> None:
    trace = random_trace(4)
    with pytest.raises(UsageError, match="unknown policy 'fifo'") as caught:
        replay(trace, policies=["fifo"])
    assert all(name in str(caught.value.hint) for name in (*POLICIES, OPTIMUM))
    with pytest.raises(UsageError, match="0 slots"):
        replay(trace, [0])
    with pytest.raises(UsageError, match=r"share of 1\.5"):
        replay(trace, shares=[1.5])
    with pytest.raises(ResourceError, match="3 that a token uses"):
        replay(trace, [2])
