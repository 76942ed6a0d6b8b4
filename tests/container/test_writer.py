"""Resuming: from any cut, any damage, any journal state, the result is what one uninterrupted run writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from waste import quant
from waste.container.layout import RecordLayout, bank_digest
from waste.container.writer import BankWriter, TensorFileWriter
from waste.errors import ResourceError

LAYOUT = RecordLayout.of("q4", "q8", "bf16", 33, 17)
EXPERTS = 5
SPECS = [
    ("a", "f32", (5,)),
    ("b", "q8", (40, 130)),
    ("c", "bf16", (3, 7)),
    ("d", "q4", (1, 1)),
    ("e", "f32", (2, 1, 3)),
]


def tensor_blobs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"a": (5, 1), "b": (40, 130), "c": (3, 7), "d": (1, 1), "e": (2, 3)}
    return {name: quant.get(fmt).encode(rng.standard_normal(shapes[name]).astype(np.float32)) for name, fmt, _ in SPECS}


def expert_blobs(expert: int) -> list[np.ndarray]:
    rng = np.random.default_rng(100 + expert)
    return [rng.integers(0, 256, section.nbytes).astype(np.uint8) for section in LAYOUT.sections]


def write_tensors(path: Path, *, resume: bool = False, entries: tuple = ()) -> tuple:
    blobs = tensor_blobs()
    with TensorFileWriter(path, resume=resume) as writer:
        done = writer.verify_prefix(entries)
        for name, fmt, shape in SPECS[done:]:
            writer.append(name, fmt, shape, blobs[name])
        return writer.seal()


def write_bank(path: Path, *, resume: bool = False, checksums: tuple[int, ...] = ()):
    with BankWriter(path, 3, LAYOUT, resume=resume) as writer:
        for expert in range(writer.verify_prefix(checksums), EXPERTS):
            writer.append(*expert_blobs(expert))
        return writer.seal(), writer.checksums


def test_tensors_lie_one_after_another_on_64_bytes_between_zeros(tmp_path: Path) -> None:
    entries = write_tensors(tmp_path / "t.bin")
    data = (tmp_path / "t.bin").read_bytes()
    expected = b""
    for entry, blob in zip(entries, tensor_blobs().values(), strict=True):
        assert (entry.offset, entry.nbytes, entry.file) == (len(expected), len(blob), "t.bin")
        expected += blob.tobytes() + bytes(-len(blob) % 64)
    assert data == expected
    assert not (tmp_path / "t.bin.part").exists()


def test_nothing_has_the_final_name_before_it_is_sealed(tmp_path: Path) -> None:
    with TensorFileWriter(tmp_path / "t.bin") as writer, BankWriter(tmp_path / "b.bin", 0, LAYOUT) as bank:
        writer.append("a", "f32", (5,), tensor_blobs()["a"])
        bank.append(*expert_blobs(0))
        writer.sync()
        bank.sync()
        assert sorted(os.listdir(tmp_path)) == ["b.bin.part", "t.bin.part"]
    assert sorted(os.listdir(tmp_path)) == ["b.bin.part", "t.bin.part"]
    with pytest.raises(ValueError, match="closed"):
        writer.append("b", "f32", (5,), tensor_blobs()["a"])


def test_a_tensor_in_pieces_is_the_tensor(tmp_path: Path) -> None:
    blob = tensor_blobs()["b"]
    with TensorFileWriter(tmp_path / "t.bin") as writer:
        whole = writer.append("whole", "q8", (40, 130), blob)
        parts = writer.append_parts("parts", "q8", (40, 130), np.array_split(blob, 7))
        writer.seal()
    assert whole.checksum == parts.checksum
    data = (tmp_path / "t.bin").read_bytes()
    assert data[whole.offset :][: whole.nbytes] == data[parts.offset :][: parts.nbytes] == blob.tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_resumed_tensor_file_is_byte_identical(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t.bin"
    entries = write_tensors(path)
    clean = path.read_bytes()
    # The interruption leaves a prefix, possibly with a damaged byte, and garbage behind it; the
    # journal knows some first entries; the file may have been sealed already.
    left = bytearray(clean[: data.draw(st.integers(0, len(clean)))])
    if left and data.draw(st.booleans()):
        left[data.draw(st.integers(0, len(left) - 1))] ^= 1
    left += data.draw(st.binary(max_size=200))
    path.unlink()
    (path if data.draw(st.booleans()) else tmp_path / "t.bin.part").write_bytes(left)
    known = entries[: data.draw(st.integers(0, len(entries)))]
    assert write_tensors(path, resume=True, entries=known) == entries
    assert path.read_bytes() == clean
    assert os.listdir(tmp_path) == ["t.bin"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_resumed_bank_is_byte_identical(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "b.bin"
    sealed = write_bank(path)
    clean = path.read_bytes()
    left = bytearray(clean[: data.draw(st.integers(0, len(clean)))])
    if left and data.draw(st.booleans()):
        left[data.draw(st.integers(0, len(left) - 1))] ^= 1
    path.unlink()
    (path if data.draw(st.booleans()) else tmp_path / "b.bin.part").write_bytes(left)
    known = sealed[1][: data.draw(st.integers(0, EXPERTS))]
    assert write_bank(path, resume=True, checksums=known) == sealed
    assert path.read_bytes() == clean


def test_only_what_is_intact_and_known_counts(tmp_path: Path) -> None:
    bank, tensors = tmp_path / "b.bin", tmp_path / "t.bin"
    entry, checksums = write_bank(bank)
    assert entry.digest == bank_digest(checksums)
    with BankWriter(bank, 3, LAYOUT, resume=True) as writer:
        assert writer.verify_prefix(checksums[:3]) == 3
        assert (tmp_path / "b.bin.part").stat().st_size == 3 * LAYOUT.stride
    with BankWriter(bank, 3, LAYOUT, resume=True) as writer:
        assert writer.verify_prefix((checksums[0], checksums[2])) == 1
    with BankWriter(bank, 4, LAYOUT, resume=True) as writer:
        assert writer.verify_prefix(checksums) == 0
    entries = write_tensors(tensors)
    for wrong in (
        entries[1:],
        entries[:1] + entries[:1],
        entries[:1] + entries[2:],
        tuple(type(entry)(**{**vars(entry), "file": "other.bin"}) for entry in entries),
    ):
        write_tensors(tensors)
        with TensorFileWriter(tensors, resume=True) as writer:
            good = int(wrong[0] == entries[0])
            assert writer.verify_prefix(wrong) == good
            assert (tmp_path / "t.bin.part").stat().st_size == 64 * good


def test_starting_anew_forgets_what_was_there(tmp_path: Path) -> None:
    entries = write_tensors(tmp_path / "t.bin")
    (tmp_path / "t.bin.part").write_bytes(b"x" * 100_000)
    assert write_tensors(tmp_path / "t.bin") == entries
    clean = (tmp_path / "t.bin").read_bytes()
    (tmp_path / "t.bin.part").write_bytes(b"x" * 100_000)
    write_tensors(tmp_path / "t.bin", resume=True)
    assert (tmp_path / "t.bin").read_bytes() == clean


def test_a_full_disk_leaves_a_file_that_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, blobs = tmp_path / "t.bin", tensor_blobs()
    expected = write_tensors(tmp_path / "clean.bin")
    pwrite = os.pwrite

    def almost_full(fd: int, data: memoryview, offset: int) -> int:
        if offset + len(data) > 3000:
            if offset >= 3000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(fd, data[: 3000 - offset], offset)
        return pwrite(fd, data, offset)

    with TensorFileWriter(path) as writer:
        writer.append("a", "f32", (5,), blobs["a"])
        monkeypatch.setattr(os, "pwrite", almost_full)
        with pytest.raises(ResourceError, match=r"no space left while writing '.*t\.bin'"):
            writer.append("b", "q8", (40, 130), blobs["b"])
        assert writer.nbytes == 64
        monkeypatch.setattr(os, "pwrite", pwrite)
        for name, fmt, shape in SPECS[1:]:
            writer.append(name, fmt, shape, blobs[name])
        writer.seal()
    assert path.read_bytes() == (tmp_path / "clean.bin").read_bytes()
    assert len(expected) == len(SPECS)


def test_what_a_failed_append_left_behind_is_not_sealed(tmp_path: Path) -> None:
    blobs = tensor_blobs()
    with TensorFileWriter(tmp_path / "t.bin") as writer:
        writer.append("a", "f32", (5,), blobs["a"])
        with pytest.raises(ValueError, match="more than the expected"):
            writer.append_parts("b", "q8", (40, 130), [blobs["b"][:5000], blobs["b"]])
        writer.seal()
    assert (tmp_path / "t.bin").stat().st_size == 64


def test_misuse_is_a_programming_error(tmp_path: Path) -> None:
    blobs = tensor_blobs()
    with TensorFileWriter(tmp_path / "t.bin") as writer:
        writer.append("a", "f32", (5,), blobs["a"])
        for name, fmt, shape, parts in (
            ("a", "f32", (5,), [blobs["a"]]),
            ("x", "q8", (5,), [blobs["a"]]),
            ("x", "f32", (4,), [blobs["a"]]),
            ("x", "f32", (6,), [blobs["a"]]),
            ("x", "f32", (5,), []),
        ):
            with pytest.raises(ValueError, match="tensor"):
                writer.append_parts(name, fmt, shape, parts)
        with pytest.raises(ValueError, match="before the first append"):
            writer.verify_prefix(())
    with BankWriter(tmp_path / "b.bin", 0, LAYOUT) as bank:
        with pytest.raises(ValueError, match="without experts"):
            bank.seal()
        with pytest.raises(ValueError, match="bytes"):
            bank.append(*expert_blobs(0)[::-1])
    with pytest.raises(ResourceError, match="No such file"):
        TensorFileWriter(tmp_path / "nowhere" / "t.bin")
