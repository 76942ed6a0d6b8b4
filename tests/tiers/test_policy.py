"""Policies against exact books: victims are residents, the right ones, and cost the same for any number of slots."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.tiers.policy import POLICIES, Adaptive, Key, Lfu, Lru, Policy

NAMES = sorted(POLICIES)


class Shelf:
    """A cache without records: what is resident, by the rules of `Policy`."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self.policy = policy
        self.slots = slots
        self.residents: set[Key] = set()
        self.victims: list[Key] = []
        self.hits = 0

    def demand(self, layer: int, experts: list[int]) -> None:
        there = [e for e in experts if (layer, e) in self.residents]
        self.hits += len(there)
        self.policy.used(layer, there)
        pinned = {(layer, e) for e in experts}
        missing = [e for e in experts if (layer, e) not in self.residents]
        for _ in range(len(self.residents) + len(missing) - self.slots):
            self.give_up(pinned)
        for e in missing:
            self.residents.add((layer, e))
            self.policy.admitted(layer, e, demanded=True)

    def read_ahead(self, layer: int, expert: int) -> None:
        if (layer, expert) not in self.residents:
            if len(self.residents) == self.slots:
                self.give_up(set())
            self.residents.add((layer, expert))
            self.policy.admitted(layer, expert, demanded=False)

    def give_up(self, pinned: set[Key]) -> Key:
        victim = self.policy.victim(pinned)
        assert victim in self.residents
        assert victim not in pinned
        self.residents.remove(victim)
        self.victims.append(victim)
        return victim


def tokens(rng: np.random.Generator, count: int, layers: int, experts: int, k: int, skew: float) -> Iterator[list]:
    """Sets of k experts a layer, drawn by a Zipf law over a shuffled order of its own in each layer."""
    weight = -skew * np.log(np.arange(1, experts + 1))
    order = np.stack([rng.permutation(experts) for _ in range(layers)])
    for _ in range(count):
        noisy = weight[order] + rng.gumbel(size=order.shape)
        yield np.argsort(-noisy, axis=1)[:, :k].tolist()


def hits(policy: Policy, slots: int, work: list[list]) -> int:
    shelf = Shelf(policy, slots)
    for sets in work:
        for layer, experts in enumerate(sets):
            shelf.demand(layer, experts)
        policy.token()
    return shelf.hits


def consistent(policy: Adaptive, shelf: Shelf) -> None:
    """Every adviser fits into the slots, and knows which residents it would not hold."""
    for adviser in policy._advisers:
        held = {(layer, expert) for layer, experts in adviser.held.items() for expert in experts}
        assert len(held) == adviser.count <= shelf.slots
        assert adviser.unwanted.keys() == shelf.residents - held


