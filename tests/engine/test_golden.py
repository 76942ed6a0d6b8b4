"""Law 3: exact mode equals transformers on a trained model, logits, choices and text alike.

The golden values were made by transformers 5.24.0 in float32; examples/nano-glm/README.md says how.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from waste.engine.engine import Engine

GOLDEN = np.load(Path(__file__).resolve().parents[2] / "examples" / "nano-glm" / "golden.npz")
PROMPTS = [str(name) for name in GOLDEN["names"]]
CLEAR = 1e-5  # choices are compared where the margin is larger than any float32 engine's error


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(np.float64(b)))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_choices_equal_transformers(exact_engine: Engine, prompt: str, recorder) -> None:
    ids = GOLDEN[f"{prompt}.input_ids"]
    logits = exact_engine.session().eval(ids, all_logits=True, trace=recorder)
    want = GOLDEN[f"{prompt}.logits"]
    assert relative(logits[-len(want) :], want) < 1e-4

    config, compared = exact_engine.config, 0
    for layer in config.moe_layers:
        margin, chosen = GOLDEN[f"{prompt}.router_margin.{layer}"], GOLDEN[f"{prompt}.router_ids.{layer}"]
        clear = margin > CLEAR
        compared += int(clear.sum())
        np.testing.assert_array_equal(np.stack(recorder.experts[layer])[clear], chosen[clear])
    assert compared > 0.99 * len(ids) * len(config.moe_layers)

    for layer in (i for i, kind in enumerate(config.attention) if kind == "mla"):
        margin, wanted = GOLDEN[f"{prompt}.dsa_margin.{layer}"], GOLDEN[f"{prompt}.dsa_ids.{layer}"]
        for row, gap, mine in zip(wanted, margin, recorder.positions[layer][-len(wanted) :], strict=True):
            if gap > CLEAR:
                np.testing.assert_array_equal(np.sort(mine), row[row >= 0])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_transformers(exact_engine: Engine, prompt: str) -> None:
    session = exact_engine.session()
    logits = session.eval(GOLDEN[f"{prompt}.input_ids"])
    made = []
    for _ in GOLDEN[f"{prompt}.greedy_ids"]:
        made.append(int(logits.argmax()))
        logits = session.eval(made[-1:])
    assert made == GOLDEN[f"{prompt}.greedy_ids"].tolist()
