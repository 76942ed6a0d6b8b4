"""Every tensor of a model: name, shape, role, and where a release keeps it. The one place sizes come from.

Converter preflight, container check, footprint, engine allocation and `info` all read these lists.
Names are the release's own without the wrapper ("layers.3.mlp.gate.weight"); a family's name table
(`waste.convert.names`) says how its files spell them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from waste.models.config import ModelConfig


class Role(Enum):
    """What a tensor is, which decides the formats it may be stored in (`waste.models.formats`)."""

    FIRST = "first"  # the attention of layer 0, all matrices that the next four name in other layers
    KDA = "kda"  # q, k, v and o projections
    KDA_GATE = "kda_gate"  # the low-rank pairs behind its decay (f) and its output gate (g)
    MLA = "mla"  # all projections, kv_b as key rows and value rows
    INDEXER = "indexer"  # queries; its small matrices are SMALL
    DENSE = "dense"  # MLPs without a router; the draft layer's eh_proj, which every draft goes through too
    SHARED = "shared"  # shared experts
    TABLE = "table"  # embedding and head: never below 8 bits
    SMALL = "small"  # small sensitive matrices: bf16 (exact for BF16 releases), f32 in exact mode
    EXACT = "exact"  # f32: norms, router, hyper-connections, convolutions, decay, biases
    EXPERT = "expert"  # routed experts, which have a format for each of gate, up and down


class View(Enum):
    """Which part of a source tensor a stored tensor holds."""

    WHOLE = "whole"
    KEY_UP = "key_up"  # kv_b: per head the key rows, transposed
    VALUE_UP = "value_up"  # kv_b: per head the value rows


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor. `source` and `source_shape` are the release's; equal to name and shape for WHOLE."""

    name: str
    shape: tuple[int, ...]
    role: Role
    source: str
    source_shape: tuple[int, ...]
    view: View = View.WHOLE

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return math.prod(self.shape[1:])


def _whole(name: str, shape: tuple[int, ...], role: Role) -> TensorSpec:
    return TensorSpec(name, shape, role, name, shape)


def _attention(config: ModelConfig, layer: int, kind: str, indexed: bool) -> Iterator[TensorSpec]:
    at, d = f"layers.{layer}.self_attn.", config.hidden_size
    kda, kda_gate, mla, indexer = Role.KDA, Role.KDA_GATE, Role.MLA, Role.INDEXER
    if layer == 0:
        kda = kda_gate = mla = indexer = Role.FIRST
    if kind == "kda":
        assert config.kda is not None
        n, dim, c, taps = config.kda.heads, config.kda.head_dim, config.kda.channels, config.kda.conv
        for part in "qkv":
            yield _whole(f"{at}{part}_proj.weight", (c, d), kda)
            yield _whole(f"{at}{part}_conv1d.weight", (c, 1, taps), Role.EXACT)
        for part in "fg":
            yield _whole(f"{at}{part}_a_proj.weight", (dim, d), kda_gate)
            yield _whole(f"{at}{part}_b_proj.weight", (c, dim), kda_gate)
        yield _whole(f"{at}b_proj.weight", (n, d), Role.SMALL)
        yield _whole(f"{at}A_log", (n,), Role.EXACT)
        yield _whole(f"{at}dt_bias", (c,), Role.EXACT)
        yield _whole(f"{at}o_norm.weight", (dim,), Role.EXACT)
        yield _whole(f"{at}o_proj.weight", (d, c), kda)
        return
    m = config.mla
    q_in = d if m.q_lora is None else m.q_lora
    if m.q_lora is None:
        yield _whole(f"{at}q_proj.weight", (m.heads * (m.nope + m.rope), d), mla)
    else:
        yield _whole(f"{at}q_a_proj.weight", (m.q_lora, d), mla)
        yield _whole(f"{at}q_a_layernorm.weight", (m.q_lora,), Role.EXACT)
        yield _whole(f"{at}q_b_proj.weight", (m.heads * (m.nope + m.rope), m.q_lora), mla)
    yield _whole(f"{at}kv_a_proj_with_mqa.weight", (m.row, d), mla)
    yield _whole(f"{at}kv_a_layernorm.weight", (m.kv_lora,), Role.EXACT)
    kv_b, kv_b_shape = f"{at}kv_b_proj.weight", (m.heads * (m.nope + m.v), m.kv_lora)
    yield TensorSpec(f"{at}k_up.weight", (m.heads * m.kv_lora, m.nope), mla, kv_b, kv_b_shape, View.KEY_UP)
    yield TensorSpec(f"{at}v_up.weight", (m.heads * m.v, m.kv_lora), mla, kv_b, kv_b_shape, View.VALUE_UP)
    yield _whole(f"{at}o_proj.weight", (d, m.heads * m.v), mla)
    if not indexed:
        return
    ix, at = config.indexer, f"{at}indexer."
    assert ix is not None
    yield _whole(f"{at}wq_b.weight", (ix.heads * ix.head_dim, q_in), indexer)
    yield _whole(f"{at}wk.weight", (ix.head_dim, d), Role.SMALL)
    yield _whole(f"{at}k_norm.weight", (ix.head_dim,), Role.EXACT)
    yield _whole(f"{at}k_norm.bias", (ix.head_dim,), Role.EXACT)
    yield _whole(f"{at}weights_proj.weight", (ix.heads, d), Role.SMALL)
    if ix.pool > 1:
        yield _whole(f"{at}index_kpool_compress_gate", (ix.head_dim, d), Role.SMALL)
        yield _whole(f"{at}index_kpool_compress_ape", (ix.pool, ix.head_dim), Role.EXACT)


