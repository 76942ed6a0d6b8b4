"""A checkpoint in GLM-5.3-Flash's release layout, below 1 MB, written by hand: random weights whose values are known.

FP8 with partial blocks, BF16 and F32 beside it, an MTP layer, vision tensors, a byte-level tokenizer, a chat template.
It shares no code with the package, so that it can be its judge.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HIDDEN, VOCAB, EXPERTS, INNER, DENSE = 160, 320, 4, 40, 144
HEADS, NOPE, V, Q_LORA, KV_LORA = 2, 16, 24, 32, 24
KDA_HEADS, KDA_DIM, CONV = 2, 16, 4
INDEX_HEADS, INDEX_DIM, POOL = 2, 16, 4
KINDS = ["linear_attention", "deepseek_sparse_attention"]
LAYERS = len(KINDS)
MLA_LAYERS = [i for i, kind in enumerate(KINDS) if "sparse" in kind]
WRAPPER = "model.language_model."

SPECIALS = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|><think>"


@dataclass
class Stored:
    """One tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Tiny:
    """A checkpoint folder, what is in it, and what its weights mean. `write` makes the folder say so."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Stored] = field(default_factory=dict)
    truth: dict[str, np.ndarray] = field(default_factory=dict)  # float32, by name in the checkpoint
    shards: int = 3
    tokenizer: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> dict[str, Any]:
        """The config of the text model."""
        found: dict[str, Any] = self.config["text_config"]
        return found

    def write(self) -> Tiny:
        """Write config, tokenizer and shards (0: one file without an index), replacing the weights."""
        self.path.mkdir(parents=True, exist_ok=True)
        for old in [*self.path.glob("*.safetensors"), *self.path.glob("*.index.json")]:
            old.unlink()
        write_json(self.path / "config.json", self.config)
        write_json(self.path / "generation_config.json", {"eos_token_id": self.text["eos_token_id"], "top_p": 0.95})
        write_json(self.path / "tokenizer.json", self.tokenizer)
        write_json(self.path / "tokenizer_config.json", {"eos_token": SPECIALS[0]})
        (self.path / "chat_template.jinja").write_text(TEMPLATE)
        names = list(self.tensors)
        if self.shards == 0:
            write_safetensors(self.path / "model.safetensors", self.tensors)
            return self
        index = {}
        for i in range(self.shards):
            file = f"model-{i + 1:05d}-of-{self.shards:05d}.safetensors"
            part = names[i :: self.shards] if i else names[:: self.shards]
            write_safetensors(self.path / file, {name: self.tensors[name] for name in part})
            index.update(dict.fromkeys(part, file))
        write_json(self.path / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
        return self

    def at(self, path: Path) -> Tiny:
        """A copy at another place, written."""
        return Tiny(
            path, copy.deepcopy(self.config), dict(self.tensors), dict(self.truth), self.shards,
            copy.deepcopy(self.tokenizer),
        ).write()  # fmt: skip


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def write_safetensors(path: Path, tensors: dict[str, Stored]) -> None:
    """The format by hand: header length, header, data without gaps."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors.values()))


