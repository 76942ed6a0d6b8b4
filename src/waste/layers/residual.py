"""How a sublayer hangs in the residual: plain (x + f(norm x)) or hyper-connections (four mixed streams)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from waste.backends.base import Array, HcWeights, Ops, Vector
from waste.backends.shapes import HcShape

Sublayer = Callable[[Array], Array]


class Residual(Protocol):
    """One site: feeds a sublayer from the residual and adds its output back."""

    def apply(self, ops: Ops, x: Array, sublayer: Sublayer) -> Array: ...


@dataclass(frozen=True)
class PlainResidual:
    """x (T, D) -> x + sublayer(rms(x))."""

    norm: Vector
    eps: float

    def apply(self, ops: Ops, x: Array, sublayer: Sublayer) -> Array:
        return ops.add(x, sublayer(ops.rms_norm(x, self.norm, self.eps)))


@dataclass(frozen=True)
class HyperConnection:
    """x (T, S, D): collapse, norm, sublayer, spread and mix (GLM-5.3's mHC)."""

    weights: HcWeights
    shape: HcShape
    norm: Vector
    eps: float

    def apply(self, ops: Ops, x: Array, sublayer: Sublayer) -> Array:
        mix = ops.hc_pre(x, self.weights, self.shape, self.norm, self.eps)
        return ops.hc_post(x, sublayer(mix.y), mix)
