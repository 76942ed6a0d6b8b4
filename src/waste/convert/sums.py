"""The checksums of the embedding's strips, which let a run leave the table on disk and read a row at a time.

They are taken from the finished tensor file, at the end: so they are the same whether a conversion was interrupted or
not, and what they vouch for is what lies on the drive. That reads the table once more, 0.65 GB of GLM-5.3-Flash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from waste.container.manifest import TensorEntry
from waste.container.strips import Strips, computed_sums, sums_name
from waste.convert.provenance import RESTART_HINT
from waste.errors import InputError
from waste.models.config import ModelConfig
from waste.models.spec import EMBEDDING


def strip_sums(directory: Path, config: ModelConfig, tensors: Sequence[TensorEntry]) -> dict[str, bytes]:
    """Name and content of the small file, from the finished `tensors` in `directory`; empty for a tied embedding.

    A head that is tied to it reads all of it, so such a table is loaded as a whole. Raises InputError when the table is
    no longer what was written.
    """
    try:
        return {
            sums_name(entry.name): computed_sums(directory / entry.file, entry) for entry in _streamed(config, tensors)
        }
    except InputError as error:
        raise InputError(error.message, hint=RESTART_HINT) from error


def unknown_sums(config: ModelConfig, tensors: Sequence[TensorEntry]) -> dict[str, bytes]:
    """As `strip_sums`, with zeros for checksums: what is known before anything is written."""
    return {
        sums_name(entry.name): bytes(Strips.of(entry.fmt, entry.shape).sums_bytes)
        for entry in _streamed(config, tensors)
    }


def _streamed(config: ModelConfig, tensors: Sequence[TensorEntry]) -> Iterator[TensorEntry]:
    if not config.tie_word_embeddings:
        yield from (entry for entry in tensors if entry.name == EMBEDDING)
