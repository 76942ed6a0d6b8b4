"""Name tables: how the files of each family spell the tensors of `models/spec.py`.

Specs use GLM's and DeepSeek's names without a wrapper ("layers.3.mlp.gate.weight"). Releases put them under
"model.", multimodal ones under "model.language_model." (GLM, with `lm_head` outside) or "language_model.model."
(Kimi, with `lm_head` inside), and Kimi-Linear calls the MoE block and its matrices by other names.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

# In order of preference; the first under which the checkpoint has its embedding is the one.
_WRAPPERS = ("model.language_model.", "language_model.model.", "model.", "language_model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_USUAL_WRAPPER = {"glm5_next": "model.language_model."}  # the others: "model."

_BLOCK_SPARSE = ".block_sparse_moe."
_ROUTED = re.compile(r"^(layers\.\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.")
_ROUTER_OR_SHARED = re.compile(r"^(layers\.\d+)\.mlp\.(gate|shared_experts)\.")
_SHORT = {"gate": "w1", "up": "w3", "down": "w2"}

_VISION = re.compile(r"^(model\.)?(visual|vision_tower|vision_model|mm_projector|multi_modal_projector)\.")
# DeepSeek repeats the embedding and the head in the draft layer: the same numbers as the trunk's. A head that nothing
# asks for is that of a model with tied embeddings, which repeats the embedding.
_COPY = re.compile(r"(^|\.)(layers\.\d+\.(embed_tokens|shared_head\.head)|lm_head)\.weight$")


@dataclass(frozen=True)
class NameTable:
    """How one checkpoint spells its tensors. `release` translates; make it with `table_for`."""

    wrapper: str
    head: str
    block_sparse: bool  # Kimi-Linear's words for the MoE block

    def release(self, name: str) -> str:
        """The checkpoint's name of the spec's tensor `name`."""
        if name == "lm_head.weight":
            return self.head
        if self.block_sparse:
            routed = _ROUTED.match(name)
            if routed is not None:
                layer, expert, part = routed.groups()
                name = f"{layer}{_BLOCK_SPARSE}experts.{expert}.{_SHORT[part]}.{name[routed.end() :]}"
            else:
                name = _ROUTER_OR_SHARED.sub(rf"\1{_BLOCK_SPARSE}\2.", name)
        return self.wrapper + name


def table_for(family: str, names: Collection[str]) -> NameTable:
    """The table of the checkpoint whose tensors are called `names`.

    The wrapper is read off the names; where none fits (the embedding is missing) it is the family's usual one, so
    that messages about missing tensors use the release's names.
    """
    usual = _USUAL_WRAPPER.get(family, "model.")
    for leaf in ("embed_tokens.weight", "norm.weight"):
        fitting = [wrapper for wrapper in _WRAPPERS if wrapper + leaf in names]
        if fitting:
            wrapper = fitting[0]
            break
    else:
        wrapper = usual
    head = next((head for head in _HEADS if head in names), _HEADS[0])
    return NameTable(wrapper, head, family == "kimi_linear" and _speaks_kimi(names))


def _speaks_kimi(names: Collection[str]) -> bool:
    """Whether the MoE block has Kimi's name; also when there is no MoE tensor at all."""
    return any(_BLOCK_SPARSE in name for name in names) or not any(".mlp.experts." in name for name in names)


def is_vision(name: str) -> bool:
    """Whether a checkpoint's tensor belongs to a vision tower, which is left out for now."""
    return _VISION.match(name) is not None


def is_copy(name: str) -> bool:
    """Whether a checkpoint's tensor, if nothing asks for it, repeats the embedding or the head."""
    return _COPY.search(name) is not None
