"""What a cache tells a policy, and what it asks of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

Key = tuple[int, int]  # (layer, expert)


class Policy(Protocol):
    """The order in which residents of one partition leave. Every call takes O(1) in the number of slots, amortised.

    A policy never changes a result, only which records have to be read again.
    """

    def used(self, layer: int, experts: Iterable[int]) -> None:
        """Residents that were just demanded, in this order."""
        ...

    def admitted(self, layer: int, expert: int, *, demanded: bool) -> None:
        """It became resident: because it was demanded, or ahead of any demand (prefetched, filled)."""
        ...

    def victim(self, pinned: Collection[Key]) -> Key:
        """The resident to give up, none of `pinned`, removed from the books. The caller knows that there is one."""
        ...

    def removed(self, layer: int, expert: int) -> None:
        """A resident left for another reason: to another tier, or because the tier shrank."""
        ...

    def resized(self, capacity: int) -> None:
        """The partition has so many slots from now on."""
        ...

    def token(self) -> None:
        """One decode step has passed."""
        ...