def _feed_forward(config: ModelConfig, layer: int, kind: str) -> Iterator[TensorSpec]:
    at, d = f"layers.{layer}.mlp.", config.hidden_size
    width, role = config.intermediate_size, Role.DENSE
    if kind == "moe":
        yield _whole(f"{at}gate.weight", (config.router.experts, d), Role.EXACT)
        yield _whole(f"{at}gate.e_score_correction_bias", (config.router.experts,), Role.EXACT)
        if config.shared_experts == 0:
            return
        at, width, role = f"{at}shared_experts.", config.shared_experts * config.moe_intermediate_size, Role.SHARED
    yield _whole(f"{at}gate_proj.weight", (width, d), role)
    yield _whole(f"{at}up_proj.weight", (width, d), role)
    yield _whole(f"{at}down_proj.weight", (d, width), role)


# A row for each token id; the one tensor of which a token reads a row, not all.
EMBEDDING = "embed_tokens.weight"


def trunk_specs(config: ModelConfig) -> list[TensorSpec]:
    """Everything but routed experts and the draft layer, in the order of `trunk.bin`."""
    d = config.hidden_size
    specs = [_whole(EMBEDDING, (config.vocab_size, d), Role.TABLE)]
    for i in range(config.num_layers):
        at = f"layers.{i}."
        specs.append(_whole(f"{at}input_layernorm.weight", (d,), Role.EXACT))
        specs.append(_whole(f"{at}post_attention_layernorm.weight", (d,), Role.EXACT))
        if config.hc is not None:
            for site in ("attn", "ffn"):
                specs.append(_whole(f"{at}hc_{site}_fn", (config.hc.outputs, config.hc.streams * d), Role.EXACT))
                specs.append(_whole(f"{at}hc_{site}_base", (config.hc.outputs,), Role.EXACT))
                specs.append(_whole(f"{at}hc_{site}_scale", (3,), Role.EXACT))
        indexed = config.indexer is not None and config.index_kinds[i] == "full"
        specs += _attention(config, i, config.attention[i], indexed)
        specs += _feed_forward(config, i, config.mlp[i])
    specs.append(_whole("norm.weight", (d,), Role.EXACT))
    if not config.tie_word_embeddings:
        specs.append(_whole("lm_head.weight", (config.vocab_size, d), Role.TABLE))
    return specs


def draft_specs(config: ModelConfig) -> list[TensorSpec]:
    """The draft (MTP) layer without its routed experts: `draft.bin`. Empty where the model has none."""
    if config.draft_layers == 0:
        return []
    i, d = config.num_layers, config.hidden_size
    at = f"layers.{i}."
    specs = [_whole(f"{at}{n}.weight", (d,), Role.EXACT) for n in ("enorm", "hnorm", "shared_head.norm")]
    specs.append(_whole(f"{at}eh_proj.weight", (d, 2 * d), Role.DENSE))
    specs.append(_whole(f"{at}input_layernorm.weight", (d,), Role.EXACT))
    specs.append(_whole(f"{at}post_attention_layernorm.weight", (d,), Role.EXACT))
    specs += _attention(config, i, "mla", config.indexer is not None)
    specs += _feed_forward(config, i, "moe")
    return specs


def bank_layers(config: ModelConfig) -> tuple[int, ...]:
    """Layers that have a bank of expert records: MoE layers, then the draft layer."""
    return config.moe_layers + ((config.num_layers,) if config.draft_layers else ())


def expert_sources(config: ModelConfig, layer: int, expert: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """gate (F, D), up (F, D) and down (D, F) of one routed expert, as a release names them."""
    at, d, f = f"layers.{layer}.mlp.experts.{expert}.", config.hidden_size, config.moe_intermediate_size
    return (
        _whole(f"{at}gate_proj.weight", (f, d), Role.EXPERT),
        _whole(f"{at}up_proj.weight", (f, d), Role.EXPERT),
        _whole(f"{at}down_proj.weight", (d, f), Role.EXPERT),
    )


def bank_name(layer: int) -> str:
    """File name of a layer's bank."""
    return f"experts-{layer:03d}.bin"


TRUNK_FILE = "trunk.bin"
DRAFT_FILE = "draft.bin"
