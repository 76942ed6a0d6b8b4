"""What a conversion writes, file by file and item by item, and which source tensors each item is made of.

Preflight sums it up, the pipeline carries it out, and both walk the same lists: so what is announced is what is
written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from waste.container.layout import TRUNK_ALIGN, RecordLayout, align_up
from waste.convert.names import NameTable
from waste.models.config import ModelConfig
from waste.models.formats import Formats
from waste.models.spec import (
    DRAFT_FILE,
    TRUNK_FILE,
    TensorSpec,
    bank_layers,
    bank_name,
    draft_specs,
    expert_sources,
    trunk_specs,
)


@dataclass(frozen=True)
class TensorItem:
    """One stored tensor: what it is, the format it gets, and the checkpoint's name of its source."""

    spec: TensorSpec
    fmt: str
    source: str


@dataclass(frozen=True)
class TensorFile:
    """trunk.bin or draft.bin: items in order of their place in the file."""

    name: str
    items: tuple[TensorItem, ...]
    nbytes: int


@dataclass(frozen=True)
class BankFile:
    """The expert records of one layer."""

    name: str
    layer: int
    experts: int
    layout: RecordLayout
    config: ModelConfig
    names: NameTable

    @property
    def nbytes(self) -> int:
        return self.experts * self.layout.stride

    def sources(self, expert: int) -> tuple[tuple[TensorSpec, str], ...]:
        """(spec, checkpoint's name) of gate, up and down of one expert."""
        specs = expert_sources(self.config, self.layer, expert)
        return tuple((spec, self.names.release(spec.source)) for spec in specs)


@dataclass(frozen=True)
class Work:
    """All files with weights, in the order in which they are written."""

    tensors: tuple[TensorFile, ...]
    banks: tuple[BankFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all these files."""
        return sum(file.nbytes for file in self.tensors) + sum(bank.nbytes for bank in self.banks)

    def sources(self) -> Iterator[tuple[TensorSpec, str]]:
        """(spec, checkpoint's name) of every source tensor, each once, in order of first use."""
        last = ""
        for file in self.tensors:
            for item in file.items:
                # The two halves of kv_b follow each other.
                if item.source != last:
                    yield item.spec, item.source
                last = item.source
        for bank in self.banks:
            for expert in range(bank.experts):
                yield from bank.sources(expert)


def work_for(config: ModelConfig, formats: Formats, names: NameTable) -> Work:
    """Everything that `config` needs, in `formats`, from a checkpoint that spells its tensors as `names`."""
    files = [_tensor_file(TRUNK_FILE, trunk_specs(config), formats, names)]
    draft = draft_specs(config)
    if draft:
        files.append(_tensor_file(DRAFT_FILE, draft, formats, names))
    layout = formats.record(config)
    experts = config.router.experts
    banks = [BankFile(bank_name(i), i, experts, layout, config, names) for i in bank_layers(config)]
    return Work(tuple(files), tuple(banks))


def _tensor_file(name: str, specs: list[TensorSpec], formats: Formats, names: NameTable) -> TensorFile:
    items = tuple(TensorItem(spec, formats.of(spec), names.release(spec.source)) for spec in specs)
    return TensorFile(name, items, sum(align_up(formats.nbytes(spec), TRUNK_ALIGN) for spec in specs))
