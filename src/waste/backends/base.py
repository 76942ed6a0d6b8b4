"""The `Ops` boundary: the coarse operations a backend implements and the layers are written in.

One operation is one stage of a layer, one line of a profile and, in the native backend, one call
across the language border: five or six a layer, so that Python stays below 1.5 ms a token at 45 layers.
Every operation takes T >= 1 tokens; decode is T = 1. Activations are float32 (T, D) arrays of the
backend's own kind (`Array`: numpy for `cpu`, torch for `reference`); weights are opaque handles.

Laws (tests/backends): every backend agrees with `reference`; token t of a batch gets the same bits
as when it is evaluated alone; the number of threads changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from waste.backends.shapes import ExpertShape, HcShape, IndexerShape, KdaShape, MlaShape, RouterShape
from waste.container.layout import RecordLayout

Array = Any  # float32 activations, the backend's own array type
Weight = Any  # an (out, in) matrix in some number format, the backend's own handle
Vector = Any  # float32 parameters of any rank (norms, biases, convolutions), the backend's own array
Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HcWeights:
    """One hyper-connection site: `fn` (2S + S*S, S*D), `base` (2S + S*S), `scale` (3)."""

    fn: Vector
    base: Vector
    scale: Vector


# What is made anew in every layer of every token is a named tuple: a third of a frozen dataclass's time.


class HcMix(NamedTuple):
    """What `hc_pre` hands to the sublayer (`y`, normed) and to `hc_post` (`post`, `comb`)."""

    y: Array  # (T, D)
    post: Array  # (T, S)
    comb: Array  # (T, S, S), used transposed: new[i] = post[i] * out + sum_k comb[k, i] * old[k]


@dataclass(frozen=True)
class KdaWeights:
    """C = heads * head_dim. Convolutions are (C, taps); gate matrices are low rank: b(a(x))."""

    q: Weight
    k: Weight
    v: Weight
    q_conv: Vector
    k_conv: Vector
    v_conv: Vector
    f_a: Weight
    f_b: Weight
    b: Weight
    g_a: Weight
    g_b: Weight
    a_log: Vector  # (heads,)
    dt_bias: Vector  # (C,)
    norm: Vector  # (head_dim,)
    o: Weight


@dataclass
class KdaState:
    """Recurrent state of one KDA layer, changed in place."""

    conv: Array  # (3, taps - 1, C): the last inputs of the q, k, v convolutions, oldest first
    s: Array  # (heads, head_dim key, head_dim value)


@dataclass(frozen=True)
class MlaWeights:
    """kv_b is stored split and key-side transposed, so that both absorptions read rows."""

    q_a: Weight | None  # (q_lora, D)
    q_a_norm: Vector | None
    q_b: Weight  # (H * (nope + rope), q_lora or D)
    kv_a: Weight  # (kv_lora + rope, D)
    kv_a_norm: Vector
    k_up: Weight  # (H * kv_lora, nope): row h * kv_lora + r
    v_up: Weight  # (H * v, kv_lora)
    o: Weight  # (D, H * v)


class MlaProjection(NamedTuple):
    """What a token chunk brings to attention."""

    q: Array  # (T, H, row): absorbed queries, the rope part last
    rows: Array  # (T, row): cache rows, latent normed, the rope part last
    q_latent: Array | None  # (T, q_lora) normed; also feeds the indexer


@dataclass(frozen=True)
class IndexerWeights:
    wq_b: Weight  # (n * d, q_lora)
    wk: Weight  # (d, D)
    k_norm: Vector
    k_norm_bias: Vector
    proj: Weight  # (n, D)
    gate: Weight | None  # (d, D), pooled selection only
    ape: Vector | None  # (pool, d)


@dataclass
class IndexState:
    """Index keys of one layer: finished pools, and the pairs of the pool being filled. In place."""

    keys: Array  # (capacity, d): one vector per finished pool
    open_keys: Array  # (pool, d)
    open_gates: Array  # (pool, d)
    tokens: int = 0  # seen so far


class Selection(NamedTuple):
    """Attended positions of T queries, ascending; row t is positions[offsets[t]:offsets[t + 1]]."""

    positions: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]  # (T + 1,)


@dataclass(frozen=True)
class MlpWeights:
    gate: Weight
    up: Weight
    down: Weight


class Routing(NamedTuple):
    """Chosen experts of T tokens, best choice first (ties: lower index)."""

    ids: npt.NDArray[np.int32]  # (T, K)
    weights: Array  # (T, K) float32, normalised and scaled


class Record(NamedTuple):
    """One expert's record where it lies in memory. Native code reads it as the tuple it is."""

    expert: int
    data: Bytes
    address: int  # of data[0]
    nbytes: int
    arrived: int  # address of an int32: 0 while the record is read, 1 once it is there, below 0 when that failed.
    # 0 instead of an address: it is there. Whoever holds the record keeps the int32 alive.

    @classmethod
    def of(cls, expert: int, data: Bytes, arrived: int = 0) -> Record:
        """Raises ValueError unless `data` is contiguous uint8."""
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise ValueError(f"record: expected contiguous uint8 (bytes), found {data.dtype} {data.shape}")
        return cls(expert, data, data.ctypes.data, data.nbytes, arrived)


