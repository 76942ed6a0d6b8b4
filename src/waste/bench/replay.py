"""Policies replayed on a routing trace: what a cache of a given size would have hit, and the most that any could.

The rules are those of `waste.tiers.cache` without prefetch: in each layer of each pass, a token's experts (or the
different experts of a chunk) are demanded as a set. Residents are used first; each of the others takes a free slot or
that of the policy's victim, and none of the set leaves meanwhile. A set larger than its partition comes in waves.

The optimum knows the future: it gives up what is needed again last (Belady), under the same rules, in each partition by
itself. After a set that is larger than the partition it may keep any part of it, which no cache can choose: there it is
a bound.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waste.bench.trace import Mark, RoutingTrace, Steps, read_trace
from waste.errors import UsageError
from waste.events import OnEvent, ignore
from waste.tiers.partition import Division, Partition, divide
from waste.tiers.policy import POLICIES, Key, Policy

OPTIMUM = "optimum"
SHARES = (0.02, 0.05, 0.10, 0.25, 0.50, 0.75)


@dataclass(frozen=True)
class ReplayRow:
    """One policy at one size. A use is a hit or a miss; `step_` counts those of decoded tokens only."""

    policy: str
    division: str  # how the slots were divided: "pooled", "layered", "routed"
    partitions: int
    slots: int
    share_resident: float  # bytes in slots of the bytes of all experts
    tokens: int
    hits: int
    uses: int
    step_hits: int
    step_uses: int

    @property
    def hit_share(self) -> float:
        return self.hits / self.uses if self.uses else 0.0


@dataclass
class Tally:
    """Hits and uses, all and those of decoded tokens."""

    hits: int = 0
    uses: int = 0
    step_hits: int = 0
    step_uses: int = 0

    def add(self, hits: int, uses: int, step: bool) -> None:
        self.hits += hits
        self.uses += uses
        if step:
            self.step_hits += hits
            self.step_uses += uses


# One forward pass: whether it decodes one token, and the different experts of each layer, ascending.
Pass = tuple[bool, list[list[int]]]


def replay(
    trace: str | os.PathLike[str] | RoutingTrace,
    slots: Sequence[int] | None = None,
    *,
    shares: Sequence[float] = SHARES,
    policies: Sequence[str] = (*POLICIES, OPTIMUM),
    division: Division | None = None,
    on_event: OnEvent = ignore,
) -> list[ReplayRow]:
    """A row for every size and policy, in this order.

    slots: sizes of the tier in records of average size; without them `shares` of all experts' bytes, each in (0, 1].
    division: how a tier is divided; default as the engine does it. `routed` counts the trace's own uses.
    Raises InputError for a damaged trace, UsageError for sizes and policies that there are not, ResourceError for a
    tier below top_k records.
    """
    if not isinstance(trace, RoutingTrace):
        trace = read_trace(trace, on_event)
    for name in policies:
        if name != OPTIMUM and name not in POLICIES:
            raise UsageError(f"unknown policy {name!r}", hint=f"one of {', '.join((*POLICIES, OPTIMUM))}")
    passes = list(forward_passes(trace))
    counts = _counts(trace) if division == "routed" else None
    rows = []
    for budget in _budgets(trace, slots, shares):
        header = trace.header
        partitions = divide(budget, header.strides, header.experts, header.top_k, counts, division=division)
        for name in policies:
            if name == OPTIMUM:
                tally = optimum(passes, trace.header.layers, partitions)
            else:
                tally = simulate(passes, trace.header.layers, partitions, POLICIES[name])
            rows.append(_row(name, division, trace, partitions, tally))
    return rows


def forward_passes(trace: RoutingTrace) -> Iterator[Pass]:
    """The trace as sets of experts."""
    for entry in trace.entries:
        if isinstance(entry, Mark):
            continue
        if isinstance(entry, Steps):
            for sets in np.sort(entry.ids, axis=-1).tolist():
                yield True, sets
        else:
            yield False, [np.unique(entry.ids[:, i]).tolist() for i in range(entry.ids.shape[1])]


def simulate(
    passes: Sequence[Pass], layers: Sequence[int], partitions: Sequence[Partition], make: Callable[[int], Policy]
) -> Tally:
    """What a cache of these partitions hits, each with a policy of its own."""
    tally = Tally()
    shelves = [_Shelf(partition, make) for partition in partitions]
    home = {layer: shelf for partition, shelf in zip(partitions, shelves, strict=True) for layer in partition.layers}
    for step, sets in passes:
        for layer, experts in zip(layers, sets, strict=True):
            tally.add(home[layer].demand(layer, experts), len(experts), step)
        if step:
            for shelf in shelves:
                shelf.policy.token()
    return tally


class _Shelf:
    """A partition and what is in it."""

    def __init__(self, partition: Partition, make: Callable[[int], Policy]) -> None:
        self.policy = make(partition.slots)
        self._slots = self._free = partition.slots
        self._residents: dict[int, set[int]] = {layer: set() for layer in partition.layers}

    def demand(self, layer: int, experts: list[int]) -> int:
        """Make them resident; how many were."""
        residents = self._residents[layer]
        if len(experts) <= self._slots:
            return self._wave(layer, experts, residents)
        waiting = sorted(experts, key=lambda expert: expert not in residents)
        waves = range(0, len(waiting), self._slots)
        return sum(self._wave(layer, waiting[at : at + self._slots], residents) for at in waves)

    def _wave(self, layer: int, experts: list[int], residents: set[int]) -> int:
        there = [expert for expert in experts if expert in residents]
        self.policy.used(layer, there)
        if len(there) == len(experts):
            return len(there)
        missing = [expert for expert in experts if expert not in residents]
        pinned = {(layer, expert) for expert in experts}
        for _ in missing:
            if self._free:
                self._free -= 1
            else:
                left, gone = self.policy.victim(pinned)
                self._residents[left].remove(gone)
        for expert in missing:
            residents.add(expert)
            self.policy.admitted(layer, expert, demanded=True)
        return len(there)


def optimum(passes: Sequence[Pass], layers: Sequence[int], partitions: Sequence[Partition]) -> Tally:
    """The most hits that any choice of victims gives, found by looking ahead."""
    tally = Tally()
    for partition in partitions:
        _optimum_of(partition.slots, _demands(passes, layers, frozenset(partition.layers)), tally)
    return tally


def _demands(passes: Sequence[Pass], layers: Sequence[int], wanted: frozenset[int]) -> list[tuple[bool, list[Key]]]:
    """The sets demanded of some of the layers, in order."""
    return [
        (step, [(layer, expert) for expert in experts])
        for step, sets in passes
        for layer, experts in zip(layers, sets, strict=True)
        if layer in wanted
    ]


def _offer(latest: list[tuple[int, Key]], keys: list[Key], uses: list[int]) -> None:
    for key, use in zip(keys, uses, strict=True):
        heapq.heappush(latest, (-use, key))


def _optimum_of(slots: int, demands: list[tuple[bool, list[Key]]], tally: Tally) -> None:
    never = len(demands)
    following: list[list[int]] = [[] for _ in demands]  # the demand that uses each key next
    coming: dict[Key, int] = {}
    for at in range(never - 1, -1, -1):
        keys = demands[at][1]
        following[at] = [coming.get(key, never) for key in keys]
        coming.update(dict.fromkeys(keys, at))
    next_use: dict[Key, int] = {}  # of residents
    latest: list[tuple[int, Key]] = []  # (-next use, key)
    for (step, keys), uses in zip(demands, following, strict=True):
        tally.add(sum(key in next_use for key in keys), len(keys), step)
        next_use.update(zip(keys, uses, strict=True))
        if len(keys) > slots:
            _offer(latest, keys, uses)
        # The set itself is not among the candidates otherwise. What the heap remembers of earlier uses has come to
        # pass: it lies below all that is resident and is never reached.
        while len(next_use) > slots:
            del next_use[heapq.heappop(latest)[1]]
        if len(keys) <= slots:
            _offer(latest, keys, uses)


def _budgets(trace: RoutingTrace, slots: Sequence[int] | None, shares: Sequence[float]) -> list[int]:
    header = trace.header
    records = header.experts * len(header.layers)
    everything = header.experts * sum(header.record_bytes)
    if slots is not None:
        for n in slots:
            if n < 1:
                raise UsageError(f"{n} slots: at least 1 is needed")
        return [min(everything, n * everything // records) for n in slots]
    for share in shares:
        if not 0 < share <= 1:
            raise UsageError(f"a share of {share:g} of the experts: expected more than 0 and at most 1")
    least = header.top_k * max(header.record_bytes)
    return [max(least, round(share * records) * everything // records) for share in shares]


def _counts(trace: RoutingTrace) -> dict[int, npt.NDArray[np.int64]]:
    """Uses of each layer's experts in the whole trace."""
    header = trace.header
    totals = np.zeros((len(header.layers), header.experts), np.int64)
    for entry in trace.entries:
        if not isinstance(entry, Mark):
            for row, ids in zip(totals, np.moveaxis(entry.ids, 1, 0), strict=True):
                row += np.bincount(ids.ravel(), minlength=header.experts)
    return dict(zip(header.layers, totals, strict=True))


def _row(
    name: str, division: Division | None, trace: RoutingTrace, partitions: Sequence[Partition], tally: Tally
) -> ReplayRow:
    header = trace.header
    used = sum(partition.nbytes for partition in partitions)
    return ReplayRow(
        policy=name,
        division=(division or "layered") if len(partitions) == len(header.layers) else "pooled",
        partitions=len(partitions),
        slots=sum(partition.slots for partition in partitions),
        share_resident=used / (header.experts * sum(header.record_bytes)),
        tokens=trace.tokens,
        hits=tally.hits,
        uses=tally.uses,
        step_hits=tally.step_hits,
        step_uses=tally.step_uses,
    )
