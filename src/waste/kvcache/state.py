"""The memory of one session: a state per layer, for a fixed number of tokens.

MLA layers keep one row per token and, where they are indexed, one key per pool; KDA layers keep a
fixed state that cannot be rewound, so a session only ever moves forward. Caches are allocated whole: the
system commits zero pages when they are first written, so a long context costs nothing until it is used,
and nothing is ever copied to grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from waste.backends.base import Array, IndexState, KdaState, Ops
from waste.backends.shapes import IndexerShape, KdaShape, MlaShape


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


def bytes_per_token(mla: MlaShape, indexer: IndexerShape | None) -> float:
    """float32 bytes one token adds to one MLA layer (indexer None: a layer without an index)."""
    index = indexer.head_dim / indexer.pool if indexer is not None else 0.0
    return 4 * (mla.row + index)


def kda_bytes(shape: KdaShape) -> int:
    """float32 bytes of one KDA layer's state."""
    return 4 * (3 * (shape.conv - 1) * shape.channels + shape.heads * shape.head_dim**2)
