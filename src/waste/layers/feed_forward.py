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

    def wanted_ahead(self, layer: int) -> int:
        """How many experts of `layer`, the next one, are worth predicting now; 0: none."""
        ...

    def prefetch(self, layer: int, experts: Sequence[int], likely: int) -> None:
        """A later wave of `layer` may want these, the first most; `likely` are worth a read. Returns at once."""
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
class NextRouter:
    """The router of the MoE layer that follows, as it is asked ahead of time: for more experts than a token takes.

    It is asked with the input of the layer before. On nano-glm 76 % of a token's experts are among as many predicted,
    93 % among twice as many; scaling that input by the ratio of the two layers' norms changes neither, and the input
    of the attention between them, a layer later, gives 70 and 88 % (LEARNED: lookahead).
    """

    layer: int
    gate: Weight  # a handle of its own: a backend remembers one use of each
    bias: Vector
    router: RouterShape


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
    following: NextRouter | None = None

    def forward(self, ops: Ops, x: Array, experts: ExpertStore, chunk: Chunk) -> Array:
        routing = ops.route(x, self.gate, self.bias, self.router)
        chunk.trace.routing(self.layer, chunk.start, routing)
        layout = experts.layout(self.layer)
        waves = experts.waves(self.layer, sorted(set(routing.ids.ravel().tolist())))
        if len(waves) == 1:
            with waves[0] as wave:
                if chunk.tokens == 1 and self.following is not None:  # a chunk wants most experts anyway
                    self._look_ahead(ops, x, experts, self.following)
                return ops.expert_group(x, routing, layout, wave, self.shape, self.shared)
        out = ops.zeros(chunk.tokens, self.router.top_k, self.shape.hidden)
        for part in waves:
            with part as wave:
                ops.experts(x, routing, layout, wave, self.shape, out)
        shared = None if self.shared is None else ops.mlp(x, self.shared, self.shape.limit)
        return ops.combine(out, routing, shared)

    @staticmethod
    def _look_ahead(ops: Ops, x: Array, experts: ExpertStore, following: NextRouter) -> None:
        """After this layer's own reads have begun, so that they come first."""
        width = experts.wanted_ahead(following.layer)
        if width > 0:
            predicted = ops.route(x, following.gate, following.bias, following.router).ids[0]
            experts.prefetch(following.layer, predicted.tolist(), width)
