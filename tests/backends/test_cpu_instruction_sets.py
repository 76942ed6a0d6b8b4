"""Every float loop of the `cpu` backend on every instruction set: right, and the same to the bit but for attention.

Attention over the cache fuses multiplications with additions where there is an instruction for it (lanes/mla.cpp).

What each operation computes is the business of its own file; here the shapes are ragged (one register is 4, 8 or 16
floats, sums are defined for 16 lanes) and the instruction sets take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.backends import base
from waste.backends.shapes import HcShape, IndexerShape, KdaShape, MlaShape, RouterShape
from waste.kernels import encode, isa
from waste.quant import get

F32 = npt.NDArray[np.float32]
Case = Callable[[Any, np.random.Generator, int, int], list[Any]]  # (ops, rng, tokens, numbers) -> outputs


@pytest.fixture(params=isa.ISAS)
def forced(request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    if name not in isa.usable():
        pytest.skip(f"no {name} on this processor")
    isa.force(name)
    yield name
    isa.force(None)


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, np.float32)


def matrix(ops: Any, rng: np.random.Generator, rows: int, cols: int, fmt: str = "f32") -> Any:
    return ops.weight(get(fmt).encode(normal(rng, rows, cols) * np.float32(2 * cols**-0.5)), fmt, rows, cols)


def norms(ops: Any, rng: np.random.Generator, t: int, n: int) -> list[Any]:
    return [ops.rms_norm(ops.vector(normal(rng, t, n)), ops.vector(normal(rng, n)), 1e-5)]


def sums(ops: Any, rng: np.random.Generator, t: int, n: int) -> list[Any]:
    x, y, parts = (ops.vector(normal(rng, *shape)) for shape in ((t, n), (t, n), (t, 3, n)))
    routing = base.Routing(np.zeros((t, 3), np.int32), ops.vector(normal(rng, t, 3)))
    return [ops.add(x, y), ops.combine(parts, routing, None), ops.combine(parts, routing, x), ops.hc_mean(parts)]


def streams(count: int) -> Case:
    shape = HcShape(count, sinkhorn_iters=3, eps=1e-6, norm_eps=1e-5)

    def case(ops: Any, rng: np.random.Generator, t: int, n: int) -> list[Any]:
        fn = normal(rng, shape.outputs, count * n) * np.float32((count * n) ** -0.5)
        w = base.HcWeights(*(ops.vector(a) for a in (fn, normal(rng, shape.outputs), np.float32([0.7, 1.1, 1.5]))))
        x, out = ops.vector(normal(rng, t, count, n)), ops.vector(normal(rng, t, n))
        mix = ops.hc_pre(x, w, shape, ops.vector(normal(rng, n)), 1e-5)
        return [mix.y, mix.post, mix.comb, ops.hc_post(x, out, mix)]

    return case


def products(fmt: str) -> Case:
    def case(ops: Any, rng: np.random.Generator, t: int, n: int) -> list[Any]:
        return [ops.linear(ops.vector(normal(rng, t, n)), matrix(ops, rng, 21, n, fmt))]

    return case


def router(fmt: str) -> Case:
    shape = RouterShape(19, 4, 1, 1, 2.5, True)

    def case(ops: Any, rng: np.random.Generator, t: int, n: int) -> list[Any]:
        x, bias = ops.vector(normal(rng, t, n)), ops.vector(normal(rng, 19))
        routing = ops.route(x, matrix(ops, rng, 19, n, fmt), bias, shape)
        return [routing.ids, routing.weights]

    return case


def feed_forward(ops: Any, rng: np.random.Generator, t: int, n: int) -> list[Any]:
    w = base.MlpWeights(matrix(ops, rng, 37, n), matrix(ops, rng, 37, n), matrix(ops, rng, n, 37))
    return [ops.mlp(ops.vector(normal(rng, t, n)), w, limit) for limit in (None, 0.5)]


def kda(bound: float | None) -> Case:
    def case(ops: Any, rng: np.random.Generator, t: int, n: int) -> list[Any]:
        heads, size = 2, min(n, 70)
        shape, c = KdaShape(heads, size, 4, bound, 1e-5), heads * size
        vectors = {
            **{f"{name}_conv": normal(rng, c, 4) for name in "qkv"},
            "a_log": rng.uniform(-2, 1, heads).astype(np.float32),
            "dt_bias": normal(rng, c),
            "norm": normal(rng, size),
        }
        shapes = {"f_a": (size, n), "f_b": (c, size), "b": (heads, n), "g_a": (size, n), "g_b": (c, size), "o": (n, c)}
        matrices = {**dict.fromkeys("qkv", (c, n)), **shapes}
        w = base.KdaWeights(
            **{name: ops.vector(a) for name, a in vectors.items()},
            **{name: matrix(ops, rng, *rows_cols) for name, rows_cols in matrices.items()},
        )
        state = base.KdaState(ops.zeros(3, 3, c), ops.zeros(heads, size, size))
        return [ops.kda(ops.vector(normal(rng, t, n)), w, shape, state), state.s, state.conv]

    return case


def mla(heads: int) -> Case:
    def case(ops: Any, rng: np.random.Generator, t: int, n: int) -> list[Any]:
        m = MlaShape(heads, 20, n, 17, 0, 13, 0.2, 1e-6, None)
        w = base.MlaWeights(
            q_a=matrix(ops, rng, 20, 50),
            q_a_norm=ops.vector(normal(rng, 20)),
            q_b=matrix(ops, rng, heads * 17, 20),
            kv_a=matrix(ops, rng, n, 50),
            kv_a_norm=ops.vector(normal(rng, n)),
            k_up=matrix(ops, rng, heads * n, 17),
            v_up=matrix(ops, rng, heads * 13, n),
            o=matrix(ops, rng, 50, heads * 13),
        )
        projection = ops.mla_project(ops.vector(normal(rng, t, 50)), w, m, 0)
        rows = ops.vector(normal(rng, 90 + t, n))
        return [projection.q, projection.rows, ops.mla_attend(projection.q, rows, 90, None, w, m)]

    return case


def index(ops: Any, rng: np.random.Generator, t: int, n: int) -> list[Any]:
    size = min(n, 70)
    shape, tokens = IndexerShape(3, size, topk=8, pool=2, rotary=None), 20 + t
    w = base.IndexerWeights(
        wq_b=matrix(ops, rng, 3 * size, 30),
        wk=matrix(ops, rng, size, n),
        k_norm=ops.vector(normal(rng, size)),
        k_norm_bias=ops.vector(normal(rng, size)),
        proj=matrix(ops, rng, 3, n),
        gate=matrix(ops, rng, size, n),
        ape=ops.vector(normal(rng, 2, size)),
    )
    state = base.IndexState(ops.zeros(tokens // 2, size), ops.zeros(2, size), ops.zeros(2, size))
    found = ops.index(ops.vector(normal(rng, tokens, n)), ops.vector(normal(rng, tokens, 30)), w, shape, state)
    return [found.positions, found.offsets, state.keys]


CASES: dict[str, Case] = {
    "rms_norm": norms,
    "add, combine, hc_mean": sums,
    "hc, 4 streams": streams(4),
    "hc, 3 streams": streams(3),
    "linear f32": products("f32"),
    "linear bf16": products("bf16"),
    "route f32": router("f32"),
    "route bf16": router("bf16"),
    "mlp": feed_forward,
    "kda, bounded": kda(-5.0),
    "kda, free": kda(None),
    "mla, 5 heads": mla(5),
    "index": index,
}


def run(case: str, ops: Any, tokens: int, numbers: int) -> list[Any]:
    # The oracle works in place where the backend does, so outputs are copied.
    return [
        np.asarray(a).copy() for a in CASES[case](ops, np.random.default_rng(tokens * 1000 + numbers), tokens, numbers)
    ]


@pytest.mark.parametrize(("tokens", "numbers"), [(1, 64), (9, 133)])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_oracle(lab: Any, forced: str, case: str, tokens: int, numbers: int) -> None:
    found, expected = (run(case, ops, tokens, numbers) for ops in (lab.cpu, lab.oracle))
    for a, b in zip(found, expected, strict=True):
        if a.dtype == np.float32:
            lab.close(a, b, 5e-6)
        else:
            assert np.array_equal(a, b)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(1, 9), st.integers(1, 200))
def test_instruction_sets_change_no_bit(lab: Any, case: str, tokens: int, numbers: int) -> None:
    found = {}
    try:
        for name in isa.usable():
            isa.force(name)
            found[name] = [a.tobytes() for a in run(case, lab.cpu, tokens, numbers)]
    finally:
        isa.force(None)
    like = "portable"
    if case == "mla, 5 heads":  # its projections; what attends agrees among the sets that fuse
        assert all(outputs[:2] == found["portable"][:2] for outputs in found.values())
        found.pop("portable")
        like = "avx2"
    assert all(outputs == found[like] for outputs in found.values())


@pytest.mark.parametrize("numbers", [1, 15, 16, 17, 130, 1100])
@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 1e38, 1e-42])
def test_numbers_that_are_none_look_the_same_everywhere(
    lab: Any, rng: np.random.Generator, numbers: int, fill: float
) -> None:
    """NaN, infinities, overflow and subnormals in every third place: comparisons and clamps decide alike."""
    x = normal(rng, 2, 4, numbers)
    x.reshape(-1)[::3] = fill
    w = [lab.weight(lab.cpu, normal(rng, *shape)) for shape in ((17, numbers), (17, numbers), (numbers, 17))]
    found = []
    try:
        for name in isa.usable():
            isa.force(name)
            outputs = [
                lab.cpu.rms_norm(x, np.ones(numbers, np.float32), 1e-5),
                lab.cpu.hc_mean(x),
                lab.cpu.linear(x[:, 0].copy(), w[0]),
                lab.cpu.mlp(x[:, 1].copy(), base.MlpWeights(*w), 3.0),
            ]
            # The sign of a NaN is the processor's choice.
            found.append([np.where(np.isnan(a), np.float32(np.nan), a).tobytes() for a in outputs])
    finally:
        isa.force(None)
    assert all(outputs == found[0] for outputs in found)


@pytest.mark.parametrize("shape", [(1, 1), (17, 129), (40, 300)])
def test_decoding_is_the_same_everywhere(lab: Any, fmt: str, shape: tuple[int, int]) -> None:
    """Whole matrices and single rows, of any bytes; what they mean is in test_cpu_products.py."""
    rng = np.random.default_rng(shape[1])
    fmt_of = get(fmt)
    blob = rng.integers(0, 256, fmt_of.nbytes(*shape), np.uint8)
    if fmt in ("f32", "bf16"):
        blob = np.ascontiguousarray(fmt_of.encode(normal(rng, *shape))).view(np.uint8)
    ids = rng.permutation(shape[0])
    found = []
    try:
        for name in isa.usable():
            isa.force(name)
            rows = lab.cpu.embed(lab.cpu.weight(blob, fmt, *shape), ids)
            whole = encode.decode(blob, fmt_of.code, *shape)
            with np.errstate(invalid="ignore"):
                assert np.array_equal(rows, whole[ids], equal_nan=True)
            found.append(np.where(np.isnan(whole), np.float32(np.nan), whole).tobytes())
    finally:
        isa.force(None)
    assert all(a == found[0] for a in found)
