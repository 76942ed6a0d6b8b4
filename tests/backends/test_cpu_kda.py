"""KDA of the `cpu` backend: against the float64 oracle, against its definition, and its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from waste.backends.base import KdaState, KdaWeights
from waste.backends.shapes import KdaShape
from waste.kernels import _cpu

F32 = npt.NDArray[np.float32]
SHAPES = [(4, 64, 4, 256), (1, 16, 4, 33), (3, 20, 2, 40), (5, 7, 5, 30), (2, 128, 4, 140), (2, 8, 1, 24)]


def kda_shape(heads: int, head_dim: int, taps: int, bound: float | None) -> KdaShape:
    return KdaShape(heads, head_dim, taps, bound, 1e-5)


def kda_arrays(rng: np.random.Generator, shape: KdaShape, dim: int) -> dict[str, F32]:
    c, rank = shape.channels, shape.head_dim

    def matrix(rows: int, cols: int) -> F32:
        return rng.standard_normal((rows, cols), np.float32) * np.float32(2 * cols**-0.5)

    return {
        **{name: matrix(c, dim) for name in "qkv"},
        **{f"{name}_conv": matrix(c, shape.conv) for name in "qkv"},
        "f_a": matrix(rank, dim),
        "f_b": matrix(c, rank),
        "b": matrix(shape.heads, dim),
        "g_a": matrix(rank, dim),
        "g_b": matrix(c, rank),
        "a_log": rng.uniform(-2, 1, shape.heads).astype(np.float32),
        "dt_bias": rng.standard_normal(c, np.float32),
        "norm": rng.standard_normal(shape.head_dim, np.float32),
        "o": matrix(dim, c),
    }


VECTORS = {"q_conv", "k_conv", "v_conv", "a_log", "dt_bias", "norm"}


def weights(lab: Any, ops: Any, arrays: dict[str, F32], fmt: str = "f32") -> KdaWeights:
    return KdaWeights(**{n: ops.vector(a) if n in VECTORS else lab.weight(ops, a, fmt) for n, a in arrays.items()})


def empty(ops: Any, shape: KdaShape) -> KdaState:
    return KdaState(
        ops.zeros(3, shape.conv - 1, shape.channels), ops.zeros(shape.heads, shape.head_dim, shape.head_dim)
    )


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("heads", "head_dim", "taps", "dim"), SHAPES)
def test_agrees_with_the_oracle(
    lab: Any, rng: np.random.Generator, heads: int, head_dim: int, taps: int, dim: int, bound: float | None
) -> None:
    shape = kda_shape(heads, head_dim, taps, bound)
    arrays, x = kda_arrays(rng, shape, dim), rng.standard_normal((9, dim), np.float32)
    outs, states = [], []
    for ops in (lab.cpu, lab.oracle):
        w, state = weights(lab, ops, arrays), empty(ops, shape)
        first = ops.kda(ops.vector(x[:6]), w, shape, state)
        second = ops.kda(ops.vector(x[6:]), w, shape, state)
        outs.append(np.concatenate([first, second]))
        states.append(state)
    lab.close(outs[0], outs[1], 5e-6)
    if taps > 1:
        lab.close(states[0].conv, states[1].conv)
    lab.close(states[0].s, states[1].s, 5e-6)


def test_every_weight_format(lab: Any, rng: np.random.Generator, fmt: str) -> None:
    shape, dim = kda_shape(3, 24, 4, -5.0), 100
    arrays, x = kda_arrays(rng, shape, dim), rng.standard_normal((3, dim), np.float32)
    found, expected = (
        ops.kda(ops.vector(x), weights(lab, ops, arrays, fmt), shape, empty(ops, shape))
        for ops in (lab.cpu, lab.oracle)
    )
    lab.close(found, expected, max(5e-6, lab.tolerance(fmt, 4)))


def test_delta_rule_written_out(lab: Any, rng: np.random.Generator) -> None:
    """One head, a second path from the formulas: S = a S; S += k (beta (v - k S)); o = q S."""
    shape, dim = kda_shape(1, 6, 3, -2.0), 10
    arrays, x = kda_arrays(rng, shape, dim), rng.standard_normal((5, dim), np.float32)
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    x64 = x.astype(np.float64)

    def sigmoid(z: Any) -> Any:
        return 1 / (1 + np.exp(-z))

    def mixed(name: str, t: int) -> Any:
        inputs = x64 @ wide[name].T
        taps = [inputs[t - 2 + j] * wide[f"{name}_conv"][:, j] for j in range(3) if t - 2 + j >= 0]
        total = np.sum(taps, axis=0)
        return total * sigmoid(total)

    s, expected = np.zeros((6, 6)), []
    for t in range(5):
        q, k, v = (mixed(name, t) for name in "qkv")
        q, k = q / np.sqrt(q @ q + 1e-6) / np.sqrt(6), k / np.sqrt(k @ k + 1e-6)
        f = wide["f_b"] @ (wide["f_a"] @ x64[t]) + wide["dt_bias"]
        s = np.exp(-2.0 * sigmoid(np.exp(wide["a_log"][0]) * f))[:, None] * s
        beta = sigmoid(wide["b"] @ x64[t])
        s = s + np.outer(k, beta * (v - k @ s))
        o = q @ s
        o = o / np.sqrt(np.mean(o * o) + 1e-5) * wide["norm"] * sigmoid(wide["g_b"] @ (wide["g_a"] @ x64[t]))
        expected.append(wide["o"] @ o)
    lab.close(lab.cpu.kda(x, weights(lab, lab.cpu, arrays), shape, empty(lab.cpu, shape)), np.array(expected), 5e-6)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("tokens", [9, 70])
def test_threads_and_grouping_change_no_bit(
    lab: Any, rng: np.random.Generator, bound: float | None, tokens: int
) -> None:
    shape, dim = kda_shape(5, 20, 4, bound), 50
    arrays, x = kda_arrays(rng, shape, dim), rng.standard_normal((tokens, dim), np.float32)
    finals: list[bytes] = []

    def make() -> Callable[[Any, slice], list[F32]]:
        state = empty(lab.cpu, shape)

        def run(ops: Any, part: slice) -> list[F32]:
            out = ops.kda(x[part], weights(lab, ops, arrays, "q8"), shape, state)
            if part.stop == tokens:
                finals.append(state.conv.tobytes() + state.s.tobytes())
            return [out]

        return run

    lab.laws(make, tokens)
    assert len(finals) == 7
    assert len(set(finals)) == 1


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e18])
def test_extreme_inputs_leave_a_finite_state(lab: Any, rng: np.random.Generator, size: float) -> None:
    for bound in (-5.0, None):
        shape, dim = kda_shape(2, 16, 4, bound), 32
        arrays = kda_arrays(rng, shape, dim)
        x = (rng.standard_normal((5, dim)) * size).astype(np.float32)
        state = empty(lab.cpu, shape)
        out = lab.cpu.kda(x, weights(lab, lab.cpu, arrays), shape, state)
        assert np.isfinite(out).all()
        assert np.isfinite(state.s).all()
        if size < 1e-38:
            assert not out.any()


# -- the delta rule alone


def rule_inputs(rng: np.random.Generator, tokens: int, heads: int, dim: int) -> tuple[list[F32], F32]:
    """q, k, v, decay (T, H, D), beta (T, H) as gates and norms make them, and a state that is not empty."""
    q, k, v = rng.standard_normal((3, tokens, heads, dim), np.float32)
    for a in (q, k):
        a /= np.linalg.norm(a, axis=-1, keepdims=True)
    decay, beta = rng.random((tokens, heads, dim), np.float32), rng.random((tokens, heads), np.float32)
    return [q, k, v, decay, beta], rng.standard_normal((heads, dim, dim), np.float32)


def rule(pool: _cpu.Pool, inputs: list[F32], state: F32, part: slice) -> F32:
    """Outputs of some tokens; advances `state`."""
    given = [np.ascontiguousarray(a[part]) for a in inputs]
    tokens, heads, dim = given[0].shape
    out = np.empty_like(given[0])
    _cpu.delta_rule(pool, *(a.ctypes.data for a in given), tokens, heads, dim, state.ctypes.data, out.ctypes.data)
    return out


def rule_float64(inputs: list[F32], state: F32) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    q, k, v, decay, beta = (a.astype(np.float64) for a in inputs)
    s, out = state.astype(np.float64), np.empty(v.shape)
    for t in range(len(q)):
        s = s * decay[t][:, :, None]
        correction = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], s))
        s = s + k[t][:, :, None] * correction[:, None]
        out[t] = np.einsum("hk,hkv->hv", q[t], s)
    return out, s


@pytest.mark.parametrize("tokens", [1, 2, 67])
@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 1), (3, 7), (2, 16), (5, 33), (2, 48), (3, 64), (2, 100), (2, 128), (1, 150)]
)
def test_delta_rule_agrees_with_float64(lab: Any, rng: np.random.Generator, tokens: int, heads: int, dim: int) -> None:
    inputs, state = rule_inputs(rng, tokens, heads, dim)
    expected, last = rule_float64(inputs, state)
    lab.close(rule(_cpu.Pool(2), inputs, state, slice(0, tokens)), expected)
    lab.close(state, last)


@pytest.mark.parametrize("kind", ["nothing is kept", "all is kept", "tiny", "huge", "mixed sizes"])
def test_delta_rule_of_extreme_sizes(lab: Any, rng: np.random.Generator, kind: str) -> None:
    inputs, state = rule_inputs(rng, 9, 2, 40)
    if kind == "nothing is kept":
        inputs[3][:] = 0
    elif kind == "all is kept":
        inputs[3][:], inputs[4][:] = 1, 1
    elif kind in ("tiny", "huge"):
        factor = np.float32(1e-18 if kind == "tiny" else 1e30)
        inputs[2] *= factor
        state *= factor
    else:
        inputs[2] *= (10.0 ** rng.uniform(-12, 12, inputs[2].shape)).astype(np.float32)
    expected, last = rule_float64(inputs, state)
    found = rule(_cpu.Pool(1), inputs, state, slice(0, 9))
    lab.close(found, expected)
    lab.close(state, last)


@pytest.mark.parametrize(("heads", "dim"), [(5, 20), (2, 128), (3, 80)])
def test_delta_rule_is_the_same_bits_however_tokens_come(rng: np.random.Generator, heads: int, dim: int) -> None:
    tokens = 70
    inputs, state = rule_inputs(rng, tokens, heads, dim)
    found = set()
    for threads in (1, 2, 5):
        for size in (1, 2, 23, 64, tokens):
            s = state.copy()
            parts = [rule(_cpu.Pool(threads), inputs, s, slice(t, t + size)) for t in range(0, tokens, size)]
            found.add(np.concatenate(parts).tobytes() + s.tobytes())
    assert len(found) == 1


def test_decay_over_the_whole_range_of_its_gate(lab: Any, rng: np.random.Generator) -> None:
    """exp(-rate * softplus(f + bias)): from all kept to nothing kept, through both ends of the logarithm."""
    shape, dim = kda_shape(4, 50, 4, None), 8
    arrays, x = kda_arrays(rng, shape, dim), rng.standard_normal((7, dim), np.float32)
    arrays["dt_bias"] = np.linspace(-90, 90, shape.channels).astype(np.float32)
    arrays["a_log"] = np.array([-12, -3, 0, 3], np.float32)
    states = []
    for ops in (lab.cpu, lab.oracle):
        w, state = weights(lab, ops, arrays), empty(ops, shape)
        ops.kda(ops.vector(x), w, shape, state)
        states.append(state.s)
    lab.close(states[0], states[1])
