"""What there is to say about a model: counts, bytes and what RAM buys, from its config and its formats alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from waste.models.config import ModelConfig
from waste.planner.footprint import Sizes, floor_bytes, tokenizer_bytes
from waste.units import format_bytes, format_count

GIB = 1 << 30

Row = tuple[str, str]


@dataclass(frozen=True)
class Stored:
    """Tensors of one class in one number format: of the trunk, the draft layer, or the routed experts."""

    part: str  # "trunk", "draft", "experts", or of a checkpoint "weights"
    kind: str | None  # of trunk and draft, the class: "kda", "table" and so on
    format: str  # "q8", or a checkpoint's dtype "F8_E4M3"
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class ModelFacts:
    """One model in one choice of formats."""

    config: ModelConfig
    sizes: Sizes
    context: int  # tokens, of the RAM floor
    baseline_bytes: int  # what the process of `waste run` occupies without any model

    @property
    def ram_floor_bytes(self) -> int:
        """The least that runs: baseline, tokenizer, trunk, a session's state, buffers, one layer's top-k experts."""
        baseline = self.baseline_bytes + tokenizer_bytes(self.config)
        trunk, record = self.sizes.resident_trunk_bytes, self.sizes.record_bytes
        return floor_bytes(self.config, trunk, record, self.context, baseline)

    @property
    def all_experts(self) -> int:
        """Routed experts of all layers that answer prompts."""
        return self.sizes.expert_layers * self.sizes.experts

    @property
    def experts_per_gib(self) -> float:
        """Experts that fit into one GiB of cache, whether there are so many or not."""
        return GIB / self.sizes.record_bytes if self.sizes.record_bytes else 0.0

    def rows(self) -> Iterator[Row]:
        """(what, value) as `waste info` shows them."""
        config, sizes = self.config, self.sizes
        yield "family", config.family
        draft = f", {format_count(_draft_parameters(self))} of them the draft layer's" if config.draft_layers else ""
        yield "parameters", format_count(sizes.parameters) + draft
        yield "active", f"{format_count(sizes.active_parameters)} per token"
        yield "layers", f"{config.num_layers}: {'; '.join(_kinds(config))}"
        if sizes.expert_layers:
            shared = f", {config.shared_experts} shared" if config.shared_experts else ""
            yield "experts", f"{sizes.experts} a layer in {sizes.expert_layers} layers, {sizes.top_k} a token{shared}"
        yield "context", f"{config.max_position_embeddings} tokens at most"
        yield "vocabulary", f"{config.vocab_size} rows"

    def cost_rows(self) -> Iterator[Row]:
        """(what, value) of what running it takes."""
        sizes = self.sizes
        experts = sizes.token_bytes - sizes.read_trunk_bytes
        parts = f"trunk {format_bytes(sizes.read_trunk_bytes)} + experts {format_bytes(experts)}"
        yield "a token reads", f"{format_bytes(sizes.token_bytes)}: {parts}"
        yield "RAM floor", f"{format_bytes(self.ram_floor_bytes)} at a context of {self.context} tokens"
        if self.all_experts:
            fit = min(self.experts_per_gib, float(self.all_experts))
            share = fit / self.all_experts
            held = f"{fit:.0f} of {self.all_experts} experts ({share:.1%})"
            yield "1 GiB of cache", f"holds {held}, {format_bytes(sizes.record_bytes)} each"

    def document(self) -> dict[str, Any]:
        """The same for JSON: plain numbers, unit in the key."""
        config, sizes = self.config, self.sizes
        return {
            "family": config.family,
            "parameters": sizes.parameters,
            "active_parameters": sizes.active_parameters,
            "draft_parameters": _draft_parameters(self),
            "layers": {
                "total": config.num_layers,
                **{kind: config.attention.count(kind) for kind in ("kda", "mla")},
                "indexed": _indexed(config),
                **{kind: config.mlp.count(kind) for kind in ("dense", "moe")},
                "draft": config.draft_layers,
            },
            "experts": {
                "per_layer": sizes.experts,
                "layers": sizes.expert_layers,
                "per_token": sizes.top_k,
                "shared": config.shared_experts,
                "record_bytes": sizes.record_bytes,
            },
            "context_tokens": config.max_position_embeddings,
            "vocabulary_rows": config.vocab_size,
            "trunk_bytes": sizes.trunk_bytes,
            "resident_trunk_bytes": sizes.resident_trunk_bytes,
            "draft_bytes": sizes.draft_bytes,
            "bank_bytes": sizes.bank_bytes,
            "token_bytes": sizes.token_bytes,
            "ram_floor_bytes": self.ram_floor_bytes,
            "ram_floor_context_tokens": self.context,
            "experts_per_gib": self.experts_per_gib,
        }


def stored_rows(stored: list[Stored]) -> list[list[str]]:
    """Rows of the formats table."""
    return [
        [s.part if s.kind is None else f"{s.part} {s.kind}", s.format, str(s.tensors), format_bytes(s.nbytes)]
        for s in stored
    ]


def stored_document(stored: list[Stored]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [{("bytes" if key == "nbytes" else key): value for key, value in asdict(s).items()} for s in stored]


def _indexed(config: ModelConfig) -> int:
    """Attention layers that choose their own tokens."""
    if config.indexer is None:
        return 0
    pairs = zip(config.attention, config.index_kinds, strict=True)
    return sum(kind == "mla" and index == "full" for kind, index in pairs)


def _kinds(config: ModelConfig) -> Iterator[str]:
    """ "6 KDA, 2 MLA (2 sparse)", "1 dense, 7 MoE", "1 draft layer beside them"."""
    sparse = f" ({_indexed(config)} sparse)" if _indexed(config) else ""
    yield _counted(config.attention, {"kda": "KDA", "mla": f"MLA{sparse}"})
    yield _counted(config.mlp, {"dense": "dense", "moe": "MoE"})
    if config.draft_layers:
        yield f"{config.draft_layers} draft layer beside them"


def _counted(kinds: Sequence[str], names: Mapping[str, str]) -> str:
    return ", ".join(f"{kinds.count(kind)} {name}" for kind, name in names.items() if kind in kinds)


def _draft_parameters(facts: ModelFacts) -> int:
    """Numbers of the draft layer: its trunk part and its own experts."""
    from waste.models.spec import draft_specs

    if not facts.config.draft_layers:
        return 0
    per_expert = 3 * facts.config.hidden_size * facts.config.moe_intermediate_size
    return sum(spec.rows * spec.cols for spec in draft_specs(facts.config)) + facts.sizes.experts * per_expert
