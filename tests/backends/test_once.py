"""What is remembered for a layer's weights: made once, for the right object and use, and no longer than it lives."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from waste.backends.base import HcWeights, MlpWeights
from waste.backends.once import Once
from waste.backends.shapes import HcShape, RouterShape


@dataclass
class Owner:
    value: int


class Maker:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, owner: Owner, *args: int) -> tuple[int, ...]:
        self.calls += 1
        return (owner.value, *args)


def test_made_once_for_an_object_and_a_use() -> None:
    once, make, owner = Once(), Maker(), Owner(1)
    assert [once.of(owner, (2, 3), make, 5) for _ in range(3)] == [(1, 5)] * 3
    assert make.calls == 1
    assert once.of(owner, (2, 4), make, 6) == (1, 6)
    assert once.of(owner, (2, 4), make, 7) == (1, 6)
    assert once.of(Owner(1), (2, 4), make, 8) == (1, 8)  # equal, but another
    assert make.calls == 3


def test_what_could_not_be_made_is_tried_again() -> None:
    def fail(owner: Owner) -> int:
        raise ValueError("no")

    once, owner = Once(), Owner(1)
    with pytest.raises(ValueError, match="no"):
        once.of(owner, None, fail)
    assert once.of(owner, None, Maker()) == (1,)


def test_owners_are_not_kept_and_their_successors_not_mistaken_for_them() -> None:
    once, make = Once(), Maker()
    for value in range(100):  # most of them at the address of the one before
        assert once.of(Owner(value), None, make) == (value,)
        gc.collect(0)
    assert not once._known


def test_weights_that_share_parts_are_told_apart(lab: Any, rng: np.random.Generator) -> None:
    """One gate with two biases, one site with two norms, one up with two gates: in turns, on one backend."""
    x, gate = rng.standard_normal((4, 8), np.float32), lab.weight(lab.cpu, rng.standard_normal((6, 8), np.float32))
    biases = np.zeros(6, np.float32), np.array([9, 8, 0, 0, 0, 0], np.float32)
    shape = RouterShape(6, 2, 1, 1, 1.0, True)
    first, second = (lab.cpu.route(x, gate, bias, shape).ids for bias in biases)
    assert (second == [0, 1]).all() and (first != second).any()
    assert np.array_equal(lab.cpu.route(x, gate, biases[0], shape).ids, first)

    hc, norms = HcShape(2, 2, 1e-6, 1e-5), (np.ones(8, np.float32), np.full(8, 2, np.float32))
    w = HcWeights(rng.standard_normal((8, 16), np.float32), np.zeros(8, np.float32), np.ones(3, np.float32))
    streams = rng.standard_normal((4, 2, 8), np.float32)
    for norm in (*norms, *norms):
        assert np.array_equal(
            lab.cpu.hc_pre(streams, w, hc, norm, 1e-5).y * norms[1],
            2 * norm * lab.cpu.hc_pre(streams, w, hc, norms[0], 1e-5).y,
        )

    up, down = (lab.weight(lab.cpu, rng.standard_normal(s, np.float32)) for s in ((6, 8), (8, 6)))
    a, b = MlpWeights(gate, up, down), MlpWeights(up, up, down)
    outs = [lab.cpu.mlp(x, w, None) for w in (a, b, a, b)]
    assert np.array_equal(outs[0], outs[2]) and np.array_equal(outs[1], outs[3])
    assert not np.array_equal(outs[0], outs[1])
