"""Matrix products and embedding rows of the `cpu` backend, for every number format and ragged shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import rotated_formats
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.quant import get

F32 = npt.NDArray[np.float32]
FORMATS = ["f32", "bf16", "q8", "q4", "wt2", "wt3", "wt4", "q6"]
ROTATED = ["wt2", "wt3", "wt4", "q6"]
SHAPES = [(1, 1), (1, 300), (15, 127), (16, 128), (17, 129), (33, 40), (50, 384), (160, 257)]


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, np.float32)


def plain_decode(blob: npt.NDArray[np.uint8], fmt: str, rows: int, cols: int) -> npt.NDArray[np.float64]:
    """The strip layout, one weight at a time."""
    vectors = {"q8": 32, "q4": 16}[fmt]
    group_bytes, groups = 32 + 64 * vectors, -(-cols // 128)
    out = np.empty((rows, cols))
    for row in range(rows):
        for col in range(cols):
            at = (row // 16 * groups + col // 128) * group_bytes
            scale = blob[at : at + 32].view(np.float16)[row % 16]
            k, codes = col % 128, blob[at + 32 : at + group_bytes]
            if fmt == "q8":
                code = int(codes[64 * (k // 4) + 4 * (row % 16) + k % 4].astype(np.int8))
            else:
                byte = int(codes[64 * (k // 8) + 4 * (row % 16) + k % 4])
                code = (byte & 15 if k % 8 < 4 else byte >> 4) - 8
            out[row, col] = code * np.float64(scale)
    return out


def summands(x: F32, blob: npt.NDArray[np.uint8], fmt: str, rows: int, cols: int) -> npt.NDArray[np.float64]:
    """What rounding errors are relative to, (T, rows): the size of the summands, as a sum may nearly cancel.

    In the rotated formats every weight of a group, padding included, and every input of it takes part in each.
    """
    padded = cols if fmt not in ROTATED else -(-cols // 128) * 128
    decoded = np.abs(get(fmt).decode(blob, rows, padded).astype(np.float64))
    inputs = np.pad(np.abs(x.astype(np.float64)), ((0, 0), (0, padded - cols)))
    if fmt not in ROTATED:
        return np.asarray(inputs @ decoded.T)
    groups = (len(x), 1, -1, 128), (1, rows, -1, 128)
    sizes = (np.linalg.norm(a.reshape(shape), axis=3) for a, shape in zip((inputs, decoded), groups, strict=True))
    return np.asarray(np.prod([*np.broadcast_arrays(*sizes)], axis=0).sum(axis=2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_linear_is_the_product_with_the_decoded_weight(
    lab: Any, rng: np.random.Generator, fmt: str, shape: tuple[int, int], tokens: int
) -> None:
    values, x = normal(rng, *shape), normal(rng, tokens, shape[1])
    decoded = get(fmt).decode(get(fmt).encode(values), *shape).astype(np.float64)
    found = lab.cpu.linear(x, lab.weight(lab.cpu, values, fmt))
    error = np.abs(found - x.astype(np.float64) @ decoded.T)
    assert (error <= 1e-6 * summands(x, get(fmt).encode(values), fmt, *shape) + 1e-30).all()


@pytest.mark.parametrize("quantised", ["q8", "q4"])
@pytest.mark.parametrize("shape", [(16, 128), (21, 200)])
def test_strip_layout_byte_by_byte(lab: Any, rng: np.random.Generator, quantised: str, shape: tuple[int, int]) -> None:
    """Any bytes are weights: every code, and scales that are negative, zero and subnormal."""
    rows, cols = shape
    blob = rng.integers(0, 256, get(quantised).nbytes(rows, cols), np.uint8)
    group = {"q8": 2080, "q4": 1056}[quantised]
    for at in range(0, len(blob), group):
        scales = (rng.standard_normal(16) * 10.0 ** rng.integers(-7, 2, 16)).astype(np.float16)
        scales[rng.integers(16)] = 0
        blob[at : at + 32] = scales.view(np.uint8)
    weights = plain_decode(blob, quantised, rows, cols)
    w = lab.cpu.weight(blob, quantised, rows, cols)
    assert np.array_equal(lab.cpu.embed(w, np.arange(rows)), weights.astype(np.float32))
    for tokens in (1, 5):
        x = normal(rng, tokens, cols)
        error = np.abs(lab.cpu.linear(x, w) - x.astype(np.float64) @ weights.T)
        assert (error <= 1e-6 * (np.abs(x) @ np.abs(weights).T)).all()


@pytest.mark.parametrize("quantised", ROTATED)
@pytest.mark.parametrize("shape", [(16, 128), (21, 200)])
def test_rotated_layout_byte_by_byte(
    lab: Any, rng: np.random.Generator, quantised: str, shape: tuple[int, int]
) -> None:
    """The same, read by tests/oracles/rotated_formats.py."""
    rows, cols = shape
    fmt = get(quantised)
    blob = rng.integers(0, 256, fmt.nbytes(rows, cols), np.uint8)
    group = fmt.nbytes(16, 128)
    for at in range(0, len(blob), group):
        scales = (rng.standard_normal(16) * 10.0 ** rng.integers(-7, 2, 16)).astype(np.float16)
        scales[rng.integers(16)] = 0
        blob[at : at + 32] = scales.view(np.uint8)
    weights = rotated_formats.decode(quantised, blob, rows, cols)
    w = lab.cpu.weight(blob, quantised, rows, cols)
    assert np.array_equal(lab.cpu.embed(w, np.arange(rows)), weights)
    for tokens in (1, 5):
        x = normal(rng, tokens, cols)
        error = np.abs(lab.cpu.linear(x, w) - x.astype(np.float64) @ weights.astype(np.float64).T)
        assert (error <= 1e-6 * summands(x, blob, quantised, rows, cols)).all()


@pytest.mark.parametrize("quantised", ["q8", "q4", *ROTATED])
def test_padding_is_never_read_as_input(lab: Any, rng: np.random.Generator, quantised: str) -> None:
    """Numbers behind a vector's end do not reach the sum, not even those that are not finite."""
    values = normal(rng, 20, 130)
    buffer = np.full((3, 400), np.nan, np.float32)
    w = lab.weight(lab.cpu, values, quantised)
    x = normal(rng, 3, 130)
    expected = lab.cpu.linear(x, w)
    for t in range(3):
        buffer[t, :130] = x[t]
        assert np.array_equal(lab.cpu.linear(buffer[t : t + 1, :130], w)[0], expected[t])


