"""What a conversion of nano-glm costs on held-out text: loss, KL divergence and top-1 agreement with exact mode.

    waste convert examples/nano-glm exact.waste --experts f32 --trunk f32
    waste convert examples/nano-glm default.waste
    python tools/quality.py exact.waste default.waste

Windows of 512 tokens of examples/nano-glm/eval.json, the same ones for every container; the spread is the
standard error over positions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from waste import Engine

TEXTS = Path(__file__).resolve().parent.parent / "examples" / "nano-glm" / "eval.json"
WINDOW = 512


def windows(engine: Engine, per_topic: int) -> list[list[int]]:
    """The first whole windows of each topic's documents, joined by the end-of-text token."""
    end = engine.tokenizer.id_of("<|endoftext|>")
    found = []
    for documents in json.loads(TEXTS.read_text(encoding="utf-8")).values():
        ids = [i for text in documents for i in (*engine.tokenizer.encode(text), end)]
        found += [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:per_topic]
    return found


def log_probabilities(engine: Engine, ids: list[int]) -> np.ndarray:
    """(T, V) float64."""
    logits = engine.session().eval(ids, all_logits=True).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exact", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--windows", type=int, default=8, help="per topic (default 8)")
    chosen = parser.parse_args()
    print("| container | positions | loss | loss change | KL from exact | same top-1, % |\n|---|---|---|---|---|---|")
    with Engine.open(chosen.exact) as engine:
        texts = windows(engine, chosen.windows)
        # Kept for all containers: 16 MiB a window of nano-glm.
        references = [log_probabilities(engine, ids)[:-1] for ids in texts]
    for path in [chosen.exact, *chosen.others]:
        losses, changes, divergences, same = [], [], [], []
        with Engine.open(path) as engine:
            for ids, p in zip(texts, references, strict=True):
                q = log_probabilities(engine, ids)[:-1]
                target = np.array(ids[1:])[:, None]
                loss = -np.take_along_axis(q, target, 1)[:, 0]
                losses.append(loss)
                changes.append(loss + np.take_along_axis(p, target, 1)[:, 0])
                divergences.append((np.exp(p) * (p - q)).sum(-1))
                same.append(p.argmax(-1) == q.argmax(-1))
        loss, change, kl = (np.concatenate(x) for x in (losses, changes, divergences))
        error = [x.std() / len(x) ** 0.5 for x in (change, kl)]
        print(
            f"| {path.name} | {len(loss)} | {loss.mean():.4f} | {change.mean():+.4f} ± {error[0]:.4f} "
            f"| {kl.mean():.4f} ± {error[1]:.4f} | {100 * np.concatenate(same).mean():.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
