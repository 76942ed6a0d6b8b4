"""`ModelConfig`: a model's numbers, normalised. Everything that sizes or steers the engine, once.

Built from a Hugging Face config by `waste.models.hf_config`, stored in the container's manifest,
read back by the engine and by `info`. Every value was read from the release; where a default would
be wrong there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from waste.backends.shapes import ExpertShape, HcShape, IndexerShape, KdaShape, MlaShape, RouterShape
from waste.errors import InputError
from waste.models.plain import build

AttentionKind = Literal["kda", "mla"]
MlpKind = Literal["dense", "moe"]
IndexKind = Literal["full", "shared"]

# Counts and ids; all other numbers of a model are above zero.
_MAY_BE_ZERO = ("shared_experts", "draft_layers", "pad_token_id", "bos_token_id", "mla.rope", "kda.gate_lower_bound")


@dataclass(frozen=True)
class ModelConfig:
    """One text model. Layers count from 0; the draft (MTP) layer, if any, is layer `num_layers`."""

    family: str  # "glm5_next", "kimi_linear", "glm_moe_dsa", "deepseek_v3"
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention: tuple[AttentionKind, ...]  # per layer
    mlp: tuple[MlpKind, ...]  # per layer
    index_kinds: tuple[IndexKind, ...]  # per layer; meaningful where there is an indexer
    intermediate_size: int  # of dense layers
    moe_intermediate_size: int
    shared_experts: int  # fused into one MLP of shared_experts * moe_intermediate_size
    swiglu_limit: float | None
    router: RouterShape
    mla: MlaShape
    kda: KdaShape | None
    indexer: IndexerShape | None
    hc: HcShape | None
    draft_layers: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers of the trunk with routed experts, the draft layer not included."""
        return tuple(i for i, kind in enumerate(self.mlp) if kind == "moe")

    @property
    def expert(self) -> ExpertShape:
        return ExpertShape(self.hidden_size, self.moe_intermediate_size, self.swiglu_limit)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Every token id that the config names."""
        return self.eos_token_ids + tuple(i for i in (self.pad_token_id, self.bos_token_id) if i is not None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` is the exact inverse."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> ModelConfig:
        """Raises InputError when a field is missing, unknown, of the wrong kind, or contradicts the others."""
        try:
            config: ModelConfig = build(ModelConfig, data, "config")
            for problem in _problems(config):
                raise InputError(f"config: {problem}")
        except InputError as error:
            raise InputError(
                f"the container's model is not one this version can read: {error.message}",
                hint="convert the model again with this version",
            ) from error
        return config


def _problems(config: ModelConfig) -> Iterator[str]:
    """What no model can be, so that nothing behind this has to expect it. First things first."""
    parts: dict[str, object] = {"": config, "mla.": config.mla, "router.": config.router}
    parts |= {"kda.": config.kda, "indexer.": config.indexer, "hc.": config.hc}
    for prefix, part in parts.items():
        for name, value in vars(part).items() if part is not None else ():
            if prefix + name not in _MAY_BE_ZERO and type(value) in (int, float) and value <= 0:
                yield f"{prefix}{name} is {value}, not above zero"
    for name in ("attention", "mlp", "index_kinds"):
        if len(getattr(config, name)) != config.num_layers:
            yield f"{name} has {len(getattr(config, name))} entries for {config.num_layers} layers"
    if "moe" not in config.mlp:
        yield "no layer has experts"
    if config.draft_layers > 1:
        yield f"draft_layers is {config.draft_layers}, at most 1 is known"
    if config.kda is None and "kda" in config.attention:
        yield "kda is null, but there are layers of it"
    for token in config.special_ids:
        if token >= config.vocab_size:
            yield f"id {token} is not below vocab_size, {config.vocab_size}"
    yield from _router_problems(config.router)
    yield from _attention_problems(config)


def _router_problems(router: RouterShape) -> Iterator[str]:
    experts, groups, kept = router.experts, router.groups, router.topk_groups
    if groups == 0 or experts % groups or kept > groups or (groups > 1 and experts // groups < 2):
        yield f"router has {groups} groups, {kept} of them kept, for {experts} experts"
    elif router.top_k > experts // groups * kept:
        yield f"router chooses {router.top_k} of {experts // groups * kept} experts"


def _attention_problems(config: ModelConfig) -> Iterator[str]:
    mla, indexer = config.mla, config.indexer
    turns = {"mla": mla.rotary, "indexer": indexer.rotary if indexer is not None else None}
    for name, rotary in turns.items():
        if rotary is not None and (rotary.dim != mla.rope or rotary.dim != 2 * len(rotary.inv_freq)):
            yield f"{name}.rotary turns {rotary.dim} of {mla.rope} channels by {len(rotary.inv_freq)} angles"
    if indexer is None:
        return
    if indexer.pool and indexer.topk % indexer.pool:
        yield f"indexer.topk is {indexer.topk}, not a multiple of pool, {indexer.pool}"
    if indexer.rotary is not None and indexer.rotary.dim > indexer.head_dim:
        yield f"indexer.rotary turns {indexer.rotary.dim} of {indexer.head_dim} channels"
    kinds = [kind for kind, layer in zip(config.index_kinds, config.attention, strict=False) if layer == "mla"]
    if kinds[:1] == ["shared"]:
        yield "index_kinds: the first layer with an indexer shares the selection of none"
