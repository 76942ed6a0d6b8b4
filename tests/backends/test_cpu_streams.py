"""Norms, sums and hyper-connections of the `cpu` backend against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from waste.backends.base import HcMix, HcWeights, Routing
from waste.backends.shapes import HcShape

F32 = npt.NDArray[np.float32]
SIZES = [1, 7, 16, 33, 250]


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e30])
def test_rms_norm(lab: Any, rng: np.random.Generator, dim: int, size: float) -> None:
    x, w = normal(rng, 4, dim) * np.float32(size), normal(rng, dim)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * w
    lab.close(lab.cpu.rms_norm(x, w, 1e-5), expected, 2e-7)


def test_rms_norm_of_nothing_is_nothing(lab: Any) -> None:
    for value in (0.0, 1e-42):
        assert not lab.cpu.rms_norm(np.full((2, 40), value, np.float32), np.ones(40, np.float32), 1e-5).any()


def test_rms_norm_takes_any_leading_axes(lab: Any, rng: np.random.Generator) -> None:
    x, w = normal(rng, 2, 3, 20), normal(rng, 20)
    assert np.array_equal(lab.cpu.rms_norm(x, w, 1e-6).reshape(6, 20), lab.cpu.rms_norm(x.reshape(6, 20), w, 1e-6))


def test_add_is_exact(lab: Any, rng: np.random.Generator) -> None:
    x, y = normal(rng, 9, 5000), normal(rng, 9, 5000)
    for ops in lab.crews.values():
        assert np.array_equal(ops.add(x, y), x + y)


def test_combine_sums_in_routing_order(lab: Any, rng: np.random.Generator) -> None:
    parts, weights, shared = normal(rng, 5, 3, 40), normal(rng, 5, 3), normal(rng, 5, 40)
    routing = Routing(np.zeros((5, 3), np.int32), weights)
    expected = np.zeros((5, 40), np.float32)
    for k in range(3):
        expected = expected + weights[:, k, None] * parts[:, k]
    assert np.array_equal(lab.cpu.combine(parts, routing, None), expected)
    assert np.array_equal(lab.cpu.combine(parts, routing, shared), expected + shared)


def hc_shape(streams: int = 4, iters: int = 20) -> HcShape:
    return HcShape(streams, sinkhorn_iters=iters, eps=1e-6, norm_eps=1e-5)


def hc_arrays(rng: np.random.Generator, shape: HcShape, dim: int) -> tuple[F32, F32, F32]:
    wide = shape.streams * dim
    fn = normal(rng, shape.outputs, wide) * np.float32(wide**-0.5)
    return fn, normal(rng, shape.outputs), np.float32([0.7, 1.1, 1.5])


@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize(("streams", "iters"), [(4, 20), (2, 1), (3, 2), (1, 5), (16, 3)])
def test_hc_pre_agrees_with_the_oracle(lab: Any, rng: np.random.Generator, dim: int, streams: int, iters: int) -> None:
    shape, x, norm = hc_shape(streams, iters), normal(rng, 3, streams, dim), normal(rng, dim)
    arrays = hc_arrays(rng, shape, dim)
    mixes = []
    for ops in (lab.cpu, lab.oracle):
        w = HcWeights(*(ops.vector(a) for a in arrays))
        mixes.append(ops.hc_pre(ops.vector(x), w, shape, ops.vector(norm), 1e-5))
    for part in ("y", "post", "comb"):
        lab.close(getattr(mixes[0], part), getattr(mixes[1], part))


def test_hc_mixing_matrix_is_doubly_stochastic(lab: Any, rng: np.random.Generator) -> None:
    shape, dim = hc_shape(iters=60), 30
    w = HcWeights(*hc_arrays(rng, shape, dim))
    comb = lab.cpu.hc_pre(normal(rng, 5, 4, dim), w, shape, np.ones(dim, np.float32), 1e-5).comb
    assert np.abs(comb.sum(1) - 1).max() < 1e-5
    assert np.abs(comb.sum(2) - 1).max() < 1e-4


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e20, 1e30])
def test_hc_pre_survives_extreme_streams(lab: Any, rng: np.random.Generator, size: float) -> None:
    shape, dim = hc_shape(), 40
    x = (rng.standard_normal((2, 4, dim)) * size).astype(np.float32)
    arrays, norm = hc_arrays(rng, shape, dim), np.ones(dim, np.float32)
    mixes = [
        ops.hc_pre(ops.vector(x), HcWeights(*(ops.vector(a) for a in arrays)), shape, ops.vector(norm), 1e-5)
        for ops in (lab.cpu, lab.oracle)
    ]
    for part in ("post", "comb"):
        lab.close(getattr(mixes[0], part), getattr(mixes[1], part), 1e-5)
    assert np.isfinite(mixes[0].y).all()


@pytest.mark.parametrize("dim", [*SIZES, 1100])
@pytest.mark.parametrize("streams", [1, 3, 4, 16])
def test_hc_post_agrees_with_its_definition_and_works_in_place(
    lab: Any, rng: np.random.Generator, dim: int, streams: int
) -> None:
    x, out = normal(rng, 3, streams, dim), normal(rng, 3, dim)
    post, comb = normal(rng, 3, streams), normal(rng, 3, streams, streams)
    expected = post[:, :, None].astype(np.float64) * out[:, None]
    expected += np.einsum("tki,tkd->tid", comb.astype(np.float64), x)
    found = lab.cpu.hc_post(x, out, HcMix(out, post, comb))
    assert found is x
    lab.close(found, expected)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("streams", "dim"), [(4, 33), (1, 7), (3, 1100)])
def test_a_seam_is_its_two_parts(lab: Any, rng: np.random.Generator, tokens: int, streams: int, dim: int) -> None:
    """hc_post of one site, hc_pre of another: the same bits on every backend and crew, and what the oracle says."""
    shape, x, out = hc_shape(streams, 3), normal(rng, tokens, streams, dim), normal(rng, tokens, dim)
    sites = [(hc_arrays(rng, shape, dim), normal(rng, dim)) for _ in range(2)]
    found = []
    for ops in (*lab.crews.values(), lab.oracle):
        (w, norm), (next_w, next_norm) = ((HcWeights(*map(ops.vector, a)), ops.vector(n)) for a, n in sites)
        mix = ops.hc_pre(ops.vector(x), w, shape, norm, 1e-5)
        after = ops.hc_post(ops.vector(x.copy()), ops.vector(out), mix)
        expected = [after, *ops.hc_pre(after, next_w, shape, next_norm, 1e-3)]
        before = ops.vector(x.copy())
        seam, next_mix = ops.hc_seam(before, ops.vector(out), mix, next_w, shape, next_norm, 1e-3)
        assert seam is before or ops is lab.oracle
        for a, b in zip([seam, *next_mix], expected, strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))
        found.append([seam, *next_mix])
    for a, b in zip(found[0], found[-1], strict=True):
        lab.close(a, b, 1e-5)


@pytest.mark.parametrize("dim", SIZES)
def test_add_norm_is_its_two_parts(lab: Any, rng: np.random.Generator, dim: int) -> None:
    x, y, w = normal(rng, 4, dim), normal(rng, 4, dim), normal(rng, dim)
    for ops in (*lab.crews.values(), lab.oracle):
        first, second, weight = ops.vector(x), ops.vector(y), ops.vector(w)
        total, normed = ops.add_norm(first, second, weight, 1e-3)
        assert np.array_equal(np.asarray(total), np.asarray(ops.add(first, second)))
        assert np.array_equal(np.asarray(normed), np.asarray(ops.rms_norm(total, weight, 1e-3)))


def test_hc_expand_and_mean_undo_each_other(lab: Any, rng: np.random.Generator) -> None:
    x = normal(rng, 3, 21)
    streams = lab.cpu.hc_expand(x, hc_shape())
    assert np.array_equal(streams, np.repeat(x[:, None], 4, axis=1))
    assert np.array_equal(lab.cpu.hc_mean(streams), x)
    mixed = normal(rng, 3, 5, 21)
    lab.close(lab.cpu.hc_mean(mixed), mixed.astype(np.float64).mean(1))


def test_threads_and_grouping_change_no_bit(lab: Any, rng: np.random.Generator) -> None:
    shape, dim, tokens = hc_shape(), 1100, 9
    w, norm = HcWeights(*hc_arrays(rng, shape, dim)), normal(rng, dim)
    x, out = normal(rng, tokens, 4, dim), normal(rng, tokens, dim)

    def run(ops: Any, part: slice) -> list[F32]:
        mix = ops.hc_pre(x[part], w, shape, norm, 1e-5)
        after = ops.hc_post(x[part].copy(), out[part], mix)
        seam, following = ops.hc_seam(x[part].copy(), out[part], mix, w, shape, norm, 1e-5)
        return [*mix, after, ops.hc_mean(after), ops.hc_expand(mix.y, shape), seam, *following]

    lab.laws(lambda: run, tokens)
    lab.laws(lambda: lambda ops, part: [ops.rms_norm(out[part], norm, 1e-5), ops.add(out[part], out[part])], tokens)
    lab.laws(lambda: lambda ops, part: list(ops.add_norm(out[part], out[part], norm, 1e-5)), tokens)
