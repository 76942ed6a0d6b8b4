#!/usr/bin/env python3
"""Build a tiny random-weight Hugging Face checkpoint in the layout of a real release.

The weights come from the model classes of the ``transformers`` package, filled with
deliberately non-trivial random values, and are written the way the real checkpoint is:
sharded safetensors with an index, one tensor per expert, the release's tensor names and
dtypes, nested configuration, tokenizer, generation configuration and chat template.

    python tiny_checkpoint.py glm5_next   tiny-glm53 --fp8
    python tiny_checkpoint.py kimi_linear tiny-kimi
    python tiny_checkpoint.py glm_moe_dsa tiny-glm52 --fp8
    python tiny_checkpoint.py deepseek_v3 tiny-dsv3 --fp8
    python tiny_checkpoint.py deepseek_v3 tiny-k2 --fp8 --variant kimi_k2

Everything is a function of the options and ``--seed``. Needs torch, transformers,
safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

ARCHITECTURES = ("glm5_next", "kimi_linear", "glm_moe_dsa", "deepseek_v3")

# --------------------------------------------------------------------------------------
# Tokenizer material
# --------------------------------------------------------------------------------------

GLM_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# In id order: the real vocabulary places these at 154820 .. 154855.
GLM_SPECIAL = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
]
# The tail from <think> on is not "special": decoding with skip_special_tokens keeps it.
GLM_NOT_SPECIAL = set(GLM_SPECIAL[GLM_SPECIAL.index("<think>") :])

# name -> offset from the first special id; the real vocabulary starts them at 163584.
KIMI_SPECIAL = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "[UNK]": 18,
    "[PAD]": 19,
}
KIMI_RESERVED = 20

DEEPSEEK_SPECIAL = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜EOT｜>",
]
DEEPSEEK_PATTERNS = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]

GLM_CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}
{%- if part is string -%}{{- part -}}
{%- elif part.type == 'text' -%}{{- part.text -}}
{%- elif part.type in ('image', 'image_url') -%}{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- '[gMASK]<sop><|system|>Reasoning Effort: ' -}}
{%- if reasoning_effort is defined and reasoning_effort in ('low', 'high') -%}
{{- reasoning_effort | capitalize -}}
{%- else -%}
{{- 'Max' -}}
{%- endif -%}
{%- if tools -%}
{{- '<|system|>\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>\\n' -}}
{%- for tool in tools -%}
{{- (tool.function if tool.function is defined else tool) | tojson -}}{{- '\\n' -}}
{%- endfor -%}
{{- '</tools>\\n\\nFor each function call, output the function name and arguments within the following XML format:\\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{{- '<|system|>' ~ text_of(m.content) -}}
{%- elif m.role == 'user' -%}
{{- '<|user|>' ~ text_of(m.content) -}}
{%- elif m.role == 'assistant' -%}
{%- set body = text_of(m.content) -%}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' -%}
{%- if not thought and '</think>' in body -%}
{%- set thought = body.split('</think>')[0].split('<think>')[-1] -%}
{%- set body = body.split('</think>')[-1] -%}
{%- endif -%}
{%- if clear_thinking is defined and clear_thinking -%}{%- set thought = '' -%}{%- endif -%}
{{- '<|assistant|><think>' ~ thought.strip() ~ '</think>' ~ body.strip() -}}
{%- for call in (m.tool_calls or []) -%}
{%- set f = call.function if call.function is defined else call -%}
{{- '<tool_call>' ~ f.name -}}
{%- for key, value in f.arguments.items() -%}
{{- '<arg_key>' ~ key ~ '</arg_key><arg_value>' ~ (value if value is string else value | tojson) ~ '</arg_value>' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
{{- '<tool_response>' ~ text_of(m.content) ~ '</tool_response>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}
"""

KIMI_CHAT_TEMPLATE = """\
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
{{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>' -}}
{%- endif -%}
{%- set tag = 'user' if m.role == 'user' else ('assistant' if m.role == 'assistant' else 'system') -%}
{{- '<|im_' ~ tag ~ '|>' ~ m.role ~ '<|im_middle|>' ~ m.content ~ '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}
"""

