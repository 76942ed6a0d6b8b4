"""How a tier's bytes are divided into partitions: sets of layers that share slots of one size. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from waste.errors import ResourceError
from waste.units import format_bytes

# pooled: one partition for all layers whose records have one size; layered: one for each layer, of equally many slots;
# routed: one for each layer, with the slots that the most used experts of all layers would fill.
Division = Literal["pooled", "layered", "routed"]

# Hit share of `lfu` on nano-glm over topic switches, pooled / layered, by per cent resident: 50.4 / 52.3 at 25, 77.2 /
# 77.7 at 50, 84.4 / 84.4 at 60, 92.9 / 92.2 at 75; with prompts the
# lines cross at 70. Routed never gained more than 0.5 with counts of the same text, and
# lost as much with those of an earlier one: usage changes with the topic (LEARNED: expert-policies).
POOLED_FROM = 0.67


@dataclass(frozen=True)
class Partition:
    """`slots` of `stride` bytes for the experts of `layers`, ascending."""

    layers: tuple[int, ...]
    stride: int
    slots: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.stride


def divide(
    budget_bytes: int,
    strides: Mapping[int, int],
    experts: int,
    top_k: int,
    counts: Mapping[int, npt.NDArray[Any]] | None = None,
    *,
    division: Division | None = None,
) -> tuple[Partition, ...]:
    """Partitions of at most `budget_bytes`, each layer in exactly one, in the order of their first layers.

    strides: layer -> bytes of a record; experts: in a layer; top_k: of them a token uses; counts: layer -> (E,) uses of
    its experts so far. `division` is measured advice unless given; without counts, `routed` is `layered`.

    A slot is as large as the records of its partition. A partition has at least top_k slots and never more than its
    layers have experts; where layers cannot have top_k each, they are pooled, and when even pools cannot, all layers
    share top_k or more slots of the largest record. What is left over is less than a slot of any partition that could
    use one. Raises ResourceError when top_k of the largest records are more than the budget.
    """
    if not strides:
        return ()
    layers = sorted(strides)
    everything = experts * sum(strides.values())
    if division is None:
        division = "pooled" if budget_bytes >= POOLED_FROM * everything else "layered"
    least = min(top_k, experts)
    alone: list[tuple[int, ...]] = [(layer,) for layer in layers]
    pools = [tuple(layer for layer in layers if strides[layer] == stride) for stride in _in_order(strides)]
    choices = [pools] if division == "pooled" else [alone, pools]
    for groups in choices:
        sizes = [strides[group[0]] for group in groups]
        if least * sum(sizes) <= budget_bytes:
            break
    else:
        groups, sizes = [tuple(layers)], [max(strides.values())]
        if least * sizes[0] > budget_bytes:
            raise ResourceError(
                f"{format_bytes(budget_bytes)} for experts do not hold the {least} that a token uses in one layer",
                hint=f"{format_bytes(least * sizes[0])} are needed at least",
            )
    most = [experts * len(group) for group in groups]
    if division == "routed" and counts is not None and groups == alone:
        slots = _by_use(budget_bytes, sizes, [counts[layer] for layer in layers], least)
    else:
        slots = _evenly(budget_bytes, sizes, most, [len(group) for group in groups], least)
    return tuple(Partition(group, sizes[i], slots[i]) for i, group in enumerate(groups))


def _in_order(strides: Mapping[int, int]) -> list[int]:
    """The different strides, by the first layer that has them."""
    return list(dict.fromkeys(strides[layer] for layer in sorted(strides)))


def _evenly(budget: int, sizes: list[int], most: list[int], weights: list[int], least: int) -> list[int]:
    """`least` each, the others in proportion to `weights`, the last where there are fewest for the weight."""
    left = budget - least * sum(sizes)
    share = left // sum(size * weight for size, weight in zip(sizes, weights, strict=True))
    slots = [min(limit, least + share * weight) for limit, weight in zip(most, weights, strict=True)]
    left = budget - sum(n * size for n, size in zip(slots, sizes, strict=True))
    while True:
        able = [i for i, size in enumerate(sizes) if slots[i] < most[i] and size <= left]
        if not able:
            return slots
        i = min(able, key=lambda i: slots[i] / weights[i])
        slots[i] += 1
        left -= sizes[i]


def _by_use(budget: int, sizes: list[int], counts: list[npt.NDArray[Any]], least: int) -> list[int]:
    """Slots for the most used experts by byte, `least` in each layer whatever they count."""
    ranked = np.stack([np.sort(np.asarray(row, np.float64))[::-1] for row in counts])  # (L, E)
    # One use more for all: where nothing has been counted, each rank is filled in all layers before the next.
    value = (ranked[:, least:] + 1) / np.array(sizes, np.float64)[:, None]
    order = np.argsort(-value.T.ravel(), kind="stable") % len(sizes)
    slots = [least] * len(sizes)
    left = budget - least * sum(sizes)
    for i in order.tolist():
        if sizes[i] <= left:
            slots[i] += 1
            left -= sizes[i]
    return slots
