"""Name tables against real spellings: all of a release's tensors are accounted for, and every spec finds its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from waste.convert import ConvertOptions, plan_conversion
from waste.convert.names import is_copy, is_vision, table_for

GLM = {"model.language_model.embed_tokens.weight", "lm_head.weight", "model.language_model.layers.1.mlp.experts.0.x"}
KIMI = {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.block_sparse_moe.experts.0.w1.weight"}
PLAIN = {"model.layers.1.mlp.experts.0.gate_proj.weight"}
SPARSE = "model.layers.{}.block_sparse_moe."
K2 = {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"}


@pytest.mark.parametrize(
    ("family", "names", "spec", "release"),
    [
        ("glm5_next", GLM, "layers.3.self_attn.A_log", "model.language_model.layers.3.self_attn.A_log"),
        ("glm5_next", GLM, "lm_head.weight", "lm_head.weight"),
        ("glm5_next", set(), "norm.weight", "model.language_model.norm.weight"),
        ("deepseek_v3", set(), "norm.weight", "model.norm.weight"),
        ("deepseek_v3", K2, "norm.weight", "language_model.model.norm.weight"),
        ("deepseek_v3", K2, "lm_head.weight", "language_model.lm_head.weight"),
        ("kimi_linear", KIMI, "layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("kimi_linear", KIMI, "layers.1.mlp.gate.weight", "model.layers.1.block_sparse_moe.gate.weight"),
        (
            "kimi_linear",
            KIMI,
            "layers.1.mlp.gate.e_score_correction_bias",
            "model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
        ),
        (
            "kimi_linear",
            KIMI,
            "layers.1.mlp.shared_experts.up_proj.weight",
            "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight",
        ),
        ("kimi_linear", KIMI, "layers.12.mlp.experts.99.gate_proj.weight", f"{SPARSE.format(12)}experts.99.w1.weight"),
        ("kimi_linear", KIMI, "layers.1.mlp.experts.3.up_proj.weight", f"{SPARSE.format(1)}experts.3.w3.weight"),
        ("kimi_linear", KIMI, "layers.1.mlp.experts.3.down_proj.weight", f"{SPARSE.format(1)}experts.3.w2.weight"),
        ("kimi_linear", PLAIN, "layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.weight"),
    ],
)  # fmt: skip
def test_release_names(family: str, names: set[str], spec: str, release: str) -> None:
    assert table_for(family, names).release(spec) == release


def test_what_is_left_out() -> None:
    assert is_vision("model.visual.blocks.0.attn.qkv.weight")
    assert is_vision("vision_tower.patch_embed.weight")
    assert is_vision("mm_projector.proj.0.weight")
    assert not is_vision("model.language_model.layers.0.visual.weight")
    assert is_copy("model.layers.61.shared_head.head.weight")
    assert is_copy("model.layers.61.embed_tokens.weight")
    assert not is_copy("model.embed_tokens.weight")
    assert not is_copy("model.layers.61.shared_head.norm.weight")


RELEASES = {
    "glm5_next": ["--fp8", "--layers", "4", "--dense", "1"],
    "kimi_linear": ["--layers", "4"],
    "glm_moe_dsa": ["--fp8", "--layers", "4", "--dense", "1"],
    "deepseek_v3": ["--fp8", "--layers", "3", "--dense", "1"],
    "kimi_k2": ["--variant", "kimi_k2", "--layers", "3"],
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers about keys that the releases have
@pytest.mark.parametrize("release", RELEASES)
def test_every_tensor_of_every_family_is_accounted_for(release: str, tmp_path: Path) -> None:
    """Checkpoints made from transformers' own classes, in the releases' spelling: nothing missing, nothing over."""
    pytest.importorskip("transformers")
    tiny_checkpoint = pytest.importorskip("tiny_checkpoint")
    architecture = "deepseek_v3" if release == "kimi_k2" else release
    small = ["--experts", "8", "--topk", "2", "--vocab", "400"]
    tiny_checkpoint.main([architecture, str(tmp_path / "ckpt"), *RELEASES[release], *small])
    plan = plan_conversion(str(tmp_path / "ckpt"), tmp_path / "out", ConvertOptions())
    assert plan.unused == ()
    assert bool(plan.vision) == (release == "glm5_next")
    assert bool(plan.copies) == (release == "deepseek_v3")
    assert plan.config.draft_layers == (0 if release.startswith("kimi") else 1)