def test_threads_and_grouping_change_no_bit(lab: Any, rng: np.random.Generator, fmt: str) -> None:
    values, x = normal(rng, 150, 270), normal(rng, 70, 270)
    lab.laws(lambda: lambda ops, part: [ops.linear(x[part], lab.weight(ops, values, fmt))], 70)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 9), st.sampled_from(FORMATS), st.data())
def test_a_token_has_the_same_bits_in_any_batch(
    lab: Any, rows: int, cols: int, tokens: int, number_format: str, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    w = lab.weight(lab.crews[1], normal(rng, rows, cols), number_format)
    x = normal(rng, tokens, cols)
    t = data.draw(st.integers(0, tokens - 1))
    assert lab.crews[3].linear(x, w)[t].tobytes() == lab.crews[1].linear(x[t : t + 1], w)[0].tobytes()


def test_embedding_rows_are_exact(lab: Any, rng: np.random.Generator, fmt: str) -> None:
    values = normal(rng, 37, 150)
    ids = np.array([0, 36, 16, 15, 15, 1])
    decoded = get(fmt).decode(get(fmt).encode(values), 37, 150)
    assert np.array_equal(lab.cpu.embed(lab.weight(lab.cpu, values, fmt), ids), decoded[ids])


@pytest.mark.parametrize("bad", [-1, 37, 2**40])
def test_embedding_refuses_ids_outside_the_table(lab: Any, rng: np.random.Generator, bad: int) -> None:
    with pytest.raises(IndexError, match="37 rows"):
        lab.cpu.embed(lab.weight(lab.cpu, normal(rng, 37, 20)), np.array([1, bad]))


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_extreme_inputs(lab: Any, rng: np.random.Generator, fmt: str, size: float) -> None:
    """Zeros stay zero, subnormals count as zero, large numbers do not overflow before their time."""
    values = normal(rng, 20, 140)
    x = (normal(rng, 2, 140).astype(np.float64) * size).astype(np.float32)
    found = lab.cpu.linear(x, lab.weight(lab.cpu, values, fmt))
    if size < 1e-38:
        assert not found.any()
    else:
        decoded = get(fmt).decode(get(fmt).encode(values), 20, 140).astype(np.float64)
        lab.close(found, x.astype(np.float64) @ decoded.T)


def test_one_hot_inputs_read_single_weights(lab: Any, rng: np.random.Generator, fmt: str) -> None:
    values = normal(rng, 19, 133)
    decoded = get(fmt).decode(get(fmt).encode(values), 19, 133)
    found = lab.cpu.linear(np.eye(133, dtype=np.float32), lab.weight(lab.cpu, values, fmt))
    assert np.array_equal(found, decoded.T)


def test_the_callers_float_mode_is_restored(lab: Any, rng: np.random.Generator) -> None:
    lab.cpu.linear(normal(rng, 3, 200), lab.weight(lab.cpu, normal(rng, 100, 200)))
    tiny = np.full(4, 1e-40, np.float32)
    assert (tiny * np.float32(0.5) > 0).all()
