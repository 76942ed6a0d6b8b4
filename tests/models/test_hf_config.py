"""Hugging Face configs: release values survive, spellings are understood, everything else is refused by key."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.errors import InputError, UnsupportedError, WasteError
from waste.models.config import ModelConfig
from waste.models.hf_config import from_hf, weight_block

Config = dict[str, Any]


def text_of(config: Config) -> Config:
    text: Config = config.get("text_config", config)
    return text


def model_of(config: Config, generation: Config | None = None) -> ModelConfig:
    return from_hf(config, generation)[0]


def refusal(config: Config, kind: type[WasteError] = UnsupportedError) -> str:
    with pytest.raises(kind) as caught:
        from_hf(config, None)
    message = caught.value.message
    assert "\n" not in message
    return message


# -- releases


def test_glm5_next_release(glm: Config) -> None:
    model, notices = from_hf(glm, None)
    assert notices == ()
    assert model.family == "glm5_next"
    assert [i for i, kind in enumerate(model.attention) if kind == "mla"] == list(range(3, 45, 4))
    assert model.moe_layers == tuple(range(3, 45))
    assert model.indexer is not None
    assert (model.indexer.pool, model.indexer.keep) == (4, 512)
    assert model.mla.scale == 1 / 16
    assert model.mla.rotary is None
    assert model.mla.row == 512
    assert model.mla.latent_eps == 1e-5
    assert model.kda is not None
    assert model.kda.gate_lower_bound == -5.0
    assert model.kda.channels == 8192
    assert model.hc is not None
    assert (model.hc.streams, model.hc.sinkhorn_iters, model.hc.norm_eps) == (4, 20, 1e-5)
    assert model.swiglu_limit == 10.0
    assert model.draft_layers == 1
    assert model.eos_token_ids == (154820, 154827, 154829)
    assert model.pad_token_id == 154820


def test_kimi_linear_release(kimi: Config) -> None:
    model, notices = from_hf(kimi, None)
    assert notices == ()  # its own spellings are no oddity
    assert [i for i, kind in enumerate(model.attention) if kind == "mla"] == [3, 7, 11, 15, 19, 23, 26]
    assert model.moe_layers == tuple(range(1, 27))
    assert model.mla.q_lora is None
    assert model.mla.rotary is None
    assert model.mla.row == 576
    assert model.mla.scale == 192**-0.5
    assert model.mla.latent_eps == 1e-6  # not rms_norm_eps
    assert model.kda is not None
    assert model.kda.gate_lower_bound is None
    assert model.kda.norm_eps == 1e-5
    assert (model.router.experts, model.router.top_k, model.router.scaling) == (256, 8, 2.446)
    assert model.router.normalize
    assert model.max_position_embeddings == 1048576
    assert model.hc is None
    assert model.indexer is None
    assert model.swiglu_limit is None
    assert model.draft_layers == 0
    assert model.eos_token_ids == (163586,)
    assert model.bos_token_id == 163584


def test_glm_moe_dsa_release(glm52: Config) -> None:
    model, notices = from_hf(glm52, None)
    assert notices == ()
    full = [i for i, kind in enumerate(model.index_kinds) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert len(full) == 21
    assert model.mla.latent_eps == 1e-6
    assert model.rms_norm_eps == 1e-5
    assert model.mla.rotary is not None
    assert model.mla.rotary.dim == 64
    assert model.mla.rotary.inv_freq[1] == pytest.approx(8e6 ** (-2 / 64))
    assert model.indexer is not None
    assert model.indexer.pool == 1
    assert model.indexer.rotary == model.mla.rotary
    assert model.mla.scale == 1 / 16
    assert set(model.attention) == {"mla"}


def test_deepseek_release_and_kimi_k2(deepseek: Config) -> None:
    model, notices = from_hf(deepseek, None)
    assert notices == ()
    assert (model.router.groups, model.router.topk_groups) == (8, 4)
    m = 0.1 * math.log(40) + 1
    assert model.mla.scale == pytest.approx(192**-0.5 * m * m)
    assert model.mla.latent_eps == 1e-6
    deepseek["model_type"] = "kimi_k2"
    assert model_of(deepseek) == model


def test_indexer_pattern_is_derived_as_transformers_does(glm52: Config) -> None:
    stated = model_of(glm52).index_kinds
    del glm52["indexer_types"]
    assert model_of(glm52).index_kinds == stated
    glm52["index_topk_pattern"] = "".join("F" if kind == "full" else "S" for kind in stated)
    del glm52["index_topk_freq"]
    assert model_of(glm52).index_kinds == stated
    del glm52["index_topk_pattern"]
    assert set(model_of(glm52).index_kinds) == {"full"}


def test_round_trip_through_json(release: Config) -> None:
    model = model_of(release)
    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model


def test_config_is_not_changed(release: Config) -> None:
    before = copy.deepcopy(release)
    from_hf(release, {"eos_token_id": 7})
    assert release == before


def test_flat_text_config_is_the_same_model(glm: Config) -> None:
    flat = {**glm["text_config"], "quantization_config": glm["quantization_config"]}
    assert model_of(flat) == model_of(glm)
    flat["model_type"] = "glm5_next"
    assert model_of(flat) == model_of(glm)


# -- oracle: transformers' own classes


def arguments(config: Config) -> Config:
    """What a config class of transformers takes without warnings."""
    left_out = ("model_type", "architectures", "quantization_config")
    kept = {key: value for key, value in config.items() if key not in left_out}
    if kept.get("rope_scaling", 0) is None:
        del kept["rope_scaling"]
    return copy.deepcopy(kept)


@pytest.mark.parametrize(
    ("original", "factor", "fast", "slow"), [(4096, 40, 32, 1), (4096, 32.0, 1.0, 1.0), (64, 8, 32, 1)]
)
def test_yarn_equals_transformers(deepseek: Config, original: int, factor: float, fast: float, slow: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    deepseek["rope_scaling"] |= {
        "original_max_position_embeddings": original, "factor": factor, "beta_fast": fast, "beta_slow": slow,
    }  # fmt: skip
    theirs = transformers.DeepseekV3Config(**arguments(deepseek))
    freq, wave = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    model = model_of(deepseek)
    assert model.mla.rotary is not None
    assert wave == 1.0
    assert model.mla.rotary.inv_freq == pytest.approx(freq.tolist(), rel=1e-5)
    assert model.mla.scale == pytest.approx(yarn_apply_mscale(theirs.rope_parameters, 192**-0.5))


def test_layer_plan_equals_transformers(glm: Config, kimi: Config) -> None:
    transformers = pytest.importorskip("transformers")
    for config, cls in ((kimi, "KimiLinearConfig"), (glm["text_config"], "Glm5NextTextConfig")):
        theirs = getattr(transformers, cls)(**arguments(config))
        ours = model_of(config)
        assert [kind == "kda" for kind in ours.attention] == [t == "linear_attention" for t in theirs.layer_types]
        assert [kind == "moe" for kind in ours.mlp] == [t == "sparse" for t in theirs.mlp_layer_types]


def test_config_written_back_by_transformers(glm: Config, kimi: Config) -> None:
    """transformers spells the KDA settings and the counts of experts in its own way when it saves."""
    transformers = pytest.importorskip("transformers")
    for config, cls in ((kimi, "KimiLinearConfig"), (glm["text_config"], "Glm5NextTextConfig")):
        written = json.loads(getattr(transformers, cls)(**arguments(config)).to_json_string(use_diff=False))
        written.setdefault("mla_use_nope", True)
        ours, again = model_of(config), model_of({**written, "eos_token_id": config["eos_token_id"]})
        assert again == ours


# -- layer kinds


def eight(config: Config) -> Config:
    """A plan of eight layers with full attention at 3 and 7."""
    text = text_of(config)
    text["num_hidden_layers"] = 8
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        text.pop(key, None)
    text.setdefault("linear_attn_config", {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4})
    text["linear_attn_config"] |= {"kda_layers": [0, 1, 2, 4, 5, 6], "full_attn_layers": [3, 7]}
    return text


WORDS = (["linear_attention"] * 3 + ["full_attention"]) * 2


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("family", ["glm", "kimi", "deepseek"])
def test_base_of_layer_lists_is_recognised(request: pytest.FixtureRequest, family: str, base: int, words: bool) -> None:
    config = request.getfixturevalue(family)
    text = eight(config)
    text["linear_attn_config"] |= {
        "kda_layers": [base + i for i in (0, 1, 2, 4, 5, 6)],
        "full_attn_layers": [base + 3, base + 7],
    }
    if words:
        text["layer_types"] = list(WORDS)
    assert [i for i, kind in enumerate(model_of(config).attention) if kind == "mla"] == [3, 7]


@given(layers=st.integers(1, 40), base=st.integers(0, 1), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_partition_is_recovered(layers: int, base: int, data: st.DataObject) -> None:
    from waste.models.hf_layers import attention_kinds
    from waste.models.hf_reader import Reader

    full = data.draw(st.sets(st.integers(0, layers - 1)))
    linear = {
        "full_attn_layers": [i + base for i in sorted(full)],
        "kda_layers": [i + base for i in range(layers) if i not in full],
    }
    kinds = attention_kinds(Reader({"linear_attn_config": linear}, "", []), layers, own_spelling="full_attention")
    assert {i for i, kind in enumerate(kinds) if kind == "mla"} == full


@pytest.mark.parametrize(
    ("kda", "full", "word"),
    [
        ([1, 2, 4, 5, 6], [3, 7], "neither 0 nor 8"),  # 0 left out: reads as neither base
        ([0, 1, 2, 4, 5, 6, 8], [3, 7], "both 0 and 8"),
        ([0, 1, 2, 3, 4, 5, 6], [3, 7], "layer 3 twice"),
        ([0, 1, 2, 4, 5], [3, 7], "leave out layer 6"),
        ([0, 1, 2, 4, 5, 9], [3, 7], "layer 9 of 8"),
        (None, [3, 6], "neither 0 nor 8"),
    ],
)
def test_ambiguous_layer_lists_are_refused(glm: Config, kda: list[int] | None, full: list[int], word: str) -> None:
    eight(glm)["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    assert word in refusal(glm, InputError)


def test_layer_types_decide_over_the_lists(glm: Config) -> None:
    eight(glm)["layer_types"] = list(reversed(WORDS))
    model, notices = from_hf(glm, None)
    assert [i for i, kind in enumerate(model.attention) if kind == "mla"] == [0, 4]
    assert any("contradict layer_types" in notice for notice in notices)


# -- end ids


@pytest.mark.parametrize("place", ["top", "text", "generation"])
@pytest.mark.parametrize("ids", [[11, 300, 301], 11])
def test_every_end_id_is_kept_from_any_file(glm: Config, place: str, ids: list[int] | int) -> None:
    glm["text_config"].pop("eos_token_id")
    generation: Config = {}
    {"top": glm, "text": glm["text_config"], "generation": generation}[place]["eos_token_id"] = ids
    assert model_of(glm, generation).eos_token_ids == ((11, 300, 301) if isinstance(ids, list) else (11,))


def test_end_ids_are_united_in_order(glm: Config) -> None:
    glm["eos_token_id"] = [9, 8]
    glm["text_config"]["eos_token_id"] = 7
    assert model_of(glm, {"eos_token_id": [8, 6]}).eos_token_ids == (9, 8, 7, 6)


def test_no_end_id_is_a_notice(glm: Config) -> None:
    glm["text_config"].pop("eos_token_id")
    model, notices = from_hf(glm, None)
    assert model.eos_token_ids == ()
    assert any("eos_token_id" in notice for notice in notices)


@pytest.mark.parametrize("bad", ["11", True, -1, [3, None], [2.0], 154880, {"a": 1}])
def test_bad_end_ids_are_refused(glm: Config, bad: object) -> None:
    glm["text_config"]["eos_token_id"] = bad
    assert "eos_token_id" in refusal(glm, InputError)


# -- rotary settings

ROPES: dict[str, Config] = {
    "flat": {"rope_theta": 500000, "rope_scaling": None},
    "parameters": {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    "scaling_holds_theta": {"rope_scaling": {"rope_theta": 500000.0, "rope_type": "default"}},
    "per_layer_type": {"rope_parameters": {"full_attention": {"rope_theta": 500000.0, "rope_type": "default"}}},
    "both_disagree": {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
}


@pytest.mark.parametrize("place", ROPES)
def test_theta_is_found_wherever_it_is(deepseek: Config, place: str) -> None:
    del deepseek["rope_theta"], deepseek["rope_scaling"]
    deepseek |= ROPES[place]
    model, notices = from_hf(deepseek, None)
    assert model.mla.rotary is not None
    assert model.mla.rotary.inv_freq == pytest.approx([500000.0 ** (-2 * i / 64) for i in range(32)])
    assert model.mla.scale == 192**-0.5
    assert bool(notices) == (place == "both_disagree")


def test_yarn_under_rope_parameters_is_the_same(deepseek: Config) -> None:
    before = model_of(deepseek)
    scaling = deepseek.pop("rope_scaling")
    scaling["rope_type"] = scaling.pop("type")
    deepseek["rope_parameters"] = {**scaling, "rope_theta": deepseek.pop("rope_theta")}
    assert model_of(deepseek) == before


def test_missing_theta_never_becomes_a_default(deepseek: Config) -> None:
    del deepseek["rope_theta"]
    assert "rope_theta is missing" in refusal(deepseek, InputError)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"type": "linear"}, "linear"),
        ({"type": "llama3"}, "llama3"),
        ({"mscale": 0.7}, "mscale"),
        ({"mscale": None, "mscale_all_dim": None}, "mscale"),
        ({"attention_factor": 1.3}, "mscale"),
        ({"truncate": False}, "truncate"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_other_rotary_scaling_is_refused(deepseek: Config, change: Config, word: str) -> None:
    deepseek["rope_scaling"] |= change
    assert word in refusal(deepseek)


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
def test_yarn_needs_its_numbers(deepseek: Config, key: str) -> None:
    del deepseek["rope_scaling"][key]
    assert key in refusal(deepseek, InputError)


# -- values that must not be defaulted


def test_index_kpool_is_read_not_defaulted(glm: Config) -> None:
    glm["text_config"]["index_kpool"] = 8
    indexer = model_of(glm).indexer
    assert indexer is not None
    assert indexer.pool == 8
    del glm["text_config"]["index_kpool"]
    assert "index_kpool is missing" in refusal(glm, InputError)


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"gate_lower_bound": -3.0}, -3.0),
        ({"gate_lower_bound": None}, -5.0),
        ({"gate_lower_bound": None, "safe_gate": True}, -5.0),
        ({"gate_lower_bound": None, "safe_gate": False}, None),
        ({"gate_lower_bound": -2, "safe_gate": False}, -2.0),
    ],
)
def test_gate_lower_bound(glm: Config, change: Config, bound: float | None) -> None:
    linear = glm["text_config"]["linear_attn_config"]
    linear |= change
    for missing in (False, True):
        if missing and linear["gate_lower_bound"] is None:
            del linear["gate_lower_bound"]
        kda = model_of(glm).kda
        assert kda is not None
        assert kda.gate_lower_bound == bound


REQUIRED = [
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "rms_norm_eps",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "routed_scaling_factor",
    "norm_topk_prob",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
]
REQUIRED_BY = {
    "glm": [*REQUIRED, "q_lora_rank", "index_topk", "index_n_heads", "index_head_dim", "index_kpool", "hc_mult",
            "hc_sinkhorn_iters", "hc_eps", "swiglu_limit"],
    "kimi": [],
    "glm52": [*REQUIRED, "q_lora_rank", "index_topk", "index_n_heads", "index_head_dim", "first_k_dense_replace"],
    "deepseek": [*REQUIRED, "n_group", "topk_group", "first_k_dense_replace"],
}  # fmt: skip


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in REQUIRED_BY.items() for key in keys])
def test_missing_keys_are_named(request: pytest.FixtureRequest, family: str, key: str) -> None:
    config = request.getfixturevalue(family)
    del text_of(config)[key]
    assert f"{key} is missing" in refusal(config, InputError)


BAD_INTEGERS: list[object] = ["4", True, -1, 0, 2.5, [1], {}, 2**40]


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_experts_per_tok", "index_kpool", "kv_lora_rank"]
)
@pytest.mark.parametrize("bad", BAD_INTEGERS, ids=repr)
def test_wrong_integers_are_refused_by_key(glm: Config, key: str, bad: object) -> None:
    glm["text_config"][key] = bad
    assert key in refusal(glm, InputError)


@pytest.mark.parametrize("key", ["rms_norm_eps", "routed_scaling_factor", "swiglu_limit", "hc_eps"])
@pytest.mark.parametrize("bad", ["1e-5", True, -1, 0, math.nan, math.inf, [1.0], 10**400], ids=lambda v: repr(v)[:12])
def test_wrong_numbers_are_refused_by_key(glm: Config, key: str, bad: object) -> None:
    glm["text_config"][key] = bad
    assert key in refusal(glm, InputError)


# -- variants


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("index_kpool_compress", False, "false"),
        ("index_kpool_always_select_tail", False, "false"),
        ("mhc", False, "false"),
        ("hres_vwnstyle", False, "false"),
        ("mhc_no_norm_weight", True, "true"),
        ("indexer_types", ["full"] * 44 + ["shared"], "shared"),
        ("mla_use_nope", False, "false"),
        ("qk_rope_head_dim", 64, "64"),
        ("hidden_act", "gelu", "gelu"),
        ("scoring_func", "softmax", "softmax"),
        ("topk_method", "greedy", "greedy"),
        ("attention_bias", True, "true"),
        ("moe_layer_freq", 2, "2"),
        ("moe_router_dtype", "bfloat16", "bfloat16"),
        ("num_key_value_heads", 8, "8"),
        ("mlp_bias", True, "true"),
    ],
)
def test_unsupported_values_are_refused_by_key_and_value(glm: Config, key: str, value: object, said: str) -> None:
    glm["text_config"][key] = value
    glm["text_config"].pop("qk_head_dim")
    message = refusal(glm)
    assert f"text_config.{key}" in message
    assert said in message
    assert "supported" in message


@pytest.mark.parametrize(
    "key",
    [
        "index_kpool_compress",
        "index_kpool_always_select_tail",
        "mhc",
        "moe_layer_freq",
        "mla_use_nope",
        "scoring_func",
        "topk_method",
        "hidden_act",
        "attention_bias",
        "n_group",
        "topk_group",
        "moe_router_dtype",
        "indexer_types",
        "num_key_value_heads",
    ],
)
def test_absent_keys_that_mean_the_supported_value(glm: Config, key: str) -> None:
    before = model_of(glm)
    del glm["text_config"][key]
    assert model_of(glm) == before


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("mla_use_nope", "mla_nope"),
        ("hc_mult", "mhc_num_residual_streams"),
        ("hc_sinkhorn_iters", "mhc_sinkhorn_iterations"),
        ("n_routed_experts", "num_local_experts"),
    ],
)
def test_other_spellings_are_accepted_with_a_notice(glm: Config, own: str, other: str) -> None:
    before = model_of(glm)
    text = glm["text_config"]
    text[other] = text.pop(own)
    model, notices = from_hf(glm, None)
    assert model == before
    assert any(other in notice for notice in notices)
    text[own] = text[other]
    assert from_hf(glm, None) == (before, ())  # both, and they agree


def test_spellings_that_disagree_are_refused(glm: Config) -> None:
    glm["text_config"]["mhc_num_residual_streams"] = 2
    message = refusal(glm, InputError)
    assert "hc_mult" in message
    assert "mhc_num_residual_streams" in message


@pytest.mark.parametrize("word", ["full_attention", "indexed_attention"])
def test_words_for_full_attention(glm: Config, word: str) -> None:
    before = model_of(glm)
    types = glm["text_config"]["layer_types"]
    glm["text_config"]["layer_types"] = [word if t != "linear_attention" else t for t in types]
    model, notices = from_hf(glm, None)
    assert model == before
    assert any(word in notice for notice in notices)


def test_unknown_layer_types_are_refused(glm: Config) -> None:
    glm["text_config"]["layer_types"][5] = "sliding_attention"
    message = refusal(glm)
    assert "layer_types[5]" in message
    assert "sliding_attention" in message


@pytest.mark.parametrize(
    ("family", "change", "word"),
    [
        ("glm52", {"qk_rope_head_dim": 63, "qk_head_dim": None}, "qk_rope_head_dim"),
        ("glm52", {"qk_head_dim": 255}, "qk_head_dim"),
        ("glm52", {"indexer_types": ["shared"] + ["full"] * 77}, "indexer_types[0]"),
        ("glm52", {"index_head_dim": 32}, "index_head_dim"),
        ("deepseek", {"qk_rope_head_dim": 0}, "qk_rope_head_dim"),
        ("deepseek", {"n_group": 7}, "n_group"),
        ("deepseek", {"topk_group": 9}, "topk_group"),
        ("deepseek", {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ("glm", {"index_topk": 2047}, "index_topk"),
        ("glm", {"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ("glm", {"layer_types": ["linear_attention"]}, "layer_types"),
        ("glm", {"vocab_size": 154820}, "eos_token_id"),
        ("glm", {"linear_attn_config": 5}, "linear_attn_config"),
    ],
)
def test_contradictions_are_refused(request: pytest.FixtureRequest, family: str, change: Config, word: str) -> None:
    config = request.getfixturevalue(family)
    text_of(config).update(change)
    assert word in refusal(config, InputError)


@pytest.mark.parametrize(
    ("family", "change", "word"),
    [
        ("glm52", {"rope_interleave": False}, "rope_interleave"),
        ("glm52", {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ("deepseek", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek", {"index_topk": 2048}, "index_topk"),
        ("deepseek", {"first_k_dense_replace": 61}, "first_k_dense_replace"),
        ("glm52", {"layer_types": ["linear_attention"] + ["indexed_attention"] * 77}, "layer_types[0]"),
        ("kimi", {"mla_use_output_gate": True}, "mla_use_output_gate"),
        ("kimi", {"attn_res_block_size": 12}, "attn_res_block_size"),
        ("kimi", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ("kimi", {"mla_use_nope": False}, "mla_use_nope"),
    ],
)
def test_variants_of_the_other_families(request: pytest.FixtureRequest, family: str, change: Config, word: str) -> None:
    config = request.getfixturevalue(family)
    config |= change
    assert word in refusal(config)


# -- which model


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("glm5_nxt", ["glm5_nxt", "glm5_next"]),
        ("deepseek_v32", ["deepseek_v32", "deepseek_v3"]),
        ("llama", ["llama"]),
        ("kimi_k3", ["kimi_k3", "not supported yet"]),
        ("new\nline", ["new\\nline"]),
    ],
)
def test_unknown_models_are_named(deepseek: Config, name: str, words: list[str]) -> None:
    deepseek["model_type"] = name
    message = refusal(deepseek)
    assert all(word in message for word in words)


def test_k3_is_refused_although_its_text_model_is_known(kimi: Config) -> None:
    assert "kimi_k3" in refusal({"model_type": "kimi_k3", "text_config": kimi})


@pytest.mark.parametrize("bad", [None, 5])
def test_model_type_must_be_there(deepseek: Config, bad: object) -> None:
    deepseek["model_type"] = bad
    assert "model_type" in refusal(deepseek, InputError)


@pytest.mark.parametrize("bad", [[], "text", 3, None])
def test_config_must_be_an_object(bad: Any) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        from_hf(bad, None)


# -- quantisation and tied embeddings


def test_weight_block(glm: Config) -> None:
    assert weight_block(glm) == (128, 128)
    glm["quantization_config"]["weight_block_size"] = [64, 32]
    assert weight_block(glm) == (64, 32)
    del glm["quantization_config"]
    assert weight_block(glm) == (128, 128)


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size"),
    ],
)
def test_other_quantisation_is_refused(deepseek: Config, section: Config, word: str) -> None:
    deepseek["quantization_config"] = section
    assert word in refusal(deepseek)


@pytest.mark.parametrize("size", [[128], [128, 0], "128", [128, True], [128.0, 128]])
def test_wrong_block_sizes_are_refused(deepseek: Config, size: object) -> None:
    deepseek["quantization_config"]["weight_block_size"] = size
    assert "weight_block_size" in refusal(deepseek, InputError)


def test_tied_embeddings(glm: Config) -> None:
    glm["tie_word_embeddings"] = glm["text_config"]["tie_word_embeddings"] = True
    assert model_of(glm).tie_word_embeddings
    glm["tie_word_embeddings"] = False
    assert "tie_word_embeddings" in refusal(glm, InputError)
    del glm["tie_word_embeddings"], glm["text_config"]["tie_word_embeddings"]
    assert "tie_word_embeddings is missing" in refusal(glm, InputError)
    for names, tied in ((["lm_head.weight", "model.norm.weight"], False), (["model.norm.weight"], True)):
        model, notices = from_hf(glm, None, tensor_names=names)
        assert model.tie_word_embeddings == tied
        assert any("tie_word_embeddings" in notice for notice in notices)


# -- draft layer


def test_draft_layer_needs_its_tensors(glm: Config) -> None:
    with_draft = ["model.language_model.layers.45.eh_proj.weight", "lm_head.weight"]
    assert from_hf(glm, None, tensor_names=with_draft)[0].draft_layers == 1
    model, notices = from_hf(glm, None, tensor_names=["model.language_model.layers.44.mlp.gate.weight"])
    assert model.draft_layers == 0
    assert any("num_nextn_predict_layers" in notice for notice in notices)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_only_the_first_draft_layer_is_kept(deepseek: Config, count: int) -> None:
    deepseek["num_nextn_predict_layers"] = count
    model, notices = from_hf(deepseek, None)
    assert model.draft_layers == min(count, 1)
    assert bool(notices) == (count > 1)


# -- robustness


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("family", ["glm", "kimi", "glm52", "deepseek"])
def test_any_value_under_any_key_is_accepted_or_refused_in_one_line(
    request: pytest.FixtureRequest, family: str
) -> None:
    base = request.getfixturevalue(family)
    sites: list[Callable[[Config], Config]] = [lambda c: c, text_of, lambda c: text_of(c).get("linear_attn_config", c)]

    @given(data=st.data(), value=JSON)
    @settings(max_examples=80, deadline=None)
    def law(data: st.DataObject, value: object) -> None:
        config = copy.deepcopy(base)
        site = data.draw(st.sampled_from(sites))(config)
        site[data.draw(st.sampled_from(sorted(site)))] = value
        model, said = None, ""
        try:
            model = model_of(config)
        except WasteError as error:
            said = error.message
        assert "\n" not in said
        if model is not None:
            assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model

    law()
