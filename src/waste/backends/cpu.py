"""The native CPU backend: numpy arrays at the border, one native call per operation.

This file puts the weights of a layer together, with their shapes checked, when it meets them first; whatever changes
from call to call is checked, and outputs are allocated, where the arithmetic is: in `kernels/csrc/cpu`.
Sums are float32 in a fixed order (float64 for norms, router logits and index scores; whole numbers within the groups
of strip formats, whose inputs are rounded to 8 bits), so results depend neither on the number of threads nor on which
tokens are evaluated together.
"""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt

from waste.backends.base import (
    Bytes,
    HcMix,
    HcWeights,
    Ids,
    IndexerWeights,
    IndexState,
    KdaState,
    KdaWeights,
    MlaProjection,
    MlaWeights,
    MlpWeights,
    Routing,
    Selection,
    Wave,
)
from waste.backends.once import Once
from waste.backends.shapes import ExpertShape, HcShape, IndexerShape, KdaShape, MlaShape, Rotary, RouterShape
from waste.container.layout import RecordLayout
from waste.errors import UnsupportedError, UsageError
from waste.kernels import _cpu
from waste.kernels.arrays import f32, matrix, u8
from waste.quant import get

F32 = npt.NDArray[np.float32]

# Number formats with a kernel (`Format` in csrc/cpu/weight.hpp).
KERNEL_FORMATS = ("f32", "bf16", "q8", "q4", "wt2", "wt3", "wt4", "q6")


