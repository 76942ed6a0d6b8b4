"""The layer stack: from a `ModelConfig` and a container's tensors to logits.

One stack serves every family we know, since they differ in the kinds of layers (config.attention,
config.mlp, config.hc) and not in how layers are strung together:

    x = embed[ids]                      in every residual stream
    for each layer: attention site, feed-forward site (leaving one and entering the next is one stage)
    logits = head(rms(mean of streams))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from waste.backends.base import (
    Array,
    Bytes,
    HcWeights,
    Ids,
    IndexerWeights,
    KdaWeights,
    MlaWeights,
    MlpWeights,
    Ops,
    Vector,
    Weight,
)
from waste.container.manifest import TensorEntry
from waste.kvcache.state import SessionState, kda_state, mla_state
from waste.layers.attention import Attention, Chunk, Kda, Mla
from waste.layers.feed_forward import ExpertStore, FeedForward, Mlp, Moe, NextRouter
from waste.layers.residual import HyperConnection, PlainResidual, Residual
from waste.layers.trace import NoTrace, Trace
from waste.models.config import ModelConfig
from waste.models.embedding import Embedding, ResidentEmbedding, StreamedEmbedding
from waste.models.spec import EMBEDDING, TensorSpec, trunk_specs

# How many times as many experts as a token takes are predicted for the next layer at most.
LOOKAHEAD = 2


@dataclass(frozen=True)
class Layer:
    """Two sublayers, each at its residual site."""

    attention_site: Residual
    attention: Attention
    feed_forward_site: Residual
    feed_forward: FeedForward


class Model:
    """The trunk in memory, all but an embedding that stays on disk. Holds no session: states come in, logits go out."""

    def __init__(
        self, config: ModelConfig, ops: Ops, tensors: TrunkTensors, streamed: StreamedEmbedding | None = None
    ) -> None:
        """`streamed`: the embedding, where it stays on disk (never of a tied one)."""
        self.config = config
        self.ops = ops
        # A table on disk is not among the tensors in memory.
        table = tensors.matrix(EMBEDDING) if streamed is None else None
        self.embedding: Embedding = streamed or ResidentEmbedding(table)
        self.layers = [_layer(config, tensors, i) for i in range(config.num_layers)]
        self.norm = tensors.vector("norm.weight")
        self.head = table if config.tie_word_embeddings else tensors.matrix("lm_head.weight")

    def new_state(self, context: int) -> SessionState:
        """An empty session of at most `context` tokens."""
        config, state = self.config, SessionState([])
        for i, kind in enumerate(config.attention):
            if kind == "kda":
                assert config.kda is not None
                state.layers.append(kda_state(self.ops, config.kda))
            else:
                indexer = config.indexer if config.index_kinds[i] == "full" else None
                state.layers.append(mla_state(self.ops, config.mla, indexer, context))
        return state

    def forward(
        self,
        ids: Ids,
        state: SessionState,
        experts: ExpertStore,
        *,
        all_logits: bool = False,
        trace: Trace | None = None,
    ) -> npt.NDArray[np.float32]:
        """One chunk of tokens, advancing `state`, which must have room. ids (T,) int64, all below the vocabulary size.

        Returns the logits (T, V) with `all_logits`, else (1, V) of the last token.
        """
        ops, config = self.ops, self.config
        start, tokens = state.position, len(ids)
        chunk = Chunk(start, tokens, trace or NoTrace())
        x: Array = self.embedding.rows(ops, ids)
        if config.hc is not None:
            x = ops.hc_expand(x, config.hc)
        y, held = self.layers[0].attention_site.enter(ops, x)
        for i, (layer, memory) in enumerate(zip(self.layers, state.layers, strict=True)):
            if i > 0:
                y, held = layer.attention_site.follow(ops, held, y)
            y = layer.attention.forward(ops, y, memory, chunk)
            y, held = layer.feed_forward_site.follow(ops, held, y)
            y = layer.feed_forward.forward(ops, y, experts, chunk)
        x = self.layers[-1].feed_forward_site.leave(ops, held, y)
        state.position = start + tokens
        if config.hc is not None:
            x = ops.hc_mean(x)
        if not all_logits:
            x = x[-1:]
        return ops.numpy(ops.linear(ops.rms_norm(x, self.norm, config.rms_norm_eps), self.head))


class TrunkTensors:
    """Tensors of a container that agrees with its model (`models.stored`), by name, handed to a backend once."""

    def __init__(self, config: ModelConfig, ops: Ops, entries: Mapping[str, TensorEntry], blobs: Mapping[str, Bytes]):
        self._ops = ops
        self._entries = entries
        self._blobs = blobs
        self._specs: dict[str, TensorSpec] = {spec.name: spec for spec in trunk_specs(config)}

    def matrix(self, name: str) -> Weight:
        """A weight handle in whatever format the container has it."""
        spec, entry = self._specs[name], self._entries[name]
        return self._ops.weight(self._blobs[name], entry.fmt, spec.rows, spec.cols)

    def vector(self, name: str, *shape: int) -> Vector:
        """A float32 parameter, reshaped where a layer wants another shape than the release's."""
        spec = self._specs[name]
        values = self._blobs[name].view(np.float32)
        return self._ops.vector(values.reshape(shape or spec.shape))

    def optional_matrix(self, name: str) -> Weight | None:
        return self.matrix(name) if name in self._specs else None

    def optional_vector(self, name: str) -> Vector | None:
        return self.vector(name) if name in self._specs else None


