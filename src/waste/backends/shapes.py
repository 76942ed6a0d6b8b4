"""Dimensions of the layer kinds, as `Ops` and the layers read them. Plain numbers, frozen.

Axis letters: T tokens, S context, D hidden, H heads, E experts, K top-k, F expert inner, R cache row.
Formulas: architectures of GLM-5.3-Flash, Kimi-Linear, DeepSeek-V3 as `transformers` 5.24 computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class HcShape:
    """Manifold-constrained hyper-connections: `streams` residual streams mixed at each sublayer."""

    streams: int
    sinkhorn_iters: int  # column normalisations; row normalisations are one fewer
    eps: float
    norm_eps: float  # of the RMS over all streams

    @property
    def outputs(self) -> int:
        """Rows of the mapping: pre, post and the mixing matrix."""
        return 2 * self.streams + self.streams**2


@dataclass(frozen=True)
class KdaShape:
    """Kimi delta attention: a gated delta rule over a (head_dim, head_dim) state per head."""

    heads: int
    head_dim: int
    conv: int  # taps of the causal depthwise convolution, the last one multiplies the current token
    gate_lower_bound: float | None  # None: log decay is -exp(A) * softplus(f), else bound * sigmoid(exp(A) * f)
    norm_eps: float

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding over adjacent pairs (2i, 2i+1) of `dim` channels."""

    dim: int
    inv_freq: tuple[float, ...]  # dim / 2 angles per position, YaRN already applied

    @staticmethod
    def plain(dim: int, theta: float) -> Rotary:
        return Rotary(dim, tuple(theta ** (-2 * i / dim) for i in range(dim // 2)))

    @staticmethod
    def yarn(dim: int, theta: float, factor: float, original: int, beta_fast: float, beta_slow: float) -> Rotary:
        """NTK-by-parts interpolation (transformers `modeling_rope_utils`), used at every position."""

        def channel_of(rotations: float) -> float:
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(channel_of(beta_fast)), 0)
        high = min(math.ceil(channel_of(beta_slow)), dim - 1)
        freq = []
        for i in range(dim // 2):
            plain = theta ** (-2 * i / dim)
            ramp = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
            freq.append(plain / factor * ramp + plain * (1 - ramp))
        return Rotary(dim, tuple(freq))


@dataclass(frozen=True)
class MlaShape:
    """Absorbed multi-head latent attention: one cache row of `row` numbers per token for all heads."""

    heads: int
    q_lora: int | None  # None: queries straight from the hidden state
    kv_lora: int
    nope: int
    rope: int  # shared key channels beside the latent; rotated only if `rotary`
    v: int
    scale: float
    latent_eps: float
    rotary: Rotary | None

    @property
    def row(self) -> int:
        return self.kv_lora + self.rope


@dataclass(frozen=True)
class IndexerShape:
    """Sparse selection: scores pools of `pool` tokens and keeps the best `topk // pool` of them."""

    heads: int
    head_dim: int
    topk: int  # tokens
    pool: int
    rotary: Rotary | None  # over the first channels of queries and keys
    norm_eps: float = 1e-6

    @property
    def keep(self) -> int:
        return self.topk // self.pool


@dataclass(frozen=True)
class RouterShape:
    """Sigmoid router with a correction bias that moves the choice, not the weight."""

    experts: int
    top_k: int
    groups: int
    topk_groups: int
    scaling: float
    normalize: bool


@dataclass(frozen=True)
class ExpertShape:
    """A SwiGLU feed-forward (D, F), its inputs clamped at `limit` before the activation."""

    hidden: int
    inner: int
    limit: float | None
