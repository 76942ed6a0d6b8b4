"""The sparse-selection index of the `cpu` backend: keys, exact top-k, ties, state."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.backends.base import IndexerWeights, IndexState
from waste.backends.shapes import IndexerShape, Rotary
from waste.kernels import _cpu

F32 = npt.NDArray[np.float32]
FORMS = {
    "pools": IndexerShape(8, 32, topk=16, pool=4, rotary=None),
    "pools of three": IndexerShape(3, 20, topk=9, pool=3, rotary=None),
    "tokens": IndexerShape(4, 24, topk=7, pool=1, rotary=Rotary.plain(10, 8e6)),
    "tokens, not rotated": IndexerShape(2, 16, topk=5, pool=1, rotary=None),
}
DIM, Q_LORA = 50, 30


def arrays_of(rng: np.random.Generator, shape: IndexerShape) -> dict[str, F32]:
    d, n = shape.head_dim, shape.heads
    arrays = {
        "wq_b": rng.standard_normal((n * d, Q_LORA), np.float32),
        "wk": rng.standard_normal((d, DIM), np.float32),
        "k_norm": rng.standard_normal(d, np.float32),
        "k_norm_bias": rng.standard_normal(d, np.float32),
        "proj": rng.standard_normal((n, DIM), np.float32),
    }
    if shape.pool > 1:
        arrays["gate"] = rng.standard_normal((d, DIM), np.float32) * np.float32(0.2)
        arrays["ape"] = rng.standard_normal((shape.pool, d), np.float32)
    return arrays


def weights(lab: Any, ops: Any, arrays: dict[str, F32], fmt: str = "f32") -> IndexerWeights:
    parts: dict[str, Any] = {"gate": None, "ape": None}
    for name, values in arrays.items():
        vector = name in ("k_norm", "k_norm_bias", "ape")
        parts[name] = ops.vector(values) if vector else lab.weight(ops, values, fmt)
    return IndexerWeights(**parts)


def empty(ops: Any, shape: IndexerShape, tokens: int) -> IndexState:
    d = shape.head_dim
    return IndexState(ops.zeros(tokens // shape.pool, d), ops.zeros(shape.pool, d), ops.zeros(shape.pool, d))


def inputs(rng: np.random.Generator, tokens: int) -> tuple[F32, F32]:
    return rng.standard_normal((tokens, DIM), np.float32), rng.standard_normal((tokens, Q_LORA), np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_agrees_with_the_oracle(lab: Any, rng: np.random.Generator, form: str) -> None:
    shape = FORMS[form]
    arrays, (x, latent) = arrays_of(rng, shape), inputs(rng, 60)
    states = [empty(ops, shape, 60) for ops in (lab.cpu, lab.oracle)]
    begin = 0
    for end in (1, 2, 5, 14, 15, 40, 60):
        found, expected = (
            ops.index(ops.vector(x[begin:end]), ops.vector(latent[begin:end]), weights(lab, ops, arrays), shape, state)
            for ops, state in zip((lab.cpu, lab.oracle), states, strict=True)
        )
        assert (found is None) == (expected is None) == (end // shape.pool <= shape.keep)
        if found is not None:
            assert np.array_equal(found.positions, expected.positions)
            assert np.array_equal(found.offsets, expected.offsets)
        begin = end
    assert states[0].tokens == states[1].tokens == 60
    lab.close(states[0].keys, states[1].keys)
    if shape.pool > 1:
        lab.close(states[0].open_keys, states[1].open_keys)
        lab.close(states[0].open_gates, states[1].open_gates)


def test_every_weight_format(lab: Any, rng: np.random.Generator, fmt: str) -> None:
    shape = FORMS["pools"]
    arrays, (x, latent) = arrays_of(rng, shape), inputs(rng, 40)
    found, expected = (
        ops.index(ops.vector(x), ops.vector(latent), weights(lab, ops, arrays, fmt), shape, empty(ops, shape, 40))
        for ops in (lab.cpu, lab.oracle)
    )
    if fmt in ("f32", "bf16"):
        assert np.array_equal(found.positions, expected.positions)
    else:  # inputs rounded to 8 bits decide near ties otherwise
        assert np.array_equal(found.offsets, expected.offsets)
        assert np.mean(found.positions == expected.positions) > 0.8


@pytest.mark.parametrize("form", FORMS)
def test_selection_is_the_best_of_the_past(lab: Any, rng: np.random.Generator, form: str) -> None:
    """A second path from the formulas, float64, from the keys the state holds."""
    shape, tokens = FORMS[form], 50
    arrays, (x, latent) = arrays_of(rng, shape), inputs(rng, tokens)
    state = empty(lab.cpu, shape, tokens)
    selection = lab.cpu.index(x, latent, weights(lab, lab.cpu, arrays), shape, state)
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    for t in range(tokens):
        q = (wide["wq_b"] @ latent[t]).reshape(shape.heads, shape.head_dim)
        if shape.rotary is not None:
            pairs = q[:, : shape.rotary.dim].reshape(shape.heads, -1, 2) @ [1, 1j]
            turned = pairs * np.exp(1j * t * np.array(shape.rotary.inv_freq))
            q[:, : shape.rotary.dim] = np.stack([turned.real, turned.imag], -1).reshape(shape.heads, -1)
        whole = (t + 1) // shape.pool
        scores = (wide["proj"] @ x[t]) @ np.maximum(q @ state.keys[:whole].T.astype(np.float64), 0)
        best = np.sort(np.argsort(-scores, kind="stable")[: shape.keep])
        expected = [p * shape.pool + u for p in best for u in range(shape.pool)]
        expected += range(whole * shape.pool, t + 1)
        assert selection.positions[selection.offsets[t] : selection.offsets[t + 1]].tolist() == expected


def test_ties_go_to_the_lower_index(lab: Any, rng: np.random.Generator) -> None:
    """Equal tokens make equal pools: the first ones stay."""
    shape = FORMS["pools"]
    x, latent = (np.repeat(a, 40, axis=0) for a in inputs(rng, 1))
    selection = lab.cpu.index(x, latent, weights(lab, lab.cpu, arrays_of(rng, shape)), shape, empty(lab.cpu, shape, 40))
    last = selection.positions[selection.offsets[39] :]
    assert last.tolist() == list(range(16))


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e15, np.nan])
def test_extreme_inputs_still_select_a_valid_set(lab: Any, rng: np.random.Generator, size: float) -> None:
    shape = FORMS["pools"]
    x, latent = (a * np.float32(size) for a in inputs(rng, 45))
    selection = lab.cpu.index(x, latent, weights(lab, lab.cpu, arrays_of(rng, shape)), shape, empty(lab.cpu, shape, 45))
    for t in range(45):
        chosen = selection.positions[selection.offsets[t] : selection.offsets[t + 1]]
        assert len(chosen) == min((t + 1) // 4, 4) * 4 + (t + 1) % 4
        assert (np.diff(chosen) > 0).all()
        assert chosen[0] >= 0
        assert chosen[-1] <= t


@pytest.mark.parametrize("form", FORMS)
def test_threads_and_grouping_change_no_bit(lab: Any, rng: np.random.Generator, form: str) -> None:
    shape = dataclasses.replace(FORMS[form], topk=6 * FORMS[form].pool)
    tokens = 300
    arrays, (x, latent) = arrays_of(rng, shape), inputs(rng, tokens)
    finals: set[bytes] = set()
    expected: list[list[int]] = []

    for threads, ops in lab.crews.items():
        w = weights(lab, ops, arrays)
        for size in (tokens, 7, *([1] if threads == 1 else [])):
            state, rows = empty(ops, shape, tokens), []
            for begin in range(0, tokens, size):
                part = slice(begin, min(begin + size, tokens))
                selection = ops.index(x[part], latent[part], w, shape, state)
                for i in range(part.stop - begin):
                    if selection is None:
                        rows.append(list(range(begin + i + 1)))
                    else:
                        chosen = selection.positions[selection.offsets[i] : selection.offsets[i + 1]]
                        rows.append(chosen.tolist())
            expected = expected or rows
            assert rows == expected
            finals.add(state.keys.tobytes() + state.open_keys.tobytes() + state.open_gates.tobytes())
    assert len(finals) == 1


def test_refuses_to_write_beyond_the_capacity(lab: Any, rng: np.random.Generator) -> None:
    shape = FORMS["pools"]
    w, (x, latent) = weights(lab, lab.cpu, arrays_of(rng, shape)), inputs(rng, 12)
    with pytest.raises(ValueError, match="3 pools do not fit the capacity of 2"):
        lab.cpu.index(x, latent, w, shape, empty(lab.cpu, shape, 8))


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 100), (15, 97), (17, 33), (32, 128), (40, 16), (70, 200)])
def test_any_number_of_heads_channels_and_pools(lab: Any, rng: np.random.Generator, heads: int, head_dim: int) -> None:
    """More pools than one thread scores at a time; from the keys of the state, in float64."""
    shape, tokens = IndexerShape(heads, head_dim, topk=60, pool=3, rotary=None), 1500
    arrays, (x, latent) = arrays_of(rng, shape), inputs(rng, tokens)
    w, state = weights(lab, lab.cpu, arrays), empty(lab.cpu, shape, tokens)
    lab.cpu.index(x[:-1], latent[:-1], w, shape, state)
    selection = lab.cpu.index(x[-1:], latent[-1:], w, shape, state)
    q = (arrays["wq_b"].astype(np.float64) @ latent[-1]).reshape(heads, head_dim)
    likeness = np.maximum(q @ state.keys.T.astype(np.float64), 0)
    scores = (arrays["proj"].astype(np.float64) @ x[-1]) @ likeness
    best = np.sort(np.argsort(-scores, kind="stable")[: shape.keep])
    edge = np.sort(scores)[-shape.keep]
    assert np.min(np.abs(scores[scores != edge] - edge)) > 1e-6 * np.abs(scores).max()  # the choice is clear
    assert selection.positions[::3].tolist() == (3 * best).tolist()


# -- the choice alone


def choose(scores: npt.NDArray[np.float64], keep: int) -> list[int]:
    chosen = np.full(keep + 1, -7, np.int32)  # one more, to see that it stays
    _cpu.choose(scores.ctypes.data, len(scores), keep, chosen.ctypes.data)
    assert chosen[keep] == -7
    return [int(i) for i in chosen[:keep]]


def by_sorting(scores: npt.NDArray[np.float64], keep: int) -> list[int]:
    """NaN below everything, then by score, ties to the lower index."""
    order = sorted(
        range(len(scores)), key=lambda i: (np.isnan(scores[i]), -scores[i] if scores[i] == scores[i] else 0, i)
    )
    return sorted(order[:keep])


# Equal numbers, neighbours, both zeros, denormals, infinities, NaN.
TIED = [0.0, -0.0, 1.0, -1.0, np.nextafter(1.0, 2.0), 5e-324, -5e-324, 2.2e-308, 1e308, np.inf, -np.inf, np.nan]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_choice_equals_a_full_sort(data: st.DataObject) -> None:
    number = st.sampled_from(TIED) | st.floats(allow_nan=True)
    scores = np.array(data.draw(st.lists(number, min_size=1, max_size=60)), np.float64)
    keep = data.draw(st.integers(0, len(scores)))
    assert choose(scores, keep) == by_sorting(scores, keep)


@pytest.mark.parametrize("kind", ["normal", "few values", "equal", "close", "denormal", "ascending", "descending"])
@pytest.mark.parametrize("count", [1, 2, 1000, 5003])
def test_choice_among_many(rng: np.random.Generator, kind: str, count: int) -> None:
    scores = {
        "normal": rng.standard_normal(count),
        "few values": rng.integers(-2, 3, count).astype(np.float64),
        "equal": np.full(count, -3.5),
        "close": 1.0 + rng.integers(0, count, count) * 2.0**-52,
        "denormal": rng.integers(-count, count, count) * 5e-324,
        "ascending": np.arange(count, dtype=np.float64),
        "descending": -np.arange(count, dtype=np.float64),
    }[kind]
    for keep in {1, count // 3, count // 2, count - 1, count} - {0}:
        assert choose(scores, keep) == by_sorting(scores, keep)


def test_refuses_to_choose_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="cannot choose 3 of 2"):
        choose(np.zeros(2), 3)
