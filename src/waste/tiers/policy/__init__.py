"""Which expert leaves when there is no room: one small class per policy, chosen by name.

A policy orders the keys of one partition; it knows nothing of memory, records or files. No call takes longer for more
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from waste.tiers.policy.adaptive import Adaptive
from waste.tiers.policy.arrival import Fifo
from waste.tiers.policy.base import Key, Policy
from waste.tiers.policy.frequency import Lfu
from waste.tiers.policy.recency import Lru

# By name: a maker of a policy for a partition of so many slots.
POLICIES: Mapping[str, Callable[[int], Policy]] = MappingProxyType({"lru": Lru, "lfu": Lfu, "adaptive": Adaptive})

__all__ = ["POLICIES", "Adaptive", "Fifo", "Key", "Lfu", "Lru", "Policy"]
