"""q8 and q4 byte by byte: against a scalar float64 reader written from the definition of the layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste import quant

GROUP_BYTES = {"q8": 2080, "q4": 1056}
LIMITS = {"q8": (-127, 127), "q4": (-8, 7)}
F16_ULP = 2.0**-24

names = st.sampled_from(["q8", "q4"])
sizes = st.integers(1, 150)


def read_one(name: str, blob: bytes, cols: int, row: int, col: int) -> tuple[int, float]:
    """(code, scale) of one weight, found by the layout's definition alone."""
    groups = -(-cols // 128)
    start = (row // 16 * groups + col // 128) * GROUP_BYTES[name]
    r, c = row % 16, col % 128
    scale = float(np.frombuffer(blob, "<f2", 1, start + 2 * r)[0])
    if name == "q8":
        byte = blob[start + 32 + 64 * (c // 4) + 4 * r + c % 4]
        return byte - 256 if byte > 127 else byte, scale
    byte = blob[start + 32 + 64 * (c // 8) + 4 * r + c % 4]
    return (byte >> 4 if c % 8 >= 4 else byte & 15) - 8, scale


def read_all(name: str, blob: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of the whole padded matrix, float64."""
    padded = (-(-rows // 16) * 16, -(-cols // 128) * 128)
    codes, scales = np.zeros(padded), np.zeros(padded)
    data = blob.tobytes()
    for row in range(padded[0]):
        for col in range(padded[1]):
            codes[row, col], scales[row, col] = read_one(name, data, cols, row, col)
    return codes, scales


def random_weight(rows: int, cols: int, seed: int) -> np.ndarray:
    """Rows of very different size, with outliers and zero groups."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(3, (rows, cols)) * 10.0 ** rng.integers(-4, 4, (rows, 1))
    weight[rng.random((rows, cols)) < 0.1] = 0
    if rows > 1:
        weight[rng.integers(rows)] = 0
    return weight.astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(names, sizes, sizes, st.integers(0, 2**32 - 1))
def test_layout_rounding_and_padding(name: str, rows: int, cols: int, seed: int) -> None:
    fmt = quant.get(name)
    weight = random_weight(rows, cols, seed)
    blob = fmt.encode(weight)
    assert len(blob) == -(-rows // 16) * -(-cols // 128) * GROUP_BYTES[name]
    codes, scales = read_all(name, blob, rows, cols)
    low, high = LIMITS[name]
    # decode is code * scale, and nothing else
    decoded = fmt.decode(blob, rows, cols)
    np.testing.assert_array_equal(decoded, (codes * scales).astype(np.float32)[:rows, :cols])
    # padding is zero: no code, and no scale where a whole row is padding
    assert not codes[rows:].any()
    assert not codes[:, cols:].any()
    assert not scales[rows:].any()
    # every code is the nearest that the stored scale allows
    assert ((low <= codes) & (codes <= high)).all()
    inner = (slice(None, rows), slice(None, cols))
    s, w = scales[inner], weight.astype(np.float64)
    wanted = np.divide(w, s, out=np.zeros_like(w), where=s != 0)
    slack = 1e-5 * (1 + np.abs(wanted))
    assert (np.abs(codes[inner] - np.clip(wanted, low, high)) <= 0.5 + slack).all()
    # zero groups have scale zero, and only groups too small for a code do
    peak = np.abs(np.pad(w, ((0, 0), (0, -cols % 128)))).reshape(rows, -1, 128).max(axis=2)
    assert ((scales[:rows, ::128] == 0) == (peak <= F16_ULP / 2)).all()


@pytest.mark.parametrize("name", ["q8", "q4"])
def test_every_single_weight_lands_in_its_own_place(name: str) -> None:
    fmt = quant.get(name)
    for row in range(0, 33, 3):
        for col in range(0, 260, 7):
            weight = np.zeros((33, 260), np.float32)
            weight[row, col] = 1
            codes, scales = read_all(name, fmt.encode(weight), 33, 260) if col == 7 else (None, None)
            blob = fmt.encode(weight).tobytes()
            code, scale = read_one(name, blob, 260, row, col)
            assert code * scale == pytest.approx(1, rel=1e-3)
            if codes is not None and scales is not None:
                assert np.count_nonzero(codes * scales) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_q8_clips_nothing_that_matters(rows: int, cols: int, seed: int) -> None:
    """The scale is stored rounded, yet no weight is off by more than half a step and 2^-11 of itself."""
    weight = random_weight(rows, cols, seed)
    fmt = quant.get("q8")
    back = fmt.decode(fmt.encode(weight), rows, cols)
    padded = np.pad(weight, ((0, 0), (0, -cols % 128))).reshape(rows, -1, 128)
    step = np.repeat(np.abs(padded).max(axis=2) / 127, 128, axis=1)[:, :cols]
    allowed = 0.5 * np.maximum(step * (1 + 2.0**-11), F16_ULP) + np.abs(weight) * 2.0**-11
    # Below the normal float16 range steps are rounded up to the next multiple of 2^-24.
    allowed += np.where(step < 2.0**-14, F16_ULP / 2, 0)
    assert (np.abs(back - weight) <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", ["q8", "q4"])
@pytest.mark.parametrize("exponent", range(-149, -10, 4))
def test_tiny_weights_are_off_by_less_than_the_smallest_scale(name: str, exponent: int) -> None:
    """Nothing is refused for being small, and nothing small turns into something large."""
    weight = (np.random.default_rng(0).uniform(-1, 1, (16, 128)) * 2.0**exponent).astype(np.float32)
    fmt = quant.get(name)
    back = fmt.decode(fmt.encode(weight), 16, 128)
    # q8 is off by half a step; q4 may cut the largest weight off where that serves the others.
    share = 1 / 127 if name == "q8" else 0.2
    assert np.abs(back - weight).max() <= max(F16_ULP, 2.0**exponent * share)
    if exponent < -25:
        assert not back.any()


def best_possible(group: np.ndarray) -> float:
    """The least error of any 4-bit grid with the layout's codes, by brute force over 4000 scales, float64."""
    peak = np.abs(group).max()
    scale = np.concatenate([np.linspace(0.4, 1.4, 2000), -np.linspace(0.4, 1.4, 2000)])[:, None] * peak / 8
    codes = np.clip(np.rint(group / scale), -8, 7)
    return float(np.square(group - codes * scale).sum(axis=1).min())


@pytest.mark.parametrize("law", ["normal", "laplace", "uniform", "skewed"])
def test_q4_scales_are_close_to_the_best_there_are(law: str) -> None:
    rng = np.random.default_rng(3)
    draw = {
        "normal": rng.standard_normal, "laplace": lambda size: rng.laplace(size=size),
        "uniform": lambda size: rng.uniform(-1, 1, size), "skewed": lambda size: rng.gamma(2, 1, size) - 0.5,
    }  # fmt: skip
    weight = draw[law]((32, 128)).astype(np.float32)
    fmt = quant.get("q4")
    lost = np.square(fmt.decode(fmt.encode(weight), 32, 128).astype(np.float64) - weight).sum()
    best = sum(best_possible(group.astype(np.float64)) for group in weight)
    assert lost <= 1.012 * best


@pytest.mark.parametrize("sign", [1, -1])
def test_q4_serves_either_sign_equally(sign: int) -> None:
    """A grid is lopsided (-8 to 7), so the sign of the scale has to follow the weights."""
    weight = np.linspace(-8, 7, 16, dtype=np.float32).repeat(8)[None] * sign
    assert (quant.get("q4").decode(quant.get("q4").encode(weight), 1, 128) == weight).all()


@pytest.mark.parametrize(("name", "low", "high"), [("q8", -127, 127), ("q4", -8, 7)])
def test_weights_on_the_grid_come_back_exactly(name: str, low: int, high: int) -> None:
    codes = np.random.default_rng(1).integers(low, high + 1, (33, 300))
    codes[:, ::128] = low
    weight = (codes * 0.03125).astype(np.float32)
    fmt = quant.get(name)
    assert (fmt.decode(fmt.encode(weight), 33, 300) == weight).all()
