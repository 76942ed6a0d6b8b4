"""A small finished container with every kind of content, and the parts it was made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from waste import quant
from waste.container.layout import RecordLayout, matrix_shape
from waste.container.manifest import FileEntry, Manifest
from waste.container.writer import BankWriter, TensorFileWriter
from waste.io.checksum import checksum
from waste.io.files import atomic_write

HIDDEN, INNER, EXPERTS = 40, 24, 3


@dataclass(frozen=True)
class Tiny:
    """What lies in the container that `build` wrote to `path`."""

    path: Path
    manifest: Manifest
    tensors: dict[str, np.ndarray]  # name -> encoded bytes
    experts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]  # (layer, expert) -> blobs


def encoded_experts(seed: int, layout: RecordLayout) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blobs of gate, up and down for each expert of a layer."""
    rng = np.random.default_rng(seed)
    return [
        tuple(
            quant.get(section.fmt).encode(rng.standard_normal((section.rows, section.cols)).astype(np.float32))
            for section in layout.sections
        )
        for _ in range(EXPERTS)
    ]


def build(path: Path, seed: int = 0) -> Tiny:
    """Write a container with two tensor files, two banks and two small files."""
    path.mkdir()
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    entries = []
    for file, specs in (
        ("trunk.bin", [("norm", "f32", (5,)), ("conv", "f32", (6, 1, 4)), ("head", "q8", (17, 130)), ("s", "f32", ())]),
        ("draft.bin", [("proj", "q4", (3, 9)), ("plain", "bf16", (7, 3))]),
    ):
        with TensorFileWriter(path / file) as writer:
            for name, fmt, shape in specs:
                weight = rng.standard_normal(matrix_shape(shape)).astype(np.float32)
                tensors[name] = quant.get(fmt).encode(weight)
                writer.append(name, fmt, shape, tensors[name])
            entries.extend(writer.seal())
    experts, banks = {}, []
    for layer, fmts in ((1, ("q4", "q4", "q8")), (4, ("bf16", "q8", "f32"))):
        layout = RecordLayout.of(*fmts, HIDDEN, INNER)
        with BankWriter(path / f"experts-{layer:03d}.bin", layer, layout) as bank:
            for expert, blobs in enumerate(encoded_experts(seed + layer, layout)):
                experts[layer, expert] = blobs
                bank.append(*blobs)
            banks.append(bank.seal())
    files = []
    for name, data in (("tokenizer.json", b'{"a": 1}'), ("chat_template.jinja", b"{{ x }}")):
        atomic_write(path / name, data)
        files.append(FileEntry(name, len(data), checksum(data)))
    manifest = Manifest(
        tool="0.0.0",
        options={"experts": "q4", "threads": 2, "exact": False, "note": None},
        provenance={"source": "a/b", "files": {"model.safetensors": {"nbytes": 7, "digest": "00"}}},
        architecture="tiny",
        config={"hidden_size": HIDDEN, "eps": 1e-5, "names": ["Zoë", "\ud83d"]},
        stop_ids=(1, 2, 7),
        formats={"experts.gate": "q4"},
        tensors=tuple(entries),
        banks=tuple(banks),
        files=tuple(files),
    )
    atomic_write(path / "manifest.json", manifest.to_bytes())
    return Tiny(path, manifest, tensors, experts)


@pytest.fixture
def build_container() -> Callable[..., Tiny]:
    return build


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return build(tmp_path / "tiny.waste")
