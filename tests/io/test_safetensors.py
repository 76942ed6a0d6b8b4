"""Safetensors headers and checkpoints: equal to the reference library on good files, one-line refusals on bad ones."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from waste.errors import InputError
from waste.io.safetensors import INDEX_NAME, Checkpoint, read_header

NUMPY_NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL", "float64": "F64"}
A = ("F32", np.arange(12, dtype=np.float32).reshape(3, 4))
B = ("I16", np.arange(5, dtype=np.int16))


def refused(call: Callable[[], object], *words: str) -> InputError:
    """The call fails with a one-line InputError that contains all of `words`."""
    with pytest.raises(InputError) as caught:
        call()
    message = caught.value.message
    assert "\n" not in message
    assert "\n" not in (caught.value.hint or "")
    for word in words:
        assert word in message, message
    return caught.value


arrays = st.tuples(
    st.sampled_from(sorted(NUMPY_NAMES)), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 2**32 - 1)
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(min_size=1, max_size=12).filter(lambda n: n != "__metadata__"), arrays, max_size=6))
def test_reads_what_the_reference_library_writes(tmp_path: Path, specs: dict) -> None:
    tensors = {
        name: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
        for name, (dtype, shape, seed) in specs.items()
    }
    folder = tmp_path / "ckpt"
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"a": "b"})
    with Checkpoint.open(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        assert checkpoint.files == {"model.safetensors": (folder / "model.safetensors").stat().st_size}
        for name, array in tensors.items():
            info = checkpoint.tensors[name]
            assert (info.dtype, info.shape, info.nbytes) == (NUMPY_NAMES[array.dtype.name], array.shape, array.nbytes)
            assert checkpoint.read(name).tobytes() == array.tobytes()
            if array.ndim and len(array):
                assert checkpoint.read_rows(name, 1, len(array)).tobytes() == array[1:].tobytes()


def test_tensors_come_in_order_of_their_data(tmp_path: Path, file_bytes: Callable[..., bytes]) -> None:
    def reverse(header: dict) -> None:
        items = list(header.items())
        header.clear()
        header.update(reversed(items))

    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"z": A, "a": B}, reverse))
    infos = list(read_header(path).values())
    assert [info.name for info in infos] == ["z", "a"]
    assert path.read_bytes()[infos[1].offset :] == B[1].tobytes()


@pytest.mark.parametrize("keep", range(-40, 0))
def test_every_truncation_is_refused_with_both_sizes(
    tmp_path: Path, file_bytes: Callable[..., bytes], keep: int
) -> None:
    data = file_bytes({"a": A})
    path = tmp_path / "x.safetensors"
    path.write_bytes(data[:keep])
    refused(lambda: read_header(path), "'" + str(path) + "'", str(len(data)), str(len(data) + keep))


def test_every_cut_of_the_header_is_refused(tmp_path: Path, file_bytes: Callable[..., bytes]) -> None:
    data = file_bytes({"a": A})
    path = tmp_path / "x.safetensors"
    for keep in range(len(data) - A[1].nbytes):
        path.write_bytes(data[:keep])
        refused(lambda: read_header(path), str(path))


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path, file_bytes: Callable[..., bytes]) -> None:
    path = tmp_path / "x.safetensors"
    data = file_bytes({"a": A})
    path.write_bytes(data + b"\0")
    refused(lambda: read_header(path), "belong to no tensor", str(len(data)), str(len(data) + 1))


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 100_000_000, 100_000_001, (1 << 63) + 8, (1 << 64) - 1])
def test_lying_header_lengths_are_refused_without_allocating(
    tmp_path: Path, file_bytes: Callable[..., bytes], length: int
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + file_bytes({"a": A})[8:])
    refused(lambda: read_header(path), str(path), "at most 100000000" if length > 100_000_000 else "")


def test_a_header_above_the_limit_is_refused_even_if_the_file_has_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001) + b"{}")
    os.truncate(path, 100_000_009)  # sparse: costs nothing unless it is read
    refused(lambda: read_header(path), "at most 100000000")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"abc", "cut short"),
        (b"<!doctype html><html>Access to this model is restricted</html>", "HTML"),
        (b"\n  <HTML><body>gated", "HTML"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n", "Git LFS pointer"),
    ],
)
def test_impostors_are_named(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    refused(lambda: read_header(path), word, str(path))


def _entry(**change: object):
    return lambda header: header["a"].update(change)


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (_entry(dtype="F31"), "F31"),
        (_entry(dtype=7), "dtype"),
        (_entry(shape=[6, 4]), "[6, 4]"),
        (_entry(shape=[-3, -4]), "[-3, -4]"),
        (_entry(shape=[3.0, 4]), "shape"),
        (_entry(shape=[True, 12]), "shape"),
        (_entry(shape="34"), "shape"),
        (_entry(shape=[1] * 17 + [12]), "shape"),
        (_entry(shape=[2**63, 2**63, 0]), "shape"),
        (_entry(data_offsets=[0]), "data_offsets"),
        (_entry(data_offsets=[-1, 47]), "data_offsets"),
        (_entry(data_offsets=[48, 0]), "before it begins"),
        (_entry(data_offsets=[0, 47]), "47"),
        (_entry(data_offsets=[4, 52]), "gap"),
        (_entry(data_offsets=None), "data_offsets"),
        (lambda header: header.update(a=[]), "object"),
        (lambda header: header.update(b={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}), "overlap"),
        (lambda header: header.update(b={"dtype": "F32", "shape": [2], "data_offsets": [48, 56]}), "cut short"),
        (lambda header: header.update(b={"dtype": "F4", "shape": [3], "data_offsets": [48, 49]}), "1.5 bytes"),
    ],
)
def test_contradictory_headers_are_refused(
    tmp_path: Path, file_bytes: Callable[..., bytes], edit: Callable[[dict], None], word: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"a": A}, edit))
    refused(lambda: read_header(path), word, str(path))


@pytest.mark.parametrize(
    "text",
    [b"[]", b"null", b"{", b'{"a"', b"\xff\xfe{}", b"[" * 100_000, b'{"a":{},"a":{}}', b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_headers_that_are_no_json_object_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    refused(lambda: read_header(path), str(path))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_headers_give_tensors_inside_the_file_or_an_input_error(
    tmp_path: Path, file_bytes: Callable[..., bytes], data
) -> None:
    content = bytearray(file_bytes({"a": A, "b": B}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    try:
        infos = read_header(path)
    except InputError:
        return
    assert all(8 <= info.offset <= info.offset + info.nbytes <= len(content) for info in infos.values())


def test_names_cannot_break_the_line(tmp_path: Path, file_bytes: Callable[..., bytes]) -> None:
    path = tmp_path / "new\nline"
    path.write_bytes(file_bytes({"a\nb\u2028": ("F31", A[1])}))
    refused(lambda: read_header(path), "F31")


def test_links_to_nothing_are_an_incomplete_download_named_as_in_the_folder(
    checkpoint_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint_dir({"one.safetensors": {"a": A}, "two.safetensors": {"b": B}})
    blob = tmp_path / "0123abcd"
    (folder / "two.safetensors").rename(blob)
    (folder / "two.safetensors").symlink_to(blob)
    Checkpoint.open(folder).close()
    blob.rename(tmp_path / "0123abcd.incomplete")
    error = refused(lambda: Checkpoint.open(folder), "download incomplete", "two.safetensors")
    assert "0123abcd" not in error.message
    refused(lambda: read_header(folder / "two.safetensors"), "download incomplete", "two.safetensors")
    (folder / INDEX_NAME).unlink()
    (folder / INDEX_NAME).symlink_to("nowhere")
    refused(lambda: Checkpoint.open(folder), "download incomplete", INDEX_NAME)


def test_missing_shards_are_counted_before_any_is_parsed(checkpoint_dir: Callable[..., Path]) -> None:
    folder = checkpoint_dir({f"{n}.safetensors": {n: A} for n in "abcd"})
    (folder / "b.safetensors").unlink()
    (folder / "d.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(b"junk")
    refused(lambda: Checkpoint.open(folder), "b.safetensors", "2 of 4", "incomplete download?")


def test_only_indexed_files_and_tensors_are_read(
    checkpoint_dir: Callable[..., Path], file_bytes: Callable[..., bytes]
) -> None:
    folder = checkpoint_dir({"one.safetensors": {"a": A, "extra": B}})
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    (folder / "model.safetensors").write_bytes(file_bytes({"a": ("F32", A[1] + 1)}))
    (folder / "adapter_model.safetensors").write_bytes(b"not even a header")
    with Checkpoint.open(folder) as checkpoint:
        assert list(checkpoint.tensors) == ["a"]
        assert list(checkpoint.files) == ["one.safetensors"]
        assert checkpoint.unindexed == ("extra",)
        assert checkpoint.read("a").tobytes() == A[1].tobytes()
        refused(lambda: checkpoint.read("extra"), "'extra'", "missing")


def test_a_tensor_that_its_shard_lacks_is_refused(checkpoint_dir: Callable[..., Path]) -> None:
    folder = checkpoint_dir({"one.safetensors": {"a": A}})
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    refused(lambda: Checkpoint.open(folder), "'b'", "one.safetensors")


@pytest.mark.parametrize(
    "index",
    [
        "{}", "[]", "{", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../ckpt/one.safetensors"}}', '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": "one\\u0000"}}',
        '{"weight_map": {"a": "' + "x" * 300 + '"}}',
        '{"weight_map": {"a": "one.safetensors", "a": "one.safetensors"}}',
    ],
)  # fmt: skip
def test_unusable_indices_are_refused(checkpoint_dir: Callable[..., Path], index: str) -> None:
    folder = checkpoint_dir({"one.safetensors": {"a": A}})
    (folder / INDEX_NAME).write_text(index)
    refused(lambda: Checkpoint.open(folder))


def test_folders_without_a_checkpoint_say_what_is_there(tmp_path: Path, file_bytes: Callable[..., bytes]) -> None:
    refused(lambda: Checkpoint.open(tmp_path / "nowhere"), "does not exist")
    refused(lambda: Checkpoint.open(tmp_path), "neither", "incomplete download?")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(lambda: Checkpoint.open(tmp_path), "pytorch_model.bin")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(file_bytes({"a": A}))
    refused(lambda: Checkpoint.open(tmp_path), INDEX_NAME, "missing")
    refused(lambda: Checkpoint.open(tmp_path / "pytorch_model.bin"), "is not a directory")
    (tmp_path / "model.safetensors").mkdir()
    refused(lambda: Checkpoint.open(tmp_path), "is a directory")


def test_a_special_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    refused(lambda: Checkpoint.open(tmp_path), "special file")


def test_a_file_that_shrinks_and_a_read_error_name_shard_tensor_and_offset(
    lone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lone({"a": A, "b": B})
    checkpoint = Checkpoint.open(folder)
    os.truncate(folder / "model.safetensors", checkpoint.tensors["b"].offset + 3)
    checkpoint.read("a")
    refused(lambda: checkpoint.read("b"), "model.safetensors", "'b'", "cut short")

    def failing(fd: int, buffers: list, offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    refused(lambda: checkpoint.read("a"), "model.safetensors", "'a'", str(checkpoint.tensors["a"].offset), "read error")


def test_rows_outside_the_tensor_and_reads_after_closing_are_programming_errors(lone: Callable[..., Path]) -> None:
    checkpoint = Checkpoint.open(lone({"a": A, "s": ("F32", np.array(1.5, np.float32))}))
    assert checkpoint.read("s").view(np.float32) == [1.5]
    for begin, end in ((-1, 1), (2, 1), (0, 4)):
        with pytest.raises(ValueError, match="rows"):
            checkpoint.read_rows("a", begin, end)
    with pytest.raises(ValueError, match="rows"):
        checkpoint.read_rows("s", 0, 1)
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("a")
