"""`ModelConfig`: a model's numbers, normalised. Everything that sizes or steers the engine, once.

Built from a Hugging Face config by `waste.models.hf_config`, stored in the container's manifest,
read back by the engine and by `info`. Every value was read from the release; where a default would
be wrong there is none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from waste.backends.shapes import ExpertShape, HcShape, IndexerShape, KdaShape, MlaShape, Rotary, RouterShape
from waste.errors import InputError

AttentionKind = Literal["kda", "mla"]
MlpKind = Literal["dense", "moe"]
IndexKind = Literal["full", "shared"]


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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` is the exact inverse."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> ModelConfig:
        """Raises InputError when a field is missing, unknown or of the wrong kind."""
        try:
            fields = dict(data)
            mla = dict(fields.pop("mla"))
            mla["rotary"] = _rotary(mla["rotary"])
            indexer = fields.pop("indexer")
            if indexer is not None:
                indexer = dict(indexer)
                indexer["rotary"] = _rotary(indexer["rotary"])
            kda, hc, router = fields.pop("kda"), fields.pop("hc"), fields.pop("router")
            for key in ("attention", "mlp", "index_kinds", "eos_token_ids"):
                fields[key] = tuple(fields[key])
            return ModelConfig(
                **fields,
                mla=MlaShape(**mla),
                indexer=IndexerShape(**indexer) if indexer else None,
                kda=KdaShape(**kda) if kda else None,
                hc=HcShape(**hc) if hc else None,
                router=RouterShape(**router),
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"the container's model config is not one this version can read: {error}") from error


def _rotary(data: dict[str, Any] | None) -> Rotary | None:
    return None if data is None else Rotary(data["dim"], tuple(data["inv_freq"]))
