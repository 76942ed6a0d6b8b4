"""A container of nano-glm whose weights went through ggml's types or our formats, for tools/quality.py to judge.

    waste convert examples/nano-glm exact.waste --experts f32 --trunk f32
    python tools/quality_ggml.py exact.waste iq3.waste --experts IQ3_XXS --trunk Q6_K --table Q8_0 --library LIB
    python tools/quality_ggml.py exact.waste wt3.waste --experts wt3 --trunk q6 --table q8
    python tools/quality.py exact.waste iq3.waste wt3.waste

Weights are encoded, decoded and stored in float32, so that both sides run the same float32 products and only the
weights differ. LIB is libggml-base of a ggml built with shared libraries; importance is flat.

nano-glm's widths of 64 and 96 fill neither ggml's blocks of 256 nor our groups of 128, those of a large model do. To
have a large model's error at a large model's bits, nothing is padded: the down matrices of experts lie side by side,
as many as make a multiple of 256 columns (eight), and narrow matrices of the trunk are cut anew into rows of 256.
Both sides alike. The bits that are printed hold for such widths. Norms, the router, convolutions and small matrices
stay exact, and so does the draft layer, which the evaluation does not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from ggml_library import F32Array, Quantiser, bits, decode
from gguf import GGMLQuantizationType

from waste import quant
from waste.container.layout import matrix_shape
from waste.container.manifest import MANIFEST_NAME, BankEntry, FileEntry, Manifest, TensorEntry
from waste.container.reader import Container
from waste.container.writer import BankWriter, TensorFileWriter
from waste.convert.sums import strip_sums
from waste.io.checksum import checksum
from waste.io.files import atomic_write
from waste.models.formats import MATRICES
from waste.models.spec import TRUNK_FILE, Role, trunk_specs
from waste.models.stored import stored_config
from waste.units import format_bytes

# What every width is made a multiple of: a superblock of ggml's types, two groups of ours.
BLOCK = 256
# Weights of GLM-5.3-Flash, draft layer included, by `waste.models.spec`: routed experts, trunk matrices, embedding and
# head. The rest is 1.1e8.
GLM_5_3_FLASH = {"experts": 311.65e9, "trunk": 7.72e9, "table": 1.27e9}

Lossy = Callable[[F32Array], F32Array]


def lossy(name: str, quantiser: Quantiser) -> Lossy:
    """Encode and decode a (rows, multiple of 256) matrix in one of our formats, or in a ggml type."""
    if name in quant.names():
        fmt = quant.get(name)
        return lambda weight: fmt.decode(fmt.encode(weight), *weight.shape)
    return lambda weight: decode(name, quantiser.encode(name, weight))


def bits_of(name: str) -> float:
    """Bits a weight for widths that need no padding."""
    return quant.get(name).bits if name in quant.names() else bits(name)


def recut(weight: F32Array, through: Lossy) -> F32Array:
    """A trunk matrix through a format: as it is, or cut anew into rows of 256 when its own do not fit."""
    wide = weight if weight.shape[1] % BLOCK == 0 else weight.reshape(-1, BLOCK)
    return through(np.ascontiguousarray(wide)).reshape(weight.shape)


def side_by_side(weights: F32Array, through: Lossy) -> F32Array:
    """(E, rows, K), one matrix of every expert, through a format, so many to a row that K is a multiple of 256."""
    experts, rows, cols = weights.shape
    together = math.lcm(cols, BLOCK) // cols
    if experts % together:
        raise ValueError(f"{experts} experts of width {cols} do not fill rows of a multiple of {BLOCK}")
    groups = weights.reshape(-1, together, rows, cols).transpose(0, 2, 1, 3)
    back = through(np.ascontiguousarray(groups).reshape(-1, together * cols))
    return np.ascontiguousarray(back.reshape(groups.shape).transpose(0, 2, 1, 3)).reshape(weights.shape)


def write_bank(exact: Container, entry: BankEntry, target: Path, through: tuple[Lossy, Lossy, Lossy]) -> BankEntry:
    """A bank of `exact` with gate, up and down through their formats."""
    record = np.empty(entry.layout.stride, np.uint8)
    parts = [np.empty((entry.experts, part.rows, part.cols), np.float32) for part in entry.layout.sections]
    with exact.bank(entry.layer) as bank:
        for expert in range(entry.experts):
            bank.read(expert, record)
            for part, section in zip(parts, entry.layout.sections, strict=True):
                blob = record[section.offset : section.offset + section.nbytes]
                part[expert] = blob.view("<f4").reshape(section.rows, section.cols)
    made = [side_by_side(part, go) for part, go in zip(parts, through, strict=True)]
    with BankWriter(target / entry.file, entry.layer, entry.layout) as writer:
        for gate, up, down in zip(*made, strict=True):
            writer.append(*(matrix.reshape(-1).view(np.uint8) for matrix in (gate, up, down)))
        return writer.seal()


def container(exact: Container, target: Path, formats: dict[str, str], quantiser: Quantiser) -> Manifest:
    """Write the new container but for its manifest, and return that. `formats`: gate, up, down, trunk, table."""
    through = {name: lossy(fmt, quantiser) for name, fmt in formats.items()}
    config = stored_config(exact.manifest)
    classes = dict.fromkeys(MATRICES, through["trunk"]) | {Role.TABLE: through["table"]}
    roles = {spec.name: spec.role for spec in trunk_specs(config)}
    tensors: list[TensorEntry] = []
    for file in exact.manifest.tensor_files():
        loaded = exact.load_tensors(file)
        with TensorFileWriter(target / file) as writer:
            for entry in exact.manifest.tensors_of(file):
                blob = loaded[entry.name]
                go = classes.get(roles[entry.name]) if file == TRUNK_FILE else None
                if go is not None:
                    matrix = blob.view("<f4").reshape(matrix_shape(entry.shape))
                    blob = np.ascontiguousarray(recut(matrix, go)).reshape(-1).view(np.uint8)
                writer.append(entry.name, "f32", entry.shape, blob)
            tensors += writer.seal()
    keep = lossy("f32", quantiser)
    banks = []
    for bank in exact.manifest.banks:
        evaluated = bank.layer in config.moe_layers
        chosen = (through["gate"], through["up"], through["down"]) if evaluated else (keep, keep, keep)
        banks.append(write_bank(exact, bank, target, chosen))
    files = {small.name: exact.read_file(small.name) for small in exact.manifest.files}
    files |= strip_sums(target, config, tensors)
    for name, data in files.items():
        (target / name).write_bytes(data)
    small = tuple(FileEntry(name, len(data), checksum(data)) for name, data in sorted(files.items()))
    return dataclasses.replace(exact.manifest, tensors=tuple(tensors), banks=tuple(banks), files=small)


def described(formats: dict[str, str]) -> Iterator[str]:
    """Bits of every class, then of all of GLM-5.3-Flash."""
    experts = sum(bits_of(formats[part]) for part in ("gate", "up", "down")) / 3
    classes = {"experts": experts, "trunk": bits_of(formats["trunk"]), "table": bits_of(formats["table"])}
    yield from (f"{name} {value:.4g}" for name, value in classes.items())
    total = sum(GLM_5_3_FLASH[name] * value / 8 for name, value in classes.items())
    yield f"GLM-5.3-Flash {format_bytes(round(total))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exact", type=Path, help="container with experts and trunk in f32")
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--experts", default="f32", help="a format, or two joined by a plus: gate and up, then down")
    parser.add_argument("--trunk", default="f32", help="attention, dense MLP, shared experts")
    parser.add_argument("--table", default="f32", help="embedding and head")
    parser.add_argument("--library", type=Path, help="libggml-base; Q8_0 and Q4_0 need none")
    chosen = parser.parse_args()
    inner, _, down = chosen.experts.partition("+")
    formats = {"gate": inner, "up": inner, "down": down or inner, "trunk": chosen.trunk, "table": chosen.table}
    for name in formats.values():
        if name not in quant.names() and name not in GGMLQuantizationType.__members__:
            parser.error(f"{name!r} is neither one of our formats, {', '.join(quant.names())}, nor a ggml type")
    exact = Container.open(chosen.exact)
    if set(exact.manifest.formats.values()) != {"f32"}:
        parser.error(f"{chosen.exact} is not a container with all weights in f32")
    chosen.target.mkdir(parents=True)
    manifest = container(exact, chosen.target, formats, Quantiser(chosen.library))
    atomic_write(chosen.target / MANIFEST_NAME, manifest.to_bytes())
    print(f"{chosen.target.name}: bits a weight: {', '.join(described(formats))}")


if __name__ == "__main__":
    main()
