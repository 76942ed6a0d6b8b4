"""The two feed-forward sublayers: a dense MLP, and routed experts beside a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from waste.backends.base import Array, MlpWeights, Ops, Vector, Wave, Weight
from waste.backends.shapes import ExpertShape, RouterShape
from waste.container.layout import RecordLayout
from waste.layers.attention import Chunk


class ExpertStore(Protocol):
    """Where routed experts come from. `waste.tiers` implements it over a container."""

    def layout(self, layer: int) -> RecordLayout: ...

    def waves(self, layer: int, experts: Sequence[int]) -> Sequence[AbstractContextManager[Wave]]:
        """The records of `experts`, each exactly once, in as many waves as there is room for.

        Reading begins when a wave is entered. Its records stay pinned inside its `with` block.
        """
        ...


class FeedForward(Protocol):
    """A feed-forward sublayer: (T, D) normed -> (T, D)."""

    def forward(self, ops: Ops, x: Array, experts: ExpertStore, chunk: Chunk) -> Array: ...


@dataclass(frozen=True)
class Mlp:
    weights: MlpWeights
    limit: float | None

    def forward(self, ops: Ops, x: Array, experts: ExpertStore, chunk: Chunk) -> Array:
        return ops.mlp(x, self.weights, self.limit)


@dataclass(frozen=True)
class Moe:
    """Each expert's output is kept per (token, rank) and summed in routing order at the end, so that
    neither the order of arrival nor the number of waves changes one bit of the sum."""

    layer: int
    gate: Weight
    bias: Vector
    router: RouterShape
    shape: ExpertShape
    shared: MlpWeights | None

    def forward(self, ops: Ops, x: Array, experts: ExpertStore, chunk: Chunk) -> Array:
        routing = ops.route(x, self.gate, self.bias, self.router)
        chunk.trace.routing(self.layer, chunk.start, routing)
        layout = experts.layout(self.layer)
        waves = experts.waves(self.layer, sorted(set(routing.ids.ravel().tolist())))
        if len(waves) == 1:
            with waves[0] as wave:
                return ops.expert_group(x, routing, layout, wave, self.shape, self.shared)
        out = ops.zeros(chunk.tokens, self.router.top_k, self.shape.hidden)
        for part in waves:
            with part as wave:
                ops.experts(x, routing, layout, wave, self.shape, out)
        shared = None if self.shared is None else ops.mlp(x, self.shared, self.shape.limit)
        return ops.combine(out, routing, shared)