def bf16(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Truncated to bf16: (uint16 bits, the float32 values they stand for)."""
    bits = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def _e4m3_values() -> np.ndarray:
    values = np.empty(256)
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[byte] = math.nan if byte & 127 == 127 else -size if byte & 128 else size
    return values


E4M3 = _e4m3_values()
_FINITE = np.flatnonzero(np.isfinite(E4M3))


def fp8(values: np.ndarray, block: int = 128) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block-scaled e4m3: (bytes, scales, the float32 values they stand for)."""
    rows, cols = values.shape
    grid = math.ceil(rows / block), math.ceil(cols / block)
    scale = np.empty(grid, np.float32)
    for r in range(grid[0]):
        for c in range(grid[1]):
            part = values[r * block : (r + 1) * block, c * block : (c + 1) * block]
            scale[r, c] = np.float32(np.abs(part).max() / 448)
    spread = np.repeat(np.repeat(scale, block, 0), block, 1)[:rows, :cols]
    order = _FINITE[np.argsort(E4M3[_FINITE], kind="stable")]
    steps = E4M3[order]
    nearest = np.searchsorted((steps[1:] + steps[:-1]) / 2, values / spread)
    codes = order[nearest].astype(np.uint8)
    return codes, scale, (E4M3[codes] * spread.astype(np.float64)).astype(np.float32)


class Builder:
    """Draws tensors and records what they mean."""

    def __init__(self, tiny: Tiny, seed: int, quantised: bool) -> None:
        self.tiny = tiny
        self.rng = np.random.default_rng(seed)
        self.quantised = quantised

    def draw(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape) / math.sqrt(shape[-1])

    def put_bf16(self, name: str, *shape: int) -> None:
        bits, self.tiny.truth[name] = bf16(self.draw(*shape))
        self.tiny.tensors[name] = Stored("BF16", shape, bits.tobytes())

    def put_f32(self, name: str, *shape: int) -> None:
        values = self.draw(*shape).astype(np.float32)
        self.tiny.truth[name] = values
        self.tiny.tensors[name] = Stored("F32", shape, values.tobytes())

    def put_fp8(self, name: str, rows: int, cols: int) -> None:
        if not self.quantised:
            self.put_bf16(name, rows, cols)
            return
        codes, scale, self.tiny.truth[name] = fp8(self.draw(rows, cols))
        self.tiny.tensors[name] = Stored("F8_E4M3", (rows, cols), codes.tobytes())
        self.tiny.tensors[f"{name}_scale_inv"] = Stored("F32", scale.shape, scale.tobytes())


def build(path: Path, seed: int = 1, quantised: bool = True) -> Tiny:
    """A checkpoint of three layers: KDA with a dense MLP, MLA with experts, and the MTP layer."""
    tokenizer = byte_tokenizer()
    end = 256 + len(MERGES)
    tiny = Tiny(path, config_of(end), tokenizer=tokenizer)
    b = Builder(tiny, seed, quantised)
    b.put_bf16(f"{WRAPPER}embed_tokens.weight", VOCAB, HIDDEN)
    for i in range(LAYERS + 1):
        at = f"{WRAPPER}layers.{i}."
        draft = i == LAYERS
        b.put_bf16(f"{at}input_layernorm.weight", HIDDEN)
        b.put_bf16(f"{at}post_attention_layernorm.weight", HIDDEN)
        if draft:
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                b.put_bf16(f"{at}{norm}.weight", HIDDEN)
            b.put_bf16(f"{at}eh_proj.weight", HIDDEN, 2 * HIDDEN)
        else:
            for site in ("attn", "ffn"):
                b.put_bf16(f"{at}hc_{site}_fn", 24, 4 * HIDDEN)
                b.put_f32(f"{at}hc_{site}_base", 24)
                b.put_f32(f"{at}hc_{site}_scale", 3)
        if draft or i in MLA_LAYERS:
            _mla(b, f"{at}self_attn.")
        else:
            _kda(b, f"{at}self_attn.")
        if i == 0:
            _swiglu(b, f"{at}mlp.", DENSE)
            continue
        b.put_bf16(f"{at}mlp.gate.weight", EXPERTS, HIDDEN)
        b.put_f32(f"{at}mlp.gate.e_score_correction_bias", EXPERTS)
        _swiglu(b, f"{at}mlp.shared_experts.", INNER)
        for e in range(EXPERTS):
            _swiglu(b, f"{at}mlp.experts.{e}.", INNER)
    b.put_bf16(f"{WRAPPER}norm.weight", HIDDEN)
    b.put_bf16("lm_head.weight", VOCAB, HIDDEN)
    b.put_bf16("model.visual.patch_embed.proj.weight", 8, 3, 2, 2)
    b.put_bf16("model.visual.blocks.0.norm1.weight", 8)
    return tiny.write()


def _mla(b: Builder, at: str) -> None:
    b.put_fp8(f"{at}q_a_proj.weight", Q_LORA, HIDDEN)
    b.put_bf16(f"{at}q_a_layernorm.weight", Q_LORA)
    b.put_fp8(f"{at}q_b_proj.weight", HEADS * NOPE, Q_LORA)
    b.put_fp8(f"{at}kv_a_proj_with_mqa.weight", KV_LORA, HIDDEN)
    b.put_bf16(f"{at}kv_a_layernorm.weight", KV_LORA)
    b.put_bf16(f"{at}kv_b_proj.weight", HEADS * (NOPE + V), KV_LORA)
    b.put_fp8(f"{at}o_proj.weight", HIDDEN, HEADS * V)
    b.put_bf16(f"{at}indexer.wq_b.weight", INDEX_HEADS * INDEX_DIM, Q_LORA)
    b.put_bf16(f"{at}indexer.wk.weight", INDEX_DIM, HIDDEN)
    b.put_bf16(f"{at}indexer.k_norm.weight", INDEX_DIM)
    b.put_bf16(f"{at}indexer.k_norm.bias", INDEX_DIM)
    b.put_bf16(f"{at}indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
    b.put_bf16(f"{at}indexer.index_kpool_compress_gate", INDEX_DIM, HIDDEN)
    b.put_bf16(f"{at}indexer.index_kpool_compress_ape", POOL, INDEX_DIM)


def _kda(b: Builder, at: str) -> None:
    channels = KDA_HEADS * KDA_DIM
    for part in "qkv":
        b.put_bf16(f"{at}{part}_proj.weight", channels, HIDDEN)
        b.put_bf16(f"{at}{part}_conv1d.weight", channels, 1, CONV)
    for part in "fg":
        b.put_bf16(f"{at}{part}_a_proj.weight", KDA_DIM, HIDDEN)
        b.put_bf16(f"{at}{part}_b_proj.weight", channels, KDA_DIM)
    b.put_bf16(f"{at}b_proj.weight", KDA_HEADS, HIDDEN)
    b.put_f32(f"{at}A_log", KDA_HEADS)
    b.put_f32(f"{at}dt_bias", channels)
    b.put_bf16(f"{at}o_norm.weight", KDA_DIM)
    b.put_bf16(f"{at}o_proj.weight", HIDDEN, channels)


def _swiglu(b: Builder, at: str, width: int) -> None:
    b.put_fp8(f"{at}gate_proj.weight", width, HIDDEN)
    b.put_fp8(f"{at}up_proj.weight", width, HIDDEN)
    b.put_fp8(f"{at}down_proj.weight", HIDDEN, width)


def config_of(end: int) -> dict[str, Any]:
    """config.json as the release nests it; `end` is the first special id."""
    text = {
        "model_type": "glm5_next_text", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "intermediate_size": DENSE, "moe_intermediate_size": INNER, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "moe_layer_freq": 1, "swiglu_limit": 10.0, "hidden_act": "silu", "attention_bias": False,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": 0, "q_lora_rank": Q_LORA,
        "kv_lora_rank": KV_LORA, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": 0, "v_head_dim": V,
        "mla_use_nope": True, "index_topk": 16, "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM,
        "index_kpool": POOL, "index_kpool_compress": True, "index_kpool_always_select_tail": True,
        "indexer_types": ["full"] * LAYERS, "mhc": True, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "num_nextn_predict_layers": 1, "pad_token_id": end, "eos_token_id": [end, end + 4],
        "layer_types": KINDS, "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "linear_attn_config": {
            "num_heads": KDA_HEADS, "head_dim": KDA_DIM, "short_conv_kernel_size": CONV, "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(LAYERS) if i not in MLA_LAYERS], "full_attn_layers": MLA_LAYERS,
        },
    }  # fmt: skip
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next",
        "tie_word_embeddings": False, "quantization_config": quantization, "text_config": text,
        "vision_config": {"depth": 1},
    }  # fmt: skip


