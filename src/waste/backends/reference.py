"""The oracle inside the house: every operation in plain torch, float32 or float64, no cleverness.

Weights are decoded once and kept dense, so it needs several times the memory of `cpu`; experts are
decoded at each use. Formulas are those of `waste.backends.base`; where the release's own code has a
choice of order, this follows transformers 5.24.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

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
from waste.backends.shapes import ExpertShape, HcShape, IndexerShape, KdaShape, MlaShape, Rotary, RouterShape
from waste.container.layout import RecordLayout, Section
from waste.quant import get


class ReferenceOps:
    """`Ops` in torch. `dtype` is torch.float32 or torch.float64; results are exact to that precision."""

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    # -- memory

    def weight(self, blob: Bytes, fmt: str, rows: int, cols: int) -> Tensor:
        return self.vector(get(fmt).decode(blob, rows, cols))

    def vector(self, values: npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        # numpy's zeros are committed when they are written to, torch's at once: caches are allocated whole.
        return torch.from_numpy(np.zeros(shape, np.float64 if self.dtype == torch.float64 else np.float32))

    def numpy(self, array: Tensor) -> npt.NDArray[np.float32]:
        return array.detach().to(torch.float32).numpy()

    # -- elementwise and small

    def embed(self, table: Tensor, ids: Ids) -> Tensor:
        return table[torch.from_numpy(np.asarray(ids, np.int64))]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms(x, eps) * weight

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = self.add(x, y)
        return total, self.rms_norm(total, weight, eps)

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w.T

    # -- residual streams

    def hc_expand(self, x: Tensor, shape: HcShape) -> Tensor:
        return x[:, None].repeat(1, shape.streams, 1)

    def hc_pre(self, streams: Tensor, w: HcWeights, shape: HcShape, norm: Tensor, eps: float) -> HcMix:
        t, s, _ = streams.shape
        z = _rms(streams.reshape(t, -1), shape.norm_eps) @ w.fn.T
        pre = torch.sigmoid(z[:, :s] * w.scale[0] + w.base[:s]) + shape.eps
        post = 2 * torch.sigmoid(z[:, s : 2 * s] * w.scale[1] + w.base[s : 2 * s])
        comb = torch.softmax((z[:, 2 * s :] * w.scale[2] + w.base[2 * s :]).view(t, s, s), dim=-1) + shape.eps
        comb = comb / (comb.sum(1, keepdim=True) + shape.eps)
        for _ in range(shape.sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + shape.eps)
            comb = comb / (comb.sum(1, keepdim=True) + shape.eps)
        collapsed = (pre[:, :, None] * streams).sum(1)
        return HcMix(self.rms_norm(collapsed, norm, eps), post, comb)

    def hc_post(self, streams: Tensor, out: Tensor, mix: HcMix) -> Tensor:
        spread: Tensor = mix.post[:, :, None] * out[:, None]
        return spread + torch.einsum("tki,tkd->tid", mix.comb, streams)

    def hc_seam(
        self, streams: Tensor, out: Tensor, mix: HcMix, w: HcWeights, shape: HcShape, norm: Tensor, eps: float
    ) -> tuple[Tensor, HcMix]:
        streams = self.hc_post(streams, out, mix)
        return streams, self.hc_pre(streams, w, shape, norm, eps)

    def hc_mean(self, streams: Tensor) -> Tensor:
        return streams.mean(1)

    # -- attention

    def kda(self, x: Tensor, w: KdaWeights, shape: KdaShape, state: KdaState) -> Tensor:
        t, n, d = len(x), shape.heads, shape.head_dim
        mixed = []
        for i, (proj, kernel) in enumerate(((w.q, w.q_conv), (w.k, w.k_conv), (w.v, w.v_conv))):
            history = torch.cat([state.conv[i], x @ proj.T])  # (taps - 1 + T, C)
            y = sum(history[j : j + t] * kernel[:, j] for j in range(shape.conv))
            mixed.append(F.silu(torch.as_tensor(y)).view(t, n, d))
            state.conv[i].copy_(history[t:])
        q, k, v = mixed
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * d**-0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
        f = (((x @ w.f_a.T) @ w.f_b.T) + w.dt_bias).view(t, n, d)
        rate = w.a_log.exp().view(n, 1)
        if shape.gate_lower_bound is not None:
            decay = torch.exp(shape.gate_lower_bound * torch.sigmoid(rate * f))
        else:
            decay = torch.exp(-rate * F.softplus(f))
        beta = torch.sigmoid(x @ w.b.T)
        out = torch.empty(t, n, d, dtype=self.dtype)
        for i in range(t):
            state.s.mul_(decay[i, :, :, None])
            delta = beta[i, :, None] * (v[i] - torch.einsum("nk,nkv->nv", k[i], state.s))
            state.s.add_(k[i, :, :, None] * delta[:, None, :])
            out[i] = torch.einsum("nk,nkv->nv", q[i], state.s)
        gate = ((x @ w.g_a.T) @ w.g_b.T).view(t, n, d)
        y = self.rms_norm(out, w.norm, shape.norm_eps) * torch.sigmoid(gate)
        o: Tensor = w.o
        return y.reshape(t, n * d) @ o.T

    def mla_project(self, x: Tensor, w: MlaWeights, shape: MlaShape, start: int) -> MlaProjection:
        t = len(x)
        latent = None
        if w.q_a is not None:
            assert w.q_a_norm is not None
            latent = self.rms_norm(x @ w.q_a.T, w.q_a_norm, shape.latent_eps)
        q = ((x if latent is None else latent) @ w.q_b.T).view(t, shape.heads, shape.nope + shape.rope)
        kv = x @ w.kv_a.T
        rows = self.rms_norm(kv[:, : shape.kv_lora], w.kv_a_norm, shape.latent_eps)
        q_rope, k_rope = q[..., shape.nope :], kv[:, shape.kv_lora :]
        if shape.rotary is not None:
            k_rope = _rotate(k_rope, shape.rotary, start)
            q_rope = _rotate(q_rope, shape.rotary, start)
        k_up = w.k_up.view(shape.heads, shape.kv_lora, shape.nope)
        absorbed = torch.einsum("thn,hrn->thr", q[..., : shape.nope], k_up)
        return MlaProjection(torch.cat([absorbed, q_rope], -1), torch.cat([rows, k_rope], -1), latent)

    def index(
        self, x: Tensor, q_latent: Tensor, w: IndexerWeights, shape: IndexerShape, state: IndexState
    ) -> Selection | None:
        t, start, pool = len(x), state.tokens, shape.pool
        keys = F.layer_norm(x @ w.wk.T, (shape.head_dim,), w.k_norm, w.k_norm_bias, shape.norm_eps)
        q = (q_latent @ w.wq_b.T).view(t, shape.heads, shape.head_dim)
        if shape.rotary is not None:
            r = shape.rotary.dim
            keys = torch.cat([_rotate(keys[:, :r], shape.rotary, start), keys[:, r:]], -1)
            q = torch.cat([_rotate(q[..., :r], shape.rotary, start), q[..., r:]], -1)
        if pool == 1:
            state.keys[start : start + t] = keys
        else:
            assert w.gate is not None and w.ape is not None
            gates = x @ w.gate.T
            for i in range(t):
                slot = (start + i) % pool
                state.open_keys[slot], state.open_gates[slot] = keys[i], gates[i]
                if slot == pool - 1:
                    share = torch.softmax(state.open_gates + w.ape, dim=0)
                    state.keys[(start + i) // pool] = (share * state.open_keys).sum(0)
        state.tokens = start + t
        if (start + t) // pool <= shape.keep:
            return None
        heads = (x @ w.proj.T) * shape.heads**-0.5
        positions, offsets = [], [0]
        for i in range(t):
            position = start + i
            whole = (position + 1) // pool
            scores = torch.relu(q[i] @ state.keys[:whole].T * shape.head_dim**-0.5)
            scores = heads[i] @ scores
            best = torch.sort(scores, descending=True, stable=True).indices[: shape.keep].sort().values
            kept = (best[:, None] * pool + torch.arange(pool)).reshape(-1)
            row = torch.cat([kept, torch.arange(whole * pool, position + 1)])
            positions.append(row.numpy().astype(np.int32))
            offsets.append(offsets[-1] + len(row))
        return Selection(np.concatenate(positions), np.asarray(offsets, np.int64))

    def mla_attend(
        self, q: Tensor, cache: Tensor, start: int, selection: Selection | None, w: MlaWeights, shape: MlaShape
    ) -> Tensor:
        t = len(q)
        v_up = w.v_up.view(shape.heads, shape.v, shape.kv_lora)
        out = torch.empty(t, shape.heads, shape.v, dtype=self.dtype)
        for i in range(t):
            if selection is None:
                rows = cache[: start + i + 1]
            else:
                chosen = selection.positions[selection.offsets[i] : selection.offsets[i + 1]]
                rows = cache[torch.from_numpy(chosen.astype(np.int64))]
            p = torch.softmax((q[i] @ rows.T) * shape.scale, dim=-1)
            out[i] = torch.einsum("hr,hvr->hv", p @ rows[:, : shape.kv_lora], v_up)
        o: Tensor = w.o
        return out.reshape(t, -1) @ o.T

    # -- feed forward

    def mlp(self, x: Tensor, w: MlpWeights, limit: float | None) -> Tensor:
        down: Tensor = w.down
        return _swiglu(x @ w.gate.T, x @ w.up.T, limit) @ down.T

    def route(self, x: Tensor, gate: Tensor, bias: Tensor, shape: RouterShape) -> Routing:
        score = torch.sigmoid(x @ gate.T)
        choice = score + bias
        if shape.topk_groups < shape.groups:
            per = choice.view(len(x), shape.groups, -1)
            rank = torch.sort(per.topk(2, -1).values.sum(-1), dim=-1, descending=True, stable=True).indices
            dropped = torch.zeros(len(x), shape.groups, dtype=torch.bool)
            dropped.scatter_(1, rank[:, shape.topk_groups :], True)
            choice = per.masked_fill(dropped[:, :, None], -torch.inf).view_as(choice)
        ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : shape.top_k]
        weights = score.gather(1, ids)
        if shape.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(ids.numpy().astype(np.int32), weights * shape.scaling)

    def experts(
        self, x: Tensor, routing: Routing, layout: RecordLayout, wave: Wave, shape: ExpertShape, out: Tensor
    ) -> None:
        wave.wait()
        for record in wave.records:
            tokens, ranks = np.nonzero(routing.ids == record.expert)
            w = MlpWeights(*(self._section(record.data, s) for s in (layout.gate, layout.up, layout.down)))
            rows = torch.from_numpy(tokens)
            out[rows, torch.from_numpy(ranks)] = self.mlp(x[rows], w, shape.limit)

    def expert_group(
        self,
        x: Tensor,
        routing: Routing,
        layout: RecordLayout,
        wave: Wave,
        shape: ExpertShape,
        shared: MlpWeights | None,
    ) -> Tensor:
        out = self.zeros(len(x), routing.ids.shape[1], shape.hidden)
        self.experts(x, routing, layout, wave, shape, out)
        return self.combine(out, routing, None if shared is None else self.mlp(x, shared, shape.limit))

    def _section(self, record: Bytes, section: Section) -> Tensor:
        blob = record[section.offset : section.offset + section.nbytes]
        return self.weight(blob, section.fmt, section.rows, section.cols)

    def combine(self, out: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
        total = torch.zeros_like(out[:, 0])
        for k in range(out.shape[1]):
            total = total + routing.weights[:, k, None] * out[:, k]
        return total if shared is None else total + shared


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def _rotate(x: Tensor, rotary: Rotary, start: int) -> Tensor:
    """x (T, ..., dim): rotate pairs (2i, 2i + 1) by position * inv_freq[i]; angles in float32 as the release."""
    freq = torch.tensor(rotary.inv_freq, dtype=torch.float32)
    angle = torch.arange(start, start + len(x), dtype=torch.float32)[:, None] * freq
    angle = angle.view(len(x), *([1] * (x.dim() - 2)), -1).to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = a * angle.cos() - b * angle.sin()
    out[..., 1::2] = a * angle.sin() + b * angle.cos()
    return out
