"""One timeline of tokens: feed ids, get logits. The state only moves forward; it can be saved and restored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from waste.errors import UsageError, WasteError
from waste.events import OnEvent, Progress, ignore
from waste.kvcache import store
from waste.layers.trace import Trace
from waste.models.model import Model
from waste.planner.footprint import PREFILL_CHUNK
from waste.tiers.cache import ExpertCache


@dataclass(frozen=True)
class SessionStats:
    """Expert traffic of the engine since the session began."""

    expert_hits: int
    expert_misses: int  # that were not there when they were asked for, whether their reads had begun or not
    bytes_read: int
    stall_s: float  # seconds in which there was nothing to compute until a record came


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
        self._ids = np.zeros(context, np.int32)
        self._logits = np.empty(model.config.vocab_size, np.float32)
        self._failed = False
        self._start = cache.stats.copy()

    @property
    def position(self) -> int:
        """Tokens evaluated so far."""
        return self._state.position

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The tokens evaluated so far: (position,), a copy."""
        return self._ids[: self.position].copy()

    @property
    def stats(self) -> SessionStats:
        since = self._cache.stats - self._start
        return SessionStats(since.hits, since.misses + since.late, since.bytes_read, since.stall_s)

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
        is evaluated then), WasteError while another thread evaluates on this engine. A read error in the middle, or
        Ctrl-C, leaves the session unusable: later calls say so. The engine is as good as before.
        """
        tokens = self._checked(ids)
        if len(tokens) > 1:  # at once: the first chunk of a large model takes a while
            on_event(Progress("prefill", 0, len(tokens), "tokens"))
        self._cache.begin()
        self._failed = True  # until every chunk has gone through: the states are changed in place
        began = time.perf_counter()
        rows = []
        try:
            for begin in range(0, len(tokens), self._chunk):
                part = tokens[begin : begin + self._chunk]
                logits = self._model.forward(part, self._state, self._cache, all_logits=all_logits, trace=trace)
                rows.append(logits)
                if len(tokens) > 1:
                    on_event(Progress("prefill", begin + len(part), len(tokens), "tokens"))
            self._ids[self.position - len(tokens) : self.position] = tokens
            np.copyto(self._logits, rows[-1][-1])
            self._failed = False
            if len(tokens) == 1:
                self._cache.token(time.perf_counter() - began)
        except WasteError:
            self._cache.end()
            raise
        except BaseException:
            self._cache.tear()
            raise
        self._cache.end()
        return np.concatenate(rows) if all_logits else rows[-1][0]

    def sync(
        self, ids: Sequence[int] | npt.NDArray[np.integer], *, on_event: OnEvent = ignore
    ) -> npt.NDArray[np.float32]:
        """Go on to where `ids`, the whole timeline from its first token, ends: evaluates only what is new.

        Returns the logits after the last id, (V,) float32. Raises UsageError when the tokens held are not the first
        ones of `ids`, as a state cannot be rewound, and whatever `eval` raises.
        """
        self._refuse_failed()
        held = self.position
        common = store.common_prefix(self._ids[:held], ids)
        if common < held:
            raise UsageError(
                f"this session holds {held} tokens, and the {len(ids)} given differ from them after {common}",
                hint="start a new session",
            )
        if 0 < held == len(ids):
            return self._logits.copy()
        return self.eval(ids[held:], on_event=on_event)

    def checkpoint(self, file: store.StateWriter) -> None:
        """Add the state as it is now to `file`, if it is beyond the last one there.

        Raises WasteError after a failed `eval`, UsageError when nothing was evaluated yet, ResourceError where the
        file cannot be written.
        """
        self._refuse_failed()
        if self.position == 0:
            raise UsageError("an empty session cannot be saved")
        if self.position > file.position:
            file.add(self._model.ops, self._state, self._ids[: self.position], self._logits)

    def restore(
        self,
        path: Path,
        digest: int,
        ids: Sequence[int] | npt.NDArray[np.integer] | None = None,
        *,
        on_event: OnEvent = ignore,
    ) -> store.Restored:
        """Take over the state of a session file: what `Engine.restore` does with a new session. Errors as there."""
        self._refuse_failed()
        if self.position > 0:
            raise UsageError("only a new session can be restored")
        self._failed = True  # until the whole file is known to be sound
        found = store.restore(
            path,
            digest,
            self._model.ops,
            self._state,
            context=self._context,
            vocabulary=self._model.config.vocab_size,
            ids=ids,
            on_event=on_event,
        )
        if len(found.ids):
            self._ids[: len(found.ids)] = found.ids
            np.copyto(self._logits, found.logits)
        self._failed = False
        return found

    def _refuse_failed(self) -> None:
        self._cache.refuse_closed()
        if self._failed:
            raise WasteError("this session stopped in the middle of a token", hint="start a new session")

    def _checked(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        self._refuse_failed()
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
