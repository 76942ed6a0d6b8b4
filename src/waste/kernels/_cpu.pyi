"""
Native CPU stages. Arrays are C-contiguous; ValueError, naming the axes, for others.
"""

from collections.abc import Sequence

import numpy
import numpy.typing


def address_f32(array: numpy.typing.NDArray[numpy.float32], name: str, axes: str, shape: Sequence[int], writable: bool = False) -> int:
    """
    Address of a C-contiguous float32 array of this shape; ValueError, naming the axes, if it is anything else.
    """

def address_u8(array: numpy.typing.NDArray[numpy.uint8], name: str, axes: str, shape: Sequence[int], writable: bool = False) -> int:
    """The same for uint8."""

class Pool:
    """Threads and scratch memory. Stages of one pool run one at a time."""

    def __init__(self, threads: int) -> None: ...

    @property
    def threads(self) -> int: ...

class Weight:
    """A matrix in kernel layout at an address; keeps `owner` alive."""

    def __init__(self, address: int, fmt: int, rows: int, cols: int, owner: object | None = None) -> None: ...

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def fmt(self) -> int: ...

class HcSite:
    """A hyper-connection site."""

    def __init__(self, fn: int, base: int, scale: int, norm: int, iterations: int, eps: float, stream_eps: float, norm_eps: float, streams: int, dim: int) -> None: ...

class KdaLayer:
    """A KDA sublayer. `bound` None: log decay has no lower bound."""

    def __init__(self, q: Weight, k: Weight, v: Weight, f_a: Weight, f_b: Weight, b: Weight, g_a: Weight, g_b: Weight, o: Weight, q_conv: int, k_conv: int, v_conv: int, a_log: int, dt_bias: int, norm: int, bound: float | None, norm_eps: float, dim: int, heads: int, head_dim: int, taps: int) -> None: ...

class MlaLayer:
    """
    An MLA sublayer. `q_a` None: no query latent. `inv_freq` 0: no rotation.
    """

    def __init__(self, q_a: Weight | None, q_a_norm: int, q_b: Weight, kv_a: Weight, kv_a_norm: int, k_up: Weight, v_up: Weight, o: Weight, latent_eps: float, scale: float, inv_freq: int, dim: int, heads: int, kv_lora: int, nope: int, rope: int, v: int) -> None: ...

class Indexer:
    """
    The index of an MLA sublayer. `gate` None, `ape` 0: every token is a pool.
    """

    def __init__(self, wq_b: Weight, wk: Weight, proj: Weight, gate: Weight | None, norm: int, norm_bias: int, ape: int, inv_freq: int, rotary: int, norm_eps: float, dim: int, q_lora: int, heads: int, head_dim: int, pool: int, keep: int) -> None: ...

class Mlp:
    """A dense feed-forward: gate and up (F, D), down (D, F)."""

    def __init__(self, gate: Weight, up: Weight, down: Weight) -> None: ...

class Router:
    """The router of an MoE sublayer."""

    def __init__(self, gate: Weight, bias: int, top_k: int, groups: int, topk_groups: int, scaling: float, normalize: bool) -> None: ...

class RecordLayout:
    """
    Formats and offsets of the three matrices of an expert record; it has `nbytes` or more.
    """

    def __init__(self, gate: tuple[int, int], up: tuple[int, int], down: tuple[int, int], hidden: int, inner: int, nbytes: int, limit: float) -> None: ...

def usable(isa: int) -> bool:
    """
    Whether native code can use 0 (portable), 1 (avx2), 2 (avx512), 3 (amx) here.
    """

def active() -> int:
    """The one in use."""

def lanes() -> int:
    """
    The one the float loops in use were compiled for: at most the active one.
    """

def force(isa: int | None) -> None:
    """Use this one from now on; None: the best again."""

def encode(pool: Pool, w: int, fmt: int, rows: int, cols: int, importance: int, isa: int, out: int) -> tuple[int, int]:
    """
    `importance` 0: none. Returns the groups with unusable weights and those with a clipped scale.
    """

def decode(pool: Pool, w: Weight, out: int) -> None:
    """The whole matrix as floats."""

def linear(pool: Pool, x: numpy.typing.NDArray[numpy.float32], w: Weight) -> numpy.typing.NDArray[numpy.float32]: ...

def embed(pool: Pool, table: Weight, ids: numpy.typing.NDArray[numpy.int64]) -> numpy.typing.NDArray[numpy.float32]: ...

def rms_norm(pool: Pool, x: numpy.typing.NDArray[numpy.float32], w: numpy.typing.NDArray[numpy.float32], eps: float) -> numpy.typing.NDArray[numpy.float32]: ...

def add(pool: Pool, x: numpy.typing.NDArray[numpy.float32], y: numpy.typing.NDArray[numpy.float32]) -> numpy.typing.NDArray[numpy.float32]: ...

def add_norm(pool: Pool, x: numpy.typing.NDArray[numpy.float32], y: numpy.typing.NDArray[numpy.float32], w: numpy.typing.NDArray[numpy.float32], eps: float) -> tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]:
    """`add`, then `rms_norm` of the sum: both."""

