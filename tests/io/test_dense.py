"""Checkpoint tensors as float32: exact values, and refusal of everything non-finite or ill-scaled."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from waste.errors import InputError, UnsupportedError, WasteError
from waste.io import dense
from waste.io.checksum import checksum
from waste.io.dense import RowStream, load_f32, orphan_scales
from waste.io.safetensors import Checkpoint

# torch's own e4m3 conversion is the independent oracle.
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
FINITE = np.flatnonzero(np.isfinite(E4M3)).astype(np.uint8)


def expected_fp8(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32(e4m3 * scale) by a plain loop over blocks, in float64."""
    out = E4M3.astype(np.float64)[codes]
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows, cols = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            out[rows, cols] *= np.float64(scale[i, j])
    return out.astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(values, np.float32)).to(torch.bfloat16).view(torch.int16).numpy()


def fp8_pair(rows: int, cols: int, block: tuple[int, int] = (128, 128), seed: int = 0):
    rng = np.random.default_rng(seed)
    codes = rng.choice(FINITE, (rows, cols))
    grid = (math.ceil(rows / block[0]), math.ceil(cols / block[1]))
    return codes, rng.lognormal(-6, 3, grid).astype(np.float32)


@pytest.mark.parametrize("shape", [(576, 256), (80, 200), (1, 128), (129, 129), (300, 1), (128, 127), (1, 1)])
def test_fp8_equals_the_float64_product_rounded_once(lone: Callable[..., Path], shape: tuple[int, int]) -> None:
    codes, scale = fp8_pair(*shape)
    with Checkpoint.open(lone({"w": ("F8_E4M3", codes), "w_scale_inv": ("F32", scale)})) as checkpoint:
        values, digest = load_f32(checkpoint, "w")
    np.testing.assert_array_equal(values, expected_fp8(codes, scale, (128, 128)))
    assert values.dtype == np.float32
    assert digest == checksum(codes.tobytes() + scale.tobytes())


@pytest.mark.parametrize("block", [(3, 5), (64, 128), (1, 1), (500, 500)])
def test_other_block_sizes_and_narrow_chunks(
    lone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, block: tuple[int, int]
) -> None:
    codes, scale = fp8_pair(77, 41, block)
    # Chunks of 16 rows, so that their borders fall inside blocks and blocks inside chunks.
    monkeypatch.setattr(dense, "_CHUNK_BYTES", 1)
    with Checkpoint.open(lone({"w": ("F8_E4M3", codes), "w_scale_inv": ("F32", scale)})) as checkpoint:
        values, digest = load_f32(checkpoint, "w", block)
        begins = [begin for begin, _ in RowStream(checkpoint, "w", block)]
    np.testing.assert_array_equal(values, expected_fp8(codes, scale, block))
    assert digest == checksum(codes.tobytes() + scale.tobytes())
    assert begins == [0, 16, 32, 48, 64]


def test_all_finite_codes_with_half_and_bf16_scales_and_signed_zero(lone: Callable[..., Path]) -> None:
    codes = np.where(np.isfinite(E4M3), np.arange(256), 0).astype(np.uint8).reshape(16, 16)
    tensors = {
        "h": ("F8_E4M3", codes),
        "h_scale_inv": ("F16", np.array([[0.5]], np.float16)),
        "b": ("F8_E4M3", codes),
        "b_scale_inv": ("BF16", bf16([[0.25]])),
        "z": ("F8_E4M3", codes),
        "z_scale_inv": ("F32", np.zeros((1, 1), np.float32)),
    }
    with Checkpoint.open(lone(tensors)) as checkpoint:
        half, _ = load_f32(checkpoint, "h")
        np.testing.assert_array_equal(half, E4M3[codes] * np.float32(0.5))
        assert np.signbit(half[8, 0])
        np.testing.assert_array_equal(load_f32(checkpoint, "b")[0], E4M3[codes] * np.float32(0.25))
        assert not load_f32(checkpoint, "z")[0].any()


def test_plain_floats_keep_value_and_shape(lone: Callable[..., Path]) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((5, 1, 7)).astype(np.float32)
    tensors = {
        "f32": ("F32", values),
        "f16": ("F16", values.astype(np.float16)),
        "bf16": ("BF16", bf16(values)),
        "f64": ("F64", values.astype(np.float64) / 3),
        "scalar": ("F32", np.array(-0.0, np.float32)),
        "empty": ("BF16", np.zeros((4, 0), np.uint16)),
        "none": ("F32", np.zeros((0,), np.float32)),
    }
    expected = {
        "f32": values,
        "f16": values.astype(np.float16).astype(np.float32),
        "bf16": torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy(),
        "f64": (values.astype(np.float64) / 3).astype(np.float32),
        "scalar": np.array(-0.0, np.float32),
        "empty": np.zeros((4, 0), np.float32),
        "none": np.zeros((0,), np.float32),
    }
    with Checkpoint.open(lone(tensors)) as checkpoint:
        for name, array in expected.items():
            found, digest = load_f32(checkpoint, name)
            assert found.shape == array.shape
            assert found.tobytes() == array.astype(np.float32).tobytes(), name
            assert digest == checksum(tensors[name][1].tobytes())


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused_with_their_position(lone: Callable[..., Path], dtype: str, bad: float) -> None:
    values = np.ones((4, 3, 2), np.float64)
    values[2, 1, 0] = bad
    encode = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
    array = bf16(values) if dtype == "BF16" else values.astype(encode[dtype])
    checkpoint = Checkpoint.open(lone({"w": (dtype, array)}))
    with checkpoint, pytest.raises(InputError, match=r"'w'.*\[2, 1, 0\]"):
        load_f32(checkpoint, "w")


