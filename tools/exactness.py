"""How far a container of nano-glm is from transformers: logits and greedy text on the golden prompts.

waste convert examples/nano-glm exact.waste --experts f32 --trunk f32
python tools/exactness.py exact.waste
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from waste import Engine

GOLDEN = Path(__file__).resolve().parent.parent / "examples" / "nano-glm" / "golden.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("container", type=Path)
    parser.add_argument("--backend", action="append", choices=["cpu", "reference"], help="default: both")
    chosen = parser.parse_args()
    golden = np.load(GOLDEN)
    print("| backend | prompt | tokens | logits, relative L2 | greedy tokens equal |\n|---|---|---|---|---|")
    for backend in chosen.backend or ["cpu", "reference"]:
        with Engine.open(chosen.container, backend=backend, threads=1) as engine:
            for name in map(str, golden["names"]):
                ids, want = golden[f"{name}.input_ids"], golden[f"{name}.logits"]
                session = engine.session()
                logits = session.eval(ids, all_logits=True)
                error = np.linalg.norm(np.float64(logits[-len(want) :]) - want) / np.linalg.norm(want)
                made, row = [], logits[-1]
                for _ in golden[f"{name}.greedy_ids"]:
                    made.append(int(row.argmax()))
                    row = session.eval(made[-1:])
                same = int((np.array(made) == golden[f"{name}.greedy_ids"]).sum())
                print(f"| {backend} | {name} | {len(ids)} | {error:.1e} | {same} of {len(made)} |", flush=True)


if __name__ == "__main__":
    main()
