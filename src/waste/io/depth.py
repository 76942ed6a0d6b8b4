"""How many reads to keep in flight on a drive: found by trying, as no drive tells.

One read at a time leaves most drives partly idle; more than they can use only lets an urgent read wait behind others.
So the depth climbs while a step gains and comes down while it costs nothing.
"""

from __future__ import annotations

import math

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
FIRST_DEPTH = 4

# A step up must bring 3 %: less is not worth the wait of an urgent read behind more of the others.
_GAIN = math.log(1.03)
# Rates of neighbouring depths are compared in pairs taken in turns, as a shared drive changes from second to second.
# Windows differ by 5 to 10 % on one; 3 pairs tell a gain of 25 %, 12 pairs one of 5 %.
_LEAST_PAIRS, _MOST_PAIRS = 3, 12
_LEAST_SIGMA = 0.02  # three pairs may agree by chance
_CONFIDENT = 2.0  # standard errors
# When neither neighbour is better, that many windows pass before the next trial, twice as many after each: a trial of
# a depth that loses a quarter in 3 of 6 windows costs 12 % while it lasts.
_FIRST_REST, _LONGEST_REST = 8, 128


class Depth:
    """Hill climbing over DEPTHS. Use `value`, measure a rate with it, call `observe`, use the new `value`.

    Pure: no clock, no thread. Constant time a call.
    """

    def __init__(self, first: int = FIRST_DEPTH) -> None:
        """Start at `first`, one of DEPTHS."""
        self._at = DEPTHS.index(first)
        self._step = 1  # the direction of the trial, now or next
        self._refused = 0  # trials in a row, one in each direction, that changed nothing
        self._rest = 0  # windows until the next trial
        self._patience = _FIRST_REST
        self._base_rate: float | None = None  # measured, waiting for its pair
        self._begin()

    @property
    def value(self) -> int:
        """The depth for the next window."""
        return DEPTHS[self._at + self._step] if self._base_rate is not None else DEPTHS[self._at]

    def observe(self, rate: float) -> None:
        """A window at `value` moved data at `rate`, in any unit; rates that are not positive and finite are ignored."""
        if not 0 < rate < math.inf:
            return
        if self._rest > 0:
            self._rest -= 1
            return
        if not 0 <= self._at + self._step < len(DEPTHS):
            self._end(moved=False)
        elif self._base_rate is None:
            self._base_rate = rate
        else:
            self._compare(math.log(rate) - math.log(self._base_rate))

    def _compare(self, ratio: float) -> None:
        """One more pair: log of the neighbour's rate over the present one's."""
        self._base_rate = None
        self._pairs += 1
        self._sum += ratio
        self._squares += ratio * ratio
        if self._pairs < _LEAST_PAIRS:
            return
        mean = self._sum / self._pairs
        variance = max(0.0, self._squares / self._pairs - mean * mean) * self._pairs / (self._pairs - 1)
        error = max(math.sqrt(variance), _LEAST_SIGMA) / math.sqrt(self._pairs)
        # Up wants a gain; down only that the way back up would bring none.
        margin = mean - (_GAIN if self._step > 0 else -_GAIN)
        if abs(margin) > _CONFIDENT * error or self._pairs >= _MOST_PAIRS:
            self._end(moved=margin > 0)

    def _end(self, *, moved: bool) -> None:
        if moved:
            self._at += self._step
            self._refused = 0
            self._patience = _FIRST_REST
        else:
            self._step = -self._step
            self._refused += 1
            if self._refused >= 2:
                self._refused = 0
                self._rest = self._patience
                self._patience = min(2 * self._patience, _LONGEST_REST)
        self._begin()

    def _begin(self) -> None:
        self._pairs = 0
        self._sum = self._squares = 0.0
        self._base_rate = None
