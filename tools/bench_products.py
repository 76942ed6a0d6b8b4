"""Speed of the native matrix products, in multiply-adds per second of one thread's CPU time, for every format.

    python tools/bench_products.py           a Markdown table
    python tools/bench_products.py --json    the same for programs

A 2048 x 4096 matrix times 1 and 64 tokens. Formats take turns, so that a busy machine slows all of them down, and the
best of the rounds counts. The machine's rate of copying stands beside them: q8 at one token reads a byte a weight.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
from stopwatch import copy_rate, seconds

from waste import quant
from waste.hardware.brief import look
from waste.kernels import _cpu

FORMATS = ("f32", "bf16", "q8", "q4", "q6", "wt4", "wt3", "wt2")
ROWS, COLS = 2048, 4096
TOKENS = (1, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args()

    rng = np.random.default_rng(0)
    dense = rng.standard_normal((ROWS, COLS), np.float32) * np.float32(0.02)
    x = rng.standard_normal((max(TOKENS), COLS), np.float32)
    y = np.empty((max(TOKENS), ROWS), np.float32)
    pool = _cpu.Pool(1)
    weights = {}
    for name in FORMATS:
        fmt = quant.get(name)
        blob = np.ascontiguousarray(fmt.encode(dense)).view(np.uint8)
        weights[name] = _cpu.Weight(blob.ctypes.data, fmt.code, ROWS, COLS, blob)
    best = {(name, tokens): 0.0 for name in FORMATS for tokens in TOKENS}
    for _ in range(chosen.rounds):
        for name, tokens in best:
            weight = weights[name]
            spent = seconds(
                lambda weight=weight, tokens=tokens: _cpu.linear(pool, x.ctypes.data, weight, y.ctypes.data, tokens)
            )
            best[name, tokens] = max(best[name, tokens], ROWS * COLS * tokens / spent / 1e9)
    machine = look(Path.cwd())
    found = {
        "cpu": machine.cpu,
        "instruction_sets": list(machine.instruction_sets),
        "load_average": round(os.getloadavg()[0], 2),
        "copy_gb_per_s": round(copy_rate(), 1),
        "giga_multiply_adds_per_s": [
            {"format": name, "tokens": tokens, "rate": round(rate, 2)} for (name, tokens), rate in best.items()
        ],
    }
    if chosen.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{machine.cpu}, {', '.join(machine.instruction_sets)}; load average {found['load_average']}")
    print(f"one thread copies {found['copy_gb_per_s']} GB/s (read and written)\n")
    print(f"| G multiply-adds/s and core | {' | '.join(f'tokens: {tokens}' for tokens in TOKENS)} |")
    print("|---|" + "---|" * len(TOKENS))
    for name in FORMATS:
        print(f"| {name} | {' | '.join(f'{best[name, tokens]:.1f}' for tokens in TOKENS)} |")


if __name__ == "__main__":
    main()
