"""How many experts of the next layer to predict and read ahead: as many as make tokens fastest, often none.

A right prediction hides a read behind arithmetic, a wrong one takes the drive's time from a read that is waited for.
Which weighs more depends on the drive, the share of experts that is resident and the text; so it is measured: widths
of a short ladder take turns, a window of tokens each, and the fastest stays (LEARNED: lookahead).
"""

from __future__ import annotations

import statistics

# Tokens of one trial. The median of fewer is noise where hit rates differ from token to token.
WINDOW = 8

# A neighbour has to be this much faster to be moved to: two equal widths must not take turns for ever.
GAIN = 0.97

# Trials of the present width between two of a neighbour: 1 after a move, doubling up to this while nothing is gained.
LONGEST_REST = 32


class Lookahead:
    """`width` experts are to be predicted now. Told of every decoded token."""

    def __init__(self, top_k: int, experts: int, fixed: int | None = None) -> None:
        """fixed: this width, whatever it costs; None adapts, beginning at half of `top_k`, where little is wasted."""
        half = (top_k + 1) // 2
        ladder = (0, half, top_k, top_k + half, 2 * top_k) if fixed is None else (min(fixed, experts),)
        self._ladder = sorted({width for width in ladder if width <= experts})
        self._at = self._ladder.index(half) if fixed is None and half in self._ladder else 0
        self._trial = self._at  # what is being tried: `_at`, or a neighbour of it
        self._times: list[float] = []
        self._base: float | None = None  # the last median at `_at`
        self._up = False  # which neighbour is next
        self._rest, self._waited = 1, 0

    @property
    def width(self) -> int:
        return self._ladder[self._trial]

    def token(self, seconds: float) -> None:
        """A token has been decoded in `seconds`."""
        if len(self._ladder) == 1:
            return
        self._times.append(seconds)
        if len(self._times) >= WINDOW:  # an interrupt may have left some
            median = statistics.median(self._times)
            self._times.clear()
            self._ended(median)

    def _ended(self, median: float) -> None:
        """A trial has ended."""
        if self._trial == self._at:
            self._base = median
            self._waited += 1
            if self._waited >= self._rest:
                self._trial = self._neighbour()
            return
        assert self._base is not None
        if median < GAIN * self._base:
            self._at, self._base, self._rest = self._trial, median, 1
        else:
            self._trial = self._at
            self._rest = min(2 * self._rest, LONGEST_REST)
        self._waited = 0

    def _neighbour(self) -> int:
        """The two neighbours take turns, where there are two."""
        last = len(self._ladder) - 1
        self._up = not self._up if 0 < self._at < last else self._at == 0
        return self._at + (1 if self._up else -1)