def test_float64_beyond_float32_and_products_beyond_it_are_refused(lone: Callable[..., Path]) -> None:
    tensors = {
        "d": ("F64", np.array([1.0, 1e39])),
        "p": ("F8_E4M3", np.full((2, 2), 0x7E, np.uint8)),
        "p_scale_inv": ("F32", np.full((1, 1), 3e38, np.float32)),
    }
    with Checkpoint.open(lone(tensors)) as checkpoint:
        with pytest.raises(InputError, match=r"'d'.*inf at \[1\]"):
            load_f32(checkpoint, "d")
        with pytest.raises(InputError, match=r"'p'.*inf at \[0, 0\]"):
            load_f32(checkpoint, "p")


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_are_refused_with_their_position(
    lone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, byte: int
) -> None:
    monkeypatch.setattr(dense, "_CHUNK_BYTES", 1)
    codes, scale = fp8_pair(150, 140)
    codes[133, 7] = byte
    scale[:] = 0  # not even a zero scale hides it
    checkpoint = Checkpoint.open(lone({"w": ("F8_E4M3", codes), "w_scale_inv": ("F32", scale)}))
    with checkpoint, pytest.raises(InputError, match=r"'w'.*NaN byte at \[133, 7\]"):
        load_f32(checkpoint, "w")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, -1e-30])
def test_impossible_scales_are_refused_with_their_position(lone: Callable[..., Path], bad: float) -> None:
    codes, scale = fp8_pair(200, 300)
    scale[1, 2] = bad
    checkpoint = Checkpoint.open(lone({"w": ("F8_E4M3", codes), "w_scale_inv": ("F32", scale)}))
    with checkpoint, pytest.raises(InputError, match=r"'w_scale_inv'.*\[1, 2\]"):
        load_f32(checkpoint, "w")


@pytest.mark.parametrize("shape", [(3, 2), (2, 2), (2, 4), (6,), (2, 3, 1), (0, 3), (1,), (), (1, 1)])
def test_grids_of_any_other_shape_are_refused(lone: Callable[..., Path], shape: tuple[int, ...]) -> None:
    codes, _ = fp8_pair(200, 300)
    scale = np.ones(shape, np.float32)
    with Checkpoint.open(lone({"w": ("F8_E4M3", codes), "w_scale_inv": ("F32", scale)})) as checkpoint:
        kind = UnsupportedError if scale.size == 1 else InputError
        with pytest.raises(kind, match=r"'w_scale_inv'.*\[2, 3\]"):
            load_f32(checkpoint, "w")


def test_fp8_without_scales_scales_without_fp8_and_other_dtypes(lone: Callable[..., Path]) -> None:
    codes, scale = fp8_pair(4, 4)
    tensors = {
        "bare": ("F8_E4M3", codes),
        "plain": ("F32", scale),
        "plain_scale_inv": ("F32", scale),
        "lost_scale_inv": ("F32", scale),
        "vector": ("F8_E4M3", codes[0]),
        "vector_scale_inv": ("F32", scale[0]),
        "int": ("I8", codes.view(np.int8)),
        "e5m2": ("F8_E5M2", codes),
        "odd": ("F8_E4M3", codes),
        "odd_scale_inv": ("F8_E8M0", np.full((1, 1), 127, np.uint8)),
    }
    with Checkpoint.open(lone(tensors)) as checkpoint:
        for name, kind, words in (
            ("bare", InputError, "'bare_scale_inv', are missing"),
            ("plain", InputError, "'plain_scale_inv'"),
            ("vector", InputError, "expected a matrix"),
            ("int", UnsupportedError, "I8"),
            ("e5m2", UnsupportedError, "F8_E5M2"),
            ("odd", UnsupportedError, "F8_E8M0"),
            ("nowhere", InputError, "'nowhere' is missing"),
        ):
            with pytest.raises(kind, match=words):
                load_f32(checkpoint, name)
        assert orphan_scales(checkpoint) == ("lost_scale_inv",)


def test_the_digest_changes_with_every_source_byte_and_needs_the_whole_stream(lone: Callable[..., Path]) -> None:
    codes, scale = fp8_pair(130, 3)
    digests = set()
    for change in ("none", "code", "scale"):
        c, s = codes.copy(), scale.copy()
        c[129, 2] ^= change == "code"
        s[1, 0] *= 2 if change == "scale" else 1
        c[129, 2] = 1 if c[129, 2] in (0x7F, 0xFF) else c[129, 2]
        with Checkpoint.open(lone({"w": ("F8_E4M3", c), "w_scale_inv": ("F32", s)}, name=change)) as checkpoint:
            stream = RowStream(checkpoint, "w")
            with pytest.raises(ValueError, match="last row"):
                _ = stream.digest
            digests.add(load_f32(checkpoint, "w")[1])
    assert len(digests) == 3


def test_messages_are_one_line(lone: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(lone({"a\nb": ("F32", np.array([np.nan], np.float32))}))
    with checkpoint, pytest.raises(WasteError) as caught:
        load_f32(checkpoint, "a\nb")
    assert "\n" not in caught.value.message
