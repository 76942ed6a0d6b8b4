"""Which layer is what: attention kinds, feed-forward kinds and indexer kinds from a Hugging Face config."""

from __future__ import annotations

from waste.errors import InputError
from waste.models.config import AttentionKind, IndexKind, MlpKind
from waste.models.hf_reader import Reader, shown

# transformers 5 and the releases spell the same attention differently; the first is nobody's default.
FULL_ATTENTION = ("full_attention", "deepseek_sparse_attention", "indexed_attention")
LINEAR_ATTENTION = "linear_attention"


def attention_kinds(text: Reader, layers: int, *, own_spelling: str) -> tuple[AttentionKind, ...]:
    """Per layer "kda" or "mla". `layer_types` decides where it is present, else the lists of `linear_attn_config`.

    The lists count from 0 in GLM's releases and from 1 in Kimi's. The base is read off the numbers: a 0 can only be
    0-based, a `layers` only 1-based; both or neither is refused. `own_spelling` is the family's word for full
    attention; its synonyms are accepted with a notice.

    Raises InputError for lists that do not name every layer once, UnsupportedError for unknown layer types.
    """
    types = text.strings("layer_types", layers)
    linear = text.sub("linear_attn_config")
    if types is None:
        if linear is None:
            raise text.missing("layer_types")
        return _from_lists(linear, layers)
    kinds: list[AttentionKind] = []
    for i, name in enumerate(types):
        if name == LINEAR_ATTENTION:
            kinds.append("kda")
        elif name in FULL_ATTENTION:
            kinds.append("mla")
            if name != own_spelling:
                text.notice(f"{text.where}layer_types: {name} is read as {own_spelling}")
        else:
            known = f"{LINEAR_ATTENTION} or {own_spelling}"
            raise text.unsupported(f"layer_types[{i}]", name, known)
    if linear is not None and (linear.has("kda_layers") or linear.has("full_attn_layers")):
        try:
            agrees = _from_lists(linear, layers) == tuple(kinds)
        except InputError:
            agrees = False
        if not agrees:
            text.notice(f"{linear.where}kda_layers and full_attn_layers contradict layer_types, which is used")
    return tuple(kinds)


def _from_lists(linear: Reader, layers: int) -> tuple[AttentionKind, ...]:
    kda, full = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if kda is None and full is None:
        raise linear.missing("kda_layers")
    named = [*(kda or []), *(full or [])]
    zero, last = 0 in named, layers in named
    if zero == last:
        what = f"both 0 and {layers}" if zero else f"neither 0 nor {layers}"
        raise InputError(
            f"{linear.where}kda_layers and full_attn_layers name {what}; cannot tell whether layers count from 0 or 1",
            hint="add layer_types to config.json: one word a layer, linear_attention or full_attention",
        )
    base = 0 if zero else 1
    for number in named:
        if not base <= number < base + layers:
            raise InputError(f"{linear.where}kda_layers and full_attn_layers name layer {number} of {layers} layers")
    if len(set(named)) != len(named):
        twice = next(number for number in named if named.count(number) > 1)
        raise InputError(f"{linear.where}kda_layers and full_attn_layers name layer {twice} twice")
    if kda is not None and full is not None and len(named) != layers:
        gone = next(number for number in range(base, base + layers) if number not in named)
        raise InputError(f"{linear.where}kda_layers and full_attn_layers leave out layer {gone}")
    chosen = set(full) if full is not None else set(range(base, base + layers)) - set(kda or [])
    return tuple("mla" if i + base in chosen else "kda" for i in range(layers))


def mlp_kinds(text: Reader, layers: int) -> tuple[MlpKind, ...]:
    """Per layer "dense" or "moe", from `mlp_layer_types` or `first_k_dense_replace`; InputError if they disagree."""
    text.require("moe_layer_freq", 1)
    types = text.strings("mlp_layer_types", layers)
    if types is None:
        dense = text.integer("first_k_dense_replace", low=0)
        return tuple("dense" if i < dense else "moe" for i in range(layers))
    kinds: list[MlpKind] = []
    for i, name in enumerate(types):
        if name not in ("dense", "sparse"):
            raise text.unsupported(f"mlp_layer_types[{i}]", name, "dense or sparse")
        kinds.append("dense" if name == "dense" else "moe")
    first = text.optional_integer("first_k_dense_replace", low=0)
    if first is not None and any((kind == "dense") != (i < first) for i, kind in enumerate(kinds)):
        raise InputError(
            f"{text.where}first_k_dense_replace is {first} but mlp_layer_types names other dense layers: "
            f"{shown([i for i, kind in enumerate(kinds) if kind == 'dense'])}"
        )
    return tuple(kinds)


def index_kinds(text: Reader, layers: int) -> tuple[IndexKind, ...]:
    """Per layer "full" (has an indexer) or "shared" (uses the selection of the last full layer).

    From `indexer_types`, else `index_topk_pattern` ("FSSF..."), else `index_topk_freq` and
    `index_skip_topk_offset` as transformers 5.24 (`GlmMoeDsaConfig`) derives them; without any, all full.
    """
    types = text.strings("indexer_types", layers)
    if types is None:
        pattern = text.raw("index_topk_pattern")
        if isinstance(pattern, str):
            types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
        elif pattern is not None:
            types = text.strings("index_topk_pattern", layers) or []
        else:
            every = text.integer("index_topk_freq", default=1, nullable=True)
            offset = text.integer("index_skip_topk_offset", default=2, low=0, nullable=True)
            types = ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers)]
        if len(types) != layers:
            raise InputError(f"{text.where}index_topk_pattern has {len(types)} entries; expected {layers}, one a layer")
    kinds: list[IndexKind] = []
    for i, name in enumerate(types):
        if name not in ("full", "shared"):
            raise text.unsupported(f"indexer_types[{i}]", name, "full or shared")
        kinds.append("full" if name == "full" else "shared")
    if kinds[0] == "shared":
        raise InputError(
            f"{text.where}indexer_types[0] is 'shared'; there is no earlier layer whose selection it could use"
        )
    return tuple(kinds)
