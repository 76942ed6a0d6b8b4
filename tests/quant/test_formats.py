"""What every number format promises: exact sizes, a bounded loss, pieces that join, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from waste import quant
from waste.errors import InputError, UsageError
from waste.io.checksum import checksum, to_hex
from waste.quant.error import relative_error

CODES = {"f32": 0, "bf16": 1, "q8": 2, "q4": 3, "wt2": 4, "wt3": 5, "wt4": 6, "q6": 7}
BITS = {"f32": 32, "bf16": 16, "q8": 8.125, "q4": 4.125, "wt2": 2.125, "wt3": 3.125, "wt4": 4.125, "q6": 6.125}
# Relative L2 on Gaussian weights. q8: one step is max/127, and the maximum of 128 is near 2.7 sigma,
# hence 2.7 / 127 / sqrt(12) = .0061; q4 and q6 as measured, plus a margin; wt as their tables promise.
GAUSSIAN = {
    "f32": 0.0, "bf16": 0.0018, "q8": 0.0068, "q4": 0.098, "wt2": 0.288, "wt3": 0.152, "wt4": 0.08, "q6": 0.0256,
}  # fmt: skip
# A group of few weights can be unlucky: q4 is off by no more than half a step, a step of max/7.
UNLUCKY = {"q4": 0.2, "wt2": 0.45, "wt3": 0.25, "wt4": 0.14, "q6": 0.04}

ROTATED = ("wt2", "wt3", "wt4", "q6")  # see test_rotated.py

names = st.sampled_from(sorted(CODES))
sizes = st.integers(1, 300)


def gaussian(rows: int, cols: int, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * scale).astype(np.float32)


def test_names_codes_and_bits_are_part_of_the_container_format() -> None:
    assert quant.names() == tuple(CODES)
    for name in CODES:
        assert (quant.get(name).name, quant.get(name).code, quant.get(name).bits) == (name, CODES[name], BITS[name])
    with pytest.raises(UsageError, match="'q3'"):
        quant.get("q3")


@settings(max_examples=60, deadline=None)
@given(names, sizes, sizes, st.integers(0, 2**32 - 1), st.sampled_from([1e-3, 1.0, 1e3]))
def test_size_depends_on_shape_alone_and_the_loss_is_bounded(
    name: str, rows: int, cols: int, seed: int, scale: float
) -> None:
    fmt = quant.get(name)
    weight = gaussian(rows, cols, seed, scale)
    blob = fmt.encode(weight)
    assert (blob.shape, blob.dtype) == ((fmt.nbytes(rows, cols),), np.uint8)
    back = fmt.decode(blob, rows, cols)
    assert (back.shape, back.dtype) == (weight.shape, np.float32)
    # In the rotated formats the padding of a narrow matrix takes part of the error; it could take none of it.
    widened = np.sqrt(-(-cols // 128) * 128 / cols) if name in ROTATED else 1.0
    assert np.linalg.norm(back - weight) <= UNLUCKY.get(name, 0.01) * widened * np.linalg.norm(weight)


@pytest.mark.parametrize("name", CODES)
def test_exact_bits_for_whole_strips(name: str) -> None:
    assert quant.get(name).nbytes(64, 512) * 8 == BITS[name] * 64 * 512


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0)])
def test_empty_matrices(name: str, shape: tuple[int, int]) -> None:
    blob = quant.get(name).encode(np.zeros(shape, np.float32))
    assert blob.shape == (quant.get(name).nbytes(*shape),) == (0,)
    assert quant.get(name).decode(blob, *shape).shape == shape


@pytest.mark.parametrize("name", CODES)
def test_gaussian_loss(name: str) -> None:
    assert relative_error(gaussian(256, 1024), quant.get(name)) <= GAUSSIAN[name]


PINNED = {
    "f32": "c36f995693a07dcf",
    "bf16": "93208964c7350de6",
    "q8": "6dbb7974cd929d5f",
    "q4": "789b0e68314dcef3",
    "wt2": "01900231dccbe3eb",
    "wt3": "0d2618d19359a39f",
    "wt4": "1bded4cb6aaffc9c",
    "q6": "2b95190272947639",
}


@pytest.mark.parametrize("name", CODES)
def test_bytes_are_the_same_on_every_machine(name: str) -> None:
    """Pinned, since a sum in an order of the processor's choice moves one byte in ten thousand, no more.

    The weights come from whole numbers and single roundings, so that they are the same everywhere, too.
    """
    mixed = np.arange(512 * 2048, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    uniform = (mixed.astype(np.float64) - 2.0**31) / 2.0**31
    weight = (uniform * uniform * uniform).astype(np.float32).reshape(512, 2048)
    assert to_hex(checksum(quant.get(name).encode(weight))) == PINNED[name]


@pytest.mark.parametrize("name", CODES)
def test_relative_error_is_the_frobenius_ratio(name: str) -> None:
    fmt = quant.get(name)
    weight = gaussian(300, 200, 4)
    back = fmt.decode(fmt.encode(weight), 300, 200).astype(np.float64)
    expected = np.linalg.norm(back - weight) / np.linalg.norm(weight.astype(np.float64))
    assert relative_error(weight, fmt) == pytest.approx(expected, rel=1e-12)
    assert relative_error(np.zeros((3, 3), np.float32), fmt) == 0


@settings(max_examples=30, deadline=None)
@given(names, st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), sizes)
def test_pieces_of_whole_strips_join_to_the_whole(name: str, first: int, second: int, last: int, cols: int) -> None:
    """What lets a converter stream an embedding: strips do not depend on each other."""
    fmt = quant.get(name)
    weight = gaussian(16 * (first + second) + last, cols, cols)
    cuts = np.split(weight, [16 * first, 16 * (first + second)])
    joined = np.concatenate([fmt.encode(cut) for cut in cuts])
    assert joined.tobytes() == fmt.encode(weight).tobytes()


@pytest.mark.parametrize("name", CODES)
def test_encoding_neither_keeps_nor_changes_its_input_and_takes_any_order(name: str) -> None:
    fmt = quant.get(name)
    weight = gaussian(50, 260)
    copy = weight.copy()
    blob = fmt.encode(weight)
    kept = blob.copy()
    assert (weight == copy).all()
    assert fmt.encode(np.asfortranarray(weight)).tobytes() == blob.tobytes()
    assert fmt.encode(np.repeat(weight, 2, axis=1)[:, ::2]).tobytes() == blob.tobytes()
    weight[:] = 0
    assert (blob == kept).all()
    readonly = np.frombuffer(blob.tobytes(), np.uint8)
    fmt.decode(readonly, 50, 260)[:] = 1
    assert readonly.tobytes() == kept.tobytes()


def test_f32_is_exact_to_the_bit_and_little_endian() -> None:
    weight = np.array([[1.0, -0.0, 1e-45], [3.4e38, -1e-39, np.pi]], np.float32)
    blob = quant.get("f32").encode(weight)
    assert blob.tobytes() == weight.astype("<f4").tobytes()
    assert quant.get("f32").decode(blob, 2, 3).tobytes() == weight.tobytes()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**127), min_size=1))
def test_bf16_rounds_as_torch_does(values: list[float]) -> None:
    weight = np.clip(np.array([values], np.float32), -(2.0**127), None)
    expected = torch.from_numpy(weight).to(torch.bfloat16)
    blob = quant.get("bf16").encode(weight)
    assert blob.tobytes() == expected.view(torch.int16).numpy().tobytes()
    assert quant.get("bf16").decode(blob, *weight.shape).tobytes() == expected.to(torch.float32).numpy().tobytes()


def test_bf16_ties_go_to_even_and_overflow_is_refused() -> None:
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0xBF808000]], np.uint32)
    assert quant.get("bf16").encode(bits.view(np.float32)).view("<u2").tolist() == [
        0x3F80, 0x3F82, 0x3F81, 0x3F81, 0xBF80,
    ]  # fmt: skip
    with pytest.raises(InputError, match="too large for bf16"):
        quant.get("bf16").encode(np.array([[3.4e38]], np.float32))


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_a_programming_error(name: str, bad: float) -> None:
    for place in ((0, 0), (17, 129), (39, 199)):
        weight = gaussian(40, 200)
        weight[place] = bad
        with pytest.raises(ValueError, match="finite"):
            quant.get(name).encode(weight)


@pytest.mark.parametrize("name", CODES)
def test_wrong_shapes_types_and_sizes_are_programming_errors(name: str) -> None:
    fmt = quant.get(name)
    for wrong in (np.zeros((2, 2)), np.zeros(4, np.float32), np.zeros((1, 2, 2), np.float32)):
        with pytest.raises(ValueError, match="float32 matrix"):
            fmt.encode(wrong)
    blob = fmt.encode(np.zeros((2, 2), np.float32))
    for wrong in (blob[:-1], np.append(blob, blob[:1]), blob.view(np.int8), blob[None]):
        with pytest.raises(ValueError, match="expected"):
            fmt.decode(wrong, 2, 2)


@pytest.mark.parametrize(("name", "limit"), [("q8", 65504 * 127), ("q4", 65504 * 7)])
def test_weights_beyond_the_largest_scale_are_refused(name: str, limit: int) -> None:
    fmt = quant.get(name)
    weight = gaussian(20, 130)
    for sign in (1, -1):
        weight[18, 129] = sign * limit
        back = fmt.decode(fmt.encode(weight), 20, 130)
        assert back[18, 129] == pytest.approx(sign * limit, rel=0.08 if name == "q4" else 1e-6)
        weight[18, 129] = sign * limit * 1.001
        with pytest.raises(InputError, match=f"too large for {name}"):
            fmt.encode(weight)
