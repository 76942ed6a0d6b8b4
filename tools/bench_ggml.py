"""Speed of matrix products from memory beside ggml's, for formats of about equal size.

    python tools/bench_ggml.py LIBS            a Markdown table
    python tools/bench_ggml.py LIBS --json     the same for programs

LIBS is the folder with libggml-base.so and libggml-cpu.so of a ggml built for this machine:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=OFF && cmake --build build

GCC 12 miscompiles the AMX kernels of ggml 0.25 (its _tile_loadconfig declares 8 of the 64 bytes it reads, so the rest
of the tile configuration is never stored): an illegal instruction ends the program. `--without AMX` leaves them out.

A 2048 x 4096 matrix times 1 and 64 tokens of float32 through ggml's CPU backend (a graph of one product) and through
our native kernels, one thread each, its CPU time. Every product takes the next of many distinct copies, and all
formats take turns, so that weights come from memory; both sides ask for huge pages. The time that a tenth of the
products stay below counts: a busy machine adds to times and never takes away.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from ggml_library import F32Array, Quantiser, bits, decode
from ggml_products import Backend, Matrices
from stopwatch import copy_rate, seconds

from waste import quant
from waste.hardware.brief import look
from waste.io.buffers import aligned
from waste.kernels import _cpu

ROWS, COLS = 2048, 4096
TOKENS = (1, 64)
# Ours and ggml's types of about its size.
PAIRS = {
    "q8": ("Q8_0",),
    "q6": ("Q6_K",),
    "wt4": ("Q4_K", "IQ4_XS", "Q4_0"),
    "wt3": ("IQ3_XXS", "IQ3_S", "Q3_K"),
    "wt2": ("IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K"),
}
# Quantised anew; the matrix repeats them. Some of ggml's types take seconds for a million weights.
_DRAWN_ROWS = 128
# The largest relative L2 distance of a product from float64: activations in 8 bits cost .005 to .01.
_TOLERANCE = 0.02


@dataclass
class Arm:
    """One way to multiply: `multiply(copy, tokens)` computes, `result` tells what came out."""

    format: str
    kernel: str  # kind of memory for ggml, "waste" for ours
    bits: float
    decoded: F32Array
    multiply: Callable[[int, int], object]
    result: Callable[[int, int], F32Array]
    spent: dict[int, list[float]] = field(default_factory=lambda: {tokens: [] for tokens in TOKENS})

    def rate(self, tokens: int) -> float:
        """G multiply-adds a second."""
        return float(ROWS * COLS * tokens / np.percentile(self.spent[tokens], 10) / 1e9)


def our_arm(name: str, dense: F32Array, x: F32Array, megabytes: int) -> Arm:
    fmt = quant.get(name)
    blob = fmt.encode(dense)
    memory = aligned(copies_of(blob.nbytes, megabytes) * blob.nbytes).reshape(-1, blob.nbytes)
    memory[:] = blob
    weights = [_cpu.Weight(copy.ctypes.data, fmt.code, ROWS, COLS, copy) for copy in memory]
    pool = _cpu.Pool(1)
    inputs = {tokens: x[:tokens] for tokens in TOKENS}

    def multiply(copy: int, tokens: int) -> F32Array:
        return _cpu.linear(pool, inputs[tokens], weights[copy % len(weights)])

    return Arm(name, "waste", fmt.bits, fmt.decode(blob, ROWS, COLS), multiply, multiply)


def ggml_arms(backend: Backend, quantiser: Quantiser, name: str, dense: F32Array, x: F32Array, mb: int) -> list[Arm]:
    """One for each kind of memory that has a kernel for the type."""
    blocks = np.tile(quantiser.encode(name, dense[:_DRAWN_ROWS]), (ROWS // _DRAWN_ROWS, 1))
    decoded = decode(name, blocks)
    copies = copies_of(blocks.nbytes, mb)
    arms = []
    for kind in backend.kinds:
        try:
            matrices = Matrices(backend, kind, name, blocks, COLS, copies, TOKENS)
        except NotImplementedError:
            continue
        for tokens in TOKENS:
            matrices.give(x[:tokens])

        def multiply(copy: int, tokens: int, matrices: Matrices = matrices) -> None:
            matrices.multiply(copy % copies, tokens)

        def result(copy: int, tokens: int, matrices: Matrices = matrices) -> F32Array:
            return matrices.result(copy % copies, tokens)

        arms.append(Arm(name, kind, bits(name), decoded, multiply, result))
    return arms


def copies_of(nbytes: int, megabytes: int) -> int:
    """How many copies of a matrix fill the memory wanted."""
    return max(2, megabytes * 1_000_000 // nbytes)


def check(arm: Arm, x: F32Array) -> None:
    """End the program unless the arm's products are those of its decoded weights."""
    for tokens in TOKENS:
        arm.multiply(0, tokens)
        exact = x[:tokens].astype(np.float64) @ arm.decoded.T.astype(np.float64)
        error = np.linalg.norm(arm.result(0, tokens) - exact) / np.linalg.norm(exact)
        if not error < _TOLERANCE:
            sys.exit(f"{arm.format} in {arm.kernel}: {tokens} tokens are {error:.3g} from the decoded weights' product")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", type=Path, help="folder with libggml-base.so and libggml-cpu.so")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40, help="products of one token for each arm (default 40)")
    parser.add_argument("--batches", type=int, default=6, help="products of 64 tokens for each arm (default 6)")
    parser.add_argument("--megabytes", type=int, default=128, help="copies of a matrix for each arm (default 128)")
    parser.add_argument("--formats", nargs="+", choices=PAIRS, default=list(PAIRS), help="ours, with ggml's beside")
    parser.add_argument("--without", nargs="+", default=[], metavar="KERNEL", help="CPU, CPU_REPACK or AMX of ggml")
    chosen = parser.parse_args()

    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((_DRAWN_ROWS, COLS), np.float32) * np.float32(0.02)
    dense = np.tile(drawn, (ROWS // _DRAWN_ROWS, 1))
    x = rng.standard_normal((max(TOKENS), COLS), np.float32)
    backend = Backend(chosen.libraries)
    for kind in chosen.without:
        backend.kinds.pop(kind, None)
    quantiser = Quantiser(chosen.libraries / "libggml-base.so")
    arms: list[Arm] = []
    for ours in chosen.formats:
        arms.append(our_arm(ours, dense, x, chosen.megabytes))
        for theirs in PAIRS[ours]:
            arms += ggml_arms(backend, quantiser, theirs, dense, x, chosen.megabytes)
    for arm in arms:
        check(arm, x)
    for tokens, rounds in zip(TOKENS, (chosen.rounds, chosen.batches), strict=True):
        for copy in range(1, rounds + 1):
            for arm in arms:
                arm.spent[tokens].append(seconds(functools.partial(arm.multiply, copy, tokens)))
    machine = look(Path.cwd())
    found = {
        "cpu": machine.cpu,
        "instruction_sets": list(machine.instruction_sets),
        "ggml": backend.version,
        "load_average": round(os.getloadavg()[0], 2),
        "copy_gb_per_s": round(copy_rate(), 1),
        "giga_multiply_adds_per_s": [
            {"format": arm.format, "kernel": arm.kernel, "bits": arm.bits}
            | {f"tokens_{tokens}": round(arm.rate(tokens), 2) for tokens in TOKENS}
            for arm in arms
        ],
    }
    if chosen.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{machine.cpu}, {', '.join(machine.instruction_sets)}; load average {found['load_average']}")
    print(f"ggml {backend.version}; one thread copies {found['copy_gb_per_s']} GB/s (read and written)\n")
    print("| format | bits | kernel | 1 token: G multiply-adds/s | GB/s of weights | 64 tokens: G multiply-adds/s |")
    print("|---|---|---|---|---|---|")
    for arm in arms:
        one, many = (arm.rate(tokens) for tokens in TOKENS)
        print(f"| {arm.format} | {arm.bits:.4g} | {arm.kernel} | {one:.2f} | {one * arm.bits / 8:.1f} | {many:.1f} |")


if __name__ == "__main__":
    main()
