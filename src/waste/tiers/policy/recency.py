"""Recency: the least recently used leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from waste.tiers.policy.base import Key


class Lru:
    """Least recently used. What was read ahead counts as used when it arrived."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # the next to leave first

    def used(self, layer: int, experts: Iterable[int]) -> None:
        move_to_end = self._order.move_to_end
        for expert in experts:
            move_to_end((layer, expert))

    def admitted(self, layer: int, expert: int, *, demanded: bool) -> None:
        self._order[layer, expert] = None

    def victim(self, pinned: Collection[Key]) -> Key:
        # Pinned keys were used last, so the first key is free unless (nearly) all are pinned.
        key = next(key for key in self._order if key not in pinned)
        del self._order[key]
        return key

    def removed(self, layer: int, expert: int) -> None:
        del self._order[layer, expert]

    def resized(self, capacity: int) -> None:
        pass

    def token(self) -> None:
        pass
