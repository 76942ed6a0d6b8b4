"""The two attention sublayers: KDA (recurrent) and absorbed MLA, dense or sparsely indexed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from waste.backends.base import Array, IndexerWeights, KdaState, KdaWeights, MlaWeights, Ops, Selection
from waste.backends.shapes import IndexerShape, KdaShape, MlaShape
from waste.kvcache.state import MlaState
from waste.layers.trace import Trace


@dataclass
class Chunk:
    """The tokens of one forward pass: where they start, who listens, and the last index selection,
    which layers without an index of their own reuse."""

    start: int
    tokens: int
    trace: Trace
    selection: Selection | None = None


class Attention(Protocol):
    """An attention sublayer: (T, D) normed -> (T, D), advancing its layer's state."""

    def forward(self, ops: Ops, x: Array, state: KdaState | MlaState, chunk: Chunk) -> Array: ...


@dataclass(frozen=True)
class Kda:
    weights: KdaWeights
    shape: KdaShape

    def forward(self, ops: Ops, x: Array, state: KdaState | MlaState, chunk: Chunk) -> Array:
        assert isinstance(state, KdaState)
        return ops.kda(x, self.weights, self.shape, state)


@dataclass(frozen=True)
class Mla:
    """`indexer` with weights: selects; `indexer` without: reuses the last selection; None: dense."""

    layer: int
    weights: MlaWeights
    shape: MlaShape
    indexer: IndexerShape | None
    index_weights: IndexerWeights | None

    def forward(self, ops: Ops, x: Array, state: KdaState | MlaState, chunk: Chunk) -> Array:
        assert isinstance(state, MlaState)
        projection = ops.mla_project(x, self.weights, self.shape, chunk.start)
        state.rows[chunk.start : chunk.start + chunk.tokens] = projection.rows
        if self.index_weights is not None:
            assert self.indexer is not None and state.index is not None and projection.q_latent is not None
            chunk.selection = ops.index(x, projection.q_latent, self.index_weights, self.indexer, state.index)
            chunk.trace.selection(self.layer, chunk.start, chunk.tokens, chunk.selection)
        selection = chunk.selection if self.indexer is not None else None
        return ops.mla_attend(projection.q, state.rows, chunk.start, selection, self.weights, self.shape)
