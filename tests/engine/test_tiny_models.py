"""Law 3 on random models of awkward shapes, made and judged by `transformers`.

Each shape makes another corner matter: groups and blocks that divide nothing, one layer, every expert
chosen, prompts from one token to several times the selection's reach.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
import transformers_oracle

from waste.convert import ConvertOptions, convert
from waste.engine.engine import Engine

CLEAR = 1e-5

# transformers warns of its own plans; they are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SHAPES = {
    "release-like": (["--fp8"], 80),
    "nothing-divides": (
        "--fp8 --hidden 200 --moe-intermediate 72 --intermediate 300 --q-lora 56 --kv-lora 40 --head-dim 24 "
        "--kda-heads 3 --kda-head-dim 20 --heads 3 --index-heads 5 --index-head-dim 28".split(),
        60,
    ),
    "one-layer": ("--layers 1 --dense 0 --fp8".split(), 30),
    "all-experts": ("--experts 4 --topk 4 --layers 5 --dense 1".split(), 40),
    "one-token": ("--layers 4 --dense 1".split(), 1),
    "long": ("--layers 4 --dense 1 --index-topk 16 --index-kpool 4 --dtype float32".split(), 90),
    "wide-pools": ("--layers 4 --dense 0 --index-topk 24 --index-kpool 8 --hc-mult 2".split(), 100),
}


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(container, what transformers computes) of one shape."""
    options, tokens = SHAPES[request.param]
    return build("glm5_next", options, tokens, tmp_path_factory.mktemp(request.param))


def build(architecture: str, options: list[str], tokens: int, folder: Path):
    checkpoint, container = folder / "checkpoint", folder / "model.waste"
    tiny_checkpoint.main([architecture, str(checkpoint), *options])
    recorded = folder / "oracle.npz"
    # transformers cannot continue a model that has no attention layer at all.
    greedy = "0" if "1" in options and "--layers" in options else "8"
    transformers_oracle.main(
        [str(checkpoint), "--random", str(tokens), "--greedy", greedy, "--trace", "--out", str(recorded)]
    )
    convert(str(checkpoint), container, ConvertOptions(experts="f32", trunk="f32"))
    return container, np.load(recorded)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_equals_transformers(case, backend: str, recorder) -> None:
    compare(*case, backend, recorder)


FAMILIES = {
    "kimi_linear": (["--layers", "5"], 40),
    "glm_moe_dsa": (["--fp8", "--layers", "6"], 60),
    "deepseek_v3": (["--fp8", "--layers", "4"], 50),
    "kimi_k2": (["--fp8", "--layers", "4", "--variant", "kimi_k2"], 50),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_equal_transformers(family: str, backend: str, tmp_path: Path, recorder) -> None:
    options, tokens = FAMILIES[family]
    architecture = "deepseek_v3" if family == "kimi_k2" else family
    compare(*build(architecture, options, tokens, tmp_path), backend, recorder)


def compare(container: Path, oracle, backend: str, recorder) -> None:
    with Engine.open(container, ram="2GiB", backend=backend, threads=1) as engine:
        session = engine.session()
        logits = session.eval(oracle["input_ids"], all_logits=True, trace=recorder)
        made, row = [], logits[-1]
        wanted = oracle["greedy_ids"].tolist() if "greedy_ids" in oracle else []
        for _ in wanted:
            made.append(int(row.argmax()))
            row = session.eval(made[-1:])
        kinds = engine.config.attention, engine.config.moe_layers

    unclear = first_unclear(oracle, kinds)
    assert unclear is None or unclear > 0, "the first token already has a tie: choose another seed"
    error = np.linalg.norm(np.float64(logits[:unclear]) - oracle["logits"][:unclear])
    assert error < 1e-4 * np.linalg.norm(oracle["logits"][:unclear])
    for layer in kinds[1]:
        mine, theirs = np.stack(recorder.experts[layer]), oracle[f"router_ids.{layer}"]
        np.testing.assert_array_equal(mine[:unclear], theirs[:unclear])
    for name in oracle.files:
        if name.startswith("dsa_ids."):
            mine = recorder.positions.get(int(name[8:]))
            if mine is not None:
                for got, want in list(zip(mine, oracle[name], strict=True))[:unclear]:
                    np.testing.assert_array_equal(np.sort(got), np.unique(want[want >= 0]))
    if unclear is None:
        assert made == wanted


def first_unclear(oracle, kinds) -> int | None:
    """The first token with a choice too close to call; what follows it may rightly differ."""
    worst = np.full(len(oracle["input_ids"]), np.inf)
    for name in oracle.files:
        if name.startswith(("router_margin.", "dsa_margin.")):
            worst = np.minimum(worst, oracle[name])
    close = np.nonzero(worst <= CLEAR)[0]
    return int(close[0]) if len(close) else None
