"""wt2, wt3, wt4 and q6 read by NumPy from the definition of their layout, bit by bit and without any cleverness."""

from __future__ import annotations

import numpy as np

# Odd tables of the window trellis, and the bits of a code.
TABLES = {
    "wt2": [25, -52, -12, 7, 3, 19, -17, 45, 29, -8, -37, 10, -26, -4, 11, 41, 0, 17, -25, 63, -32, 5, 32, -11, -5,
            43, 16, -26, 6, -17, 31, 16],
    "wt3": [-63, 25, 17, 6, -29, -13, -2, 36, -18, 18, -2, -28, -41, 38, -10, 9, 32, -25, -12, 12, 4, 21, -51, -5, 18,
            33, 46, -14, -22, -5, 9, 2],
    "wt4": [-63, -42, -33, -27, -21, -16, -12, -8, -4, 0, 4, 8, 13, 18, 25, 36, -52, -37, -27, -21, -16, -12, -8, -4,
            0, 4, 8, 12, 17, 23, 30, 45],
}  # fmt: skip
TABLES = {name: np.array(half + [-t for t in reversed(half)]) for name, half in TABLES.items()}
BITS = {"wt2": 2, "wt3": 3, "wt4": 4, "q6": 6}
SIGNS = np.array(
    [1 - 2 * (word >> bit & 1) for word in (0x91E9BDA3, 0x9BE54357, 0x6E102151, 0x6D4CF047) for bit in range(32)]
)
HADAMARD = np.array([[1]])
for _ in range(7):
    HADAMARD = np.block([[HADAMARD, HADAMARD], [HADAMARD, -HADAMARD]])
FACTOR = 256
RESCALE = np.float32(0.08838834764831845) / np.float32(FACTOR)


def rotate(weight: np.ndarray) -> np.ndarray:
    """(rows, cols) -> (rows, cols padded to 128) float64: signs, then the orthonormal transform of every 128."""
    padded = np.pad(weight.astype(np.float64), ((0, 0), (0, -weight.shape[1] % 128)))
    blocks = padded.reshape(len(padded), -1, 128) * SIGNS
    return (blocks @ HADAMARD / np.sqrt(128)).reshape(padded.shape)


def read(name: str, blob: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Values in steps (padded rows, groups, 128) int and stored scales (padded rows, groups) float16."""
    strips, groups, bits = -(-rows // 16), -(-cols // 128), BITS[name]
    parts = blob.reshape(strips, groups, 32 + 256 * bits)
    scales = np.ascontiguousarray(parts[..., :32]).view(np.float16).transpose(0, 2, 1).reshape(strips * 16, groups)
    lanes = parts[..., 32:].reshape(strips, groups, 4 * bits, 16, 4)  # vector, row, q
    lanes = lanes.transpose(0, 3, 1, 4, 2).reshape(strips * 16, groups, 4, 4 * bits)  # row, group, q, bytes
    values = np.zeros((strips * 16, groups, 32, 4), int)  # m, q
    for row, group, q in np.ndindex(strips * 16, groups, 4):
        data = [int(byte) for byte in lanes[row, group, q]]
        values[row, group, :, q] = _six_bit(data) if name == "q6" else _ring(name, data)
    return values.reshape(strips * 16, groups, 128), scales


def _ring(name: str, data: list[int]) -> list[int]:
    """32 windows of the ring that the bytes of one lane are."""
    bits = BITS[name]
    codes = []
    if bits == 3:
        for a, b, c in zip(data[::3], data[1::3], data[2::3], strict=True):
            codes += [a & 7, a >> 3 & 7, b & 7, b >> 3 & 7, c & 7, c >> 3 & 7]
            spare = a >> 6 | (b >> 6) << 2 | (c >> 6) << 4
            codes += [spare & 7, spare >> 3]
    else:
        codes = [byte >> at & (1 << bits) - 1 for byte in data for at in range(0, 8, bits)]
    ring = codes + codes[:3]
    windows = [sum(ring[m + i] << bits * i for i in range(3)) & 63 for m in range(32)]
    return [int(TABLES[name][w]) for w in windows]


def _six_bit(data: list[int]) -> list[int]:
    found = []
    for low, second, high in zip(data[::3], data[1::3], data[2::3], strict=True):
        nibbles = [low & 15, low >> 4, second & 15, second >> 4]
        found += [(nibble | (high >> 2 * i & 3) << 4) - 32 for i, nibble in enumerate(nibbles)]
    return found


def decode(name: str, blob: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """(rows, cols) float32 to the bit: whole numbers rotated back, times one rounded scale."""
    values, scales = read(name, blob, rows, cols)
    back = (values @ HADAMARD * SIGNS).astype(np.float32)
    scaled = back * (scales.astype(np.float32) * RESCALE)[..., None]
    return scaled.reshape(len(values), -1)[:rows, :cols]
