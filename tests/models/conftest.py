"""Configs of the four families with the published values of their releases, as fresh dicts for each test."""

from __future__ import annotations

from typing import Any

import pytest

GLM_FULL = list(range(3, 45, 4))
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]  # 1-based


def glm5_next() -> dict[str, Any]:
    kda = [i for i in range(45) if i not in GLM_FULL]
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "tie_word_embeddings": False,
        "image_token_id": 154854,
        "vision_config": {"model_type": "glm5_next_vision", "depth": 24},
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
        "text_config": {
            "model_type": "glm5_next_text",
            "num_hidden_layers": 45,
            "hidden_size": 4096,
            "vocab_size": 154880,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "moe_router_dtype": "float32",
            "swiglu_limit": 10.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "head_dim": 0,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 256,
            "qk_rope_head_dim": 0,
            "qk_head_dim": 256,
            "v_head_dim": 256,
            "mla_use_nope": True,
            "index_topk": 2048,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_kpool": 4,
            "index_kpool_compress": True,
            "index_kpool_always_select_tail": True,
            "index_share_for_mtp_iteration": True,
            "indexer_types": ["full"] * 45,
            "indexer_rope_interleave": True,
            "mhc": True,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "num_nextn_predict_layers": 1,
            "pad_token_id": 154820,
            "eos_token_id": [154820, 154827, 154829],
            "dtype": "bfloat16",
            "layer_types": ["deepseek_sparse_attention" if i in GLM_FULL else "linear_attention" for i in range(45)],
            "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
            "linear_attn_config": {
                "num_heads": 64,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "kda_layers": kda,
                "full_attn_layers": list(GLM_FULL),
            },
        },
    }


def kimi_linear() -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "vocab_size": 163840,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 72,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "model_max_length": 1048576,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "full_attn_layers": list(KIMI_FULL),
            "kda_layers": [i for i in range(1, 28) if i not in KIMI_FULL],
        },
    }


def glm_moe_dsa() -> dict[str, Any]:
    full = [0, 1, *range(2, 78, 4)]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "vocab_size": 154880,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "intermediate_size": 12288,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "rope_interleave": True,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": True,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_topk_pattern": None,
        "indexer_types": ["full" if i in full else "shared" for i in range(78)],
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
    }


def deepseek_v3() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "vocab_size": 129280,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 163840,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    }


@pytest.fixture
def glm() -> dict[str, Any]:
    return glm5_next()


@pytest.fixture
def kimi() -> dict[str, Any]:
    return kimi_linear()


@pytest.fixture
def glm52() -> dict[str, Any]:
    return glm_moe_dsa()


@pytest.fixture
def deepseek() -> dict[str, Any]:
    return deepseek_v3()


@pytest.fixture(params=[glm5_next, kimi_linear, glm_moe_dsa, deepseek_v3], ids=lambda make: str(make.__name__))
def release(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each family's release config in turn."""
    config: dict[str, Any] = request.param()
    return config