class Wave(Protocol):
    """Expert records on their way into memory: valid, verified and pinned once they have arrived."""

    @property
    def records(self) -> Sequence[Record]:
        """All of them, whether they have arrived or not."""
        ...

    def wait(self) -> None:
        """Until all are there. Raises what a read raised."""
        ...

    def stalled(self, seconds: float) -> None:
        """Told how long a backend that takes records as they arrive had nothing to compute."""
        ...


class Ops(Protocol):
    """The operations of a backend. Shapes in the comments; every array float32 unless said."""

    name: str

    # -- memory

    def weight(self, blob: Bytes, fmt: str, rows: int, cols: int) -> Weight:
        """A handle over `blob` (kernel layout of `fmt`); keeps the memory alive, copies nothing if it can."""
        ...

    def vector(self, values: npt.NDArray[np.float32]) -> Vector: ...

    def zeros(self, *shape: int) -> Array:
        """Zeros that take no memory until they are written to (large ones)."""
        ...

    def numpy(self, array: Array) -> npt.NDArray[np.float32]:
        """A numpy float32 copy or view, for sampling, tests and saving."""
        ...

    # -- elementwise and small

    def embed(self, table: Weight, ids: Ids) -> Array:
        """Rows of the table: (T, D)."""
        ...

    def rms_norm(self, x: Array, weight: Vector, eps: float) -> Array: ...

    def add(self, x: Array, y: Array) -> Array: ...

    def add_norm(self, x: Array, y: Array, weight: Vector, eps: float) -> tuple[Array, Array]:
        """`add`, and `rms_norm` of the sum: where a sublayer ends and the next begins. The same bits as the two."""
        ...

    def linear(self, x: Array, w: Weight) -> Array:
        """x (T, in) @ W.T -> (T, out)."""
        ...

    # -- residual streams

    def hc_expand(self, x: Array, shape: HcShape) -> Array:
        """(T, D) -> (T, S, D): the embedding in every stream."""
        ...

    def hc_pre(self, streams: Array, w: HcWeights, shape: HcShape, norm: Vector, eps: float) -> HcMix:
        """Collapse the streams, then RMSNorm with `norm`: the sublayer's input."""
        ...

    def hc_post(self, streams: Array, out: Array, mix: HcMix) -> Array:
        """Write the sublayer's output back into the streams (in place where the backend can)."""
        ...

    def hc_seam(
        self, streams: Array, out: Array, mix: HcMix, w: HcWeights, shape: HcShape, norm: Vector, eps: float
    ) -> tuple[Array, HcMix]:
        """`hc_post` of one site and `hc_pre` of the next: the streams between them, and the next one's mix.

        The same bits as the two.
        """
        ...

    def hc_mean(self, streams: Array) -> Array:
        """(T, S, D) -> (T, D)."""
        ...

    # -- attention

    def kda(self, x: Array, w: KdaWeights, shape: KdaShape, state: KdaState) -> Array:
        """The whole KDA sublayer for T tokens in order; advances `state`. -> (T, D)."""
        ...

    def mla_project(self, x: Array, w: MlaWeights, shape: MlaShape, start: int) -> MlaProjection:
        """Queries and cache rows of positions start .. start + T - 1."""
        ...

    def index(
        self, x: Array, q_latent: Array, w: IndexerWeights, shape: IndexerShape, state: IndexState
    ) -> Selection | None:
        """Advance the index by T tokens and select for each; None while every token sees its whole past."""
        ...

    def mla_attend(
        self, q: Array, cache: Array, start: int, selection: Selection | None, w: MlaWeights, shape: MlaShape
    ) -> Array:
        """Attention of T queries over cache rows 0 .. start + T - 1 (causal, or the selection), then v_up
        and o_proj. cache: (>= start + T, row), the chunk's own rows already in it. -> (T, D)."""
        ...

    # -- feed forward

    def mlp(self, x: Array, w: MlpWeights, limit: float | None) -> Array:
        """down(silu(min(gate, limit)) * clamp(up, limit)): (T, D) -> (T, D)."""
        ...

    def route(self, x: Array, gate: Weight, bias: Vector, shape: RouterShape) -> Routing: ...

    def experts(
        self, x: Array, routing: Routing, layout: RecordLayout, wave: Wave, shape: ExpertShape, out: Array
    ) -> None:
        """For each record of the wave, write that expert's output for every token that chose it: out (T, K, D),
        row (t, k) where routing.ids[t, k] is the expert. Unweighted. Raises what a read of the wave raised."""
        ...

    def combine(self, out: Array, routing: Routing, shared: Array | None) -> Array:
        """sum over k in routing order of weights[t, k] * out[t, k], then + shared. -> (T, D)."""
        ...

    def expert_group(
        self,
        x: Array,
        routing: Routing,
        layout: RecordLayout,
        wave: Wave,
        shape: ExpertShape,
        shared: MlpWeights | None,
    ) -> Array:
        """All of it at once, where one wave holds every expert chosen: `experts`, the shared one, `combine`. -> (T, D).

        The same bits as the three; may begin before the last record has arrived.
        """
        ...
