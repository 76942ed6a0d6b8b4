"""Checkpoint tensors as float32: plain floats widened, block-scaled FP8 multiplied out, nothing non-finite let through.

Block-scaled FP8 (architectures.md section 1): a tensor of dtype F8_E4M3 is `e4m3(q[i, j]) *
scale[i // bh, j // bw]`, its scales in NAME_scale_inv (a multiplier, despite the name) of
exactly ceil(rows / bh) x ceil(cols / bw) entries, cropped at ragged edges. The product has at
most 28 significant bits, so one float32 multiplication rounds it exactly once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from waste.errors import InputError, UnsupportedError
from waste.io.checksum import Hasher
from waste.io.files import shown
from waste.io.safetensors import Checkpoint, TensorInfo

F32Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

FP8 = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"

_PLAIN = ("F32", "F16", "BF16", "F64")
# Source bytes held at a time. Small enough that dozens of chunks can be in work at once, large enough that reads are
# sequential.
_CHUNK_BYTES = 4 << 20


class RowStream:
    """One tensor, read once from first row to last, a few MiB at a time.

    Iterating yields (begin, rows): rows is (n, cols) float32, the rows from `begin` on. Whoever has threads to spare
    takes `chunks` instead, which reads, and has them call `values` of each. A tensor
    that is not 2-D is seen as shape[0] rows of all the rest, a scalar as 1 x 1. `digest` is the
    checksum of the source bytes (for FP8 followed by those of the scales), known after the last row.
    Form, scales and dtype are checked on creation: InputError, UnsupportedError as `load_f32`.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, block: tuple[int, int] = (128, 128), *, multiple: int = 16):
        """All chunks but the last have a multiple of `multiple` rows (formats encode strips of 16)."""
        self._checkpoint = checkpoint
        self._info = checkpoint.info(name)
        self._multiple = multiple
        self._block = block
        self._hasher = Hasher()
        self._done = False
        self.name = name
        self.shape = self._info.shape
        self.rows, self.cols = _as_matrix(self.shape)
        self._scale: F32Array | None = None
        self._scale_bytes: Bytes | None = None
        scale_name = name + SCALE_SUFFIX
        if self._info.dtype == FP8:
            self._scale, self._scale_bytes = _read_scale(checkpoint, self._info, scale_name, block)
        elif self._info.dtype not in _PLAIN:
            raise UnsupportedError(
                f"tensor {name!r} of {shown(self._info.path)} is {self._info.dtype}, "
                f"expected one of {', '.join((*_PLAIN, FP8))}"
            )
        elif scale_name in checkpoint.tensors:
            raise InputError(
                f"tensor {name!r} of {shown(self._info.path)} is {self._info.dtype}, expected {FP8}, "
                f"as it has scales, {scale_name!r}"
            )

    @property
    def digest(self) -> int:
        """xxh3_64 of the source bytes; ValueError before the stream has been read to its end."""
        if not self._done:
            raise ValueError("the digest is known after the last row")
        return self._hasher.value

    def __iter__(self) -> Iterator[tuple[int, F32Array]]:
        for begin, end, raw in self.chunks():
            yield begin, self.values(begin, end, raw)

    def chunks(self) -> Iterator[tuple[int, int, Bytes]]:
        """(begin, end, source bytes of the rows from `begin` to `end`), to the last row."""
        self._hasher = Hasher()
        self._done = False
        row_bytes = self._info.nbytes // self.rows if self.rows else 0
        step = max(1, _CHUNK_BYTES // max(row_bytes * self._multiple, 1)) * self._multiple
        for begin in range(0, self.rows, step):
            end = min(begin + step, self.rows)
            raw = (
                self._checkpoint.read_rows(self._info.name, begin, end)
                if self.shape
                else self._checkpoint.read(self._info.name)
            )
            self._hasher.update(raw)
            yield begin, end, raw
        if self._scale_bytes is not None:
            self._hasher.update(self._scale_bytes)
        self._done = True

    def values(self, begin: int, end: int, raw: Bytes) -> F32Array:
        """One of `chunks` as (end - begin, cols) float32; InputError for what is not finite. For any thread."""
        if self._info.dtype != FP8:
            values = _widen(raw, self._info.dtype).reshape(end - begin, self.cols)
            self._refuse_non_finite(values, begin, "holds")
            return values
        nan = (raw & 0x7F) == 0x7F
        if nan.any():
            place = _place(int(nan.argmax()), begin, self.cols, self.shape)
            raise InputError(f"tensor {self._info.name!r} of {shown(self._info.path)} holds a NaN byte at {place}")
        values = _e4m3(raw).reshape(end - begin, self.cols)
        assert self._scale is not None
        height, width = self._block
        for block_row in range(begin // height, math.ceil(end / height)):
            rows = slice(max(block_row * height - begin, 0), (block_row + 1) * height - begin)
            with np.errstate(over="ignore"):
                values[rows] *= np.repeat(self._scale[block_row], width)[: self.cols]
        self._refuse_non_finite(values, begin, "times its scale gives")
        return values

    def _refuse_non_finite(self, values: F32Array, begin: int, verb: str) -> None:
        finite = np.isfinite(values)
        if not finite.all():
            index = int(finite.argmin())
            place = _place(index, begin, self.cols, self.shape)
            raise InputError(
                f"tensor {self._info.name!r} of {shown(self._info.path)} {verb} {values.flat[index]} at {place}, "
                "expected finite float32 values"
            )


def load_f32(checkpoint: Checkpoint, name: str, block: tuple[int, int] = (128, 128)) -> tuple[F32Array, int]:
    """The tensor `name`, float32 in its own shape, and the checksum of its source bytes (scales last).

    Reads F32, F16, BF16, F64 (rounded to float32) and F8_E4M3 with block scales of F32, F16 or
    BF16; `block` is (rows, columns) per scale. Holds little more than the result.

    Raises InputError, naming the tensor: not in the checkpoint; a NaN or infinity, with its
    position; FP8 without scales, scales of any shape but the grid's, a negative or non-finite
    scale; scales beside a tensor that is not FP8. UnsupportedError for other dtypes and for one
    scale per tensor.
    """
    stream = RowStream(checkpoint, name, block)
    out = np.empty((stream.rows, stream.cols), np.float32)
    for begin, rows in stream:
        out[begin : begin + len(rows)] = rows
    return out.reshape(stream.shape), stream.digest


def orphan_scales(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Names of scale tensors whose weight is not in the checkpoint, in order; a lost weight shows so."""
    return tuple(
        name
        for name in sorted(checkpoint.tensors)
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) not in checkpoint.tensors
    )


def _read_scale(
    checkpoint: Checkpoint, info: TensorInfo, scale_name: str, block: tuple[int, int]
) -> tuple[F32Array, Bytes]:
    """The (ceil(rows / bh), ceil(cols / bw)) float32 scales of an FP8 tensor, and their source bytes."""
    where = f"tensor {info.name!r} of {shown(info.path)}"
    if len(info.shape) != 2:
        raise InputError(f"{where} is {FP8} with shape {list(info.shape)}, expected a matrix")
    if scale_name not in checkpoint.tensors:
        raise InputError(
            f"{where} is {FP8} but its scales, {scale_name!r}, are missing", hint="download the file again"
        )
    scale_info = checkpoint.tensors[scale_name]
    there = f"scales {scale_name!r} of {shown(scale_info.path)}"
    if scale_info.dtype not in ("F32", "F16", "BF16"):
        raise UnsupportedError(f"{there} are {scale_info.dtype}, expected F32, F16 or BF16")
    grid = (math.ceil(info.shape[0] / block[0]), math.ceil(info.shape[1] / block[1]))
    if scale_info.shape != grid:
        if math.prod(scale_info.shape) == 1:
            raise UnsupportedError(
                f"{where} has one scale for the whole of it, {scale_name!r} of shape {list(scale_info.shape)}; "
                f"only one per {block[0]} x {block[1]} block is supported, here {list(grid)}"
            )
        raise InputError(
            f"{there} have shape {list(scale_info.shape)}, expected {list(grid)} "
            f"for {list(info.shape)} in blocks of {block[0]} x {block[1]}"
        )
    raw = checkpoint.read(scale_name)
    scale = _widen(raw, scale_info.dtype).reshape(grid)
    bad = ~np.isfinite(scale) | (scale < 0)
    if bad.any():
        row, col = np.unravel_index(int(bad.argmax()), grid)
        raise InputError(f"{there} hold {scale[row, col]} at [{row}, {col}], expected finite values of at least zero")
    return scale, raw


def _widen(raw: Bytes, dtype: str) -> F32Array:
    """(n,) float32 from the bytes of a plain float dtype, always in memory of its own."""
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F32":
        return raw.view("<f4").astype(np.float32)
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    # What float64 holds beyond the range becomes infinite here and is refused by the caller.
    with np.errstate(over="ignore"):
        return raw.view("<f8").astype(np.float32)


def e4m3_value(byte: int) -> float:
    """The value of an e4m3fn byte: 1-4-3 bits, bias 7, exponent 0 subnormal, no infinities, 0x7f and 0xff NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


@functools.cache
def _e4m3_pairs() -> npt.NDArray[np.uint64]:
    """The two float32 values, as one uint64, of every pair of e4m3 bytes read as a uint16."""
    single = np.array([e4m3_value(byte) for byte in range(256)], np.float32)
    pair = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    return np.ascontiguousarray(single[pair]).view(np.uint64).ravel()


def _e4m3(raw: Bytes) -> F32Array:
    """(n,) float32 values of e4m3 bytes.

    Two per table look-up: 475 against 140-180 million values a second for single bytes, on one
    core. (Shifting the bits into a float32 is faster still, but loses the subnormals wherever the
    processor has been told to flush them.)
    """
    padded = raw if len(raw) % 2 == 0 else np.append(raw, np.uint8(0))
    return _e4m3_pairs()[padded.view(np.uint16)].view(np.float32)[: len(raw)]


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) under which a tensor of any shape is streamed."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _place(index: int, begin: int, cols: int, shape: tuple[int, ...]) -> str:
    """The position of element `index` of the rows from `begin` on, as "[3, 17]" in the tensor's own shape."""
    if not shape:
        return "[]"
    position = np.unravel_index(begin * cols + index, shape)
    return str([int(axis) for axis in position])
