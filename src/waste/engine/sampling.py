"""From logits to the next token id: penalty, filters, temperature, one draw.

The order is penalty, top_k, top_p, min_p, temperature. The filters look at the model's own probabilities
(at temperature 1), so a higher temperature spreads the draw over the tokens the filters kept and never lets
others in. Everything is float64 in numpy; a `Sampler` owns its generator, so a seed fixes the text.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waste.errors import ExitCode, UsageError, WasteError

F64Array = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]

# How many of the best tokens top_p sorts before it sorts the whole vocabulary: the nucleus of a sure model is
# small, and a full sort of 155k numbers would cost as much as a layer.
NUCLEUS_GUESS = 1024


class LogitsError(WasteError):
    """The model answered with numbers nothing can be drawn from: a fault of waste or of the weights."""

    exit_code = ExitCode.BUG


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token. Raises UsageError for values outside their range.

    `temperature` 0, `top_k` 1, `top_p` 0 and `min_p` 1 each mean greedy: the largest logit, ties to the lowest id.
    """

    temperature: float = 0.0  # >= 0
    top_p: float = 1.0  # 0..1: the smallest set of best tokens with at least this probability; 1 is off
    top_k: int = 0  # >= 0: the best k tokens; 0 is off
    min_p: float = 0.0  # 0..1: tokens at least this share of the best one's probability; 0 is off
    repeat_penalty: float = 1.0  # > 0: divides positive and multiplies negative logits of recent tokens; 1 is off
    repeat_last_n: int = 64  # >= 0: how many of the last tokens, prompt included, the penalty looks at
    seed: int | None = None  # >= 0; None draws one from the operating system

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, math.inf)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repeat_penalty", self.repeat_penalty, 0.0, math.inf, open_low=True)
        for name, value in (("top_k", self.top_k), ("repeat_last_n", self.repeat_last_n), ("seed", self.seed)):
            if value is not None and value < 0:
                raise UsageError(f"{name} is {value}, expected 0 or more")

    @property
    def greedy(self) -> bool:
        """Whether the choice needs no random number."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0 or self.min_p == 1


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    finite = math.isfinite(value)
    if finite and low <= value <= high and not (open_low and value == low):
        return
    bound = "more than 0" if open_low else "0 or more" if high == math.inf else f"a number from {low:g} to {high:g}"
    raise UsageError(f"{name} is {value:g}, expected {bound}" + ("" if finite else " and finite"))


def published(generation_config: bytes) -> dict[str, float]:
    """Temperature, top_p, top_k and min_p of a release's generation_config.json, those that have a meaning here.

    Files in the wild carry nulls, -1 for "off" and keys of other programs; none of that is the user's mistake, so
    it is left out rather than refused. `do_sample: false` means greedy.
    """
    try:
        found = json.loads(generation_config)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    values: dict[str, float] = {}
    for name, low, high in (("temperature", 0, math.inf), ("top_p", 0, 1), ("top_k", 0, math.inf), ("min_p", 0, 1)):
        value = found.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if low <= value <= high:
            values[name] = int(value) if name == "top_k" else float(value)
    if found.get("do_sample") is False:
        values["temperature"] = 0.0
    return values


class Sampler:
    """Draws token ids. Not shared between threads: it owns a PCG64 generator."""

    def __init__(self, params: SamplingParams, masked_ids: Iterable[int] = ()) -> None:
        """`masked_ids`: rows of the vocabulary that stand for no token and must never be drawn."""
        self.params = params
        self.seed = secrets.randbits(32) if params.seed is None else params.seed  # said by `waste run`, to repeat it
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self._masked: IdArray = np.fromiter(masked_ids, dtype=np.int64)

    def sample(self, logits: npt.NDArray[np.float32], history: Sequence[int] = ()) -> int:
        """The next id. `logits`: (V,) of any float type, -inf allowed; `history`: ids so far, prompt first.

        Raises LogitsError when a logit is NaN or +inf, or when no token is left to draw.
        """
        scores = np.array(logits, dtype=np.float64).reshape(-1)
        scores[self._masked[self._masked < scores.size]] = -np.inf
        best = float(scores.max(initial=-np.inf))
        if not math.isfinite(best):
            what = "no token can be drawn: every logit is -inf" if best == -math.inf else f"a logit is {best}"
            raise LogitsError(
                f"{what}, over {scores.size} tokens at position {len(history)}",
                hint="check the model with `waste info MODEL --verify`; if it is intact, please report this",
            )
        self._penalize(scores, history)
        if self.params.greedy:
            return int(np.argmax(scores))
        ids = self._filter(scores)
        kept = scores[ids]
        with np.errstate(over="ignore"):  # a tiny temperature: -inf is what the quotient should be
            weights = np.exp((kept - kept.max()) / self.params.temperature)
        return int(ids[self._draw(weights)])

    def _penalize(self, scores: F64Array, history: Sequence[int]) -> None:
        penalty, last = self.params.repeat_penalty, self.params.repeat_last_n
        if penalty == 1 or last == 0 or not history:
            return
        recent = np.unique(np.asarray(history[-last:], dtype=np.int64))
        recent = recent[(recent >= 0) & (recent < scores.size)]
        seen = scores[recent]
        scores[recent] = np.where(seen > 0, seen / penalty, seen * penalty)

    def _filter(self, scores: F64Array) -> IdArray:
        """Ids that pass top_k, top_p and min_p, best first where a filter had to sort. Never empty."""
        params = self.params
        ids: IdArray = np.arange(scores.size, dtype=np.int64)
        if 0 < params.top_k < scores.size:
            ids = _best(scores, params.top_k)
        if params.top_p < 1:
            ids = _nucleus(scores, ids, params.top_p)
        if params.min_p > 0:
            kept = scores[ids]
            ids = ids[kept >= kept.max() + math.log(params.min_p)]
        return ids

    def _draw(self, weights: F64Array) -> int:
        total = np.cumsum(weights)
        index = int(np.searchsorted(total, self._random.random() * total[-1], side="right"))
        # The product can round up to the total itself; the last token of any weight is meant then.
        return index if index < weights.size else int(np.flatnonzero(weights)[-1])


def _best(scores: F64Array, count: int) -> IdArray:
    """Ids of the `count` largest scores, largest first, ties to the lower id."""
    threshold = np.partition(scores, scores.size - count)[scores.size - count]
    ids = np.flatnonzero(scores >= threshold)
    order = np.argsort(-scores[ids], kind="stable")
    return ids[order[:count]].astype(np.int64)


def _nucleus(scores: F64Array, ids: IdArray, top_p: float) -> IdArray:
    """The shortest prefix of `ids`, best first, whose probability among `ids` is at least `top_p`."""
    kept = scores[ids]
    weights = np.exp(kept - kept.max())
    wanted = top_p * float(weights.sum())
    for count in (NUCLEUS_GUESS, ids.size):
        order = _best(kept, min(count, ids.size))
        total = np.cumsum(weights[order])
        if total[-1] >= wanted:
            return ids[order[: int(np.searchsorted(total, wanted, side="left")) + 1]]
    return ids[order]  # rounding left the sum of all a hair below the wish
