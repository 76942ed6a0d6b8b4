"""Speed of the native encoders, in weights per second of thread CPU time, with this machine's figures beside them.

    python tools/bench_encoder.py            a Markdown table
    python tools/bench_encoder.py --json     the same for programs

Everything is included: transposing, rotation, two searches, scales, packing. Formats and instruction sets take turns,
so that a busy machine slows all of them down, and the best of the rounds counts.
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
from waste.kernels import encode as native
from waste.kernels import isa

FORMATS = ("wt2", "wt3", "wt4", "q6")
SHAPE = (64, 4096)
GLM_EXPERT_WEIGHTS = 304.4e9  # of GLM-5.3-Flash: 42 layers of 288 experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()

    weight = np.random.default_rng(0).standard_normal(SHAPE, np.float32) * np.float32(0.02)
    importance = np.random.default_rng(1).lognormal(0, 1.5, SHAPE[1]).astype(np.float32)
    best: dict[tuple[str, str, bool], float] = {}
    for _ in range(chosen.rounds):
        for name in FORMATS:
            fmt = quant.get(name)
            for instruction_set in isa.usable():
                for weighted in (False, True):
                    rows = weight[:16] if instruction_set == "portable" else weight
                    spent = seconds(
                        lambda rows=rows, fmt=fmt, weighted=weighted, chosen=instruction_set: native.encode(
                            rows,
                            fmt.code,
                            fmt.nbytes(*rows.shape),
                            importance if weighted else None,
                            instruction_set=chosen,
                        )
                    )
                    key = (name, instruction_set, weighted)
                    best[key] = max(best.get(key, 0.0), rows.size / spent / 1e6)
    machine = look(Path.cwd())
    load = os.getloadavg()[0]
    found = {
        "cpu": machine.cpu,
        "cores": machine.cores,
        "instruction_sets": list(machine.instruction_sets),
        "load_average": round(load, 2),
        "copy_gb_per_s": round(copy_rate(), 1),
        "mega_weights_per_s": [
            {"format": name, "isa": which, "weighted": weighted, "rate": round(rate, 1)}
            for (name, which, weighted), rate in best.items()
        ],
    }
    if chosen.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{machine.cpu}, {machine.cores} cores, {', '.join(machine.instruction_sets)}")
    print(f"load average {load:.1f}; one thread copies {found['copy_gb_per_s']} GB/s (read and written)\n")
    sets = isa.usable()
    print(
        f"| M weights/s and core | {' | '.join(sets)} | weighted, {sets[-1]} | GLM's experts, core-hours, {sets[-1]} |"
    )
    print("|---|" + "---|" * (len(sets) + 2))
    for name in FORMATS:
        rates = [f"{best[name, which, False]:.1f}" for which in sets]
        hours = GLM_EXPERT_WEIGHTS / (best[name, sets[-1], False] * 1e6) / 3600
        print(f"| {name} | {' | '.join(rates)} | {best[name, sets[-1], True]:.1f} | {hours:.2f} |")


if __name__ == "__main__":
    main()
