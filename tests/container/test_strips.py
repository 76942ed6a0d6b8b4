"""Strips of a stored matrix: every byte of a tensor has one checksum, and what is read is verified against it."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste import quant
from waste.container import strips as strips_module
from waste.container.manifest import FileEntry, Manifest, TensorEntry
from waste.container.reader import Container
from waste.container.strips import StripFile, Strips, computed_sums, stored_sums, sums_name
from waste.container.verify import verify
from waste.container.writer import TensorFileWriter
from waste.errors import InputError
from waste.io.checksum import checksum

SIZES = st.tuples(st.integers(1, 70), st.integers(1, 300))


def written(path: Path, fmt: str, shape: tuple[int, int]) -> tuple[TensorEntry, bytes]:
    """A random matrix between two others in a tensor file; its entry, and its bytes with the padding."""
    rng = np.random.default_rng(shape)
    with TensorFileWriter(path) as writer:
        writer.append("before", "f32", (3,), rng.integers(0, 256, 12, np.uint8))
        blob = rng.integers(0, 256, quant.get(fmt).nbytes(*shape), np.uint8)
        entry = writer.append("table.weight", fmt, shape, blob)
        writer.append("after", "f32", (3,), rng.integers(0, 256, 12, np.uint8))
        writer.seal()
    return entry, blob.tobytes() + bytes(-len(blob) % 64)


@given(fmt=st.sampled_from(quant.names()), shape=SIZES)
def test_strips_tile_the_tensor_with_its_padding(fmt: str, shape: tuple[int, int]) -> None:
    strips = Strips.of(fmt, shape)
    rows, cols = shape
    assert strips.count == -(-rows // 16)
    assert strips.nbytes == quant.get(fmt).nbytes(16, cols)
    assert sum(strips.size(i) for i in range(strips.count)) == strips.end
    assert strips.end - quant.get(fmt).nbytes(rows, cols) in range(64)
    assert strips.end % 64 == 0
    assert strips.longest == max(strips.nbytes, *(strips.size(i) for i in range(strips.count)))
    assert strips.longest - strips.nbytes in range(64)


@given(fmt=st.sampled_from(quant.names()), shape=SIZES, seed=st.integers(0, 1 << 32))
def test_a_strip_is_its_rows_encoded_alone(fmt: str, shape: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(shape).astype(np.float32)
    form, strips = quant.get(fmt), Strips.of(fmt, shape)
    blob = form.encode(weight)
    strip = int(rng.integers(strips.count))
    alone = form.encode(weight[16 * strip : 16 * strip + 16])
    assert blob[strip * strips.nbytes :][: strips.nbytes].tobytes() == alone.tobytes()


@pytest.mark.parametrize("fmt", quant.names())
def test_a_flipped_byte_changes_exactly_one_checksum(tmp_path: Path, fmt: str) -> None:
    rng = random.Random(4)
    entry, data = written(tmp_path / "t.bin", fmt, (53, 130))
    strips = Strips.of(fmt, entry.shape)
    clean = strips.sums(np.frombuffer(data, np.uint8))
    assert [int(value) for value in clean] == [
        checksum(data[i * strips.nbytes :][: strips.size(i)]) for i in range(strips.count)
    ]
    for at in {0, len(data) - 1, entry.nbytes - 1, *(rng.randrange(len(data)) for _ in range(20))}:
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        changed = np.flatnonzero(strips.sums(np.frombuffer(damaged, np.uint8)) != clean)
        assert changed.tolist() == [min(at // strips.nbytes, strips.count - 1)]


@pytest.mark.parametrize("fmt", quant.names())
@pytest.mark.parametrize("piece", [1, 5000, 1 << 22])
def test_sums_of_a_file_are_those_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: str, piece: int
) -> None:
    monkeypatch.setattr(strips_module, "_PIECE", piece)
    for shape in ((1, 1), (16, 128), (47, 200), (64, 64)):
        entry, data = written(tmp_path / "t.bin", fmt, shape)
        strips = Strips.of(fmt, shape)
        sums = computed_sums(tmp_path / "t.bin", entry)
        assert len(sums) == strips.sums_bytes
        assert sums == strips.sums(np.frombuffer(data, np.uint8)).tobytes()


def test_no_sums_are_taken_of_a_damaged_tensor(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    entry, _ = written(path, "q8", (40, 40))
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.nbytes] ^= 1  # its padding
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"t\.bin', tensor 'table.weight' is damaged"):
        computed_sums(path, entry)
    os.truncate(path, entry.offset + 100)
    with pytest.raises(InputError, match=r"t\.bin', tensor 'table.weight': the file ends"):
        computed_sums(path, entry)


@pytest.mark.parametrize("fmt", quant.names())
def test_strips_are_read_one_behind_another(tmp_path: Path, fmt: str) -> None:
    path = tmp_path / "t.bin"
    entry, data = written(path, fmt, (71, 130))
    strips = Strips.of(fmt, entry.shape)
    file = StripFile(path, entry, np.frombuffer(computed_sums(path, entry), "<u8"))
    for chosen in ([0], [4], [1, 3], [0, 4], [0, 1, 2, 3, 4]):
        out = np.full(5 * strips.nbytes + 64, 7, np.uint8)
        file.read(chosen, out)
        expected = b"".join(data[i * strips.nbytes :][: strips.size(i)] for i in chosen)
        assert out.tobytes() == expected + b"\7" * (len(out) - len(expected))
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read([0], np.empty(strips.longest, np.uint8))


def test_damage_is_told_by_its_rows_and_the_other_strips_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    entry, _ = written(path, "q8", (53, 130))
    strips = Strips.of("q8", entry.shape)
    file = StripFile(path, entry, np.frombuffer(computed_sums(path, entry), "<u8"))
    out = np.empty(strips.nbytes * 4 + 64, np.uint8)
    for strip, rows in ((0, "0 to 15"), (2, "32 to 47"), (3, "48 to 52")):
        for at in (strip * strips.nbytes, strip * strips.nbytes + strips.size(strip) - 1):
            broken = bytearray(path.read_bytes())
            broken[entry.offset + at] ^= 8
            with path.open("r+b") as same:  # the file that is open
                same.write(broken)
            with pytest.raises(
                InputError, match=rf"t\.bin', tensor 'table.weight' is damaged in rows {rows}: expected"
            ):
                file.read([0, 1, 2, 3], out)
            file.read([i for i in range(4) if i != strip], out)
            broken[entry.offset + at] ^= 8
            with path.open("r+b") as same:
                same.write(broken)
    os.truncate(path, entry.offset + 2 * strips.nbytes + 5)
    file.read([0, 1], out)
    with pytest.raises(InputError, match=r"tensor 'table.weight': the file ends at byte \d+"):
        file.read([2], out)
    file.close()


# -- in a container


def with_sums(tiny: Any, data: bytes | None = None) -> Container:
    """The container `tiny`, with a file of strip checksums for its tensor "head"; `data` instead of the right one."""
    entry = next(entry for entry in tiny.manifest.tensors if entry.name == "head")
    data = computed_sums(tiny.path / entry.file, entry) if data is None else data
    (tiny.path / "head.sums").write_bytes(data)
    files = (*tiny.manifest.files, FileEntry("head.sums", len(data), checksum(data)))
    manifest = replace(tiny.manifest, files=files)
    (tiny.path / "manifest.json").write_bytes(manifest.to_bytes())
    return Container.open(tiny.path)


def head(manifest: Manifest) -> TensorEntry:
    return next(entry for entry in manifest.tensors if entry.name == "head")


def test_a_container_has_them_or_not(tiny: Any) -> None:
    assert sums_name("embed_tokens.weight") == "embed_tokens.sums"
    assert sums_name("head") == "head.sums"
    entry = head(tiny.manifest)
    assert stored_sums(Container.open(tiny.path), entry) is None
    container = with_sums(tiny)
    found = stored_sums(container, entry)
    assert found is not None
    assert found.tobytes() == computed_sums(tiny.path / entry.file, entry)
    assert verify(container) == []


@pytest.mark.parametrize("nbytes", [0, 8, 15, 24])
def test_too_many_or_too_few_are_refused(tiny: Any, nbytes: int) -> None:
    container = with_sums(tiny, bytes(nbytes))
    with pytest.raises(InputError, match=rf"head\.sums' has {nbytes} bytes, expected 16: 8 for each of the 2 strips"):
        stored_sums(container, head(container.manifest))


def test_verify_compares_them_with_the_tensor(tiny: Any) -> None:
    sums = bytearray(computed_sums(tiny.path / "trunk.bin", head(tiny.manifest)))
    sums[9] ^= 1
    damage = verify(with_sums(tiny, bytes(sums)))  # a file that is whole, by its digest
    assert len(damage) == 1
    assert "head.sums' does not belong to tensor 'head': 1 of 2 strips" in damage[0]
    assert "the first is strip 1" in damage[0]
    assert len(verify(with_sums(tiny, bytes(24)))) == 1


def test_every_flip_is_found_once_by_verify(tiny: Any) -> None:
    container = with_sums(tiny)
    rng = random.Random(8)
    for name in ("head.sums", "trunk.bin"):
        path = tiny.path / name
        clean = path.read_bytes()
        for position in rng.sample(range(len(clean)), min(40, len(clean))):
            broken = bytearray(clean)
            broken[position] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
            assert len(verify(container)) == 1
        path.write_bytes(clean)
    assert verify(container) == []