def _layer(config: ModelConfig, tensors: TrunkTensors, i: int) -> Layer:
    attention: Attention
    if config.attention[i] == "kda":
        assert config.kda is not None
        attention = Kda(_kda(config, tensors, f"layers.{i}.self_attn."), config.kda)
    else:
        attention = _mla(config, tensors, i)
    return Layer(
        _site(config, tensors, i, "attn", "input_layernorm"),
        attention,
        _site(config, tensors, i, "ffn", "post_attention_layernorm"),
        _feed_forward(config, tensors, i),
    )


def _site(config: ModelConfig, tensors: TrunkTensors, i: int, site: str, norm: str) -> Residual:
    weight = tensors.vector(f"layers.{i}.{norm}.weight")
    if config.hc is None:
        return PlainResidual(weight, config.rms_norm_eps)
    at = f"layers.{i}.hc_{site}_"
    weights = HcWeights(tensors.vector(f"{at}fn"), tensors.vector(f"{at}base"), tensors.vector(f"{at}scale"))
    return HyperConnection(weights, config.hc, weight, config.rms_norm_eps)


def _kda(config: ModelConfig, tensors: TrunkTensors, at: str) -> KdaWeights:
    assert config.kda is not None
    conv = (config.kda.channels, config.kda.conv)
    return KdaWeights(
        q=tensors.matrix(f"{at}q_proj.weight"),
        k=tensors.matrix(f"{at}k_proj.weight"),
        v=tensors.matrix(f"{at}v_proj.weight"),
        q_conv=tensors.vector(f"{at}q_conv1d.weight", *conv),
        k_conv=tensors.vector(f"{at}k_conv1d.weight", *conv),
        v_conv=tensors.vector(f"{at}v_conv1d.weight", *conv),
        f_a=tensors.matrix(f"{at}f_a_proj.weight"),
        f_b=tensors.matrix(f"{at}f_b_proj.weight"),
        b=tensors.matrix(f"{at}b_proj.weight"),
        g_a=tensors.matrix(f"{at}g_a_proj.weight"),
        g_b=tensors.matrix(f"{at}g_b_proj.weight"),
        a_log=tensors.vector(f"{at}A_log"),
        dt_bias=tensors.vector(f"{at}dt_bias"),
        norm=tensors.vector(f"{at}o_norm.weight"),
        o=tensors.matrix(f"{at}o_proj.weight"),
    )


def _mla(config: ModelConfig, tensors: TrunkTensors, i: int) -> Mla:
    at = f"layers.{i}.self_attn."
    weights = MlaWeights(
        q_a=tensors.optional_matrix(f"{at}q_a_proj.weight"),
        q_a_norm=tensors.optional_vector(f"{at}q_a_layernorm.weight"),
        q_b=tensors.matrix(f"{at}q_proj.weight" if config.mla.q_lora is None else f"{at}q_b_proj.weight"),
        kv_a=tensors.matrix(f"{at}kv_a_proj_with_mqa.weight"),
        kv_a_norm=tensors.vector(f"{at}kv_a_layernorm.weight"),
        k_up=tensors.matrix(f"{at}k_up.weight"),
        v_up=tensors.matrix(f"{at}v_up.weight"),
        o=tensors.matrix(f"{at}o_proj.weight"),
    )
    index_weights = None
    if config.indexer is not None and config.index_kinds[i] == "full":
        at = f"{at}indexer."
        index_weights = IndexerWeights(
            wq_b=tensors.matrix(f"{at}wq_b.weight"),
            wk=tensors.matrix(f"{at}wk.weight"),
            k_norm=tensors.vector(f"{at}k_norm.weight"),
            k_norm_bias=tensors.vector(f"{at}k_norm.bias"),
            proj=tensors.matrix(f"{at}weights_proj.weight"),
            gate=tensors.optional_matrix(f"{at}index_kpool_compress_gate"),
            ape=tensors.optional_vector(f"{at}index_kpool_compress_ape"),
        )
    return Mla(i, weights, config.mla, config.indexer, index_weights)


def _feed_forward(config: ModelConfig, tensors: TrunkTensors, i: int) -> FeedForward:
    at = f"layers.{i}.mlp."
    if config.mlp[i] == "dense":
        return Mlp(_mlp(tensors, at), config.swiglu_limit)
    shared = _mlp(tensors, f"{at}shared_experts.") if config.shared_experts else None
    return Moe(
        layer=i,
        gate=tensors.matrix(f"{at}gate.weight"),
        bias=tensors.vector(f"{at}gate.e_score_correction_bias"),
        router=config.router,
        shape=config.expert,
        shared=shared,
        following=_next_router(config, tensors, i),
    )


def _next_router(config: ModelConfig, tensors: TrunkTensors, i: int) -> NextRouter | None:
    """The router of the next MoE layer after layer i, asked for up to twice the experts that a token takes."""
    layer = next((j for j in config.moe_layers if j > i), None)
    if layer is None:
        return None
    at, router = f"layers.{layer}.mlp.gate.", config.router
    most = router.topk_groups * (router.experts // router.groups)
    return NextRouter(
        layer=layer,
        gate=tensors.matrix(f"{at}weight"),
        bias=tensors.vector(f"{at}e_score_correction_bias"),
        router=replace(router, top_k=min(LOOKAHEAD * router.top_k, most)),
    )


def _mlp(tensors: TrunkTensors, at: str) -> MlpWeights:
    return MlpWeights(*(tensors.matrix(f"{at}{part}_proj.weight") for part in ("gate", "up", "down")))
