"""Products of strip formats with inputs of 8 bits, from their definition: bit for bit what every kernel must give.

A group of 128 inputs (rotated first for rotated formats) is codes times its largest magnitude / 127; whole numbers are
summed in 64 bits, groups in float32 in their order.
"""

from __future__ import annotations

import numpy as np
import rotated_formats


def quantise(x: np.ndarray, rotated: bool) -> tuple[np.ndarray, np.ndarray]:
    """(T, cols) float32 -> codes (T, groups, 128) int64 and scales (T, groups) float32."""
    padded = np.pad(x.astype(np.float32), ((0, 0), (0, -x.shape[1] % 128))).reshape(len(x), -1, 128)
    padded = np.where(np.abs(padded) < np.finfo(np.float32).tiny, np.float32(0), padded)  # subnormals count as zero
    if rotated:
        with np.errstate(invalid="ignore", over="ignore"):
            padded = _transform(padded * rotated_formats.SIGNS.astype(np.float32))
    largest = np.abs(padded).max(-1)
    finite, there = np.isfinite(padded).all(-1), largest >= np.float32(1e-30)
    usable = np.where(finite & there, largest, np.float32(1))
    inverse = np.where(finite & there, np.float32(127) / usable, np.float32(0))
    codes = np.rint(np.where(finite[..., None], padded, np.float32(0)) * inverse[..., None]).astype(np.int64)
    rescale = rotated_formats.RESCALE if rotated else np.float32(1)
    scales = usable / np.float32(127) * rescale
    return codes, np.where(finite, np.where(there, scales, np.float32(0)), np.float32(np.nan))


def _transform(x: np.ndarray) -> np.ndarray:
    """Hadamard over the last axis in float32, neighbours first."""
    half = 1
    while half < 128:
        a, b = np.moveaxis(x.reshape(*x.shape[:-1], -1, 2, half), -2, 0)
        x = np.stack((a + b, a - b), -2).reshape(x.shape)
        half *= 2
    return x


def strip_codes(name: str, blob: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole-number weights (padded rows, groups, 128) and scales as stored (padded rows, groups) float16."""
    if name in rotated_formats.BITS:
        return rotated_formats.read(name, blob, rows, cols)
    strips, groups, bits = -(-rows // 16), -(-cols // 128), {"q8": 8, "q4": 4}[name]
    parts = blob.reshape(strips, groups, 32 + 256 * bits)
    scales = np.ascontiguousarray(parts[..., :32]).view(np.float16).transpose(0, 2, 1).reshape(strips * 16, groups)
    lanes = parts[..., 32:].reshape(strips, groups, -1, 16, 4)  # vector, row, q
    if name == "q8":
        values = lanes.view(np.int8).astype(int)
    else:
        values = np.stack((lanes & 15, lanes >> 4), 3).astype(int) - 8
        values = values.reshape(strips, groups, 32, 16, 4)
    return values.transpose(0, 3, 1, 2, 4).reshape(strips * 16, groups, 128), scales


def linear(name: str, blob: np.ndarray, x: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """(T, cols) -> (T, rows) float32."""
    weights, weight_scales = strip_codes(name, blob, rows, cols)
    codes, scales = quantise(x, name in rotated_formats.BITS)
    sums = np.einsum("tgk,rgk->trg", codes, weights).astype(np.float32)
    total = np.zeros(sums.shape[:2], np.float32)
    for g in range(sums.shape[2]):
        total += sums[..., g] * (weight_scales[:, g].astype(np.float32) * scales[:, g, None])
    return total[:, :rows]
