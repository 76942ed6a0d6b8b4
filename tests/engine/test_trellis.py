"""A container of trellis formats runs: backends agree, the laws hold in every bit, and the text is still predicted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from waste.convert import ConvertOptions, convert
from waste.engine.engine import Engine

GOLDEN = np.load(Path(__file__).resolve().parents[2] / "examples" / "nano-glm" / "golden.npz")
TEXT = GOLDEN["python.input_ids"][:150]  # past the dense limit of 67 tokens: selection is at work


@pytest.fixture(scope="module")
def trellis_nano(nano_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every format of the kind at once: gate and up wt2, down wt3, trunk q6."""
    target = tmp_path_factory.mktemp("trellis") / "nano.waste"
    convert(str(nano_checkpoint), target, ConvertOptions(experts="wt2+wt3", trunk="q6"))
    return target


@pytest.fixture(scope="module")
def engine(trellis_nano: Path) -> Iterator[Engine]:
    with Engine.open(trellis_nano, ram="4GiB") as engine:
        yield engine


@pytest.fixture(scope="module")
def logits(engine: Engine) -> np.ndarray:
    return engine.session().eval(TEXT, all_logits=True)


def loss(logits: np.ndarray) -> float:
    """Mean negative log likelihood of each token of the text after the first, nats."""
    wide = logits[:-1].astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    chosen = np.take_along_axis(wide, TEXT[1:, None].astype(int), 1)[:, 0]
    return float((np.log(np.exp(wide).sum(-1)) - chosen).mean())


def test_backends_agree(trellis_nano: Path, logits: np.ndarray) -> None:
    with Engine.open(trellis_nano, ram="4GiB", backend="reference", threads=1) as engine:
        expected = engine.session().eval(TEXT, all_logits=True)
    # The reference multiplies with float32 inputs, `cpu` rounds them to 8 bits: a tenth of what the formats cost.
    assert np.linalg.norm(logits - expected) < 0.06 * np.linalg.norm(expected)
    p, q = (
        x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True)) for x in (expected, logits)
    )
    assert (np.exp(p) * (p - q)).sum(-1).mean() < 0.01


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunk_size_changes_no_bit(engine: Engine, logits: np.ndarray, chunk: int) -> None:
    np.testing.assert_array_equal(engine.session(chunk=chunk).eval(TEXT, all_logits=True), logits)


@pytest.mark.parametrize("threads", [1, 3])
def test_thread_count_changes_no_bit(trellis_nano: Path, logits: np.ndarray, threads: int) -> None:
    with Engine.open(trellis_nano, ram="4GiB", threads=threads) as engine:
        np.testing.assert_array_equal(engine.session().eval(TEXT, all_logits=True), logits)


def test_text_is_predicted_nearly_as_well_as_by_the_exact_model(exact_nano: Path, logits: np.ndarray) -> None:
    with Engine.open(exact_nano, ram="4GiB") as engine:
        exact = loss(engine.session().eval(TEXT, all_logits=True))
    assert abs(loss(logits) - exact) < 0.15
