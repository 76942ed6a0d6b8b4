"""The native CPU backend: numpy arrays at the border, one native call per operation.

This file checks shapes, allocates outputs and hands addresses over; the arithmetic is in `kernels/csrc/cpu`.
Sums are float32 in a fixed order (float64 for norms, router logits and index scores), so results depend
neither on the number of threads nor on which tokens are evaluated together.
"""

from __future__ import annotations

import math
import os
from typing import Any

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
from waste.kernels.arrays import f32, f32_out, fresh, i32, i64, matrix, u8
from waste.quant import get

F32 = npt.NDArray[np.float32]

_AXES = ("", "D", "T D", "T S D", "T S S D")  # names for operations that take any number of them

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
        self._layout: tuple[RecordLayout, _cpu.RecordLayout] | None = None

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
        wanted = np.ascontiguousarray(ids, np.int64)
        t = len(wanted)
        out, out_at = fresh(t, table.cols)
        _cpu.embed(self._pool, table, i64(wanted, "ids", "T", t), out_at, t)
        return out

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        n = x.shape[-1]
        out, out_at = fresh(*x.shape)
        x_at = f32(x, "x", _AXES[x.ndim], *x.shape)
        _cpu.rms_norm(self._pool, x_at, f32(weight, "weight", "D", n), out_at, x.size // n, n, eps)
        return out

    def add(self, x: F32, y: F32) -> F32:
        shape, axes = x.shape, _AXES[x.ndim]
        out, out_at = fresh(*shape)
        _cpu.add(self._pool, f32(x, "x", axes, *shape), f32(y, "y", axes, *shape), out_at, x.size)
        return out

    def linear(self, x: F32, w: _cpu.Weight) -> F32:
        t = len(x)
        out, out_at = fresh(t, w.rows)
        _cpu.linear(self._pool, f32(x, "x", "T in", t, w.cols), w, out_at, t)
        return out

    # -- residual streams

    def hc_expand(self, x: F32, shape: HcShape) -> F32:
        t, d = x.shape
        out, out_at = fresh(t, shape.streams, d)
        _cpu.hc_expand(self._pool, f32(x, "x", "T D", t, d), out_at, t, shape.streams, d)
        return out

    def hc_pre(self, streams: F32, w: HcWeights, shape: HcShape, norm: F32, eps: float) -> HcMix:
        t, d, s = len(streams), streams.shape[-1], shape.streams
        (y, y_at), (post, post_at), (comb, comb_at) = fresh(t, d), fresh(t, s), fresh(t, s, s)
        streams_at = f32(streams, "streams", "T S D", t, s, d)
        fixed, _ = self._once.of(w, (shape, d, id(norm), eps), self._hc_pre, shape, d, norm, eps)
        _cpu.hc_pre(self._pool, streams_at, t, y_at, post_at, comb_at, *fixed)
        return HcMix(y, post, comb)

    @staticmethod
    def _hc_pre(w: HcWeights, shape: HcShape, d: int, norm: F32, eps: float) -> tuple[tuple[Any, ...], F32]:
        s = shape.streams
        _few_enough(s)
        fixed = (
            f32(w.fn, "fn", "outputs S*D", shape.outputs, s * d),
            f32(w.base, "base", "outputs", shape.outputs),
            f32(w.scale, "scale", "parts", 3),
            f32(norm, "norm", "D", d),
            shape.sinkhorn_iters,
            shape.eps,
            shape.norm_eps,
            eps,
            s,
            d,
        )
        return fixed, norm  # which thereby lives as long as its address is remembered

    def hc_post(self, streams: F32, out: F32, mix: HcMix) -> F32:
        """Changes `streams` in place and returns it."""
        t, s, d = streams.shape
        _few_enough(s)
        _cpu.hc_post(
            self._pool,
            f32_out(streams, "streams", "T S D", t, s, d),
            f32(out, "out", "T D", t, d),
            f32(mix.post, "post", "T S", t, s),
            f32(mix.comb, "comb", "T S S", t, s, s),
            t,
            s,
            d,
        )
        return streams

    def hc_mean(self, streams: F32) -> F32:
        t, s, d = streams.shape
        out, out_at = fresh(t, d)
        _cpu.hc_mean(self._pool, f32(streams, "streams", "T S D", t, s, d), out_at, t, s, d)
        return out

    # -- attention

    def kda(self, x: F32, w: KdaWeights, shape: KdaShape, state: KdaState) -> F32:
        t, d = x.shape
        h, dim = shape.heads, shape.head_dim
        out, out_at = fresh(t, d)
        x_at = f32(x, "x", "T D", t, d)
        conv_at = f32_out(state.conv, "conv", "qkv taps-1 C", 3, shape.conv - 1, shape.channels)
        s_at = f32_out(state.s, "s", "H Dk Dv", h, dim, dim)
        _cpu.kda(self._pool, x_at, t, conv_at, s_at, out_at, *self._once.of(w, (shape, d), self._kda, shape, d))
        return out

    @staticmethod
    def _kda(w: KdaWeights, shape: KdaShape, d: int) -> tuple[Any, ...]:
        h, c, taps = shape.heads, shape.channels, shape.conv
        return (
            matrix(w.q, "q", "C D", c, d),
            matrix(w.k, "k", "C D", c, d),
            matrix(w.v, "v", "C D", c, d),
            matrix(w.f_a, "f_a", "rank D", w.f_a.rows, d),
            matrix(w.f_b, "f_b", "C rank", c, w.f_a.rows),
            matrix(w.b, "b", "H D", h, d),
            matrix(w.g_a, "g_a", "rank D", w.g_a.rows, d),
            matrix(w.g_b, "g_b", "C rank", c, w.g_a.rows),
            matrix(w.o, "o", "D C", d, c),
            f32(w.q_conv, "q_conv", "C taps", c, taps),
            f32(w.k_conv, "k_conv", "C taps", c, taps),
            f32(w.v_conv, "v_conv", "C taps", c, taps),
            f32(w.a_log, "a_log", "H", h),
            f32(w.dt_bias, "dt_bias", "C", c),
            f32(w.norm, "norm", "Dh", shape.head_dim),
            shape.gate_lower_bound,
            shape.norm_eps,
            d,
            h,
            shape.head_dim,
            taps,
        )

    def mla_project(self, x: F32, w: MlaWeights, shape: MlaShape, start: int) -> MlaProjection:
        t, d = x.shape
        (q, q_at), (rows, rows_at) = fresh(t, shape.heads, shape.row), fresh(t, shape.row)
        latent, latent_at = (None, 0) if w.q_a is None else fresh(t, w.q_a.rows)
        x_at = f32(x, "x", "T D", t, d)
        project, _ = self._once.of(w, (shape, d), self._mla, shape, d)
        _cpu.mla_project(self._pool, x_at, start, t, q_at, rows_at, latent_at, *project)
        return MlaProjection(q, rows, latent)

    def _mla(self, w: MlaWeights, shape: MlaShape, d: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        h, lora, part, latent = shape.heads, shape.kv_lora, shape.nope + shape.rope, d
        q_norm_at = 0
        if w.q_a is not None:
            latent = w.q_a.rows
            q_norm_at = f32(w.q_a_norm, "q_a_norm", "q_lora", latent)
            matrix(w.q_a, "q_a", "q_lora D", latent, d)
        project = (
            w.q_a,
            q_norm_at,
            matrix(w.q_b, "q_b", "H*(nope+rope) in", h * part, latent),
            matrix(w.kv_a, "kv_a", "R D", shape.row, d),
            f32(w.kv_a_norm, "kv_a_norm", "kv_lora", lora),
            matrix(w.k_up, "k_up", "H*kv_lora nope", h * lora, shape.nope),
            shape.latent_eps,
            self._inv_freq(shape.rotary, shape.rope, shape.rope),
            d,
            h,
            lora,
            shape.nope,
            shape.rope,
        )
        attend = (
            matrix(w.v_up, "v_up", "H*v kv_lora", h * shape.v, lora),
            matrix(w.o, "o", "D H*v", d, h * shape.v),
            shape.scale,
            d,
            h,
            lora,
            shape.rope,
            shape.v,
        )
        return project, attend

    def index(
        self, x: F32, q_latent: F32, w: IndexerWeights, shape: IndexerShape, state: IndexState
    ) -> Selection | None:
        t, d = x.shape
        dim, pool, start = shape.head_dim, shape.pool, state.tokens
        total = start + t
        if len(state.keys) < total // pool:
            raise ValueError(f"index keys: {total // pool} pools do not fit the capacity of {len(state.keys)}")
        fixed = self._once.of(w, (shape, d), self._index, shape, d)
        open_keys_at = open_gates_at = 0
        if pool > 1:
            open_keys_at = f32_out(state.open_keys, "open_keys", "pool d", pool, dim)
            open_gates_at = f32_out(state.open_gates, "open_gates", "pool d", pool, dim)
        selection: Selection | None = None
        if total // pool > shape.keep:
            seen = np.arange(start + 1, total + 1)
            offsets = np.zeros(t + 1, np.int64)
            np.cumsum(np.minimum(seen // pool, shape.keep) * pool + seen % pool, out=offsets[1:])
            selection = Selection(np.empty(int(offsets[-1]), np.int32), offsets)
        _cpu.index(
            self._pool,
            f32(x, "x", "T D", t, d),
            f32(q_latent, "q_latent", "T q_lora", t, w.wq_b.cols),
            start,
            t,
            f32_out(state.keys, "keys", "capacity d", len(state.keys), dim),
            open_keys_at,
            open_gates_at,
            0 if selection is None else i32(selection.positions, "positions", "chosen", len(selection.positions)),
            0 if selection is None else i64(selection.offsets, "offsets", "T+1", t + 1),
            *fixed,
        )
        state.tokens = total
        return selection

    def _index(self, w: IndexerWeights, shape: IndexerShape, d: int) -> tuple[Any, ...]:
        n, dim, pool = shape.heads, shape.head_dim, shape.pool
        gate, ape_at = None, 0
        if pool > 1:
            if w.gate is None:
                raise ValueError(f"index: pools of {pool} tokens need a gate")
            gate = matrix(w.gate, "gate", "d D", dim, d)
            ape_at = f32(w.ape, "ape", "pool d", pool, dim)
        return (
            matrix(w.wq_b, "wq_b", "n*d q_lora", n * dim, w.wq_b.cols),
            matrix(w.wk, "wk", "d D", dim, d),
            matrix(w.proj, "proj", "n D", n, d),
            gate,
            f32(w.k_norm, "k_norm", "d", dim),
            f32(w.k_norm_bias, "k_norm_bias", "d", dim),
            ape_at,
            self._inv_freq(shape.rotary, 0, dim),
            0 if shape.rotary is None else shape.rotary.dim,
            shape.norm_eps,
            d,
            w.wq_b.cols,
            n,
            dim,
            pool,
            shape.keep,
        )

    def mla_attend(
        self, q: F32, cache: F32, start: int, selection: Selection | None, w: MlaWeights, shape: MlaShape
    ) -> F32:
        t, h, row = len(q), shape.heads, shape.row
        if len(cache) < start + t:
            raise ValueError(f"cache: expected at least start+T={start + t} rows, found {len(cache)}")
        d = w.o.rows
        out, out_at = fresh(t, d)
        _, attend = self._once.of(w, (shape, d), self._mla, shape, d)
        _cpu.mla_attend(
            self._pool,
            f32(q, "q", "T H R", t, h, row),
            f32(cache, "cache", "S R", len(cache), row),
            start,
            0 if selection is None else i32(selection.positions, "positions", "chosen", int(selection.offsets[-1])),
            0 if selection is None else i64(selection.offsets, "offsets", "T+1", t + 1),
            t,
            out_at,
            *attend,
        )
        return out

    # -- feed forward

    def mlp(self, x: F32, w: MlpWeights, limit: float | None) -> F32:
        t, d = x.shape
        out, out_at = fresh(t, w.down.rows)
        x_at = f32(x, "x", "T D", t, d)
        _cpu.mlp(self._pool, x_at, out_at, t, _limit(limit), *self._once.of(w, d, _mlp_weights, d))
        return out

    def route(self, x: F32, gate: _cpu.Weight, bias: F32, shape: RouterShape) -> Routing:
        t, k = len(x), shape.top_k
        if shape.experts % shape.groups or k > shape.topk_groups * (shape.experts // shape.groups):
            raise ValueError(
                f"router: top {k} of {shape.experts} experts in {shape.topk_groups} of {shape.groups} groups"
            )
        ids = np.empty((t, k), np.int32)
        weights, weights_at = fresh(t, k)
        _cpu.route(
            self._pool,
            f32(x, "x", "T D", t, gate.cols),
            matrix(gate, "gate", "E D", shape.experts, gate.cols),
            f32(bias, "bias", "E", shape.experts),
            k,
            shape.groups,
            shape.topk_groups,
            shape.scaling,
            shape.normalize,
            t,
            i32(ids, "ids", "T K", t, k),
            weights_at,
        )
        return Routing(ids, weights)

    def experts(self, x: F32, routing: Routing, layout: RecordLayout, wave: Wave, shape: ExpertShape, out: F32) -> None:
        t, k = routing.ids.shape
        whole = _cpu.experts(
            self._pool,
            f32(x, "x", "T D", t, shape.hidden),
            i32(routing.ids, "ids", "T K", t, k),
            self._native_layout(layout, shape),
            _records(wave, layout),
            _arrived(wave),
            _limit(shape.limit),
            f32_out(out, "out", "T K D", t, k, shape.hidden),
            t,
            k,
        )
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
        t, k = routing.ids.shape
        d = shape.hidden
        out, out_at = fresh(t, d)
        common = (None, None, None) if shared is None else self._once.of(shared, d, _mlp_weights, d)
        whole = _cpu.expert_group(
            self._pool,
            f32(x, "x", "T D", t, d),
            i32(routing.ids, "ids", "T K", t, k),
            f32(routing.weights, "weights", "T K", t, k),
            self._native_layout(layout, shape),
            _records(wave, layout),
            _arrived(wave),
            _limit(shape.limit),
            out_at,
            t,
            k,
            *common,
        )
        if not whole:
            wave.wait()
        return out

    def combine(self, out: F32, routing: Routing, shared: F32 | None) -> F32:
        t, k, d = out.shape
        total, total_at = fresh(t, d)
        _cpu.combine(
            self._pool,
            f32(out, "out", "T K D", t, k, d),
            f32(routing.weights, "weights", "T K", t, k),
            0 if shared is None else f32(shared, "shared", "T D", t, d),
            total_at,
            t,
            k,
            d,
        )
        return total

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

    def _native_layout(self, layout: RecordLayout, shape: ExpertShape) -> _cpu.RecordLayout:
        # Every layer of a model has an equal layout: the last is enough.
        last = self._layout
        same = last is not None and (last[0] is layout or last[0] == layout)
        if last is not None and same and (layout.gate.rows, layout.gate.cols) == (shape.inner, shape.hidden):
            return last[1]
        for name, section, rows, cols in (
            ("gate", layout.gate, shape.inner, shape.hidden),
            ("up", layout.up, shape.inner, shape.hidden),
            ("down", layout.down, shape.hidden, shape.inner),
        ):
            if (section.rows, section.cols) != (rows, cols):
                raise ValueError(f"{name}: expected ({rows}, {cols}), found ({section.rows}, {section.cols})")
        gate, up, down = ((_format_code(s.fmt), s.offset) for s in (layout.gate, layout.up, layout.down))
        native = _cpu.RecordLayout(gate, up, down, shape.hidden, shape.inner)
        self._layout = (layout, native)
        return native


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


def _records(wave: Wave, layout: RecordLayout) -> list[tuple[int, int]]:
    """(expert, address of its record), as native code takes them."""
    needed = layout.down.offset + layout.down.nbytes
    given = []
    for record in wave.records:
        if record.nbytes < needed:
            raise ValueError(f"record: expected {layout.stride} bytes, found {record.nbytes}")
        given.append((record.expert, record.address))
    return given


def _mlp_weights(w: MlpWeights, d: int) -> tuple[Any, ...]:
    inner = w.gate.rows
    return (
        matrix(w.gate, "gate", "F D", inner, d),
        matrix(w.up, "up", "F D", inner, d),
        matrix(w.down, "down", "D F", w.down.rows, inner),
    )


def _arrived(wave: Wave) -> int:
    flags = wave.arrived
    return 0 if flags is None else i32(flags, "arrived", "records", len(wave.records))


def _few_enough(streams: int) -> None:
    if streams > _cpu.HC_STREAMS:
        raise UnsupportedError(f"{streams} residual streams; the cpu backend has room for {_cpu.HC_STREAMS}")


def _limit(limit: float | None) -> float:
    return math.inf if limit is None else limit