DEEPSEEK_CHAT_TEMPLATE = """\
{{- '<｜begin▁of▁sentence｜>' -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<｜User｜>' ~ m.content -}}
{%- elif m.role == 'assistant' -%}{{- '<｜Assistant｜>' ~ m.content ~ '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
"""

CORPUS = """\
The mixture of experts layer routes each token to a few experts, and the rest stay idle.
A pool of four tokens shares one key; the query keeps the best pools and the tail of the context.
It's easy to say "don't", harder to show why: 3.14159, 2,718 and 42 are numbers; so is 1234567890.
def relu(x):\n    return x if x > 0 else 0\n\nfor i in range(10):\n    print(i, relu(i - 5))
路由器选择专家，然后把结果加权求和。世界，你好！这是一个测试。A股 维生素C QQ音乐
Быстрая лиса перепрыгнула через ленивую собаку. こんにちは世界。 한국어 문장도 있습니다.
Ünïcödé façade naïve café — “quotes” … → ← ≤ ≥ ± × ÷ 😀🚀
"""


def corpus(rng: random.Random) -> list[str]:
    """A few hundred lines of text: the sample lines and shuffles of their words."""
    lines = [line for line in CORPUS.splitlines() if line]
    words = CORPUS.split()
    return lines * 8 + [" ".join(rng.choices(words, k=14)) for _ in range(400)]


def train_bpe(patterns: list[str], size: int, rng: random.Random):
    """A byte-level BPE with the given pre-tokenizer patterns; ids 0..255 are the bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator(corpus(rng), trainer)
    return tok


def byte_of_char() -> dict[str, int]:
    """The inverse of the byte-to-printable-character map of byte-level BPE."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, extra = {}, 0
    for value in range(256):
        if value in keep:
            table[chr(value)] = value
        else:
            table[chr(256 + extra)] = value
            extra += 1
    return table


