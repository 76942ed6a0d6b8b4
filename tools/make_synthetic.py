"""Write a GLM-5.3-Flash-shaped container from random numbers: no checkpoint, any size, for measuring speed.

    python tools/make_synthetic.py big.waste                         hidden 2048, 12 layers, 64 experts
    python tools/make_synthetic.py deep.waste --layers 45 --hidden 256 --expert-width 96 --routed 16
    python tools/make_synthetic.py q.waste --experts wt2+wt3 --trunk q6 --seed 1

Everything that has no option is scaled from the release: its pattern of KDA and MLA layers, hyper-connections, a
pooled indexer, one shared expert. The tokenizer is real, a token per byte. Equal options give equal bytes.

Weights are Gaussian, of a size that keeps activations near one, so nothing overflows and routing spreads over all
experts. To be fast, large matrices are strips of 16 rows drawn from a pool that was encoded once for each width and
format; all formats allow that, as a strip depends on its own rows alone. So no two records are equal, but rows recur.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from waste import quant
from waste.backends.shapes import HcShape, IndexerShape, KdaShape, MlaShape, RouterShape
from waste.chat.format import JSON as CHAT_FILE
from waste.chat.format import build_format, to_json
from waste.container.layout import Bytes, Section, matrix_shape
from waste.container.manifest import MANIFEST_NAME, BankEntry, TensorEntry
from waste.container.writer import BankWriter, TensorFileWriter
from waste.convert import target
from waste.convert.assemble import assemble
from waste.convert.check import Inventory
from waste.convert.names import table_for
from waste.convert.options import ConvertOptions
from waste.convert.preflight import Prepared
from waste.convert.sums import strip_sums
from waste.convert.texts import TEMPLATE_FILE
from waste.convert.work import TensorItem, work_for
from waste.errors import WasteError
from waste.io.files import atomic_write
from waste.models.config import AttentionKind, MlpKind, ModelConfig
from waste.tokenizer import Tokenizer, to_files
from waste.tokenizer.spec import AddedToken, TokenizerSpec
from waste.units import format_bytes

POOL_STRIPS, STRIP_ROWS = 128, 16
MARKERS = ("<|endoftext|>", "<|user|>", "<|assistant|>")  # ids 256 and on, behind the bytes
TEMPLATE = """\
{%- for m in messages -%}
{{- ('<|user|>' if m.role == 'user' else '<|assistant|>') ~ m.content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Sizes:
    """What can be chosen; the defaults make a model that streams from memory and is converted in seconds."""

    hidden: int = 2048
    layers: int = 12
    dense_layers: int = 1
    routed: int = 64
    top_k: int = 8
    expert_width: int = 1024
    vocab: int = 512
    context: int = 65536


def model_config(sizes: Sizes) -> ModelConfig:
    """GLM-5.3-Flash (hidden 4096) scaled to `sizes`: head counts, latents and widths follow the hidden size."""
    hidden, layers = sizes.hidden, sizes.layers
    part = min(256, max(16, hidden // 16))  # a head's share of queries and values
    attention: tuple[AttentionKind, ...] = tuple("mla" if i % 4 == 3 else "kda" for i in range(layers))
    mlp: tuple[MlpKind, ...] = tuple("dense" if i < sizes.dense_layers else "moe" for i in range(layers))
    eps = 1e-5
    return ModelConfig(
        family="glm5_next",
        vocab_size=sizes.vocab,
        hidden_size=hidden,
        num_layers=layers,
        max_position_embeddings=sizes.context,
        rms_norm_eps=eps,
        attention=attention,
        mlp=mlp,
        index_kinds=("full",) * layers,
        intermediate_size=3 * hidden,
        moe_intermediate_size=sizes.expert_width,
        shared_experts=1,
        swiglu_limit=10.0,
        router=RouterShape(sizes.routed, sizes.top_k, groups=1, topk_groups=1, scaling=2.5, normalize=True),
        mla=MlaShape(
            heads=max(1, hidden // 64),
            q_lora=max(32, hidden * 3 // 8),
            kv_lora=max(32, hidden // 8),
            nope=part,
            rope=0,
            v=part,
            scale=part**-0.5,
            latent_eps=eps,
            rotary=None,
        ),
        kda=KdaShape(max(1, hidden // 64), head_dim=128, conv=4, gate_lower_bound=-5.0, norm_eps=eps),
        indexer=IndexerShape(max(1, hidden // 128), head_dim=128, topk=2048, pool=4, rotary=None),
        hc=HcShape(streams=4, sinkhorn_iters=20, eps=1e-6, norm_eps=eps),
        draft_layers=0,
        tie_word_embeddings=False,
        eos_token_ids=(256,),
        pad_token_id=256,
        bos_token_id=None,
    )


def texts() -> dict[str, bytes]:
    """Tokenizer and chat files: a token per byte, three markers, turns of user and assistant."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    added = tuple(AddedToken(256 + i, content, special=True) for i, content in enumerate(MARKERS))
    spec = TokenizerSpec(ranks, (r"\s+|\S+",), added, {})
    chat = build_format(Tokenizer(spec), TEMPLATE, {"eos_token": MARKERS[0]})
    return to_files(spec) | {CHAT_FILE: to_json(chat), TEMPLATE_FILE: TEMPLATE.encode()}


class Weights:
    """Random tensors in stored form. What comes out depends on the seed and on the tensor's name alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[str, int, float], Bytes] = {}

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng((self._seed, zlib.crc32(name.encode())))

    def tensor(self, item: TensorItem) -> Iterator[Bytes]:
        """The blob of one trunk tensor, in pieces."""
        name, fmt = item.spec.name, item.fmt
        rows, cols = matrix_shape(item.spec.shape)
        small = _small(name, rows, cols, self._rng(name))
        if small is not None:
            yield quant.get(fmt).encode(np.ascontiguousarray(small, np.float32).reshape(rows, cols))
            return
        yield from self._matrix(name, fmt, rows, cols, 1.0 if name == "embed_tokens.weight" else cols**-0.5)

    def section(self, name: str, section: Section) -> Bytes:
        """The blob of one matrix of an expert."""
        return np.concatenate(list(self._matrix(name, section.fmt, section.rows, section.cols, section.cols**-0.5)))

    def _matrix(self, name: str, fmt: str, rows: int, cols: int, scale: float) -> Iterator[Bytes]:
        rng = self._rng(name)
        strips, rest = divmod(rows, STRIP_ROWS)
        if strips:
            pool = self._pool(fmt, cols, scale)
            # Every strip as often as any other, give or take one.
            order = [rng.permutation(POOL_STRIPS) for _ in range(-(-strips // POOL_STRIPS))]
            yield pool[np.concatenate(order)[:strips]].reshape(-1)
        if rest:
            yield quant.get(fmt).encode(rng.standard_normal((rest, cols), np.float32) * np.float32(scale))

    def _pool(self, fmt: str, cols: int, scale: float) -> Bytes:
        """(strips, bytes of a strip)."""
        key = (fmt, cols, scale)
        if key not in self._pools:
            rng = self._rng(f"pool {fmt} {cols} {scale}")
            dense = rng.standard_normal((POOL_STRIPS * STRIP_ROWS, cols), np.float32) * np.float32(scale)
            self._pools[key] = quant.get(fmt).encode(dense).reshape(POOL_STRIPS, -1)
        return self._pools[key]


def _small(name: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray[Any, Any] | None:
    """Values of what is no plain matrix, in the range that trained models have; None for a matrix."""
    normal = rng.standard_normal((rows, cols), np.float32)
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if last.endswith("norm"):
        return 1 + 0.1 * normal
    if last == "A_log":
        return np.log(rng.uniform(1, 16, (rows, cols)))
    if last == "dt_bias":
        return normal - 2  # most channels remember for tens of tokens
    if last.endswith("conv1d"):
        return 0.5 * normal
    if last in ("hc_attn_base", "hc_ffn_base", "hc_attn_scale", "hc_ffn_scale"):
        return 0.5 * normal
    if last in ("bias", "e_score_correction_bias", "index_kpool_compress_ape"):
        return 0.02 * normal
    if last in ("gate", "hc_attn_fn", "hc_ffn_fn"):  # rows of their own, or all layers would choose alike
        return normal * np.float32(cols**-0.5)
    return None


def make(directory: Path, sizes: Sizes, options: ConvertOptions, seed: int) -> int:
    """Write the container; returns its bytes. WasteError for a target or sizes that do not do."""
    config = model_config(sizes)
    config = ModelConfig.from_json(_plain(config.to_json()))  # refuses what no container may hold
    formats, names = options.formats(), table_for(config.family, ())
    work = work_for(config, formats, names)
    target.make_directory(directory)
    weights = Weights(seed)
    tensors: list[TensorEntry] = []
    banks: list[BankEntry] = []
    for file in work.tensors:
        with TensorFileWriter(directory / file.name) as trunk:
            for item in file.items:
                trunk.append_parts(item.spec.name, item.fmt, item.spec.shape, weights.tensor(item))
            tensors += trunk.seal()
    for bank in work.banks:
        with BankWriter(directory / bank.name, bank.layer, bank.layout) as records:
            for expert in range(bank.experts):
                at = f"layers.{bank.layer}.experts.{expert}."
                gate, up, down = (
                    weights.section(at + part, section)
                    for part, section in zip(("gate", "up", "down"), bank.layout.sections, strict=True)
                )
                records.append(gate, up, down)
            banks.append(records.seal())
    files = texts() | strip_sums(directory, config, tensors)
    for name, data in sorted(files.items()):
        atomic_write(directory / name, data)
    nothing = Inventory(used=0, weights=0, read_bytes=0, vision=(), copies=(), unused=())
    prepared = Prepared(config, formats, (1, 1), {}, names, nothing, work, {}, {}, ())
    provenance = {"source": "random numbers (tools/make_synthetic.py)", "seed": seed}
    manifest = assemble(prepared, provenance, tensors, banks, files)
    text = manifest.to_bytes()
    atomic_write(directory / MANIFEST_NAME, text)
    return sum(manifest.file_sizes().values()) + len(text)


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def main() -> int:
    usual = Sizes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    for name, value in vars(usual).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--experts", help="as for waste convert")
    parser.add_argument("--trunk", help="as for waste convert")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.vocab < 256 + len(MARKERS):
        parser.error(f"--vocab {chosen.vocab}: the tokenizer has {256 + len(MARKERS)} ids")
    if chosen.seed < 0:
        parser.error("--seed is a whole number from 0 on")
    try:
        if target.state_of(chosen.directory) is not target.State.FREE:
            parser.error(f"{chosen.directory} is there already")
        sizes = Sizes(**{name: getattr(chosen, name) for name in vars(usual)})
        options = ConvertOptions(experts=chosen.experts, trunk=chosen.trunk)
        nbytes = make(chosen.directory, sizes, options, chosen.seed)
    except WasteError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1
    print(f"{chosen.directory}: {format_bytes(nbytes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
