"""Everything that can be known, and refused, before a byte is written: config, tensors, tokenizer, space, time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from waste import quant
from waste.convert.check import Inventory, check_tensors
from waste.convert.names import NameTable, table_for
from waste.convert.options import ConvertOptions
from waste.convert.source import Headers, Source, json_object, small_files, tensor_names
from waste.convert.texts import container_texts
from waste.convert.work import Work, work_for
from waste.io.files import shown
from waste.models.config import ModelConfig
from waste.models.formats import Formats
from waste.models.hf_config import CONFIG_FILE, GENERATION_FILE, from_hf, weight_block

# Nominal rates, for the forecast only: a SATA drive or a fast network read and written in turn.
_DRIVE_BYTES_PER_S = 500e6
_NETWORK_BYTES_PER_S = 50e6
_PROBE_ROWS, _PROBE_COLS = 256, 1024
_NAMED = 3  # tensors that a notice names; it counts the rest


@dataclass(frozen=True)
class Preflight:
    """What a conversion would do. Sizes in bytes; `write_bytes` is exact, to the last byte of the manifest."""

    source: str  # base name of the folder, or Hub id
    revision: str | None
    config: ModelConfig
    formats: Formats
    tensors: int  # of the checkpoint that are read, FP8 scales included
    weights: int  # numbers in them
    vision: tuple[str, ...]  # tensors that are left out for now
    copies: tuple[str, ...]  # tensors that repeat others
    unused: tuple[str, ...]  # tensors that nothing asks for
    notices: tuple[str, ...]
    download_bytes: int
    read_bytes: int
    write_bytes: int
    done_bytes: int  # of `write_bytes`, already there from an interrupted conversion
    needed_bytes: int  # that must be free at the target: journal, whole blocks and a download to the same drive too
    free_bytes: int  # at the target
    seconds: float  # expected, from a short measurement and nominal drive rates
    finished: bool = False  # the target holds exactly this already

    @property
    def fits(self) -> bool:
        """Whether the target has room for what is still to be written."""
        return self.finished or self.free_bytes >= self.needed_bytes


@dataclass(frozen=True)
class Prepared:
    """A checkpoint that was found convertible, with all that the conversion needs."""

    config: ModelConfig
    formats: Formats
    block: tuple[int, int]
    headers: Headers
    names: NameTable
    inventory: Inventory
    work: Work
    small: Mapping[str, bytes]  # files of the checkpoint
    texts: Mapping[str, bytes]  # files of the container
    notices: tuple[str, ...]


def prepare(source: Source, options: ConvertOptions) -> Prepared:
    """Check `source` from its cheapest side on: config, tokenizer, then every tensor's header. Reads no weights.

    Raises UnsupportedError for what cannot be converted, InputError for what is missing or damaged.
    """
    small = small_files(source.directory)
    raw = json_object(small[CONFIG_FILE], shown(source.directory / CONFIG_FILE))
    generation = None
    if GENERATION_FILE in small:
        generation = json_object(small[GENERATION_FILE], shown(source.directory / GENERATION_FILE))
    config, notices = from_hf(raw, generation, tensor_names=tensor_names(source.directory))
    block = weight_block(raw)
    texts, remarks = container_texts(small, source.directory, config.vocab_size)
    headers = source.headers()
    names = table_for(config.family, headers.tensors)
    formats = options.formats()
    work = work_for(config, formats, names)
    inventory = check_tensors(work, headers.tensors, block, source.label)
    notices = (*notices, *remarks, *_remarks(headers, inventory))
    return Prepared(config, formats, block, headers, names, inventory, work, small, texts, notices)


def _remarks(headers: Headers, inventory: Inventory) -> list[str]:
    """What is in the checkpoint and will not be in the container."""
    groups = (
        ("of vision, skipped: text only for now", inventory.vision),
        ("repeating the embedding or the head, skipped", inventory.copies),
        ("not used by the model", inventory.unused),
        ("in the files but not in the index, not read", headers.unindexed),
    )
    found = []
    for what, names in groups:
        if names:
            listed = ", ".join(repr(name) for name in names[:_NAMED])
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            found.append(f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {what}: {listed}{more}")
    return found


def with_local_headers(source: Source, prepared: Prepared) -> Prepared:
    """`prepared` again after the weights were fetched: what was known of remote headers is checked on the files."""
    headers = source.headers()
    inventory = check_tensors(prepared.work, headers.tensors, prepared.block, source.label)
    return replace(prepared, headers=headers, inventory=inventory)


def forecast(prepared: Prepared, threads: int, download: int, write: int) -> float:
    """Seconds that a conversion will take, roughly: encoding as measured now, drives and network at nominal rates.

    threads: that work at the same time, no more than there are cores.
    """
    weights: Counter[str] = Counter()
    for file in prepared.work.tensors:
        for item in file.items:
            weights[item.fmt] += item.spec.rows * item.spec.cols
    for bank in prepared.work.banks:
        for section in bank.layout.sections:
            weights[section.fmt] += bank.experts * section.rows * section.cols
    encoding = sum(count / _encode_rate(fmt) for fmt, count in weights.items()) / threads
    drives = (prepared.inventory.read_bytes + write) / _DRIVE_BYTES_PER_S
    return encoding + drives + download / _NETWORK_BYTES_PER_S


def _encode_rate(fmt: str) -> float:
    """Weights per second and thread, measured on a quarter of a million random ones."""
    weight = np.random.default_rng(0).standard_normal((_PROBE_ROWS, _PROBE_COLS), dtype=np.float32)
    began = time.perf_counter()
    quant.get(fmt).encode(weight)
    return float(weight.size / max(time.perf_counter() - began, 1e-6))
