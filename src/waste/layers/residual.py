"""How a sublayer hangs in the residual: plain (x + f(norm x)) or hyper-connections (four mixed streams).

Each site is entered, which gives its sublayer's input, and left with the sublayer's output. Between two sublayers that
is one stage: `follow` leaves one site and enters the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from waste.backends.base import Array, HcMix, HcWeights, Ops, Vector
from waste.backends.shapes import HcShape

Held = Any  # what a site keeps while its sublayer is at work: the residual, and how to write to it


class Residual(Protocol):
    """One site. All sites of a model are of one kind."""

    def enter(self, ops: Ops, x: Array) -> tuple[Array, Held]:
        """The residual x -> the sublayer's input (T, D)."""
        ...

    def follow(self, ops: Ops, held: Held, out: Array) -> tuple[Array, Held]:
        """`leave` of the site before, which held `held` while its sublayer made `out`, and `enter`."""
        ...

    def leave(self, ops: Ops, held: Held, out: Array) -> Array:
        """The residual with the sublayer's output `out` (T, D) in it."""
        ...


@dataclass(frozen=True)
class PlainResidual:
    """x (T, D) -> x + sublayer(rms(x))."""

    norm: Vector
    eps: float

    def enter(self, ops: Ops, x: Array) -> tuple[Array, Array]:
        return ops.rms_norm(x, self.norm, self.eps), x

    def follow(self, ops: Ops, held: Array, out: Array) -> tuple[Array, Array]:
        x, y = ops.add_norm(held, out, self.norm, self.eps)
        return y, x

    def leave(self, ops: Ops, held: Array, out: Array) -> Array:
        return ops.add(held, out)


@dataclass(frozen=True)
class HyperConnection:
    """x (T, S, D): collapse, norm, sublayer, spread and mix (GLM-5.3's mHC)."""

    weights: HcWeights
    shape: HcShape
    norm: Vector
    eps: float

    def enter(self, ops: Ops, x: Array) -> tuple[Array, tuple[Array, HcMix]]:
        mix = ops.hc_pre(x, self.weights, self.shape, self.norm, self.eps)
        return mix.y, (x, mix)

    def follow(self, ops: Ops, held: tuple[Array, HcMix], out: Array) -> tuple[Array, tuple[Array, HcMix]]:
        x, mix = held
        held = ops.hc_seam(x, out, mix, self.weights, self.shape, self.norm, self.eps)
        return held[1].y, held

    def leave(self, ops: Ops, held: tuple[Array, HcMix], out: Array) -> Array:
        x, mix = held
        return ops.hc_post(x, out, mix)
