"""Absorbed MLA of the `cpu` backend: projection and attention against the float64 oracle, forms of all families."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from waste.backends.base import MlaWeights, Selection
from waste.backends.shapes import MlaShape, Rotary

F32 = npt.NDArray[np.float32]

FORMS = {
    "glm5_next": MlaShape(4, 24, 64, 32, 0, 32, 0.2, 1e-5, None),
    "kimi_linear": MlaShape(3, None, 40, 24, 8, 20, 0.2, 1e-6, None),
    "deepseek_v3": MlaShape(5, 20, 33, 17, 6, 13, 0.2, 1e-6, Rotary.yarn(6, 10000.0, 40.0, 4096, 32.0, 1.0)),
    "glm_moe_dsa": MlaShape(6, 48, 128, 16, 16, 32, 0.2, 1e-6, Rotary.plain(16, 8e6)),
}


def arrays_of(rng: np.random.Generator, m: MlaShape, dim: int) -> dict[str, F32]:
    def matrix(rows: int, cols: int) -> F32:
        return rng.standard_normal((rows, cols), np.float32) * np.float32(2 * cols**-0.5)

    q_in = dim if m.q_lora is None else m.q_lora
    arrays = {
        "q_b": matrix(m.heads * (m.nope + m.rope), q_in),
        "kv_a": matrix(m.row, dim),
        "kv_a_norm": rng.standard_normal(m.kv_lora, np.float32),
        "k_up": matrix(m.heads * m.kv_lora, m.nope),
        "v_up": matrix(m.heads * m.v, m.kv_lora),
        "o": matrix(dim, m.heads * m.v),
    }
    if m.q_lora is not None:
        arrays["q_a"] = matrix(m.q_lora, dim)
        arrays["q_a_norm"] = rng.standard_normal(m.q_lora, np.float32)
    return arrays


def weights(lab: Any, ops: Any, arrays: dict[str, F32], fmt: str = "f32") -> MlaWeights:
    parts: dict[str, Any] = {"q_a": None, "q_a_norm": None}
    for name, values in arrays.items():
        parts[name] = ops.vector(values) if name.endswith("norm") else lab.weight(ops, values, fmt)
    return MlaWeights(**parts)


@pytest.mark.parametrize("start", [0, 1, 70000])
@pytest.mark.parametrize("form", FORMS)
def test_projection_agrees_with_the_oracle(lab: Any, rng: np.random.Generator, form: str, start: int) -> None:
    m, dim = FORMS[form], 50
    arrays, x = arrays_of(rng, m, dim), rng.standard_normal((9, dim), np.float32)
    found, expected = (
        ops.mla_project(ops.vector(x), weights(lab, ops, arrays), m, start) for ops in (lab.cpu, lab.oracle)
    )
    lab.close(found.q, expected.q)
    lab.close(found.rows, expected.rows)
    assert (found.q_latent is None) == (m.q_lora is None)
    if m.q_lora is not None:
        lab.close(found.q_latent, expected.q_latent)


@pytest.mark.parametrize("form", ["glm5_next", "deepseek_v3"])
def test_every_weight_format(lab: Any, rng: np.random.Generator, fmt: str, form: str) -> None:
    m, dim = FORMS[form], 140
    arrays, x = arrays_of(rng, m, dim), rng.standard_normal((4, dim), np.float32)
    outs = []
    for ops in (lab.cpu, lab.oracle):
        w = weights(lab, ops, arrays, fmt)
        projection = ops.mla_project(ops.vector(x), w, m, 0)
        outs.append(ops.mla_attend(projection.q, projection.rows, 0, None, w, m))
    lab.close(*outs, max(5e-6, lab.tolerance(fmt, 4)))


def test_absorption_is_attention_with_full_keys(lab: Any, rng: np.random.Generator) -> None:
    """The absorbed form against ordinary attention: keys and values multiplied out, in float64."""
    m, dim, t = dataclasses.replace(FORMS["glm_moe_dsa"], rotary=None), 30, 7
    arrays, x = arrays_of(rng, m, dim), rng.standard_normal((t, dim), np.float32)
    w = weights(lab, lab.cpu, arrays)
    projection = lab.cpu.mla_project(x, w, m, 0)
    found = lab.cpu.mla_attend(projection.q, projection.rows, 0, None, w, m)

    wide = {n: a.astype(np.float64) for n, a in arrays.items()}

    def rms(z: Any, weight: Any) -> Any:
        return z / np.sqrt((z * z).mean(-1, keepdims=True) + m.latent_eps) * weight

    q = (rms(x @ wide["q_a"].T, wide["q_a_norm"]) @ wide["q_b"].T).reshape(t, m.heads, m.nope + m.rope)
    kv = x @ wide["kv_a"].T
    latent, shared = rms(kv[:, : m.kv_lora], wide["kv_a_norm"]), kv[:, m.kv_lora :]
    k_up, v_up = wide["k_up"].reshape(m.heads, m.kv_lora, m.nope), wide["v_up"].reshape(m.heads, m.v, m.kv_lora)
    mixed = np.empty((t, m.heads, m.v))
    for h in range(m.heads):
        keys = np.concatenate([latent @ k_up[h], shared], -1)
        scores = q[:, h] @ keys.T * m.scale
        scores[np.triu_indices(t, 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, h] = p / p.sum(-1, keepdims=True) @ (latent @ v_up[h].T)
    lab.close(found, mixed.reshape(t, -1) @ wide["o"].T, 5e-6)


def selection_of(rng: np.random.Generator, start: int, tokens: int) -> Selection:
    chosen = [
        np.sort(rng.choice(start + t + 1, int(rng.integers(1, start + t + 2)), replace=False)) for t in range(tokens)
    ]
    return Selection(np.concatenate(chosen).astype(np.int32), np.cumsum([0, *map(len, chosen)]).astype(np.int64))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("start", [0, 90])
@pytest.mark.parametrize("form", FORMS)
def test_attention_agrees_with_the_oracle(
    lab: Any, rng: np.random.Generator, form: str, start: int, sparse: bool
) -> None:
    m, dim, t = FORMS[form], 40, 6
    arrays = arrays_of(rng, m, dim)
    q, cache = rng.standard_normal((t, m.heads, m.row), np.float32), rng.standard_normal((120, m.row), np.float32)
    cache[start + t :] = np.nan  # rows of the future are not looked at
    selection = selection_of(rng, start, t) if sparse else None
    found, expected = (
        ops.mla_attend(ops.vector(q), ops.vector(cache), start, selection, weights(lab, ops, arrays), m)
        for ops in (lab.cpu, lab.oracle)
    )
    lab.close(found, expected, 5e-6)


def test_selecting_everything_is_dense_attention(lab: Any, rng: np.random.Generator) -> None:
    m, dim, t = FORMS["glm5_next"], 40, 5
    w = weights(lab, lab.cpu, arrays_of(rng, m, dim))
    q, cache = rng.standard_normal((t, m.heads, m.row), np.float32), rng.standard_normal((20, m.row), np.float32)
    everything = np.concatenate([np.arange(10 + i + 1) for i in range(t)]).astype(np.int32)
    offsets = np.cumsum([0, *(10 + i + 1 for i in range(t))]).astype(np.int64)
    sparse = lab.cpu.mla_attend(q, cache, 10, Selection(everything, offsets), w, m)
    assert np.array_equal(sparse, lab.cpu.mla_attend(q, cache, 10, None, w, m))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [9, 70])
def test_threads_and_grouping_change_no_bit(lab: Any, rng: np.random.Generator, form: str, tokens: int) -> None:
    m, dim = FORMS[form], 60
    arrays, x = arrays_of(rng, m, dim), rng.standard_normal((tokens, dim), np.float32)

    def make() -> Any:
        cache = np.zeros((tokens, m.row), np.float32)

        def run(ops: Any, part: slice) -> list[F32]:
            w = weights(lab, ops, arrays, "q4")
            p = ops.mla_project(x[part], w, m, part.start)
            cache[part] = p.rows
            out = ops.mla_attend(p.q, cache, part.start, None, w, m)
            return [p.q, p.rows, out, *([] if p.q_latent is None else [p.q_latent])]

        return run

    lab.laws(make, tokens)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e15])
def test_extreme_scores(lab: Any, rng: np.random.Generator, size: float) -> None:
    """Equal scores share; a far largest one takes all; neither overflows."""
    m, dim = FORMS["glm5_next"], 40
    arrays = arrays_of(rng, m, dim)
    q = (rng.standard_normal((2, m.heads, m.row)) * size).astype(np.float32)
    cache = rng.standard_normal((30, m.row), np.float32)
    found, expected = (
        ops.mla_attend(ops.vector(q), ops.vector(cache), 28, None, weights(lab, ops, arrays), m)
        for ops in (lab.cpu, lab.oracle)
    )
    lab.close(found, expected, 5e-6)


# -- many rows: blocks, segments and groups of heads

LONG = [1, 95, 96, 97, 192, 193, 400, 7000]  # blocks of 96 rows, segments of 192 and more, at most 32 of them
WIDE = MlaShape(70, None, 20, 4, 5, 3, 0.3, 1e-6, None)  # two groups of heads, neither of them a whole one


def attend_float64(q: F32, cache: F32, rows: npt.NDArray[np.int32], w: dict[str, F32], m: MlaShape) -> Any:
    """One query from the formulas, in float64: q (H, R) -> (D)."""
    keys = cache[rows].astype(np.float64)
    scores = q.astype(np.float64) @ keys.T * m.scale
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = p / p.sum(-1, keepdims=True) @ keys[:, : m.kv_lora]
    v_up = w["v_up"].reshape(m.heads, m.v, m.kv_lora).astype(np.float64)
    return w["o"].astype(np.float64) @ np.einsum("hvk,hk->hv", v_up, mixed).reshape(-1)


@pytest.mark.parametrize("rows", LONG)
def test_any_number_of_rows(lab: Any, rng: np.random.Generator, rows: int) -> None:
    m, dim = WIDE, 24
    arrays = arrays_of(rng, m, dim)
    q, cache = rng.standard_normal((1, m.heads, m.row), np.float32), rng.standard_normal((rows, m.row), np.float32)
    found = lab.cpu.mla_attend(q, cache, rows - 1, None, weights(lab, lab.cpu, arrays), m)
    lab.close(found[0], attend_float64(q[0], cache, np.arange(rows, dtype=np.int32), arrays, m))


@pytest.mark.parametrize("heads", [1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 129])
@pytest.mark.parametrize(("kv_lora", "rope"), [(7, 0), (97, 3), (128, 64)])
def test_any_number_of_heads_and_channels(
    lab: Any, rng: np.random.Generator, heads: int, kv_lora: int, rope: int
) -> None:
    m, dim, rows = MlaShape(heads, None, kv_lora, 4, rope, 2, 0.1, 1e-6, None), 6, 230
    arrays = arrays_of(rng, m, dim)
    q, cache = rng.standard_normal((1, heads, m.row), np.float32), rng.standard_normal((rows, m.row), np.float32)
    found = lab.cpu.mla_attend(q, cache, rows - 1, None, weights(lab, lab.cpu, arrays), m)
    lab.close(found[0], attend_float64(q[0], cache, np.arange(rows, dtype=np.int32), arrays, m))


@pytest.mark.parametrize("start", [90, 380, 6140])  # beyond 32 * 192 rows segments grow
@pytest.mark.parametrize("sparse", [False, True])
def test_a_long_context_changes_no_law(lab: Any, rng: np.random.Generator, start: int, sparse: bool) -> None:
    """A query alone, in a chunk, by any number of threads: the same bits, whatever segments its neighbours have."""
    m, dim, tokens = WIDE, 24, 9
    arrays = arrays_of(rng, m, dim)
    q = rng.standard_normal((tokens, m.heads, m.row), np.float32)
    cache = rng.standard_normal((start + tokens, m.row), np.float32)
    chosen = [np.sort(rng.choice(start + t + 1, start + t, replace=False)).astype(np.int32) for t in range(tokens)]

    def make() -> Any:
        def run(ops: Any, part: slice) -> list[F32]:
            selection = None
            if sparse:
                mine = chosen[part]
                selection = Selection(np.concatenate(mine), np.cumsum([0, *map(len, mine)]).astype(np.int64))
            return [ops.mla_attend(q[part], cache, start + part.start, selection, weights(lab, ops, arrays), m)]

        return run

    lab.laws(make, tokens)


def test_rows_that_are_not_selected_are_not_read(lab: Any, rng: np.random.Generator) -> None:
    m, dim, rows = WIDE, 24, 3000
    arrays = arrays_of(rng, m, dim)
    q, cache = rng.standard_normal((1, m.heads, m.row), np.float32), rng.standard_normal((rows, m.row), np.float32)
    chosen = np.sort(rng.choice(rows, 700, replace=False)).astype(np.int32)
    mask = np.ones(rows, bool)
    mask[chosen] = False
    cache[mask] = np.nan
    selection = Selection(chosen, np.array([0, len(chosen)], np.int64))
    found = lab.cpu.mla_attend(q, cache, rows - 1, selection, weights(lab, lab.cpu, arrays), m)
    lab.close(found[0], attend_float64(q[0], cache, chosen, arrays, m))


@pytest.mark.parametrize("kind", ["rising", "falling", "last takes all", "first takes all", "equal", "all very low"])
def test_scores_that_move_from_block_to_block(lab: Any, rng: np.random.Generator, kind: str) -> None:
    """The largest score so far changes in every block, in one, or never: what came before counts for less, or not."""
    m, dim, rows = WIDE, 24, 1000
    arrays = arrays_of(rng, m, dim)
    q, cache = np.zeros((1, m.heads, m.row), np.float32), rng.standard_normal((rows, m.row), np.float32)
    q[..., -1] = 1 / m.scale  # the last channel of a row is its score
    ramp = np.linspace(-300, 300, rows)
    cache[:, -1] = {
        "rising": ramp,
        "falling": -ramp,
        "last takes all": np.where(np.arange(rows) == rows - 1, 1e6, -1e6),
        "first takes all": np.where(np.arange(rows) == 0, 1e6, -1e6),
        "equal": np.full(rows, 3.0),
        "all very low": rng.standard_normal(rows) - 1e7,
    }[kind]
    found = lab.cpu.mla_attend(q, cache, rows - 1, None, weights(lab, lab.cpu, arrays), m)
    lab.close(found[0], attend_float64(q[0], cache, np.arange(rows, dtype=np.int32), arrays, m), 5e-6)
