"""ggml's quantisers through ctypes, and an independent decoder, for the comparisons in this folder.

The shared library is the user's: configure ggml's sources with BUILD_SHARED_LIBS and give the path of libggml-base.
Types are called as in GGUF files (IQ3_XXS); the `gguf` package knows their sizes and decodes them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

F32Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def bits(name: str) -> float:
    """Bits a weight of the ggml type `name`, scales included; KeyError when there is none."""
    weights, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return 8 * nbytes / weights


def decode(name: str, blocks: Bytes) -> F32Array:
    """(rows, row bytes) blocks -> (rows, K) float32, by the `gguf` package."""
    return np.asarray(dequantize(blocks, GGMLQuantizationType[name]), np.float32)


class Quantiser:
    """Encodes matrices into ggml's types: by libggml-base, or without it, those that the `gguf` package can write."""

    def __init__(self, library: Path | None) -> None:
        """OSError when `library` cannot be loaded."""
        self._chunk = None
        if library is not None:
            self._chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
            self._chunk.restype = ctypes.c_size_t
            sizes = [ctypes.c_int64] * 3  # first weight, rows, columns
            self._chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p]

    def encode(self, name: str, weight: F32Array) -> Bytes:
        """(rows, K) float32 -> (rows, row bytes), K a multiple of the type's block. Releases the GIL.

        Every column gets the importance 1: IQ2_XXS and IQ2_XS demand one, and all other types lose less with it than
        without (LEARNED: ggml-quality). NotImplementedError for a type that needs the library.
        """
        kind = GGMLQuantizationType[name]
        if self._chunk is None:
            return np.asarray(quantize(weight, kind))
        rows, cols = weight.shape
        source = np.ascontiguousarray(weight)
        importance = np.ones(cols, np.float32)
        block_weights, block_bytes = GGML_QUANT_SIZES[kind]
        if cols % block_weights:
            raise ValueError(f"{cols} columns are no multiple of {block_weights}, a block of {name}")
        blocks = np.zeros((rows, cols // block_weights * block_bytes), np.uint8)
        address = importance.ctypes.data
        written = self._chunk(int(kind), source.ctypes.data, blocks.ctypes.data, 0, rows, cols, address)
        if written != blocks.nbytes:
            raise ValueError(f"ggml wrote {written} bytes of {name}, expected {blocks.nbytes}")
        return blocks