class CpuOps:
    """`Ops` in native code. `threads`: how many take part, the caller's included; default: all this process may use.

    Operations may be called from several threads; those of one CpuOps run one after the other.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        count = _usable_cpus() if threads is None else threads
        if not 1 <= count <= 4096:
            raise UsageError(f"the number of threads must be between 1 and 4096, not {count}")
        self._pool = _cpu.Pool(count)
        self._once = Once()
        self._rotaries: dict[Rotary, F32] = {}

    @property
    def threads(self) -> int:
        return self._pool.threads

    # -- memory

    def weight(self, blob: Bytes, fmt: str, rows: int, cols: int) -> _cpu.Weight:
        """A handle over `blob`, which it keeps alive; nothing is copied.

        Raises UnsupportedError for a format without a kernel, ValueError for a blob of another size.
        """
        code = _format_code(fmt)
        return _cpu.Weight(u8(blob, f"{fmt} blob", "bytes", get(fmt).nbytes(rows, cols)), code, rows, cols, blob)

    def vector(self, values: npt.NDArray[np.float32]) -> F32:
        return np.ascontiguousarray(values, np.float32)

    def zeros(self, *shape: int) -> F32:
        return np.zeros(shape, np.float32)

    def numpy(self, array: F32) -> F32:
        return array

    # -- elementwise and small

    def embed(self, table: _cpu.Weight, ids: Ids) -> F32:
        """Raises IndexError for an id outside the table."""
        return _cpu.embed(self._pool, table, np.ascontiguousarray(ids, np.int64))

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        return _cpu.rms_norm(self._pool, x, weight, eps)

    def add(self, x: F32, y: F32) -> F32:
        return _cpu.add(self._pool, x, y)

    def add_norm(self, x: F32, y: F32, weight: F32, eps: float) -> tuple[F32, F32]:
        return _cpu.add_norm(self._pool, x, y, weight, eps)

    def linear(self, x: F32, w: _cpu.Weight) -> F32:
        return _cpu.linear(self._pool, x, w)

    # -- residual streams

    def hc_expand(self, x: F32, shape: HcShape) -> F32:
        return _cpu.hc_expand(self._pool, x, shape.streams)

    def hc_pre(self, streams: F32, w: HcWeights, shape: HcShape, norm: F32, eps: float) -> HcMix:
        site, _ = self._once.of(w, (shape, id(norm), eps), _hc_site, shape, norm, eps)
        return HcMix(*_cpu.hc_pre(self._pool, streams, site))

    def hc_post(self, streams: F32, out: F32, mix: HcMix) -> F32:
        """Changes `streams` in place and returns it."""
        _cpu.hc_post(self._pool, streams, out, mix.post, mix.comb)
        return streams

    def hc_seam(
        self, streams: F32, out: F32, mix: HcMix, w: HcWeights, shape: HcShape, norm: F32, eps: float
    ) -> tuple[F32, HcMix]:
        """Changes `streams` in place and returns it."""
        _, post, comb = mix
        site, _ = self._once.of(w, (shape, id(norm), eps), _hc_site, shape, norm, eps)
        return streams, HcMix(*_cpu.hc_seam(self._pool, streams, out, post, comb, site))

    def hc_mean(self, streams: F32) -> F32:
        return _cpu.hc_mean(self._pool, streams)

    # -- attention

    def kda(self, x: F32, w: KdaWeights, shape: KdaShape, state: KdaState) -> F32:
        return _cpu.kda(self._pool, x, state.conv, state.s, self._once.of(w, shape, _kda_layer, shape))

    def mla_project(self, x: F32, w: MlaWeights, shape: MlaShape, start: int) -> MlaProjection:
        layer = self._once.of(w, shape, self._mla_layer, shape)
        return MlaProjection(*_cpu.mla_project(self._pool, x, start, layer))

    def _mla_layer(self, w: MlaWeights, shape: MlaShape) -> _cpu.MlaLayer:
        h, lora, part = shape.heads, shape.kv_lora, shape.nope + shape.rope
        d = latent = w.o.rows
        q_norm_at = 0
        if w.q_a is not None:
            latent = w.q_a.rows
            q_norm_at = f32(w.q_a_norm, "q_a_norm", "q_lora", latent)
            matrix(w.q_a, "q_a", "q_lora D", latent, d)
        return _cpu.MlaLayer(
            q_a=w.q_a,
            q_a_norm=q_norm_at,
            q_b=matrix(w.q_b, "q_b", "H*(nope+rope) in", h * part, latent),
            kv_a=matrix(w.kv_a, "kv_a", "R D", shape.row, d),
            kv_a_norm=f32(w.kv_a_norm, "kv_a_norm", "kv_lora", lora),
            k_up=matrix(w.k_up, "k_up", "H*kv_lora nope", h * lora, shape.nope),
            v_up=matrix(w.v_up, "v_up", "H*v kv_lora", h * shape.v, lora),
            o=matrix(w.o, "o", "D H*v", d, h * shape.v),
            latent_eps=shape.latent_eps,
            scale=shape.scale,
            inv_freq=self._inv_freq(shape.rotary, shape.rope, shape.rope),
            dim=d,
            heads=h,
            kv_lora=lora,
            nope=shape.nope,
            rope=shape.rope,
            v=shape.v,
        )

    def index(
        self, x: F32, q_latent: F32, w: IndexerWeights, shape: IndexerShape, state: IndexState
    ) -> Selection | None:
        layer = self._once.of(w, shape, self._indexer, shape)
        start = state.tokens
        chosen = _cpu.index(self._pool, x, q_latent, start, state.keys, state.open_keys, state.open_gates, layer)
        state.tokens = start + len(x)
        return None if chosen is None else Selection(*chosen)

    def _indexer(self, w: IndexerWeights, shape: IndexerShape) -> _cpu.Indexer:
        n, dim, pool, d = shape.heads, shape.head_dim, shape.pool, w.wk.cols
        gate, ape_at = None, 0
        if pool > 1:
            if w.gate is None:
                raise ValueError(f"index: pools of {pool} tokens need a gate")
            gate = matrix(w.gate, "gate", "d D", dim, d)
            ape_at = f32(w.ape, "ape", "pool d", pool, dim)
        return _cpu.Indexer(
            wq_b=matrix(w.wq_b, "wq_b", "n*d q_lora", n * dim, w.wq_b.cols),
            wk=matrix(w.wk, "wk", "d D", dim, d),
            proj=matrix(w.proj, "proj", "n D", n, d),
            gate=gate,
            norm=f32(w.k_norm, "k_norm", "d", dim),
            norm_bias=f32(w.k_norm_bias, "k_norm_bias", "d", dim),
            ape=ape_at,
            inv_freq=self._inv_freq(shape.rotary, 0, dim),
            rotary=0 if shape.rotary is None else shape.rotary.dim,
            norm_eps=shape.norm_eps,
            dim=d,
            q_lora=w.wq_b.cols,
            heads=n,
            head_dim=dim,
            pool=pool,
            keep=shape.keep,
        )

    def mla_attend(
        self, q: F32, cache: F32, start: int, selection: Selection | None, w: MlaWeights, shape: MlaShape
    ) -> F32:
        positions, offsets = (None, None) if selection is None else selection
        layer = self._once.of(w, shape, self._mla_layer, shape)
        return _cpu.mla_attend(self._pool, q, cache, start, positions, offsets, layer)

    # -- feed forward

    def mlp(self, x: F32, w: MlpWeights, limit: float | None) -> F32:
        return _cpu.mlp(self._pool, x, self._once.of(w, None, _mlp), _limit(limit))

    def route(self, x: F32, gate: _cpu.Weight, bias: F32, shape: RouterShape) -> Routing:
        router, _ = self._once.of(gate, (shape, id(bias)), _router, bias, shape)
        return Routing(*_cpu.route(self._pool, x, router))

    def experts(self, x: F32, routing: Routing, layout: RecordLayout, wave: Wave, shape: ExpertShape, out: F32) -> None:
        native = self._once.of(layout, shape, _native_layout, shape)
        whole, stalled_s = _cpu.experts(self._pool, x, routing.ids, native, wave.records, out)
        if stalled_s:
            wave.stalled(stalled_s)
        if not whole:
            wave.wait()  # raises what went wrong

    def expert_group(
        self,
        x: F32,
        routing: Routing,
        layout: RecordLayout,
        wave: Wave,
        shape: ExpertShape,
        shared: MlpWeights | None,
    ) -> F32:
        ids, weights = routing
        native = self._once.of(layout, shape, _native_layout, shape)
        common = None if shared is None else self._once.of(shared, None, _mlp)
        out, whole, stalled_s = _cpu.expert_group(self._pool, x, ids, weights, native, wave.records, common)
        if stalled_s:
            wave.stalled(stalled_s)
        if not whole:
            wave.wait()
        return out

    def combine(self, out: F32, routing: Routing, shared: F32 | None) -> F32:
        return _cpu.combine(self._pool, out, routing.weights, shared)

    # -- what native code reads beside the arguments

    def _inv_freq(self, rotary: Rotary | None, least: int, most: int) -> int:
        """Address of the rotation's angles per position, float32 as in transformers; 0: no rotation.

        A rotation turns at least `least` channels and at most `most`.
        """
        if rotary is None:
            return 0
        if not least <= rotary.dim <= most:
            raise ValueError(f"rotary: expected {least} to {most} channels, found {rotary.dim}")
        angles = self._rotaries.get(rotary)
        if angles is None:
            angles = self._rotaries[rotary] = np.asarray(rotary.inv_freq, np.float32)
        return f32(angles, "inv_freq", "pairs", rotary.dim // 2)


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _format_code(fmt: str) -> int:
    if fmt not in KERNEL_FORMATS:
        raise UnsupportedError(
            f"number format {fmt!r} has no cpu kernel", hint=f"convert to one of {', '.join(KERNEL_FORMATS)}"
        )
    return get(fmt).code


# The weights of a layer as native code takes them. Vectors are kept beside what has their address, unless the weights
# that `Once` goes by hold them already.


def _hc_site(w: HcWeights, shape: HcShape, norm: F32, eps: float) -> tuple[_cpu.HcSite, F32]:
    s, d = shape.streams, len(norm)
    if s > _cpu.HC_STREAMS:
        raise UnsupportedError(f"{s} residual streams; the cpu backend has room for {_cpu.HC_STREAMS}")
    site = _cpu.HcSite(
        fn=f32(w.fn, "fn", "outputs S*D", shape.outputs, s * d),
        base=f32(w.base, "base", "outputs", shape.outputs),
        scale=f32(w.scale, "scale", "parts", 3),
        norm=f32(norm, "norm", "D", d),
        iterations=shape.sinkhorn_iters,
        eps=shape.eps,
        stream_eps=shape.norm_eps,
        norm_eps=eps,
        streams=s,
        dim=d,
    )
    return site, norm


def _kda_layer(w: KdaWeights, shape: KdaShape) -> _cpu.KdaLayer:
    d, h, c, taps = w.o.rows, shape.heads, shape.channels, shape.conv
    return _cpu.KdaLayer(
        q=matrix(w.q, "q", "C D", c, d),
        k=matrix(w.k, "k", "C D", c, d),
        v=matrix(w.v, "v", "C D", c, d),
        f_a=matrix(w.f_a, "f_a", "rank D", w.f_a.rows, d),
        f_b=matrix(w.f_b, "f_b", "C rank", c, w.f_a.rows),
        b=matrix(w.b, "b", "H D", h, d),
        g_a=matrix(w.g_a, "g_a", "rank D", w.g_a.rows, d),
        g_b=matrix(w.g_b, "g_b", "C rank", c, w.g_a.rows),
        o=matrix(w.o, "o", "D C", d, c),
        q_conv=f32(w.q_conv, "q_conv", "C taps", c, taps),
        k_conv=f32(w.k_conv, "k_conv", "C taps", c, taps),
        v_conv=f32(w.v_conv, "v_conv", "C taps", c, taps),
        a_log=f32(w.a_log, "a_log", "H", h),
        dt_bias=f32(w.dt_bias, "dt_bias", "C", c),
        norm=f32(w.norm, "norm", "Dh", shape.head_dim),
        bound=shape.gate_lower_bound,
        norm_eps=shape.norm_eps,
        dim=d,
        heads=h,
        head_dim=shape.head_dim,
        taps=taps,
    )


def _mlp(w: MlpWeights) -> _cpu.Mlp:
    inner, d = w.gate.rows, w.gate.cols
    return _cpu.Mlp(
        gate=w.gate,
        up=matrix(w.up, "up", "F D", inner, d),
        down=matrix(w.down, "down", "D F", w.down.rows, inner),
    )


def _router(gate: _cpu.Weight, bias: F32, shape: RouterShape) -> tuple[_cpu.Router, F32]:
    k = shape.top_k
    if shape.experts % shape.groups or k > shape.topk_groups * (shape.experts // shape.groups):
        raise ValueError(f"router: top {k} of {shape.experts} experts in {shape.topk_groups} of {shape.groups} groups")
    router = _cpu.Router(
        gate=matrix(gate, "gate", "E D", shape.experts, gate.cols),
        bias=f32(bias, "bias", "E", shape.experts),
        top_k=k,
        groups=shape.groups,
        topk_groups=shape.topk_groups,
        scaling=shape.scaling,
        normalize=shape.normalize,
    )
    return router, bias


def _native_layout(layout: RecordLayout, shape: ExpertShape) -> _cpu.RecordLayout:
    for name, section, rows, cols in (
        ("gate", layout.gate, shape.inner, shape.hidden),
        ("up", layout.up, shape.inner, shape.hidden),
        ("down", layout.down, shape.hidden, shape.inner),
    ):
        if (section.rows, section.cols) != (rows, cols):
            raise ValueError(f"{name}: expected ({rows}, {cols}), found ({section.rows}, {section.cols})")
    gate, up, down = ((_format_code(s.fmt), s.offset) for s in layout.sections)
    needed = max(s.offset + s.nbytes for s in layout.sections)
    return _cpu.RecordLayout(gate, up, down, shape.hidden, shape.inner, needed, _limit(shape.limit))


def _limit(limit: float | None) -> float:
    return math.inf if limit is None else limit