def write_tokenizer(kind: str, out: Path, size: int, rng: random.Random) -> dict[str, int]:
    """Write the tokenizer files of one family; return the ids of its special tokens."""
    from tokenizers import AddedToken

    if kind == "kimi":
        # The Kimi releases ship a tiktoken rank file and no tokenizer.json.
        tok = train_bpe([KIMI_PATTERN], size - KIMI_RESERVED, rng)
        back = byte_of_char()
        ranks = sorted(tok.get_vocab().items(), key=lambda kv: kv[1])
        lines = [base64.b64encode(bytes(back[c] for c in piece)).decode() + f" {rank}" for piece, rank in ranks]
        (out / "tiktoken.model").write_text("\n".join(lines) + "\n")
        base = len(ranks)
        ids = {name: base + offset for name, offset in KIMI_SPECIAL.items()}
        added = {
            str(i): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for name, i in ids.items()
        }
        config = {
            "added_tokens_decoder": added,
            "additional_special_tokens": [
                "<|im_end|>",
                "<|im_user|>",
                "<|im_assistant|>",
                "<|im_system|>",
                "<|im_middle|>",
            ],
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1000000000000000019884624838656,
            "tokenizer_class": "TikTokenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        }
        (out / "chat_template.jinja").write_text(KIMI_CHAT_TEMPLATE)
    else:
        glm = kind == "glm"
        special = GLM_SPECIAL if glm else DEEPSEEK_SPECIAL
        patterns = [GLM_PATTERN] if glm else DEEPSEEK_PATTERNS
        tok = train_bpe(patterns, size - len(special), rng)
        for name in special:
            token = AddedToken(name, normalized=False, special=not (glm and name in GLM_NOT_SPECIAL))
            if token.special:
                tok.add_special_tokens([token])
            else:
                tok.add_tokens([token])
        tok.save(str(out / "tokenizer.json"))
        ids = {name: tok.token_to_id(name) for name in special}
        config = {
            "backend": "tokenizers",
            "clean_up_tokenization_spaces": False,
            "do_lower_case": False,
            "is_local": True,
            "model_max_length": 1048576,
            "pad_token": special[0] if glm else special[2],
            "eos_token": special[0] if glm else special[1],
            "padding_side": "left",
            "remove_space": False,
            "tokenizer_class": "TokenizersBackend",
            "extra_special_tokens": [t for t in special if not (glm and t in GLM_NOT_SPECIAL)],
        }
        if not glm:
            config["bos_token"] = special[0]
        (out / "chat_template.jinja").write_text(GLM_CHAT_TEMPLATE if glm else DEEPSEEK_CHAT_TEMPLATE)
    write_json(out / "tokenizer_config.json", config)
    return ids


# --------------------------------------------------------------------------------------
# Configurations, in the spelling of the releases
# --------------------------------------------------------------------------------------


def glm5_next_config(a: argparse.Namespace) -> dict:
    layers = a.layers or 9
    kda = [i for i in range(layers) if i % 4 != 3]
    full = [i for i in range(layers) if i % 4 == 3]
    hidden = a.hidden or 160
    text = {
        "model_type": "glm5_next_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "first_k_dense_replace": min(a.dense, layers),
        "hc_eps": 1e-6,
        "hc_mult": a.hc_mult,
        "hc_sinkhorn_iters": 20,
        "head_dim": 0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "index_head_dim": a.index_head_dim,
        "index_kpool": a.index_kpool,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "index_n_heads": a.index_heads,
        "index_share_for_mtp_iteration": True,
        "index_topk": a.index_topk,
        "indexer_rope_interleave": True,
        "indexer_types": ["full"] * layers,
        "initializer_range": 0.02,
        "intermediate_size": a.intermediate,
        "kv_lora_rank": a.kv_lora,
        "layer_types": ["linear_attention" if i in kda else "deepseek_sparse_attention" for i in range(layers)],
        "linear_attn_config": {
            "full_attn_layers": full,
            "gate_lower_bound": -5.0,
            "head_dim": a.kda_head_dim,
            "kda_layers": kda,
            "num_heads": a.kda_heads,
            "short_conv_kernel_size": 4,
        },
        "max_position_embeddings": 4096,
        "mhc": True,
        "mla_use_nope": True,
        "mlp_layer_types": ["dense" if i < a.dense else "sparse" for i in range(layers)],
        "moe_intermediate_size": a.moe_intermediate,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": a.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": a.heads,
        "num_experts_per_tok": a.topk,
        "num_hidden_layers": layers,
        "num_key_value_heads": a.heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": a.q_lora,
        "qk_head_dim": a.head_dim,
        "qk_nope_head_dim": a.head_dim,
        "qk_rope_head_dim": 0,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "swiglu_limit": a.swiglu_limit,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "vocab_size": a.vocab,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "glm5_next_vision",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "depth": 2,
            "hidden_act": "silu",
            "hidden_size": 64,
            "image_size": 56,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 96,
            "num_heads": 4,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "projection_intermediate_size": 96,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "swiglu_limit": a.swiglu_limit,
            "temporal_patch_size": 2,
        },
    }


def kimi_linear_config(a: argparse.Namespace) -> dict:
    layers = a.layers or 9
    full = [i for i in range(1, layers + 1) if i % 4 == 0 or i == layers]  # 1-based
    kda = [i for i in range(1, layers + 1) if i not in full]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "auto_map": {
            "AutoConfig": "configuration_kimi.KimiLinearConfig",
            "AutoModel": "modeling_kimi.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
        },
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": a.hidden or 160,
        "initializer_range": 0.02,
        "intermediate_size": a.intermediate,
        "kv_lora_rank": a.kv_lora,
        "linear_attn_config": {
            "full_attn_layers": full,
            "head_dim": a.kda_head_dim,
            "kda_layers": kda,
            "num_heads": a.kda_heads,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 4096,
        "moe_intermediate_size": a.moe_intermediate,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": a.heads,
        "num_expert_group": 1,
        "num_experts": a.experts,
        "num_experts_per_token": a.topk,
        "num_hidden_layers": layers,
        "num_key_value_heads": a.heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": a.head_dim,
        "qk_rope_head_dim": a.rope_dim,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": a.head_dim,
        "vocab_size": a.vocab,
    }


