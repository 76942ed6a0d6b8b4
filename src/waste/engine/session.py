"""One timeline of tokens: feed ids, get logits. The state only moves forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waste.errors import UsageError, WasteError
from waste.events import OnEvent, Progress, ignore
from waste.layers.trace import Trace
from waste.models.model import Model
from waste.planner.footprint import PREFILL_CHUNK
from waste.tiers.cache import ExpertCache


@dataclass(frozen=True)
class SessionStats:
    """Expert traffic since the session began."""

    expert_hits: int
    expert_misses: int
    bytes_read: int


class Session:
    """Made by `Engine.session`. Not thread-safe; sessions of one engine share its expert cache."""

    def __init__(self, model: Model, cache: ExpertCache, context: int, *, chunk: int = PREFILL_CHUNK) -> None:
        if chunk < 1:
            raise UsageError(f"chunk is {chunk}, at least 1 token is needed")
        self._model = model
        self._cache = cache
        self._context = context
        self._chunk = chunk
        self._state = model.new_state(context)
        self._failed = False
        self._start = (cache.stats.hits, cache.stats.misses, cache.stats.bytes_read)

    @property
    def position(self) -> int:
        """Tokens evaluated so far."""
        return self._state.position

    @property
    def stats(self) -> SessionStats:
        now = self._cache.stats
        hits, misses, nbytes = self._start
        return SessionStats(now.hits - hits, now.misses - misses, now.bytes_read - nbytes)

    def eval(
        self,
        ids: Sequence[int] | npt.NDArray[np.integer],
        *,
        all_logits: bool = False,
        trace: Trace | None = None,
        on_event: OnEvent = ignore,
    ) -> npt.NDArray[np.float32]:
        """Advance by `ids` and return the logits after the last: (V,) float32, or (T, V) with `all_logits`.

        All logits take up to 8 T V bytes, which no RAM budget knows of.
        Raises UsageError for no ids, ids outside the vocabulary, or more than the context holds (nothing
        is evaluated then). A read error in the middle leaves the session unusable: later calls say so.
        """
        tokens = self._checked(ids)
        if len(tokens) > 1:  # at once: the first chunk of a large model takes a while
            on_event(Progress("prefill", 0, len(tokens), "tokens"))
        self._failed = True  # until every chunk has gone through: the states are changed in place
        rows = []
        for begin in range(0, len(tokens), self._chunk):
            part = tokens[begin : begin + self._chunk]
            logits = self._model.forward(part, self._state, self._cache, all_logits=all_logits, trace=trace)
            rows.append(logits)
            if len(tokens) > 1:
                on_event(Progress("prefill", begin + len(part), len(tokens), "tokens"))
        self._failed = False
        return np.concatenate(rows) if all_logits else rows[-1][0]

    def _checked(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        if self._failed:
            raise WasteError("this session stopped in the middle of a token", hint="start a new session")
        given = np.asarray(ids)
        vocabulary = self._model.config.vocab_size
        if given.ndim != 1 or len(given) == 0 or given.dtype.kind not in "iu":
            raise UsageError("a session needs a flat list of at least one token id, whole numbers")
        tokens = given.astype(np.int64)
        bad = tokens[(tokens < 0) | (tokens >= vocabulary)]
        if len(bad):
            raise UsageError(f"token id {int(bad[0])} is outside the vocabulary of {vocabulary}")
        if self.position + len(tokens) > self._context:
            raise UsageError(
                f"{len(tokens)} tokens after {self.position} do not fit the context of {self._context}",
                hint=f"--ctx {self.position + len(tokens)}",
            )
        return tokens
