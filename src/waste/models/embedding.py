"""The embedding table: in memory, or on disk with a few rows in memory at a time.

A token needs one row of a table that takes 0.65 GB of GLM-5.3-Flash's memory: room for 50 experts. So the table stays
on disk where the container has a checksum for each of its strips (`container.strips`) and nothing else needs it; a
head that is tied to it reads all of it for every token. Both ways give the same bits: the backend decodes the same
bytes, only by other row numbers. A strip of 65 KiB costs a token 12 us more than a row in memory, 0.14 ms when the
drive has to read it (LEARNED: trunk-load).
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from waste.backends.base import Array, Bytes, Ids, Ops, Weight
from waste.container.manifest import Manifest, TensorEntry
from waste.container.reader import Container
from waste.container.strips import StripFile, Strips, stored_sums, sums_name
from waste.io.buffers import aligned
from waste.models.config import ModelConfig
from waste.models.spec import EMBEDDING
from waste.quant.strips import STRIP_ROWS


class Embedding(Protocol):
    """Rows of the table by token id."""

    def rows(self, ops: Ops, ids: Ids) -> Array:
        """ids (T,) int64 -> (T, D) float32. IndexError for an id outside the table."""
        ...

    def close(self) -> None:
        """Let go of what is open."""
        ...


class ResidentEmbedding:
    """The whole table in memory."""

    def __init__(self, table: Weight) -> None:
        self._table = table

    def rows(self, ops: Ops, ids: Ids) -> Array:
        return ops.embed(self._table, ids)

    def close(self) -> None:
        """Nothing is open."""


class StreamedEmbedding:
    """The table on disk: the strips that a chunk needs are read, verified, and handed to the backend as a small table.

    `rows` raises InputError for a damaged strip and read errors. Threads may share it.
    """

    def __init__(self, file: StripFile) -> None:
        self._file = file
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._lock = threading.Lock()  # the buffer serves one chunk at a time

    def rows(self, ops: Ops, ids: Ids) -> Array:
        entry, strips = self._file.entry, self._file.strips
        rows, cols = entry.shape
        needed, local = _strips_of(ids, rows)
        with self._lock:
            table = self._room(len(needed))
            self._file.read(needed, table)
            # All strips but the table's last are whole, and what is behind its last row no id asks for.
            blob = table[: len(needed) * strips.nbytes]
            return ops.embed(ops.weight(blob, entry.fmt, len(needed) * STRIP_ROWS, cols), local)

    def close(self) -> None:
        """Close the file. Not while another thread reads."""
        self._file.close()

    def _room(self, count: int) -> Bytes:
        """Memory for `count` strips; it grows to that of the largest chunk and stays."""
        strips = self._file.strips
        nbytes = (count - 1) * strips.nbytes + strips.longest
        if nbytes > len(self._buffer):
            self._buffer = aligned(nbytes)
        return self._buffer


def _strips_of(ids: Ids, rows: int) -> tuple[list[int], Ids]:
    """The strips that hold `ids`, ascending, and where each id's row is when they lie one behind another."""
    if len(ids) == 1:  # decode: 1 us, of 14 that the general way takes
        token = int(ids[0])
        if not 0 <= token < rows:
            raise IndexError(f"token id {token} in a table of {rows} rows")
        return [token // STRIP_ROWS], np.array([token % STRIP_ROWS], np.int64)
    outside = ids[(ids < 0) | (ids >= rows)]
    if len(outside):
        raise IndexError(f"token id {int(outside[0])} in a table of {rows} rows")
    needed, place = np.unique(ids // STRIP_ROWS, return_inverse=True)
    return needed.tolist(), place * STRIP_ROWS + ids % STRIP_ROWS


def streams_embedding(config: ModelConfig, manifest: Manifest) -> bool:
    """Whether a run leaves the table on disk: its strips have checksums, and the head does not need it."""
    name = sums_name(EMBEDDING)
    return not config.tie_word_embeddings and any(file.name == name for file in manifest.files)


def open_streamed(container: Container, config: ModelConfig) -> StreamedEmbedding | None:
    """The table where it lies, opened; None for one that belongs into memory. InputError for damaged checksums."""
    if not streams_embedding(config, container.manifest):
        return None
    entry = table_entry(container.manifest)
    sums = stored_sums(container, entry)
    assert sums is not None
    return StreamedEmbedding(StripFile(container.path / entry.file, entry, sums))


def table_entry(manifest: Manifest) -> TensorEntry:
    """The table of a manifest that agrees with its model (`models.stored`)."""
    return next(entry for entry in manifest.tensors if entry.name == EMBEDDING)


def streamed_bytes(strips: Strips, tokens: int) -> int:
    """Memory that a table on disk takes at most while chunks of `tokens` go through it."""
    return (min(tokens, strips.count) - 1) * strips.nbytes + strips.longest + strips.sums_bytes