def glm_moe_dsa_config(a: argparse.Namespace) -> dict:
    layers = a.layers or 8
    full = [i for i in range(layers) if max(i - 3 + 1, 0) % 4 == 0]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "ep_size": 1,
        "first_k_dense_replace": a.dense,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "hidden_size": a.hidden or 160,
        "index_head_dim": a.index_head_dim,
        "index_n_heads": a.index_heads,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 3,
        "index_topk": a.index_topk,
        "index_topk_freq": 4,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if i in full else "shared" for i in range(layers)],
        "initializer_range": 0.02,
        "intermediate_size": a.intermediate,
        "kv_lora_rank": a.kv_lora,
        "max_position_embeddings": 4096,
        "mlp_layer_types": ["dense" if i < a.dense else "sparse" for i in range(layers)],
        "moe_intermediate_size": a.moe_intermediate,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": a.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": a.heads,
        "num_experts_per_tok": a.topk,
        "num_hidden_layers": layers,
        "num_key_value_heads": a.heads,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": a.q_lora,
        "qk_head_dim": a.head_dim + a.rope_dim,
        "qk_nope_head_dim": a.head_dim,
        "qk_rope_head_dim": a.rope_dim,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": a.head_dim + a.rope_dim,
        "vocab_size": a.vocab,
    }


def deepseek_v3_config(a: argparse.Namespace) -> dict:
    k2 = a.variant == "kimi_k2"
    # Small enough that a prompt of a few dozen tokens reaches the interpolated range.
    yarn = (
        {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0} if k2 else {"beta_fast": 32, "beta_slow": 1, "factor": 40}
    )
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64, "type": "yarn"}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2" if k2 else "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "first_k_dense_replace": 1 if k2 else a.dense,
        "hidden_act": "silu",
        "hidden_size": a.hidden or 160,
        "initializer_range": 0.02,
        "intermediate_size": a.intermediate,
        "kv_lora_rank": a.kv_lora,
        "max_position_embeddings": int(64 * yarn["factor"]),
        "moe_intermediate_size": a.moe_intermediate,
        "moe_layer_freq": 1,
        "n_group": 1 if k2 else 4,
        "n_routed_experts": a.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": a.heads,
        "num_experts_per_tok": a.topk,
        "num_hidden_layers": a.layers or 6,
        "num_key_value_heads": a.heads,
        "num_nextn_predict_layers": 0 if k2 else 1,
        "q_lora_rank": a.q_lora,
        "qk_nope_head_dim": a.head_dim,
        "qk_rope_head_dim": a.rope_dim,
        "rms_norm_eps": 1e-6,
        "rope_scaling": yarn,
        "rope_theta": 50000.0 if k2 else 10000,
        "routed_scaling_factor": 2.827 if k2 else 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1 if k2 else 2,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": a.head_dim,
        "vocab_size": a.vocab,
    }


# --------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------


