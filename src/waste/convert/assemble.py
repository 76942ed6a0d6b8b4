"""The manifest of a conversion, and the exact size of a container before any of it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from waste import quant
from waste.container.layout import TRUNK_ALIGN, align_up, matrix_shape
from waste.container.manifest import BankEntry, FileEntry, Manifest, TensorEntry
from waste.convert.preflight import Prepared
from waste.convert.provenance import describe, sketch
from waste.convert.source import Source
from waste.convert.sums import unknown_sums
from waste.convert.work import Work
from waste.io.checksum import checksum

_LINE_BYTES = 320  # of a line of the journal but for names: at most five numbers, three digests and their keys
_BLOCK_BYTES = 4096


def tool_version() -> str:
    """The version of this package, as manifests carry it."""
    try:
        return version("waste")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"


def assemble(
    prepared: Prepared,
    provenance: dict[str, Any],
    tensors: Sequence[TensorEntry],
    banks: Sequence[BankEntry],
    files: Mapping[str, bytes],
) -> Manifest:
    """The manifest of a container with these contents. `files`: all small ones."""
    config = prepared.config
    return Manifest(
        tool=tool_version(),
        options=dict(prepared.formats.texts()),
        provenance=provenance,
        architecture=config.family,
        config=config.to_json(),
        stop_ids=config.eos_token_ids,
        formats=dict(vars(prepared.formats)),
        tensors=tuple(tensors),
        banks=tuple(banks),
        files=tuple(FileEntry(name, len(data), checksum(data)) for name, data in sorted(files.items())),
    )


def container_bytes(source: Source, prepared: Prepared) -> int:
    """Size in bytes of the whole container. Exact: checksums have a fixed length, everything else is known."""
    provenance = describe(
        sketch(source, prepared.headers, prepared.small, prepared.formats, tool_version()), prepared.headers, {}
    )
    tensors, banks = _placeholders(prepared.work)
    files = {**prepared.texts, **unknown_sums(prepared.config, tensors)}
    manifest = assemble(prepared, provenance, tensors, banks, files)
    return sum(manifest.file_sizes().values()) + len(manifest.to_bytes())


def room_bytes(source: Source, prepared: Prepared, container: int) -> int:
    """Bytes that writing a container of `container` bytes takes at most: its journal lies beside it until the end, and
    every file fills whole blocks."""
    work = prepared.work
    identity = sketch(source, prepared.headers, prepared.small, prepared.formats, tool_version())
    journal = _LINE_BYTES + len(json.dumps(identity.to_json()))
    for file in work.tensors:
        journal += _LINE_BYTES + sum(_LINE_BYTES + len(item.spec.name) + len(item.source) for item in file.items)
    for bank in work.banks:
        names = sum(len(name) for expert in range(bank.experts) for _, name in bank.sources(expert))
        journal += _LINE_BYTES + bank.experts * _LINE_BYTES + names
    files = len(work.tensors) + len(work.banks) + len(prepared.texts) + 3  # sums, the manifest, the journal
    return container + journal + files * _BLOCK_BYTES


def _placeholders(work: Work) -> tuple[list[TensorEntry], list[BankEntry]]:
    """The entries that the finished work will have, with zeros for checksums."""
    tensors = []
    for file in work.tensors:
        offset = 0
        for item in file.items:
            nbytes = quant.get(item.fmt).nbytes(*matrix_shape(item.spec.shape))
            tensors.append(TensorEntry(item.spec.name, file.name, item.fmt, item.spec.shape, offset, nbytes, 0))
            offset = align_up(offset + nbytes, TRUNK_ALIGN)
    return tensors, [BankEntry(bank.layer, bank.name, bank.experts, bank.layout, 0) for bank in work.banks]
