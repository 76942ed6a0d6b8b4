"""Expert records: where everything lies, byte for byte, and that no wrong record is accepted."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from waste import quant
from waste.container.layout import RecordLayout, bank_digest, check_record, matrix_shape, pack_record, stored_checksum
from waste.errors import InputError, UsageError

formats = st.sampled_from(["f32", "bf16", "q8", "q4", "wt2", "wt3", "wt4", "q6"])
sizes = st.integers(1, 400)
LAYOUT = RecordLayout.of("q4", "q8", "bf16", 40, 24)


def record_of(layout: RecordLayout, layer: int, expert: int, seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    blobs = [rng.integers(0, 256, section.nbytes).astype(np.uint8) for section in layout.sections]
    return pack_record(layer, expert, layout, *blobs), blobs


@settings(max_examples=60, deadline=None)
@given(formats, formats, formats, sizes, sizes)
def test_sections_are_aligned_disjoint_ordered_and_exact(
    gate: str, up: str, down: str, hidden: int, inner: int
) -> None:
    layout = RecordLayout.of(gate, up, down, hidden, inner)
    assert [(s.fmt, s.rows, s.cols) for s in layout.sections] == [
        (gate, inner, hidden), (up, inner, hidden), (down, hidden, inner),
    ]  # fmt: skip
    end = 128
    for section in layout.sections:
        assert section.offset % 64 == 0
        assert end <= section.offset < end + 64
        assert section.nbytes == quant.get(section.fmt).nbytes(section.rows, section.cols)
        end = section.offset + section.nbytes
    assert layout.stride % 4096 == 0
    assert end <= layout.stride < end + 64 + 4096


def test_the_bytes_of_a_record_are_those_of_the_definition() -> None:
    """An independent packer: struct, by the table in the docstring of the module."""
    record, blobs = record_of(LAYOUT, 7, 300)
    expected = bytearray(LAYOUT.stride)
    expected[:32] = b"WREC" + struct.pack("<IIIQQ", 1, 7, 300, LAYOUT.stride, 0)
    for index, (section, blob, code) in enumerate(zip(LAYOUT.sections, blobs, (3, 2, 1), strict=True)):
        expected[32 + 32 * index : 64 + 32 * index] = struct.pack(
            "<4I2Q", code, section.rows, section.cols, 0, section.offset, section.nbytes
        )
        expected[section.offset : section.offset + section.nbytes] = blob.tobytes()
    digest = xxhash.xxh3_64_intdigest(bytes(expected))
    expected[24:32] = struct.pack("<Q", digest)
    assert record.tobytes() == bytes(expected)
    assert record.ctypes.data % 4096 == 0
    assert stored_checksum(record) == digest
    check_record(record, 7, 300, LAYOUT, "here")


def test_every_flipped_bit_of_a_record_is_found_padding_included() -> None:
    record, _ = record_of(RecordLayout.of("q4", "q4", "q4", 3, 2), 0, 0)
    layout = RecordLayout.of("q4", "q4", "q4", 3, 2)
    for position in range(layout.stride):
        record[position] ^= 1 << position % 8
        with pytest.raises(InputError, match=r"'f', record 0 is damaged"):
            check_record(record, 0, 0, layout, "'f', record 0")
        record[position] ^= 1 << position % 8
    check_record(record, 0, 0, layout, "here")


def resign(record: np.ndarray) -> None:
    """Give a changed record a checksum that fits."""
    record[24:32] = 0
    record[24:32] = np.frombuffer(struct.pack("<Q", xxhash.xxh3_64_intdigest(record)), np.uint8)


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"WEXP", "magic"),
        (4, struct.pack("<I", 2), "version 2, expected 1"),
        (8, struct.pack("<I", 8), "layer 8, expert 300, expected layer 7, expert 300"),
        (12, struct.pack("<I", 299), "layer 7, expert 299"),
        (16, struct.pack("<Q", 4096), "formats or sizes"),
        (32, struct.pack("<I", 2), "formats or sizes"),
        (36, struct.pack("<I", 25), "formats or sizes"),
        (44, struct.pack("<I", 1), "formats or sizes"),
        (48, struct.pack("<Q", 192), "formats or sizes"),
    ],
)
def test_valid_records_of_something_else_are_refused_saying_of_what(offset: int, value: bytes, words: str) -> None:
    record, _ = record_of(LAYOUT, 7, 300)
    record[offset : offset + len(value)] = np.frombuffer(value, np.uint8)
    resign(record)
    with pytest.raises(InputError, match=words) as caught:
        check_record(record, 7, 300, LAYOUT, "'f', record 300")
    assert caught.value.message.startswith("'f', record 300")


def test_blobs_of_another_size_and_unknown_formats_are_refused() -> None:
    _, blobs = record_of(LAYOUT, 0, 0)
    with pytest.raises(ValueError, match="bytes"):
        pack_record(0, 0, LAYOUT, blobs[0][:-1], blobs[1], blobs[2])
    with pytest.raises(ValueError, match="bytes"):
        pack_record(0, 0, LAYOUT, blobs[1], blobs[0], blobs[2])
    with pytest.raises(ValueError, match="record of"):
        check_record(np.zeros(4096, np.uint8), 0, 0, RecordLayout.of("f32", "f32", "f32", 99, 99), "here")
    with pytest.raises(UsageError, match="q5"):
        RecordLayout.of("q4", "q5", "q4", 8, 8)


def test_matrix_shape_keeps_matrices_and_folds_the_rest() -> None:
    shapes = {(3, 4): (3, 4), (5,): (5, 1), (6, 1, 4): (6, 4), (): (1, 1), (2, 3, 4, 5): (2, 60)}
    assert {shape: matrix_shape(shape) for shape in shapes} == shapes


def test_the_bank_digest_is_that_of_the_little_endian_checksums() -> None:
    values = [1, 2**63 + 5, 0]
    assert bank_digest(values) == xxhash.xxh3_64_intdigest(struct.pack("<3Q", *values))
    assert bank_digest(values) != bank_digest(values[::-1])