class Filler:
    """Random values chosen so that every branch of the model matters.

    Plain matrices keep unit variance (std 1/sqrt(fan_in)); the exceptions below make the
    SwiGLU clamp fire, spread the KDA decays, move the router's choice away from its
    scores, mix the hyper-connection streams, and give the logits a clear winner.
    """

    def __init__(self, seed: int, swiglu_limit: float | None):
        self.seed = seed
        self.limit = swiglu_limit

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        gen = torch.Generator().manual_seed((self.seed * 1000003 + stable_hash(name)) % (1 << 62))
        n = lambda std=1.0, mean=0.0: torch.randn(shape, generator=gen) * std + mean  # noqa: E731
        fan = math.prod(shape[1:]) if len(shape) > 1 else shape[0]
        unit = 1 / math.sqrt(fan)
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        # gate and up pre-activations at half the limit: about 5% of them are clamped
        pre = 0.5 * self.limit if self.limit else 1.5
        if name.endswith("bias") and "e_score" not in name and "dt_bias" not in name:
            return n(0.2)
        match leaf:
            case "embed_tokens":
                return n(0.7)
            case "lm_head" | "head":
                return n(3 * unit)
            case "gate_proj" | "up_proj" | "w1" | "w3":
                return n(pre * unit)
            case "gate_up_proj":  # fused experts: [expert, 2 * width, hidden]
                return n(pre / math.sqrt(shape[-1]))
            case "down_proj" | "w2":
                return n(2.0 / (pre * pre) / math.sqrt(shape[-1]))
            case "gate":
                return n(1.5 * unit)
            case "e_score_correction_bias":
                return n(0.15)
            case "A_log":
                return n(0.5)
            case "dt_bias":
                return n(1.5, -2.0)
            case "q_conv1d" | "k_conv1d" | "v_conv1d" | "conv1d":
                return n(0.6)
            case "index_kpool_compress_ape":
                return n(0.7)
            case "fn" | "hc_attn_fn" | "hc_ffn_fn":
                return n(unit)
            case "base" | "hc_attn_base" | "hc_ffn_base":
                return n(0.8)
            case "scale" | "hc_attn_scale" | "hc_ffn_scale":
                return torch.rand(shape, generator=gen) * 1.0 + 0.5
            case "q_b_proj" | "q_proj" | "wq_b":
                return n(1.4 * unit)
        if "norm" in leaf:
            return n(0.2, 1.0)
        return n(unit)


def stable_hash(text: str) -> int:
    value = 1469598103934665603
    for byte in text.encode():
        value = ((value ^ byte) * 1099511628211) & ((1 << 64) - 1)
    return value >> 2


def release_tensors(arch: str, name: str, tensor: torch.Tensor):
    """Translate one transformers parameter to the release's tensors: (name, tensor) pairs."""
    name = name.replace(".forget_gate.", ".")
    if ".conv1d.weight" in name:
        for part, piece in zip("qkv", tensor.chunk(3, dim=0)):
            yield name.replace(".conv1d.", f".{part}_conv1d."), piece
        return
    m = re.match(r"(.*)\.(attn|ffn)_hc\.(fn|base|scale)$", name)
    if m:
        yield f"{m[1]}.hc_{m[2]}_{m[3]}", tensor
        return
    kimi = arch == "kimi_linear"
    if ".experts." in name:
        prefix = name.split(".experts.")[0]
        if kimi:
            prefix = prefix.removesuffix(".mlp") + ".block_sparse_moe"
        gate, up, down = ("w1", "w3", "w2") if kimi else ("gate_proj", "up_proj", "down_proj")
        for e, weights in enumerate(tensor):
            if name.endswith("gate_up_proj"):
                g, u = weights.chunk(2, dim=0)
                yield f"{prefix}.experts.{e}.{gate}.weight", g
                yield f"{prefix}.experts.{e}.{up}.weight", u
            else:
                yield f"{prefix}.experts.{e}.{down}.weight", weights
        return
    if kimi and (".mlp.gate." in name or ".mlp.shared_experts." in name):
        name = name.replace(".mlp.", ".block_sparse_moe.")
    yield name, tensor


# Tensors the releases keep in 32 bits; everything else is BF16 (or FP8, below).
F32 = re.compile(r"(hc_(attn|ffn)_(base|scale)|\.A_log|\.dt_bias|e_score_correction_bias)$")
# GLM-5.3-Flash: MLA projections but kv_b, dense and shared MLPs, experts. No KDA, no indexer.
FP8 = {
    "glm5_next": re.compile(
        r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|mla_o_proj)\.weight$"
        r"|language_model.*\.mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj\.weight$"
    ),
    # DeepSeek-V3 and GLM-5.2: every linear layer but router, eh_proj, indexer weights and head.
    "deepseek_v3": re.compile(
        r"self_attn\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)\.weight$"
        r"|\.mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj\.weight$"
    ),
    "glm_moe_dsa": re.compile(
        r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|indexer\.wq_b|indexer\.wk)\.weight$"
        r"|\.mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj\.weight$"
    ),
}


