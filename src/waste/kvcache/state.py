"""The memory of one session: a state per layer, allocated for a growing number of tokens.

MLA layers keep one row per token and, where they are indexed, one key per pool; KDA layers keep a
fixed state that cannot be rewound, so a session only ever moves forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from waste.backends.base import Array, IndexState, KdaState, Ops
from waste.backends.shapes import IndexerShape, KdaShape, MlaShape

# Caches start small and double: a session opened for a long context costs nothing until it is used.
FIRST_CAPACITY = 512


@dataclass
class MlaState:
    """Latent cache of one MLA layer: `rows` (capacity, row) and the index, if the layer has one."""

    rows: Array
    index: IndexState | None


@dataclass
class SessionState:
    """All layers' states at one position."""

    layers: list[KdaState | MlaState]
    position: int = 0
    capacity: int = field(default=FIRST_CAPACITY)


def kda_state(ops: Ops, shape: KdaShape) -> KdaState:
    """An empty KDA state: no past inputs, zero memory."""
    return KdaState(
        conv=ops.zeros(3, shape.conv - 1, shape.channels), s=ops.zeros(shape.heads, shape.head_dim, shape.head_dim)
    )


def mla_state(ops: Ops, shape: MlaShape, indexer: IndexerShape | None, capacity: int) -> MlaState:
    """An empty cache for `capacity` tokens."""
    index = None
    if indexer is not None:
        pools = capacity // indexer.pool
        d = indexer.head_dim
        index = IndexState(ops.zeros(pools, d), ops.zeros(indexer.pool, d), ops.zeros(indexer.pool, d))
    return MlaState(ops.zeros(capacity, shape.row), index)


def grow(ops: Ops, state: SessionState, needed: int, limit: int) -> None:
    """Make room for `needed` tokens (at most `limit`, the session's context)."""
    if needed <= state.capacity:
        return
    capacity = min(max(needed, 2 * state.capacity), limit)
    for layer in state.layers:
        if isinstance(layer, MlaState):
            layer.rows = _grown(ops, layer.rows, capacity)
            if layer.index is not None:
                pool = len(layer.index.open_keys)
                layer.index.keys = _grown(ops, layer.index.keys, -(-capacity // pool))
    state.capacity = capacity


def _grown(ops: Ops, old: Array, rows: int) -> Array:
    new = ops.zeros(rows, old.shape[1])
    new[: len(old)] = old
    return new


def bytes_per_token(mla: MlaShape, indexer: IndexerShape | None) -> float:
    """float32 bytes one token adds to one MLA layer (indexer None: a layer without an index)."""
    index = indexer.head_dim / indexer.pool if indexer is not None else 0.0
    return 4 * (mla.row + index)


def kda_bytes(shape: KdaShape) -> int:
    """float32 bytes of one KDA layer's state."""
    return 4 * (3 * (shape.conv - 1) * shape.channels + shape.heads * shape.head_dim**2)
