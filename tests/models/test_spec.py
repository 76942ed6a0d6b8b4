"""The tensor lists against the published inventory of GLM-5.3-Flash, whose weights no test needs."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from waste.models.config import ModelConfig
from waste.models.formats import read_formats
from waste.models.hf_config import from_hf
from waste.models.spec import (
    Role,
    TensorSpec,
    View,
    bank_layers,
    draft_specs,
    expert_sources,
    trunk_specs,
)
from waste.planner.footprint import sizes

LAYERS = 45
FULL = list(range(3, LAYERS, 4))
# The release's values, as public copies of its config.json have them.
GLM_5_3_FLASH = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "text_config": {
        "model_type": "glm5_next_text", "num_hidden_layers": LAYERS, "hidden_size": 4096, "vocab_size": 154880,
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_routed_experts": 288, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_dtype": "float32",
        "swiglu_limit": 10.0, "hidden_act": "silu", "attention_bias": False, "num_attention_heads": 64,
        "num_key_value_heads": 64, "head_dim": 0, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0, "qk_head_dim": 256, "v_head_dim": 256, "mla_use_nope": True, "index_topk": 2048,
        "index_n_heads": 32, "index_head_dim": 128, "index_kpool": 4, "index_kpool_compress": True,
        "index_kpool_always_select_tail": True, "index_share_for_mtp_iteration": True, "indexer_rope_interleave": True,
        "indexer_types": ["full"] * LAYERS, "mhc": True, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "num_nextn_predict_layers": 1, "pad_token_id": 154820, "eos_token_id": [154820, 154827, 154829],
        "dtype": "bfloat16",
        "layer_types": ["deepseek_sparse_attention" if i in FULL else "linear_attention" for i in range(LAYERS)],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
        "linear_attn_config": {
            "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(LAYERS) if i not in FULL], "full_attn_layers": FULL,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return from_hf(GLM_5_3_FLASH, None)[0]


def is_fp8(spec: TensorSpec, config: ModelConfig) -> bool:
    """What the release stores in FP8: MLA projections but kv_b, all MLPs and experts; never KDA or the indexer."""
    name = spec.source
    if ".mlp." in name:
        return name.endswith("_proj.weight")
    layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
    mla = layer == config.num_layers or (layer >= 0 and config.attention[layer] == "mla")
    names = ("q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "self_attn.o_proj.weight")
    return mla and name.endswith(names)


def release(config: ModelConfig, specs: list[TensorSpec], layers: tuple[int, ...]) -> tuple[int, int]:
    """(tensors, bytes) of a release that holds `specs` and the experts of `layers`, scales included."""
    sources = {s.source: s for s in specs}
    for layer in layers:
        for expert in range(config.router.experts):
            sources |= {s.source: s for s in expert_sources(config, layer, expert)}
    count = nbytes = 0
    for spec in sources.values():
        size = math.prod(spec.source_shape)
        count += 1
        if is_fp8(spec, config):
            scales = math.prod(-(-n // 128) for n in spec.source_shape)
            count, nbytes = count + 1, nbytes + size + 4 * scales
        else:
            f32 = spec.source.endswith(("_base", "_scale", "A_log", "dt_bias", "e_score_correction_bias"))
            nbytes += size * (4 if f32 else 2)
    return count, nbytes


def test_inventory_equals_the_release(config: ModelConfig) -> None:
    """74,001 text tensors and 1,760 of the draft layer; 328 GB in all, 1.1 GB of it the vision tower."""
    text, text_bytes = release(config, trunk_specs(config), config.moe_layers)
    draft, draft_bytes = release(config, draft_specs(config), (config.num_layers,))
    assert text == 74_001
    assert draft == 1_760
    assert 326e9 < text_bytes + draft_bytes < 328.5e9


def test_sizes_of_the_real_model(config: ModelConfig) -> None:
    """321 B parameters with the draft layer; a token multiplies with 8 of 288 experts in 42 layers."""
    exact = sizes(config, read_formats("q4", "q8"))
    assert 320e9 < exact.parameters < 322e9
    per_expert = 3 * 4096 * 2048
    assert exact.active_parameters < exact.parameters - 280 * 42 * per_expert
    assert exact.bank_bytes == 43 * 288 * exact.record_bytes
    # 4.125 bits a weight, a header and at most one page of padding
    assert 0 <= exact.record_bytes - per_expert * 4.125 / 8 <= 128 + 3 * 64 + 4096


def test_names_are_unique_and_sources_cover_them(config: ModelConfig) -> None:
    specs = trunk_specs(config) + draft_specs(config)
    assert len({s.name for s in specs}) == len(specs)
    split = [s for s in specs if s.view is not View.WHOLE]
    assert len(split) == 2 * (len(FULL) + 1)
    for key, value in zip(split[::2], split[1::2], strict=True):
        assert key.source == value.source
        assert key.rows * key.cols + value.rows * value.cols == math.prod(key.source_shape)


def test_every_tensor_has_its_role(config: ModelConfig) -> None:
    """Counted by hand: 34 KDA and 11 MLA layers, 3 dense and 42 MoE ones, and an MLA and MoE draft layer."""
    count = Counter(spec.role for spec in trunk_specs(config) + draft_specs(config))
    assert count[Role.FIRST] == len("qkvo") + 2 * len("fg")
    assert count[Role.KDA] == 33 * len("qkvo")
    assert count[Role.KDA_GATE] == 33 * 2 * len("fg")
    assert count[Role.MLA] == 12 * len(("q_a", "q_b", "kv_a", "k_up", "v_up", "o"))
    assert count[Role.INDEXER] == 12
    assert count[Role.DENSE] == 3 * 3 + 1  # the draft layer's eh_proj
    assert count[Role.SHARED] == 43 * 3
    assert count[Role.TABLE] == 2
    assert count[Role.SMALL] == 34 + 12 * 3
    assert {spec.role for layer in (3, 45) for spec in expert_sources(config, layer, 0)} == {Role.EXPERT}
    exact_names = [s.name.removesuffix(".weight") for s in trunk_specs(config) if s.role is Role.EXACT]
    kept = {name.rsplit(".", 1)[-1] for name in exact_names}
    assert {"hc_attn_fn", "hc_ffn_base", "gate", "q_conv1d", "A_log", "dt_bias"} <= kept
    assert {"e_score_correction_bias", "norm", "input_layernorm", "k_norm", "bias"} <= kept


def test_banks_are_moe_layers_and_the_draft_layer(config: ModelConfig) -> None:
    assert bank_layers(config) == (*range(3, 45), 45)


def test_config_survives_json(config: ModelConfig) -> None:
    import json

    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