def combine(pool: Pool, parts: numpy.typing.NDArray[numpy.float32], weights: numpy.typing.NDArray[numpy.float32], shared: numpy.typing.NDArray[numpy.float32] | None) -> numpy.typing.NDArray[numpy.float32]: ...

def hc_expand(pool: Pool, x: numpy.typing.NDArray[numpy.float32], streams: int) -> numpy.typing.NDArray[numpy.float32]: ...

def hc_mean(pool: Pool, streams: numpy.typing.NDArray[numpy.float32]) -> numpy.typing.NDArray[numpy.float32]: ...

def hc_pre(pool: Pool, streams: numpy.typing.NDArray[numpy.float32], site: HcSite) -> tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]:
    """y, post and comb."""

def hc_post(pool: Pool, streams: numpy.typing.NDArray[numpy.float32], out: numpy.typing.NDArray[numpy.float32], post: numpy.typing.NDArray[numpy.float32], comb: numpy.typing.NDArray[numpy.float32]) -> None:
    """In place on `streams`."""

def hc_seam(pool: Pool, streams: numpy.typing.NDArray[numpy.float32], out: numpy.typing.NDArray[numpy.float32], post: numpy.typing.NDArray[numpy.float32], comb: numpy.typing.NDArray[numpy.float32], site: HcSite) -> tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]:
    """`hc_post`, in place, then `hc_pre` of `site`."""

HC_STREAMS: int = 16

def kda(pool: Pool, x: numpy.typing.NDArray[numpy.float32], conv: numpy.typing.NDArray[numpy.float32], s: numpy.typing.NDArray[numpy.float32], layer: KdaLayer) -> numpy.typing.NDArray[numpy.float32]:
    """In place on `conv` and `s`."""

def mla_project(pool: Pool, x: numpy.typing.NDArray[numpy.float32], start: int, layer: MlaLayer) -> tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32] | None]:
    """q, rows, and the query latent if there is one."""

def mla_attend(pool: Pool, q: numpy.typing.NDArray[numpy.float32], cache: numpy.typing.NDArray[numpy.float32], start: int, positions: numpy.typing.NDArray[numpy.int32] | None, offsets: numpy.typing.NDArray[numpy.int64] | None, layer: MlaLayer) -> numpy.typing.NDArray[numpy.float32]:
    """`positions` None: causal."""

def index(pool: Pool, x: numpy.typing.NDArray[numpy.float32], q_latent: numpy.typing.NDArray[numpy.float32], start: int, keys: numpy.typing.NDArray[numpy.float32], open_keys: numpy.typing.NDArray[numpy.float32], open_gates: numpy.typing.NDArray[numpy.float32], layer: Indexer) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int64]] | None:
    """
    Positions and offsets; None while every query sees its whole past. In place on keys, and, in pools of more than one token, on the open ones.
    """

def mlp(pool: Pool, x: numpy.typing.NDArray[numpy.float32], w: Mlp, limit: float) -> numpy.typing.NDArray[numpy.float32]: ...

def route(pool: Pool, x: numpy.typing.NDArray[numpy.float32], router: Router) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.float32]]:
    """ids and weights."""

def experts(pool: Pool, x: numpy.typing.NDArray[numpy.float32], ids: numpy.typing.NDArray[numpy.int32], layout: RecordLayout, records: Sequence[tuple[int, object, int, int, int]], out: numpy.typing.NDArray[numpy.float32]) -> tuple[bool, float]:
    """
    records: (expert, data, address, nbytes, arrived) each; `arrived`: address of an int32 that others set, 0 when the record is there. Returns whether all have come, and the seconds in which none was there to compute.
    """

def expert_group(pool: Pool, x: numpy.typing.NDArray[numpy.float32], ids: numpy.typing.NDArray[numpy.int32], weights: numpy.typing.NDArray[numpy.float32], layout: RecordLayout, records: Sequence[tuple[int, object, int, int, int]], shared: Mlp | None) -> tuple[numpy.typing.NDArray[numpy.float32], bool, float]:
    """
    As `experts`, then the weighted sum and the shared expert's part: that, and what `experts` returns.
    """

def delta_rule(pool: Pool, q: int, k: int, v: int, decay: int, beta: int, tokens: int, heads: int, head_dim: int, s: int, out: int) -> None:
    """
    The state update of `kda` alone, on (T, heads, head_dim); in place on `s`.
    """

def choose(score: int, count: int, keep: int, chosen: int) -> None:
    """
    Indices of the largest of `count` float64 scores, ascending, ties to the lower: int32 (keep).
    """

def read_stream(data: int, nbytes: int, passes: int, ahead: int) -> tuple[int, float]:
    """
    Reads everything `passes` times, prefetching `ahead` bytes in front (0: not at all). Returns the sum of its 64-bit words modulo 2^64 and the seconds of CPU time that took this thread.
    """
