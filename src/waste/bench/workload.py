"""What is run: how many tokens at which depth, and which ones.

All arms of a round get the same ids, and every round gets ids of its own: a cache that had seen them would look better
than it is. Decoding is forced along the text, so that neither an arm's rounding nor a loop that a greedy model falls
into changes what is routed; the sampler draws all the same, and its draw is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from waste.bench.text import PARAGRAPHS
from waste.errors import UsageError


@dataclass(frozen=True)
class Case:
    """One test: `prompt` tokens evaluated at once after `depth` others, then `generated` tokens one by one."""

    depth: int
    prompt: int
    generated: int

    @property
    def tokens(self) -> int:
        """All that a session holds in the end."""
        return self.depth + self.prompt + self.generated


def cases(depths: Sequence[int], prompts: Sequence[int], generated: int) -> tuple[Case, ...]:
    """Every depth with every prompt. Raises UsageError when there is nothing to measure."""
    found = tuple(Case(*each, generated) for each in product(dict.fromkeys(depths), dict.fromkeys(prompts)))
    if any(case.prompt == 0 and case.generated == 0 for case in found):
        raise UsageError("nothing to measure: 0 prompt tokens and 0 generated", hint="-p 64 -n 32 are the defaults")
    return found


class Stream:
    """An endless row of token ids: the paragraphs of the text, in a new order in every pass. Deterministic."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._paragraphs = [list(encode(f"{text}\n\n")) for text in PARAGRAPHS]
        self._random = np.random.Generator(np.random.PCG64(0))
        self._ready: list[int] = []

    def take(self, count: int) -> list[int]:
        """The next `count` ids."""
        while len(self._ready) < count:
            for i in self._random.permutation(len(self._paragraphs)):
                self._ready += self._paragraphs[i]
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken
