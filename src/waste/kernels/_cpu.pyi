"""
Native CPU stages. Addresses are those of C-contiguous arrays; waste.backends.cpu checks shapes.
"""

from collections.abc import Sequence


def address_f32(array: object, shape: tuple[int, ...], writable: bool = False) -> int:
    """
    Address of a C-contiguous float32 array of this shape; 0 if it is anything else.
    """

def address_i32(array: object, shape: tuple[int, ...], writable: bool = False) -> int:
    """The same for int32."""

def address_i64(array: object, shape: tuple[int, ...], writable: bool = False) -> int:
    """The same for int64."""

def address_u8(array: object, shape: tuple[int, ...], writable: bool = False) -> int:
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

class RecordLayout:
    """Formats and offsets of the three matrices of an expert record."""

    def __init__(self, gate: tuple[int, int], up: tuple[int, int], down: tuple[int, int], hidden: int, inner: int) -> None: ...

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

def linear(pool: Pool, x: int, w: Weight, y: int, tokens: int) -> None: ...

def embed(pool: Pool, table: Weight, ids: int, out: int, tokens: int) -> None: ...

def rms_norm(pool: Pool, x: int, w: int, out: int, rows: int, n: int, eps: float) -> None: ...

def add(pool: Pool, x: int, y: int, out: int, n: int) -> None: ...

def combine(pool: Pool, parts: int, weights: int, shared: int, out: int, tokens: int, top_k: int, dim: int) -> None:
    """`shared` 0: no shared expert."""

def hc_expand(pool: Pool, x: int, out: int, tokens: int, streams: int, dim: int) -> None: ...

def hc_mean(pool: Pool, x: int, out: int, tokens: int, streams: int, dim: int) -> None: ...

def hc_pre(pool: Pool, streams: int, tokens: int, y: int, post: int, comb: int, fn: int, base: int, scale: int, norm: int, iterations: int, eps: float, stream_eps: float, norm_eps: float, count: int, dim: int) -> None: ...

def hc_post(pool: Pool, streams: int, out: int, post: int, comb: int, tokens: int, count: int, dim: int) -> None:
    """In place on `streams`."""

HC_STREAMS: int = 16

def kda(pool: Pool, x: int, tokens: int, conv: int, s: int, out: int, q: Weight, k: Weight, v: Weight, f_a: Weight, f_b: Weight, b: Weight, g_a: Weight, g_b: Weight, o: Weight, q_conv: int, k_conv: int, v_conv: int, a_log: int, dt_bias: int, norm: int, bound: float | None, norm_eps: float, dim: int, heads: int, head_dim: int, taps: int) -> None: ...

def mla_project(pool: Pool, x: int, start: int, tokens: int, q: int, rows: int, latent: int, q_a: Weight | None, q_a_norm: int, q_b: Weight, kv_a: Weight, kv_a_norm: int, k_up: Weight, latent_eps: float, inv_freq: int, dim: int, heads: int, kv_lora: int, nope: int, rope: int) -> None:
    """`q_a` None: no query latent. `inv_freq` 0: no rotation."""

def mla_attend(pool: Pool, q: int, cache: int, start: int, positions: int, offsets: int, tokens: int, out: int, v_up: Weight, o: Weight, scale: float, dim: int, heads: int, kv_lora: int, rope: int, v: int) -> None:
    """`positions` 0: causal."""

def index(pool: Pool, x: int, q_latent: int, start: int, tokens: int, keys: int, open_keys: int, open_gates: int, positions: int, offsets: int, wq_b: Weight, wk: Weight, proj: Weight, gate: Weight | None, norm: int, norm_bias: int, ape: int, inv_freq: int, rotary: int, norm_eps: float, dim: int, q_lora: int, heads: int, head_dim: int, pool_size: int, keep: int) -> None:
    """`positions` 0: advance only, every query sees its whole past."""

def delta_rule(pool: Pool, q: int, k: int, v: int, decay: int, beta: int, tokens: int, heads: int, head_dim: int, s: int, out: int) -> None:
    """
    The state update of `kda` alone, on (T, heads, head_dim); in place on `s`.
    """

def choose(score: int, count: int, keep: int, chosen: int) -> None:
    """
    Indices of the largest of `count` float64 scores, ascending, ties to the lower: int32 (keep).
    """

def mlp(pool: Pool, x: int, out: int, tokens: int, limit: float, gate: Weight, up: Weight, down: Weight) -> None: ...

def route(pool: Pool, x: int, gate: Weight, bias: int, top_k: int, groups: int, topk_groups: int, scaling: float, normalize: bool, tokens: int, ids: int, weights: int) -> None: ...

def experts(pool: Pool, x: int, ids: int, layout: RecordLayout, records: Sequence[tuple[int, int]], arrived: int, limit: float, out: int, tokens: int, top_k: int) -> bool:
    """
    records: (expert id, address of its record). `arrived` 0: all are there. False: one will not come.
    """

def expert_group(pool: Pool, x: int, ids: int, weights: int, layout: RecordLayout, records: Sequence[tuple[int, int]], arrived: int, limit: float, out: int, tokens: int, top_k: int, gate: Weight | None, up: Weight | None, down: Weight | None) -> bool:
    """As `experts`, then the weighted sum and the shared expert's part."""

def read_stream(data: int, nbytes: int, passes: int, ahead: int) -> tuple[int, float]:
    """
    Reads everything `passes` times, prefetching `ahead` bytes in front (0: not at all). Returns the sum of its 64-bit words modulo 2^64 and the seconds of CPU time that took this thread.
    """
