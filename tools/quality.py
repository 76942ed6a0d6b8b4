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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from waste import Engine

TEXTS = Path(__file__).resolve().parent.parent / "examples" / "nano-glm" / "eval.json"
WINDOW = 512
WINDOWS = 8  # per topic

F32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Quality:
    """What a container does to held-out text, mean over positions and standard error. Losses and KL in nats."""

    positions: int
    loss: float
    change: float  # of the loss, from exact mode's
    change_error: float
    kl: float  # of exact mode's distribution from the container's
    kl_error: float
    same: float  # share of positions with exact mode's most likely token


class Exact:
    """The windows, and what exact mode says about them: computed once, however many containers are compared."""

    def __init__(self, path: Path, per_topic: int = WINDOWS) -> None:
        with Engine.open(path, threads=1) as engine:
            self._texts = windows(engine, per_topic)
            self._log_p = [log_probabilities(engine, ids) for ids in self._texts]

    def compare(self, path: Path) -> Quality:
        """The container at `path` against exact mode."""
        losses, changes, divergences, same = [], [], [], []
        with Engine.open(path, threads=1) as engine:
            for ids, p in zip(self._texts, self._log_p, strict=True):
                q = log_probabilities(engine, ids)
                target = np.array(ids[1:])[:, None]
                loss = -np.take_along_axis(q, target, 1)[:, 0]
                losses.append(loss)
                changes.append(loss + np.take_along_axis(p, target, 1)[:, 0])
                divergences.append((np.exp(np.float64(p)) * (np.float64(p) - q)).sum(-1))
                same.append(p.argmax(-1) == q.argmax(-1))
        loss, change, kl, agree = (np.concatenate(x) for x in (losses, changes, divergences, same))
        spread = [float(x.std() / len(x) ** 0.5) for x in (change, kl)]
        return Quality(
            len(loss), float(loss.mean()), float(change.mean()), spread[0], float(kl.mean()), spread[1], agree.mean()
        )


def windows(engine: Engine, per_topic: int) -> list[list[int]]:
    """The first whole windows of each topic's documents, joined by the end-of-text token."""
    end = engine.tokenizer.id_of("<|endoftext|>")
    found = []
    for documents in json.loads(TEXTS.read_text(encoding="utf-8")).values():
        ids = [i for text in documents for i in (*engine.tokenizer.encode(text), end)]
        found += [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:per_topic]
    return found


def log_probabilities(engine: Engine, ids: list[int]) -> F32Array:
    """(T - 1, V): of the token after each of `ids` but the last."""
    logits = engine.session().eval(ids, all_logits=True)[:-1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


HEADER = "positions | loss | loss change | KL from exact | same top-1, % |"


def row(found: Quality) -> str:
    """The columns of `HEADER`."""
    return (
        f"{found.positions} | {found.loss:.4f} | {found.change:+.4f} ± {found.change_error:.4f} "
        f"| {found.kl:.5f} ± {found.kl_error:.5f} | {100 * found.same:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exact", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"per topic (default {WINDOWS})")
    chosen = parser.parse_args()
    print(f"| container | {HEADER}\n|---|---|---|---|---|---|")
    exact = Exact(chosen.exact, chosen.windows)
    for path in chosen.others:
        print(f"| {path.name} | {row(exact.compare(path))}", flush=True)


if __name__ == "__main__":
    main()