def is_fp8(arch: str, name: str, mla_layers: set[int]) -> bool:
    if arch not in FP8:
        return False
    if arch == "glm5_next" and name.endswith("self_attn.o_proj.weight"):
        layer = int(re.search(r"layers\.(\d+)\.", name)[1])
        return layer in mla_layers
    return bool(FP8[arch].search(name))


def quantize_fp8(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-scaled e4m3: ``weight ~ q * weight_scale_inv`` with one F32 scale per block."""
    rows, cols = weight.shape
    br, bc = math.ceil(rows / block), math.ceil(cols / block)
    padded = torch.zeros(br * block, bc * block)
    padded[:rows, :cols] = weight
    tiles = padded.view(br, block, bc, block)
    scale = tiles.abs().amax(dim=(1, 3)).clamp_min(1e-12) / 448.0
    q = (tiles / scale[:, None, :, None]).view(br * block, bc * block)[:rows, :cols]
    return q.to(torch.float8_e4m3fn).contiguous(), scale.contiguous()


def mtp_tensors(arch: str, config: dict, prefix: str, fill: Filler) -> dict[str, torch.Tensor]:
    """The NextN layer: a plain pre-norm MLA + MoE block (no hyper-connections) and its glue."""
    c = config.get("text_config", config)
    layer = c["num_hidden_layers"]
    h, heads = c["hidden_size"], c["num_attention_heads"]
    qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    v = c.get("v_head_dim", qk)
    kv, ql, width = c["kv_lora_rank"], c["q_lora_rank"], c["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "enorm.weight": (h,),
        "hnorm.weight": (h,),
        "eh_proj.weight": (h, 2 * h),
        "shared_head.norm.weight": (h,),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_a_proj.weight": (ql, h),
        "self_attn.q_a_layernorm.weight": (ql,),
        "self_attn.q_b_proj.weight": (heads * qk, ql),
        "self_attn.kv_a_proj_with_mqa.weight": (kv + c["qk_rope_head_dim"], h),
        "self_attn.kv_a_layernorm.weight": (kv,),
        "self_attn.kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + v), kv),
        "self_attn.o_proj.weight": (h, heads * v),
        "mlp.gate.weight": (c["n_routed_experts"], h),
        "mlp.gate.e_score_correction_bias": (c["n_routed_experts"],),
    }
    if "index_topk" in c:
        d, nh = c["index_head_dim"], c["index_n_heads"]
        shapes |= {
            "self_attn.indexer.wq_b.weight": (nh * d, ql),
            "self_attn.indexer.wk.weight": (d, h),
            "self_attn.indexer.k_norm.weight": (d,),
            "self_attn.indexer.k_norm.bias": (d,),
            "self_attn.indexer.weights_proj.weight": (nh, h),
        }
    if "index_kpool" in c:
        shapes |= {
            "self_attn.indexer.index_kpool_compress_ape": (c["index_kpool"], d),
            "self_attn.indexer.index_kpool_compress_gate": (d, h),
        }
    for e in [*range(c["n_routed_experts"]), None]:
        where = "mlp.shared_experts" if e is None else f"mlp.experts.{e}"
        shapes |= {
            f"{where}.gate_proj.weight": (width, h),
            f"{where}.up_proj.weight": (width, h),
            f"{where}.down_proj.weight": (h, width),
        }
    if arch == "deepseek_v3":  # DeepSeek repeats the embedding and the head in the layer
        shapes |= {"embed_tokens.weight": (c["vocab_size"], h), "shared_head.head.weight": (c["vocab_size"], h)}
    return {f"{prefix}layers.{layer}.{k}": fill(f"{prefix}layers.{layer}.{k}", s) for k, s in shapes.items()}


def build_model(arch: str, config: dict):
    import transformers

    conf_name = {
        "glm5_next": "Glm5NextConfig",
        "kimi_linear": "KimiLinearConfig",
        "glm_moe_dsa": "GlmMoeDsaConfig",
        "deepseek_v3": "DeepseekV3Config",
    }[arch]
    plain = {
        k: v for k, v in config.items() if k not in ("architectures", "auto_map", "model_type", "quantization_config")
    }
    conf = getattr(transformers, conf_name)(**plain)
    return getattr(transformers, config["architectures"][0])(conf)


def write_json(path: Path, data) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_shards(tensors: dict[str, torch.Tensor], out: Path, limit: int) -> tuple[int, int]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in sorted(tensors, key=natural):
        t = tensors[name]
        nbytes = t.numel() * t.element_size()
        if shards[-1] and size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = t.contiguous()
        size += nbytes
    index, total = {}, 0
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        for name, t in shard.items():
            index[name] = file
            total += t.numel() * t.element_size()
    write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))},
    )
    return len(shards), total


def natural(name: str):
    return [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("arch", choices=ARCHITECTURES)
    p.add_argument("out", type=Path)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--variant",
        choices=["default", "kimi_k2"],
        default="default",
        help="deepseek_v3 only: Kimi K2's spelling (one group, one dense layer, tiktoken)",
    )
    p.add_argument("--fp8", action="store_true", help="block-scaled float8_e4m3fn as in the release")
    p.add_argument("--fp8-block", type=int, default=128)
    p.add_argument(
        "--mtp", action=argparse.BooleanOptionalAction, default=True, help="write the NextN layer (not for kimi_linear)"
    )
    p.add_argument(
        "--vision", action=argparse.BooleanOptionalAction, default=True, help="write the vision tower (glm5_next only)"
    )
    p.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="dtype of the unquantized tensors; float32 keeps the drawn values exactly",
    )
    p.add_argument("--shard-mb", type=float, default=2.0)
    g = p.add_argument_group("sizes")
    g.add_argument("--hidden", type=int)
    g.add_argument("--layers", type=int)
    g.add_argument("--dense", type=int, default=3, help="dense layers at the start")
    g.add_argument("--experts", type=int, default=16)
    g.add_argument("--topk", type=int, default=4)
    g.add_argument("--intermediate", type=int, default=320)
    g.add_argument("--moe-intermediate", type=int, default=64)
    g.add_argument("--vocab", type=int, default=640, help="rows of the embedding (a few are unused)")
    g.add_argument("--heads", type=int, default=4)
    g.add_argument("--head-dim", type=int, default=32, help="qk_nope_head_dim (and v_head_dim)")
    g.add_argument("--rope-dim", type=int, default=16)
    g.add_argument("--q-lora", type=int, default=96)
    g.add_argument("--kv-lora", type=int, default=48)
    g.add_argument("--kda-heads", type=int, default=4)
    g.add_argument("--kda-head-dim", type=int, default=32)
    g.add_argument("--index-heads", type=int, default=16)
    g.add_argument("--index-head-dim", type=int, default=32)
    g.add_argument("--index-topk", type=int, default=16)
    g.add_argument("--index-kpool", type=int, default=4)
    g.add_argument("--hc-mult", type=int, default=4)
    g.add_argument("--swiglu-limit", type=float, default=10.0)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    a = parse_args(argv)
    if a.fp8 and a.arch not in FP8:
        raise SystemExit(f"no FP8 release of {a.arch} is known")
    a.out.mkdir(parents=True, exist_ok=True)
    for old in [*a.out.glob("*.safetensors"), *a.out.glob("*.json"), *a.out.glob("*.jinja"), a.out / "tiktoken.model"]:
        old.unlink(missing_ok=True)
    rng = random.Random(a.seed)
    torch.manual_seed(a.seed)

    config = globals()[f"{a.arch}_config"](a)
    text = config.get("text_config", config)
    if a.arch == "glm5_next":
        text["v_head_dim"] = a.head_dim
    kind = (
        "kimi"
        if a.arch == "kimi_linear" or a.variant == "kimi_k2"
        else ("deepseek" if a.arch == "deepseek_v3" else "glm")
    )
    ids = write_tokenizer(kind, a.out, a.vocab - 32, rng)

    # token ids of the configuration
    if kind == "glm":
        eos = [ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"]]
        text |= {"eos_token_id": eos, "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
        generation = {"eos_token_id": eos, "pad_token_id": eos[0], "temperature": 1.0, "top_p": 0.95, "do_sample": True}
        if a.arch == "glm5_next":
            config |= {
                "image_token_id": ids["<|image|>"],
                "video_token_id": ids["<|video|>"],
                "image_start_token_id": ids["<|begin_of_image|>"],
                "image_end_token_id": ids["<|end_of_image|>"],
                "video_start_token_id": ids["<|begin_of_video|>"],
                "video_end_token_id": ids["<|end_of_video|>"],
            }
    elif kind == "kimi":
        text |= {"bos_token_id": ids["[BOS]"], "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["[PAD]"]}
        generation = {"eos_token_id": ids["<|im_end|>"], "max_length": 4096}
    else:
        text |= {"bos_token_id": ids[DEEPSEEK_SPECIAL[0]], "eos_token_id": ids[DEEPSEEK_SPECIAL[1]]}
        generation = {
            "bos_token_id": text["bos_token_id"],
            "eos_token_id": text["eos_token_id"],
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.95,
        }

    # weights
    model = build_model(a.arch, config)
    fill = Filler(a.seed, text.get("swiglu_limit"))
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if "rotary" in name or name.endswith("inv_freq"):
            continue
        for release_name, part in release_tensors(a.arch, name, fill(name, tuple(value.shape))):
            tensors[release_name] = part
    if a.arch == "glm5_next" and not a.vision:
        tensors = {k: v for k, v in tensors.items() if ".visual." not in k}
    prefix = "model.language_model." if a.arch == "glm5_next" else "model."
    if a.mtp and text.get("num_nextn_predict_layers"):
        tensors |= mtp_tensors(a.arch, config, prefix, fill)

    # storage dtypes
    base = getattr(torch, a.dtype)
    mla = set(range(text["num_hidden_layers"] + 1))
    if a.arch == "glm5_next":
        mla -= set(text["linear_attn_config"]["kda_layers"])
    stored: dict[str, torch.Tensor] = {}
    kept: set[str] = set()
    for name, t in tensors.items():
        if a.fp8 and is_fp8(a.arch, name, mla):
            stored[name], stored[name + "_scale_inv"] = quantize_fp8(t, a.fp8_block)
            continue
        kept.add(name.removesuffix(".weight").removesuffix(".bias"))
        stored[name] = t.to(torch.float32 if F32.search(name) else base)
    if a.fp8:
        # The releases list modules without the wrapper: "model.layers.0...", "visual...."
        skip = sorted(
            {k.replace("model.language_model.", "model.").replace("model.visual.", "visual.") for k in kept},
            key=natural,
        )
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [a.fp8_block, a.fp8_block],
        }
        if a.arch != "deepseek_v3":
            config["quantization_config"]["modules_to_not_convert"] = skip
    config["transformers_version"] = "5.24.0"
    write_json(a.out / "config.json", dict(sorted(config.items())))
    write_json(a.out / "generation_config.json", {"_from_model_config": True, **generation})
    shards, total = write_shards(stored, a.out, int(a.shard_mb * 1e6))
    print(
        f"{a.out}: {len(stored)} tensors, {sum(t.numel() for t in tensors.values()) / 1e6:.2f} M weights, "
        f"{total / 1e6:.2f} MB in {shards} shards"
    )


if __name__ == "__main__":
    main()
