"""One function per model family: the text part of a Hugging Face config -> `ModelConfig`.

Values come from the release's config; what is not implemented is refused by key and value here, before a single
weight is read. Formulas and traps: the family classes of transformers 5.24 (`glm5_next`, `kimi_linear`,
`glm_moe_dsa`, `deepseek_v3`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from waste.backends.shapes import HcShape, IndexerShape, KdaShape, MlaShape, Rotary, RouterShape
from waste.errors import InputError
from waste.models.config import AttentionKind, MlpKind, ModelConfig
from waste.models.hf_layers import attention_kinds, index_kinds, mlp_kinds
from waste.models.hf_reader import Reader, shown
from waste.models.hf_rope import rotary

# Banks are numbered with three digits, and experts with their index in a record; both far above any release.
MAX_LAYERS = 998
MAX_EXPERTS = 65_536

# The latent norms of these families are built without an epsilon and get their class's default, whatever
# rms_norm_eps says (transformers: `KimiLinearRMSNorm(kv_lora_rank)` and likewise in the others).
LATENT_EPS = 1e-6


# The release's own words for what the others call n_routed_experts and so on: no reason for a notice.
_KIMI_SPELLINGS = frozenset(
    (
        "model_max_length",
        "moe_renormalize",
        "moe_router_activation_func",
        "num_expert_group",
        "num_experts",
        "num_experts_per_token",
        "num_shared_experts",
    )
)


@dataclass(frozen=True)
class Tokens:
    """Special ids, collected from all files that name some."""

    eos: tuple[int, ...]
    pad: int | None
    bos: int | None


def glm5_next(text: Reader, tokens: Tokens, tied: bool) -> ModelConfig:
    """GLM-5.3-Flash: KDA and NoPE MLA with a pooled indexer, hyper-connections, clamped SwiGLU."""
    text.require("mhc", True)
    text.require("hres_vwnstyle", True)
    text.require("mhc_no_norm_weight", False)
    text.require("index_kpool_compress", True)
    text.require("index_kpool_always_select_tail", True)
    text.require("mla_use_nope", True, aliases=("mla_nope",))
    text.require("qk_rope_head_dim", 0)
    if not text.has("qk_rope_head_dim"):
        raise text.missing("qk_rope_head_dim")
    layers = _layers(text)
    eps = text.number("rms_norm_eps")
    kinds = attention_kinds(text, layers, own_spelling="deepseek_sparse_attention")
    indexers = index_kinds(text, layers)
    if "shared" in indexers:
        raise text.unsupported("indexer_types", "shared", "full")
    pool, topk = text.integer("index_kpool"), text.integer("index_topk")
    if topk % pool != 0:
        raise InputError(f"{text.where}index_topk is {topk}; expected a multiple of index_kpool, {pool}")
    hc = HcShape(
        streams=text.integer("hc_mult", "mhc_num_residual_streams", high=16),
        sinkhorn_iters=text.integer("hc_sinkhorn_iters", "mhc_sinkhorn_iterations", high=1000),
        eps=text.number("hc_eps"),
        norm_eps=eps,
    )
    if not text.has("swiglu_limit"):
        raise text.missing("swiglu_limit")
    mla = _mla(text, rotated=False, latent_eps=eps, needs_q_lora=True)
    indexer = IndexerShape(text.integer("index_n_heads"), text.integer("index_head_dim"), topk, pool, None)
    kda = _kda(text, eps, default_bound=-5.0) if "kda" in kinds else None
    return _assemble(
        "glm5_next",
        text,
        tokens,
        tied,
        kinds=kinds,
        mla=mla,
        kda=kda,
        indexer=indexer,
        hc=hc,
        swiglu_limit=text.optional_number("swiglu_limit"),
        index_layers=indexers,
    )


def kimi_linear(text: Reader, tokens: Tokens, tied: bool) -> ModelConfig:
    """Kimi-Linear: KDA with a softplus gate and unrotated MLA, plain residual."""
    text.usual = _KIMI_SPELLINGS
    for key in ("use_full_rank_gate", "mla_use_output_gate", "latent_moe_use_norm"):  # Kimi K3's text model
        text.require(key, False, None)
    for key in ("routed_expert_hidden_size", "attn_res_block_size", "swiglu_limit"):
        text.require(key, None)
    text.require("mla_use_nope", True, aliases=("mla_nope",))
    layers = _layers(text)
    kinds = attention_kinds(text, layers, own_spelling="full_attention")
    mla = _mla(text, rotated=False, latent_eps=LATENT_EPS, needs_q_lora=False)
    kda = _kda(text, text.number("rms_norm_eps"), default_bound=None) if "kda" in kinds else None
    return _assemble("kimi_linear", text, tokens, tied, kinds=kinds, mla=mla, kda=kda)


def glm_moe_dsa(text: Reader, tokens: Tokens, tied: bool) -> ModelConfig:
    """GLM-5 and GLM-5.2: rotated MLA with a per-token indexer that layers may share."""
    text.require("rope_interleave", True)
    text.require("indexer_rope_interleave", True)
    text.require("swiglu_limit", None)
    layers = _layers(text)
    kinds = _all_full(layers)
    if text.has("layer_types"):
        kinds = attention_kinds(text, layers, own_spelling="indexed_attention")
        if "kda" in kinds:
            raise text.unsupported(f"layer_types[{kinds.index('kda')}]", "linear_attention", "indexed_attention")
    mla = _mla(text, rotated=True, latent_eps=LATENT_EPS, needs_q_lora=True)
    heads, dim = text.integer("index_n_heads"), text.integer("index_head_dim")
    if mla.rope > dim:
        raise InputError(f"{text.where}index_head_dim is {dim}; expected at least qk_rope_head_dim, {mla.rope}")
    indexer = IndexerShape(heads, dim, text.integer("index_topk"), 1, mla.rotary)
    return _assemble(
        "glm_moe_dsa", text, tokens, tied, kinds=kinds, mla=mla, indexer=indexer, index_layers=index_kinds(text, layers)
    )


def deepseek_v3(text: Reader, tokens: Tokens, tied: bool) -> ModelConfig:
    """DeepSeek-V3, R1 and Kimi K2: rotated MLA, often with YaRN, and a router with groups.

    A config of this type may still name layers of linear attention; they are read as Kimi-Linear's.
    """
    text.require("rope_interleave", True, None)
    for key in ("swiglu_limit", "index_topk"):  # an indexer makes it DeepSeek-V3.2
        text.require(key, None)
    layers = _layers(text)
    kinds: tuple[AttentionKind, ...] = _all_full(layers)
    kda = None
    if text.has("layer_types") or text.has("linear_attn_config"):
        kinds = attention_kinds(text, layers, own_spelling="full_attention")
    if "kda" in kinds:
        text.notice(f"{text.where}{kinds.count('kda')} layers of linear attention are read as those of kimi_linear")
        kda = _kda(text, text.number("rms_norm_eps"), default_bound=None)
    mla = _mla(text, rotated=True, latent_eps=LATENT_EPS, needs_q_lora=False)
    return _assemble("deepseek_v3", text, tokens, tied, kinds=kinds, mla=mla, kda=kda, groups_required=True)


FAMILIES: dict[str, Callable[[Reader, Tokens, bool], ModelConfig]] = {
    "glm5_next": glm5_next,
    "kimi_linear": kimi_linear,
    "glm_moe_dsa": glm_moe_dsa,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
}


# -- parts that the families share


def _layers(text: Reader) -> int:
    return text.integer("num_hidden_layers", high=MAX_LAYERS)


def _all_full(layers: int) -> tuple[AttentionKind, ...]:
    full: list[AttentionKind] = ["mla"] * layers
    return tuple(full)


def _mla(text: Reader, *, rotated: bool, latent_eps: float, needs_q_lora: bool) -> MlaShape:
    heads = text.integer("num_attention_heads")
    kv_heads = text.optional_integer("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise text.unsupported("num_key_value_heads", kv_heads, f"num_attention_heads, {heads},")
    text.require("attention_bias", False, None)
    q_lora = text.integer("q_lora_rank") if needs_q_lora else text.optional_integer("q_lora_rank")
    nope, rope = text.integer("qk_nope_head_dim"), text.integer("qk_rope_head_dim", low=0)
    together = text.optional_integer("qk_head_dim")
    if together not in (None, nope + rope):
        raise InputError(
            f"{text.where}qk_head_dim is {together}; expected qk_nope_head_dim + qk_rope_head_dim, {nope + rope}"
        )
    turn: Rotary | None = None
    factor = 1.0
    if rotated:
        if rope == 0 or rope % 2:
            raise text.wrong("qk_rope_head_dim", rope, "an even number above zero: channels are rotated in pairs")
        turn, factor = rotary(text, rope)
    return MlaShape(
        heads=heads,
        q_lora=q_lora,
        kv_lora=text.integer("kv_lora_rank"),
        nope=nope,
        rope=rope,
        v=text.integer("v_head_dim"),
        scale=(nope + rope) ** -0.5 * factor,
        latent_eps=latent_eps,
        rotary=turn,
    )


def _kda(text: Reader, eps: float, *, default_bound: float | None) -> KdaShape:
    """`linear_attn_config` of the releases, or the flat `linear_*` keys that transformers writes back."""
    linear = text.sub("linear_attn_config")
    if linear is not None:
        bound = linear.optional_number("gate_lower_bound", positive=False)
        # transformers: without the key the bound is -5, unless the gate is declared unsafe.
        if bound is None and default_bound is not None and linear.boolean("safe_gate", default=True):
            bound = default_bound
        if bound is not None and bound >= 0:
            raise linear.wrong("gate_lower_bound", bound, "a number below zero")
        return KdaShape(
            linear.integer("num_heads"),
            linear.integer("head_dim"),
            linear.integer("short_conv_kernel_size", high=64),
            bound,
            eps,
        )
    if not text.has("linear_num_heads"):
        raise text.missing("linear_attn_config")
    text.notice(f"{text.where}linear_num_heads and its siblings are read as linear_attn_config")
    bound = text.optional_number("linear_lower_bound", positive=False)
    if bound is not None and bound >= 0:
        raise text.wrong("linear_lower_bound", bound, "a number below zero")
    if bound is None and default_bound is not None and not text.has("linear_lower_bound"):
        raise text.missing("linear_lower_bound")
    return KdaShape(
        text.integer("linear_num_heads"),
        text.integer("linear_head_dim"),
        text.integer("linear_conv_kernel_dim", high=64),
        bound,
        eps,
    )


def _router(text: Reader, groups_required: bool) -> RouterShape:
    text.require("scoring_func", "sigmoid", None, aliases=("moe_router_activation_func",))
    text.require("topk_method", "noaux_tc", None)
    text.require("moe_router_dtype", "float32", None)
    experts = text.integer("n_routed_experts", "num_experts", "num_local_experts", high=MAX_EXPERTS)
    top_k = text.integer("num_experts_per_tok", "num_experts_per_token")
    one = None if groups_required else 1
    groups = text.integer("n_group", "num_expert_group", default=one, nullable=not groups_required)
    kept = text.integer("topk_group", default=one, nullable=not groups_required)
    if experts % groups or kept > groups or (groups > 1 and experts // groups < 2):
        raise InputError(
            f"{text.where}n_group is {groups} and topk_group {kept}; expected groups of equal size among {experts} "
            "experts, at most all of them kept"
        )
    reachable = experts // groups * kept
    if top_k > reachable:
        raise InputError(
            f"{text.where}num_experts_per_tok is {top_k}; only {reachable} of {experts} experts can be chosen"
        )
    normalize = text.boolean("norm_topk_prob", "moe_renormalize")
    return RouterShape(experts, top_k, groups, kept, text.number("routed_scaling_factor"), normalize)


def _assemble(
    family: str,
    text: Reader,
    tokens: Tokens,
    tied: bool,
    *,
    kinds: tuple[AttentionKind, ...],
    mla: MlaShape,
    kda: KdaShape | None = None,
    indexer: IndexerShape | None = None,
    hc: HcShape | None = None,
    swiglu_limit: float | None = None,
    index_layers: tuple[str, ...] = (),
    groups_required: bool = False,
) -> ModelConfig:
    """The part that reads the same in all families."""
    text.require("hidden_act", "silu", "swish")
    text.require("mlp_bias", False, None)
    layers = len(kinds)
    mlps: tuple[MlpKind, ...] = mlp_kinds(text, layers)
    if "moe" not in mlps:
        raise text.unsupported("first_k_dense_replace", text.raw("first_k_dense_replace"), "a model with MoE layers")
    vocab = text.integer("vocab_size")
    for name, ids in (("eos_token_id", tokens.eos), ("pad_token_id", (tokens.pad,)), ("bos_token_id", (tokens.bos,))):
        for token in ids:
            if token is not None and token >= vocab:
                raise InputError(f"config.json: {name} {shown(token)} is not below vocab_size, {vocab}")
    return ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=text.integer("hidden_size"),
        num_layers=layers,
        max_position_embeddings=text.integer("max_position_embeddings", "model_max_length"),
        rms_norm_eps=text.number("rms_norm_eps"),
        attention=kinds,
        mlp=mlps,
        index_kinds=tuple("shared" if kind == "shared" else "full" for kind in index_layers or ("full",) * layers),
        intermediate_size=text.integer("intermediate_size"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        shared_experts=text.integer("n_shared_experts", "num_shared_experts", low=0),
        swiglu_limit=swiglu_limit,
        router=_router(text, groups_required),
        mla=mla,
        kda=kda,
        indexer=indexer,
        hc=hc,
        draft_layers=_draft_layers(family, text),
        tie_word_embeddings=tied,
        eos_token_ids=tokens.eos,
        pad_token_id=tokens.pad,
        bos_token_id=tokens.bos,
    )


def _draft_layers(family: str, text: Reader) -> int:
    count = text.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, low=0, nullable=True)
    if count and family == "kimi_linear":
        text.notice(f"{text.where}num_nextn_predict_layers is {count}; draft layers of kimi_linear are left out")
        return 0
    if count > 1:
        text.notice(f"{text.where}num_nextn_predict_layers is {count}; only the first draft layer is kept")
    return min(count, 1)
