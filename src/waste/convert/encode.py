"""One stored tensor from its source: dequantised, cut to its view, encoded, in pieces that fit into memory.

Matrices pass through in blocks of rows (a multiple of 16, which all formats encode independently), so that an
embedding of 154,880 x 4,096 takes some megabytes, not five gigabytes, and as many threads as there are can share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from waste import quant
from waste.container.layout import Bytes, matrix_shape
from waste.convert.parallel import Job
from waste.errors import InputError
from waste.io.dense import F32Array, RowStream, load_f32
from waste.io.safetensors import Checkpoint
from waste.models.config import ModelConfig
from waste.models.spec import TensorSpec, View
from waste.quant.strips import STRIP_ROWS

# What a weight in work takes, generously: float32, as much again of temporaries, the blob in up to four bytes.
_WEIGHT_BYTES = 16
# Weights of one job where the source is in memory already: a hundredth of a second or two of encoding.
_PIECE_WEIGHTS = 1 << 20


class TensorSource:
    """Reads the tensors of one checkpoint as specs want them. Not thread-safe; one for each thread."""

    def __init__(self, checkpoint: Checkpoint, block: tuple[int, int], config: ModelConfig) -> None:
        """block: rows and columns per FP8 scale."""
        self._checkpoint = checkpoint
        self._block = block
        self._config = config
        self.digest = 0  # of the source bytes of the tensor read last; valid once its jobs are used up
        # kv_b is stored as two tensors that follow each other: read once.
        self._kept: tuple[str, F32Array, int] | None = None

    def jobs(self, spec: TensorSpec, fmt: str, source: str) -> Iterator[Job[Bytes]]:
        """The blob of `spec` in format `fmt` as work for any thread, a piece each; then `digest` is the source's.

        Reading happens here, dequantising and encoding in the jobs. Either raises InputError naming the tensor:
        unreadable, not finite, or too large for the format.
        """
        if spec.view is View.WHOLE and len(spec.shape) == 2:
            self._kept = None
            stream = RowStream(self._checkpoint, source, self._block)
            for begin, end, raw in stream.chunks():
                weights = (end - begin) * stream.cols
                yield Job(raw.nbytes + _WEIGHT_BYTES * weights, partial(_encode_chunk, stream, begin, end, raw, fmt))
            self.digest = stream.digest
            return
        whole = self._load(source, keep=spec.view is not View.WHOLE)
        # Norms, biases and convolutions; Kimi stores A_log as [1, 1, heads, 1].
        matrix = whole.reshape(matrix_shape(spec.shape)) if spec.view is View.WHOLE else self._cut(whole, spec.view)
        step = max(1, _PIECE_WEIGHTS // (STRIP_ROWS * matrix.shape[1])) * STRIP_ROWS
        for begin in range(0, len(matrix), step):
            rows = matrix[begin : begin + step]
            yield Job(_WEIGHT_BYTES * rows.size, partial(encode, rows, fmt, source))

    def whole(self, source: str, fmt: str) -> tuple[Bytes, int]:
        """The blob of a whole matrix and the digest of its source."""
        weight, digest = load_f32(self._checkpoint, source, self._block)
        return encode(weight, fmt, source), digest

    def _load(self, source: str, keep: bool) -> F32Array:
        if self._kept is None or self._kept[0] != source:
            self._kept = None
            weight, digest = load_f32(self._checkpoint, source, self._block)
            self._kept = (source, weight, digest)
        _, weight, self.digest = self._kept
        if not keep:
            self._kept = None
        return weight

    def _cut(self, kv_b: F32Array, view: View) -> F32Array:
        """kv_b (H * (nope + v), kv_lora) -> key rows of each head transposed (H * kv_lora, nope), or its
        value rows (H * v, kv_lora)."""
        mla = self._config.mla
        heads = kv_b.reshape(mla.heads, mla.nope + mla.v, mla.kv_lora)
        if view is View.KEY_UP:
            keys = heads[:, : mla.nope].transpose(0, 2, 1)
            return np.ascontiguousarray(keys).reshape(mla.heads * mla.kv_lora, mla.nope)
        return np.ascontiguousarray(heads[:, mla.nope :]).reshape(mla.heads * mla.v, mla.kv_lora)


def _encode_chunk(stream: RowStream, begin: int, end: int, raw: Bytes, fmt: str) -> Bytes:
    return encode(stream.values(begin, end, raw), fmt, stream.name)


def encode(weight: npt.NDArray[np.float32], fmt: str, source: str) -> Bytes:
    """`weight` (rows, cols) in format `fmt`; InputError naming `source` where the format cannot hold it."""
    try:
        return quant.get(fmt).encode(weight)
    except InputError as error:
        raise InputError(f"tensor {source!r}: {error.message}", hint="--trunk f32 or --experts f32 holds it") from error
