"""The adaptive policy: what leaves is decided by whichever adviser would have hit most in recent tokens."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence

from waste.tiers.policy.base import Key, Policy
from waste.tiers.policy.frequency import Lfu
from waste.tiers.policy.recency import Lru

# Beside recency: frequency in the last tokens, and nearly plain frequency. 16 is the best of all on nano-glm. 256 is up
# to 6 points ahead of it where routing follows one skewed distribution, and 19 behind where it does not. Recency wins
# only where experts stay for a few tokens and do not come back (LEARNED: expert-policies).
HALF_LIVES = (16.0, 256.0)

# Hits are remembered with a half-life of so many tokens, and another adviser takes over when it is ahead by as many.
# With 64 and 4 the loss to the better adviser was twice as large, 0.25 points for 0.1 (LEARNED: expert-policies).
MEMORY_TOKENS = 256
MARGIN_HITS = 8.0


class Adviser:
    """A policy that runs a cache of its own on the same demands: keys without records. Its ghosts are its history."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.held: defaultdict[int, set[int]] = defaultdict(set)  # by layer, what it would hold
        self.count = 0  # of these
        self.hits = 0.0  # recent ones
        self.unwanted: OrderedDict[Key, None] = OrderedDict()  # resident although it would not hold it


class Adaptive:
    """Follows the best of several policies, and is near it after any change, as nothing has to be learned anew.

    Every adviser simulates a cache of this partition's size, so each always knows what it would hold now. The victim is
    a resident that the best adviser no longer holds; where there is none, the one that this adviser gives up next. What
    is resident so becomes what the best adviser holds.
    """

    def __init__(self, capacity: int, advisers: Sequence[Policy] | None = None) -> None:
        """advisers: policies of this capacity; default `Lru` and `Lfu` with `HALF_LIVES`."""
        if advisers is None:
            advisers = [Lru(capacity), *(Lfu(capacity, half_life) for half_life in HALF_LIVES)]
        self._capacity = capacity
        self._advisers = [Adviser(policy) for policy in advisers]
        self._best = self._advisers[len(advisers) // 2]
        self._resident: OrderedDict[Key, None] = OrderedDict()  # in order of admission
        self._keep = 0.5 ** (1 / MEMORY_TOKENS)

    def used(self, layer: int, experts: Iterable[int]) -> None:
        experts = tuple(experts)
        for adviser in self._advisers:
            held = adviser.held[layer]
            if held.issuperset(experts):
                adviser.hits += len(experts)
                adviser.policy.used(layer, experts)
            else:
                there = [expert for expert in experts if expert in held]
                adviser.hits += len(there)
                adviser.policy.used(layer, there)
                for expert in experts:
                    if expert not in held:
                        self._take(adviser, (layer, expert), demanded=True)

    def admitted(self, layer: int, expert: int, *, demanded: bool) -> None:
        key = layer, expert
        self._resident[key] = None
        for adviser in self._advisers:
            if expert not in adviser.held[layer]:
                self._take(adviser, key, demanded=demanded)
            elif demanded:
                adviser.hits += 1
                adviser.policy.used(layer, (expert,))

    def victim(self, pinned: Collection[Key]) -> Key:
        key = self._unwanted(pinned)
        self._forget(key)
        return key

    def removed(self, layer: int, expert: int) -> None:
        self._forget((layer, expert))
        for adviser in self._advisers:
            if expert in adviser.held[layer]:
                adviser.policy.removed(layer, expert)
                self._drop(adviser, (layer, expert))

    def resized(self, capacity: int) -> None:
        self._capacity = capacity
        for adviser in self._advisers:
            adviser.policy.resized(capacity)
            while adviser.count > capacity:
                self._drop(adviser, adviser.policy.victim(()))

    def token(self) -> None:
        best = self._best
        for adviser in self._advisers:
            adviser.policy.token()
            adviser.hits *= self._keep
            if adviser.hits > best.hits:
                best = adviser
        if best.hits > self._best.hits + MARGIN_HITS:
            self._best = best

    def _unwanted(self, pinned: Collection[Key]) -> Key:
        """What the best adviser does not hold or gives up now, in advance of what is about to come."""
        best = self._best
        for key in best.unwanted:
            if key not in pinned:
                return key
        # It may hold keys that are not resident. Each is passed over once, so what is admitted has paid for it.
        while best.count > len(pinned):
            key = best.policy.victim(pinned)
            self._drop(best, key)
            if key in self._resident:
                return key
        return next(key for key in self._resident if key not in pinned)

    def _take(self, adviser: Adviser, key: Key, *, demanded: bool) -> None:
        """The adviser had not held it."""
        if adviser.count >= self._capacity:
            self._drop(adviser, adviser.policy.victim(()))
        adviser.held[key[0]].add(key[1])
        adviser.count += 1
        adviser.unwanted.pop(key, None)
        adviser.policy.admitted(key[0], key[1], demanded=demanded)

    def _drop(self, adviser: Adviser, key: Key) -> None:
        """The adviser's policy has given it up."""
        adviser.held[key[0]].remove(key[1])
        adviser.count -= 1
        if key in self._resident:
            adviser.unwanted[key] = None

    def _forget(self, key: Key) -> None:
        """It is no longer resident."""
        del self._resident[key]
        for adviser in self._advisers:
            adviser.unwanted.pop(key, None)
