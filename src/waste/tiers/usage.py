"""How often each expert was used: learned by runs, kept in `usage.json` beside the model, read by the next start.

A count is the number of tokens that chose an expert, faded: what a run adds is added whole, and when a layer's uses
exceed `WINDOW_USES` all counts are scaled back to it,

    counts = (old + new) * min(1, WINDOW_USES / most uses of any layer),

so that a run's share of the file falls with every run after it, and nothing at all is lost before the file is full.

Any number of processes may merge at once. The file is never needed: whatever is wrong with it, it is as if it were
not there, and the next run writes a new one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from waste.errors import WasteError
from waste.io.files import atomic_write, read_file, writing

FILE = "usage.json"
LOCK_SUFFIX = ".lock"
SCHEMA = "waste.usage/1"

# 50,000 tokens of a model that uses eight experts a layer: some hundred conversations. A topic that is no longer
# asked about has lost half its weight after as many tokens again.
WINDOW_USES = 400_000

# A merge takes milliseconds. Whoever holds the lock longer was stopped in the middle of it, and is not waited for.
LOCK_WAIT_S = 5.0
_LOCK_POLL_S = 0.01

_BYTES_PER_COUNT, _OTHER_BYTES = 24, 64 << 10  # the longest text of a number written here is below 20 characters

Counts = npt.NDArray[np.float64]  # (E,)


class Usage:
    """Counts by layer. `layers` are those with routed experts; every one has `experts` of them."""

    def __init__(self, layers: Sequence[int], experts: int) -> None:
        """No uses yet. Each of the arrays in `counts` may be added to in place."""
        self.experts = experts
        self.counts: dict[int, Counts] = {layer: np.zeros(experts) for layer in layers}

    def add(self, layer: int, ids: npt.NDArray[np.integer]) -> None:
        """Every entry of `ids`, of any shape, is one use: what the router chose for each token."""
        self.counts[layer] += np.bincount(ids.ravel(), minlength=self.experts)

    @property
    def uses(self) -> float:
        """Of the layer that was used most; all have the same but for interrupted tokens."""
        return max((float(counts.sum()) for counts in self.counts.values()), default=0.0)

    # -- what the counts say

    def hottest(self, n: int | None = None) -> list[tuple[int, int]]:
        """The (layer, expert) that were used, most often first, at most `n`. Ties: lower layer, then lower expert."""
        layers = list(self.counts)
        table = np.array(list(self.counts.values())).reshape(len(layers), self.experts).ravel()
        order = np.argsort(-table, kind="stable")[: int(np.count_nonzero(table))][:n]
        return [(layers[i // self.experts], i % self.experts) for i in order.tolist()]

    # -- the file

    @staticmethod
    def load(path: Path, layers: Sequence[int], experts: int) -> Usage | None:
        """The counts at `path`; None where there is no file, or none that fits this model. Never fails."""
        usage = Usage(layers, experts)
        try:
            data = read_file(path, limit=_BYTES_PER_COUNT * len(layers) * experts + _OTHER_BYTES)
            usage.counts |= _counts(json.loads(data), usage.counts.keys(), experts)
        except (WasteError, ValueError, OverflowError, RecursionError):
            return None
        return usage

    def merge_into(self, path: Path) -> str | None:
        """Add these counts to the file, and fade it. None, or why that could not be done, on one line.

        Atomic: whoever reads sees the file before or after, also when this process is killed in between. The lock
        beside the file ends with the process that holds it.
        """
        if self.uses == 0:
            return None
        try:
            with writing(path):
                lock = _lock(path)
            try:
                known = Usage.load(path, list(self.counts), self.experts)
                merged = Usage(list(self.counts), self.experts)
                for layer, counts in self.counts.items():
                    merged.counts[layer] = counts + (known.counts[layer] if known else 0)
                atomic_write(path, merged._document())
            finally:
                os.close(lock)
        except WasteError as error:
            return error.message
        return None

    def _document(self) -> bytes:
        """One line a layer. Three decimals: a single use that has faded to less than a thousandth is forgotten."""
        scale = min(1.0, WINDOW_USES / max(self.uses, 1.0))
        layers = ",\n".join(
            f'"{layer}": {json.dumps([_short(count) for count in (counts * scale).tolist()], separators=(",", ":"))}'
            for layer, counts in self.counts.items()
        )
        return f'{{"schema": "{SCHEMA}", "experts": {self.experts}, "counts": {{\n{layers}\n}}}}\n'.encode("ascii")


def _short(count: float) -> float | int:
    rounded = round(count, 3)
    return int(rounded) if rounded.is_integer() else rounded


def _counts(document: object, layers: Iterable[int], experts: int) -> Mapping[int, Counts]:
    """The counts in a parsed file; ValueError for anything but a file of this model."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or document.get("experts") != experts:
        raise ValueError("no usage of this model")
    tables = document.get("counts")
    if not isinstance(tables, dict) or tables.keys() != {str(layer) for layer in layers}:
        raise ValueError("other layers")
    return {layer: _row(tables[str(layer)], experts) for layer in layers}


def _row(values: object, experts: int) -> Counts:
    if not isinstance(values, list) or len(values) != experts or not set(map(type, values)) <= {int, float}:
        raise ValueError("not a count for each expert")
    row = np.array(values, np.float64)
    # Beyond the window was not written here; infinities and NaN, which compare with nothing, would spoil every sum.
    if not ((row >= 0) & (row <= WINDOW_USES)).all():
        raise ValueError("not a count")
    return row


def _lock(path: Path) -> int:
    """A descriptor that holds the lock beside `path`; closing it lets go. OSError when it cannot be had."""
    place = path.with_name(path.name + LOCK_SUFFIX)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        # Neither through a link to somewhere else, nor waiting at a pipe that somebody put there.
        fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), place.stat()):
                return fd  # and no file that was deleted meanwhile, whose lock is nobody else's
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() >= deadline:
            raise OSError(errno.EWOULDBLOCK, "another process holds its lock")
        time.sleep(_LOCK_POLL_S)
