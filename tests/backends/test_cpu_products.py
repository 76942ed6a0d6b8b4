"""Matrix products and embedding rows of the `cpu` backend, for every number format and ragged shapes."""

from __future__ import annotations

from typing import Any

import int8_products
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
STRIPS = ["q8", "q4", *ROTATED]
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_linear_is_the_product_with_the_decoded_weight(
    lab: Any, rng: np.random.Generator, fmt: str, shape: tuple[int, int], tokens: int
) -> None:
    values, x = normal(rng, *shape), normal(rng, tokens, shape[1])
    decoded = get(fmt).decode(get(fmt).encode(values), *shape).astype(np.float64)
    found = lab.cpu.linear(x, lab.weight(lab.cpu, values, fmt))
    error = np.abs(found - x.astype(np.float64) @ decoded.T)
    if fmt in STRIPS:  # each input is off by at most half a step of its group
        step = np.linalg.norm(x, axis=1)[:, None] / 127 * (1 if fmt not in ROTATED else 4)
        assert (error <= step * np.linalg.norm(decoded, axis=1) + 1e-30).all()
        assert np.sqrt((error**2).mean()) <= 0.02 * np.linalg.norm(x) * np.linalg.norm(decoded) / error.size**0.5
    else:
        assert (error <= 1e-6 * (np.abs(x.astype(np.float64)) @ np.abs(decoded).T) + 1e-30).all()


INPUTS = ("normal", "zeros", "one hot", "alternating", "outlier", "subnormal", "tiny", "huge", "not finite")


def inputs(kind: str, rng: np.random.Generator, tokens: int, cols: int) -> F32:
    x = normal(rng, tokens, cols)
    if kind == "zeros":
        x[:] = 0
    elif kind == "one hot":
        x[:] = 0
        x[np.arange(tokens), rng.integers(0, cols, tokens)] = 3
    elif kind == "alternating":  # every code +-127: the largest sums of whole numbers there are
        x[:] = np.where(rng.random((tokens, cols)) < 0.5, -1, 1) * np.float32(7)
    elif kind == "outlier":
        x[:, cols // 2] = 1e6
    elif kind in ("subnormal", "tiny", "huge"):
        x = (x.astype(np.float64) * {"subnormal": 1e-41, "tiny": 1e-29, "huge": 1e30}[kind]).astype(np.float32)
    elif kind == "not finite":
        x[0, cols - 1], x[-1, 0] = np.inf, np.nan
    return x


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 16, 19, 131])
@pytest.mark.parametrize("quantised", ["q8", "q4", "wt2", "wt3", "wt4", "q6"])
def test_every_instruction_set_computes_the_definition(
    lab: Any, each_isa: str, rng: np.random.Generator, quantised: str, tokens: int
) -> None:
    """tests/oracles/int8_products.py, in every bit: whole numbers have one sum, floats are added in one order."""
    fmt = get(quantised)
    for rows, cols in ((16, 128), (37, 300), (1, 1), (50, 384)):
        blob = rng.integers(0, 256, fmt.nbytes(rows, cols), np.uint8)  # any bytes are codes, -128 of q8 included
        for at in range(0, len(blob), fmt.nbytes(16, 128)):
            blob[at : at + 32] = (
                (rng.standard_normal(16) * 10.0 ** rng.integers(-7, 2)).astype(np.float16).view(np.uint8)
            )
        x = normal(rng, tokens, cols)
        found = lab.cpu.linear(x, lab.cpu.weight(blob, quantised, rows, cols))
        assert np.array_equal(found, int8_products.linear(quantised, blob, x, rows, cols)), (rows, cols)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("quantised", ["q8", "q4", "wt2", "wt3", "wt4", "q6"])
def test_every_instruction_set_with_adversarial_inputs(
    lab: Any, each_isa: str, rng: np.random.Generator, quantised: str, kind: str
) -> None:
    rows, cols = 35, 260
    blob = get(quantised).encode(normal(rng, rows, cols))
    for tokens in (1, 7, 40):
        x = inputs(kind, rng, tokens, cols)
        found = lab.cpu.linear(x, lab.cpu.weight(blob, quantised, rows, cols))
        expected = int8_products.linear(quantised, blob, x, rows, cols)
        assert np.array_equal(found, expected, equal_nan=True)
        assert np.isfinite(found).all() == (kind != "not finite")
        if kind == "not finite" and tokens > 2:
            assert np.isnan(found[[0, -1]]).all() and np.isfinite(found[1:-1]).all()


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
        assert np.array_equal(lab.cpu.linear(x, w), int8_products.linear(quantised, blob, x, rows, cols))


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
        assert np.array_equal(lab.cpu.linear(x, w), int8_products.linear(quantised, blob, x, rows, cols))


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
        lab.close(found, x.astype(np.float64) @ decoded.T, lab.tolerance(fmt, 2))


def test_one_hot_inputs_read_single_weights(lab: Any, rng: np.random.Generator, fmt: str) -> None:
    values = normal(rng, 19, 133)
    decoded = get(fmt).decode(get(fmt).encode(values), 19, 133)
    found = lab.cpu.linear(np.eye(133, dtype=np.float32), lab.weight(lab.cpu, values, fmt))
    if fmt in STRIPS:  # the input's one code is 127, or +-127 once rotated
        lab.close(found, decoded.T, 1e-6)
    else:
        assert np.array_equal(found, decoded.T)


def test_the_callers_float_mode_is_restored(lab: Any, rng: np.random.Generator) -> None:
    lab.cpu.linear(normal(rng, 3, 200), lab.weight(lab.cpu, normal(rng, 100, 200)))
    tiny = np.full(4, 1e-40, np.float32)
    assert (tiny * np.float32(0.5) > 0).all()