MERGES = ["t h", "th e", "Ġ the", "i n", "e r"]


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json: 256 bytes, a few merges in order of their ids, special tokens after them."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars, extra = {}, 0
    for value in range(256):
        if value in keep:
            chars[value] = chr(value)
        else:
            chars[value] = chr(256 + extra)
            extra += 1
    vocab = {chars[value]: value for value in range(256)}
    for merge in MERGES:
        vocab[merge.replace(" ", "")] = len(vocab)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": len(vocab) + i, "content": content, "special": "think" not in content, **flags}
        for i, content in enumerate(SPECIALS)
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": [merge.split() for merge in MERGES]},
    }  # fmt: skip


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Built once; never changed."""
    return build(tmp_path_factory.mktemp("tiny") / "ckpt")


@pytest.fixture
def tiny(original: Tiny, tmp_path: Path) -> Tiny:
    """A checkpoint of the test's own, at tmp_path / "ckpt"."""
    return original.at(tmp_path / "ckpt")


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    """Where a conversion goes; nothing there yet."""
    return tmp_path / "out.waste"


@pytest.fixture(scope="session")
def clean(original: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the default conversion, never interrupted."""
    from waste.convert import ConvertOptions, convert

    target = tmp_path_factory.mktemp("clean") / "out.waste"
    convert(str(original.path), target, ConvertOptions(threads=1))
    return tree(target)


def tree(path: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {entry.name: entry.read_bytes() for entry in sorted(path.iterdir())}


@pytest.fixture
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """`tree`, for test modules."""
    return tree


@pytest.fixture
def remake() -> Callable[..., Tiny]:
    """`build`, for tests that want other weights."""
    return build


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing 2,000 texts and measuring an encoder take most of a tiny conversion: only where they are tested."""
    monkeypatch.setattr("waste.convert.preflight._encode_rate", lambda _: 1e7)
    if "real_tokenizer_check" not in request.fixturenames:
        monkeypatch.setattr("waste.convert.texts.compare_with_hf", lambda *_args, **_options: 0)


@pytest.fixture
def real_tokenizer_check() -> None:
    """Keep the comparison with the tokenizers library."""


@pytest.fixture
def copy_of() -> Callable[[Path, Path], Path]:
    """Copy a folder with its time stamps."""

    def copier(source: Path, target: Path) -> Path:
        shutil.copytree(source, target, symlinks=True)
        return target

    return copier
