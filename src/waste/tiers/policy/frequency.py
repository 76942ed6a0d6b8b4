"""Frequency: the least used leaves first, where a use counts less the longer ago it was."""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable
from math import frexp

from waste.tiers.policy.base import Key

# In tokens. Hit share on nano-glm over topic switches, pooled, at 25 / 50 / 75 % resident: 50.3 / 77.0 / 93.0 with 8,
# 50.4 / 77.2 / 92.9 with 16, 49.5 / 76.6 / 92.6 with 24, 42.0 / 69.6 / 89.0 with 128. This also protects what was used
# last. A rule of its own for the experts of the last 64 tokens, in up to a quarter of the slots, cost 0.5 to 3 points
# at every size up to 25 % and gained 0.4 at most above (LEARNED: expert-policies).
HALF_LIFE = 16

# A use counts 2**_RESCALE at most before all scores are scaled down, far inside the range of a double.
_RESCALE = 512
# Levels in a power of two.
_STEPS = 4
# The level of what was never used, below all scores.
_UNUSED = -1 << 60


class Lfu:
    """Least frequently used, with decay, resident or not: what comes back brings its past along.

    The score of a key is the sum of 2**(t / half_life) over the tokens t that used it. Relative to each other these are
    the sums of 2**-(age / half_life), and nobody has to touch a score for time to pass.

    Residents wait in levels of equal score, to a quarter of a power of two. A use raises the score only. A key
    found in the lowest level with a score above it moves up then: once for all its uses since it was placed.
    """

    def __init__(self, capacity: int, half_life: float = HALF_LIFE) -> None:
        self._growth = 2.0 ** (1 / half_life)
        self._count = 1.0  # what a use adds now
        self._base = 0  # levels that scores have lost when they were scaled down
        self._scores: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._level_of: dict[Key, int] = {}  # of residents
        self._levels: dict[int, OrderedDict[Key, None]] = {}
        self._heap: list[int] = []  # the keys of `_levels`
        # Read ahead in this token and in the one before. They leave only when there is nothing else: the past of what
        # is wanted next may be poor, and to lose it before its use is to have read it for nothing.
        self._ahead: OrderedDict[Key, None] = OrderedDict()
        self._ahead_before: OrderedDict[Key, None] = OrderedDict()

    def used(self, layer: int, experts: Iterable[int]) -> None:
        scores, count = self._scores[layer], self._count
        for expert in experts:
            scores[expert] += count

    def admitted(self, layer: int, expert: int, *, demanded: bool) -> None:
        score = self._scores[layer][expert]
        if demanded:
            self._scores[layer][expert] = score = score + self._count
            self._place((layer, expert), self._level(score))
        else:
            self._ahead[layer, expert] = None

    def victim(self, pinned: Collection[Key]) -> Key:
        heap, levels, passed = self._heap, self._levels, []
        found = None
        while heap and found is None:
            level = heap[0]
            if not levels[level]:
                del levels[heapq.heappop(heap)]
                continue
            key, _ = levels[level].popitem(last=False)
            now = self._level(self._scores[key[0]][key[1]])
            if now > level:
                self._place(key, now)
            elif key in pinned:
                passed.append((key, level))
            else:
                found = key
                del self._level_of[key]
        for kept, level in passed:
            self._place(kept, level)
        if found is None:
            ahead = next(
                books for books in (self._ahead_before, self._ahead) if any(key not in pinned for key in books)
            )
            found = next(key for key in ahead if key not in pinned)
            del ahead[found]
        return found

    def removed(self, layer: int, expert: int) -> None:
        key = layer, expert
        if key in self._level_of:
            del self._levels[self._level_of.pop(key)][key]
        else:
            del (self._ahead if key in self._ahead else self._ahead_before)[key]

    def resized(self, capacity: int) -> None:
        pass

    def token(self) -> None:
        self._count *= self._growth
        if self._count >= 2.0**_RESCALE:
            self._rescale()
        for layer, expert in self._ahead_before:
            self._place((layer, expert), self._level(self._scores[layer][expert]))
        self._ahead_before, self._ahead = self._ahead, OrderedDict()

    def _level(self, score: float) -> int:
        if not score:
            return _UNUSED
        mantissa, exponent = frexp(score)
        return self._base + _STEPS * exponent + int(2 * _STEPS * mantissa)

    def _place(self, key: Key, level: int) -> None:
        self._level_of[key] = level
        keys = self._levels.get(level)
        if keys is None:
            keys = self._levels[level] = OrderedDict()
            heapq.heappush(self._heap, level)
        keys[key] = None

    def _rescale(self) -> None:
        """Once in thousands of tokens: what is lost below the range of a double is as good as never used."""
        scale = 2.0**-_RESCALE
        self._count *= scale
        self._base += _STEPS * _RESCALE
        for scores in self._scores.values():
            for expert in scores:
                scores[expert] *= scale