layers, experts = st.integers(0, 2), st.integers(0, 9)
steps = st.one_of(
    st.tuples(st.just("demand"), layers, st.lists(experts, min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("ahead"), layers, experts),
    st.tuples(st.just("remove"), layers, experts),
    st.tuples(st.just("resize"), st.integers(4, 12)),
    st.tuples(st.just("token")),
)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(slots=st.integers(4, 12), work=st.lists(steps, max_size=60))
def test_the_books_are_those_of_the_cache_whatever_happens(name: str, slots: int, work: list) -> None:
    keeps_its_books(name, slots, work)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_the_books_are_those_of_the_cache_in_the_long_run(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    work: list[tuple] = []
    for kind in rng.choice(["demand", "ahead", "remove", "resize", "token"], 600, p=[0.6, 0.1, 0.1, 0.02, 0.18]):
        layer, expert = int(rng.integers(3)), int(rng.integers(10))
        if kind == "demand":  # some experts more than others
            chosen = np.argsort(rng.gumbel(size=10) - 0.3 * np.arange(10))[: rng.integers(1, 5)]
            work.append((kind, layer, chosen.tolist()))
        elif kind in ("ahead", "remove"):
            work.append((kind, layer, expert))
        else:
            work.append((kind, int(rng.integers(4, 13))) if kind == "resize" else (kind,))
    keeps_its_books(name, 12, work)


def keeps_its_books(name: str, slots: int, work: list[tuple]) -> None:
    shelf = Shelf(POLICIES[name](slots), slots)
    for kind, *given_ in work:
        if kind == "demand":
            shelf.demand(*given_)
        elif kind == "ahead":
            shelf.read_ahead(*given_)
        elif kind == "remove" and tuple(given_) in shelf.residents:
            shelf.residents.remove(tuple(given_))
            shelf.policy.removed(*given_)
        elif kind == "resize":
            shelf.slots = given_[0]
            while len(shelf.residents) > shelf.slots:
                shelf.give_up(set())
            shelf.policy.resized(shelf.slots)
        elif kind == "token":
            shelf.policy.token()
        if isinstance(shelf.policy, Adaptive):
            consistent(shelf.policy, shelf)
    while shelf.residents:  # every one of them can be given up, even when all others are pinned
        keep = sorted(shelf.residents)[len(shelf.residents) // 2]
        shelf.give_up(shelf.residents - {keep})
        assert keep not in shelf.residents


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    rng = np.random.default_rng(1)
    shelf, model = Shelf(Lru(20), 20), OrderedDict[Key, None]()
    for sets in tokens(rng, 100, 3, 16, 4, 0.7):
        for layer, chosen in enumerate(sets):
            before = len(shelf.victims)
            wanted = [(layer, e) for e in sorted(chosen)]
            shelf.demand(layer, [e for _, e in wanted])
            for key in [k for k in wanted if k in model]:
                model.move_to_end(key)
            for victim in shelf.victims[before:]:
                assert victim == next(k for k in model if k not in wanted)
                del model[victim]
            model.update(dict.fromkeys(k for k in wanted if k not in model))


@pytest.mark.parametrize("half_life", [0.1, 4.0, 16.0, 100.0])  # at 0.1 scores are scaled down every 51 tokens
def test_lfu_gives_up_the_lowest_decayed_count(half_life: float) -> None:
    """Recomputed from the times of all uses, evicted or not; a level is at most a quarter of its scores wide."""
    rng = np.random.default_rng(2)
    policy = Lfu(20, half_life)
    shelf = Shelf(policy, 20)
    uses: defaultdict[Key, list[int]] = defaultdict(list)

    def score(key: Key, now: int) -> float:
        return sum(2.0 ** ((t - now) / half_life) for t in uses[key])

    for now, sets in enumerate(tokens(rng, 200, 3, 16, 4, 0.7)):
        for layer, chosen in enumerate(sets):
            before, residents = len(shelf.victims), set(shelf.residents)
            shelf.demand(layer, chosen)
            wanted = {(layer, e) for e in chosen}
            for key in wanted & residents:
                uses[key].append(now)
            for victim in shelf.victims[before:]:
                lowest = min(score(key, now) for key in residents - wanted)
                assert score(victim, now) <= 1.25 * lowest * (1 + 1e-9) + 1e-150
                residents.remove(victim)
            for key in wanted - residents:
                if not uses[key] or uses[key][-1] != now:
                    uses[key].append(now)
        policy.token()
    assert len(shelf.victims) > 500


def test_counts_outlive_eviction() -> None:
    policy = Lfu(2)
    shelf = Shelf(policy, 2)
    for _ in range(3):
        shelf.demand(0, [1])
    shelf.demand(0, [2])
    shelf.policy.removed(0, 1)
    shelf.residents.remove((0, 1))
    shelf.demand(0, [2])
    shelf.demand(0, [1])  # four uses now, of which three before it left
    assert shelf.give_up(set()) == (0, 2)


def test_among_equals_the_first_to_arrive_leaves() -> None:
    shelf = Shelf(Lfu(3), 3)
    for expert in (3, 1, 2):
        shelf.demand(0, [expert])
    assert [shelf.give_up(set()) for _ in range(3)] == [(0, 3), (0, 1), (0, 2)]


def test_what_was_never_used_is_below_any_use_however_old() -> None:
    policy = Lfu(3, 0.1)
    shelf = Shelf(policy, 3)
    shelf.demand(0, [1])
    for _ in range(60):
        policy.token()
    shelf.read_ahead(0, 2)
    for _ in range(3):
        policy.token()
    assert shelf.give_up(set()) == (0, 2)


@pytest.mark.parametrize("busy", [1, 30])
def test_what_the_last_64_tokens_used_outlasts_what_144_did_not(busy: int) -> None:
    """A half-life of 16 tokens is protection enough: even a key used by every token before has lost by then."""
    policy = Lfu(100)
    shelf = Shelf(policy, 100)
    for _ in range(300):
        shelf.demand(0, [0])
        policy.token()
    for t in range(144):
        shelf.demand(1, list(range(busy)))
        if t == 144 - 64:
            shelf.demand(2, [5])  # once
        policy.token()
    assert shelf.give_up(set()) == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_read_ahead_is_not_the_next_to_leave(name: str) -> None:
    """It would have been read for nothing."""
    policy = POLICIES[name](12)
    shelf = Shelf(policy, 12)
    for t in range(50):
        shelf.demand(0, [t % 8, 8 + t % 4])
        policy.token()
    shelf.read_ahead(1, 0)
    for new in range(20, 25):
        shelf.demand(0, [new])
    policy.token()
    for new in range(30, 35):
        shelf.demand(0, [new])
    assert (1, 0) in shelf.residents
    for _ in range(3):
        policy.token()
        for new in range(40, 45):
            shelf.demand(0, [new])
    assert (1, 0) not in shelf.residents  # nobody came for it


@pytest.mark.parametrize("make", [Lru, Lfu])
def test_an_adaptive_policy_with_one_adviser_is_that_policy(make: Callable[[int], Policy]) -> None:
    work = list(tokens(np.random.default_rng(3), 150, 3, 16, 4, 0.7))
    plain, led = Shelf(make(20), 20), Shelf(Adaptive(20, [make(20)]), 20)
    for sets in work:
        for shelf in (plain, led):
            for layer, chosen in enumerate(sets):
                shelf.demand(layer, chosen)
            shelf.policy.token()
    assert led.victims == plain.victims


def regimes() -> dict[str, list[list]]:
    """Routing for which recency, frequency, or now one and now the other is better."""
    rng = np.random.default_rng(4)
    steady = list(tokens(rng, 300, 4, 32, 4, 1.2))
    moving = [[[(e + t // 2 + 7 * layer) % 32 for e in range(0, 8, 2)] for layer in range(4)] for t in range(300)]
    return {"steady": steady, "moving": moving, "both": [*steady, *moving, *steady, *moving]}


@pytest.mark.parametrize("slots", [24, 40, 64, 96])
def test_adaptive_is_near_the_better_of_recency_and_frequency(slots: int) -> None:
    found: dict[str, Counter[str]] = {}
    for regime, work in regimes().items():
        found[regime] = Counter({name: hits(POLICIES[name](slots), slots, work) for name in NAMES})
        uses = 16 * len(work)
        best = max(found[regime]["lru"], found[regime]["lfu"])
        assert found[regime]["adaptive"] >= best - 0.01 * uses, (regime, found[regime], uses)


def test_a_long_past_does_not_delay_adaptation() -> None:
    """After 1,500 tokens for frequency, recency leads within 400."""
    work = regimes()
    turn = [*(work["steady"] * 5), *work["moving"], *work["moving"][:100]]
    uses = 16 * len(work["moving"])
    found = {
        name: hits(POLICIES[name](24), 24, [*turn, *work["moving"]]) - hits(POLICIES[name](24), 24, turn)
        for name in NAMES
    }
    assert found["lru"] > found["lfu"] + 0.1 * uses
    assert found["adaptive"] >= found["lru"] - 0.01 * uses


def lines_per_miss(name: str, slots: int) -> float:
    """Lines of the policies' code that run for a demand of four missing experts, at full occupancy."""
    policy = POLICIES[name](slots)
    shelf = Shelf(policy, slots)
    rng = np.random.default_rng(5)
    for key in range(slots):
        shelf.residents.add((key % 100, key // 100))
        policy.admitted(key % 100, key // 100, demanded=True)
        if key % 400 == 399:
            policy.token()
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable | None:
        nonlocal count
        if "tiers/policy" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    fresh, demands, before = slots, 200, sys.gettrace()
    sys.settrace(trace)
    try:
        for at in range(demands):
            new = list(range(fresh, fresh + 3))
            fresh += 3
            shelf.demand(at % 100, [int(rng.integers(slots // 100)), *new])
            if at % 50 == 49:
                policy.token()
    finally:
        sys.settrace(before)
    return count / demands


@pytest.mark.parametrize("name", NAMES)
def test_a_miss_costs_the_same_in_400_slots_and_in_40_000(name: str) -> None:
    assert lines_per_miss(name, 40_000) <= 1.2 * lines_per_miss(name, 400)
