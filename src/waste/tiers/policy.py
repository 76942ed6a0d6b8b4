"""What to evict. A policy orders keys; it knows nothing of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Protocol

Key = tuple[int, int]  # (layer, expert)


class Policy(Protocol):
    """Told of every use; asked for a victim when a slot is needed. Constant time each."""

    def used(self, layer: int, experts: Iterable[int]) -> None:
        """`experts` of `layer` are resident and were just used (or just arrived), in this order."""
        ...

    def victim(self, pinned: Collection[Key]) -> Key:
        """The resident key to give up, not one of `pinned`, removed from the books. There is one."""
        ...


class Lru:
    """Least recently used."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def used(self, layer: int, experts: Iterable[int]) -> None:
        move_to_end = self._order.move_to_end
        for expert in experts:
            try:
                move_to_end((layer, expert))
            except KeyError:  # it just arrived
                self._order[layer, expert] = None

    def victim(self, pinned: Collection[Key]) -> Key:
        # Pinned keys were used last, so the first key is free unless (nearly) all are pinned.
        key = next(k for k in self._order if k not in pinned)
        del self._order[key]
        return key
