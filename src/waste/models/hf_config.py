"""Hugging Face `config.json` (+ `generation_config.json`) -> `ModelConfig`: unnested, checked, normalised."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from waste.errors import InputError, UnsupportedError
from waste.models.config import ModelConfig
from waste.models.hf_families import FAMILIES, Tokens
from waste.models.hf_reader import Reader, shown

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# Known by name and not served yet; everything else unknown gets the nearest known name.
_PLANNED = ("kimi_k3",)

_DEFAULT_BLOCK = (128, 128)


def from_hf(
    config: dict[str, Any], generation_config: dict[str, Any] | None, *, tensor_names: Iterable[str] | None = None
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model that `config` describes, and notices (one line each) about spellings and oddities that were accepted.

    `tensor_names` are the checkpoint's own, if known: a config that promises a draft (MTP) layer whose tensors the
    checkpoint does not have then gives a model without one, and `tie_word_embeddings` may be missing.

    Raises UnsupportedError, naming key and value, for what is understood and not implemented; InputError for keys
    that are missing, of the wrong type or contradict each other.
    """
    notices: list[str] = []
    top = Reader(_object(config, CONFIG_FILE), f"{CONFIG_FILE}: ", notices)
    text = top.sub("text_config") or top
    name = model_type(top, text)
    _refuse_quantization(top)
    names = None if tensor_names is None else frozenset(tensor_names)
    tied = _tied(top, text, names)
    generation = Reader(_object(generation_config or {}, GENERATION_FILE), f"{GENERATION_FILE}: ", notices)
    tokens = Tokens(
        eos=_end_ids(top, text, generation),
        pad=_token(top, text, "pad_token_id"),
        bos=_token(top, text, "bos_token_id"),
    )
    if not tokens.eos:
        text.notice(f"{CONFIG_FILE} and {GENERATION_FILE} name no eos_token_id: only limits end a text")
    model = FAMILIES[name](text, tokens, tied)
    if model.draft_layers and names is not None:
        marker = f".layers.{model.num_layers}."
        if not any(marker in f".{tensor}" for tensor in names):
            notices.append(
                f"{text.where}num_nextn_predict_layers is 1, but the checkpoint has no tensors of layer "
                f"{model.num_layers}: no draft layer"
            )
            model = replace(model, draft_layers=0)
    return model, tuple(notices)


def model_type(top: Reader, text: Reader) -> str:
    """The family's key in `FAMILIES`. UnsupportedError names an unknown model and the nearest known one."""
    found: list[tuple[str, str]] = []
    for reader in (text, top):
        value = reader.raw("model_type")
        if value is None:
            continue
        if not isinstance(value, str):
            raise reader.wrong("model_type", value, "a string")
        found.append((f"{reader.where}model_type", value))
        if value in _PLANNED:
            raise UnsupportedError(
                f"{reader.where}model_type is {shown(value)}, which is not supported yet",
                hint=f"supported: {', '.join(FAMILIES)}",
            )
    if not found:
        raise top.missing("model_type")
    for _, value in found:
        name = value.removesuffix("_text")
        if name in FAMILIES:
            return name
    where, value = found[-1]
    near = difflib.get_close_matches(value, FAMILIES, n=1, cutoff=0.4)
    nearest = f"; the nearest known is {near[0]}" if near else ""
    raise UnsupportedError(
        f"{where} {shown(value)} is not a supported model{nearest}", hint=f"supported: {', '.join(FAMILIES)}"
    )


def weight_block(config: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns that share one FP8 scale: `quantization_config.weight_block_size`, else (128, 128).

    Only the size is taken from here. Whether a tensor is FP8 is the tensor's own business: the section may be left
    over from a checkpoint that was dequantised, or missing from one that is not.
    """
    for section in _quantization_sections(Reader(_object(config, CONFIG_FILE), f"{CONFIG_FILE}: ", [])):
        size = section.raw("weight_block_size")
        if size is None:
            continue
        if not isinstance(size, list) or len(size) != 2:
            raise section.wrong("weight_block_size", size, "two whole numbers")
        for i, value in enumerate(size):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65_536:
                raise section.wrong(f"weight_block_size[{i}]", value, "a positive whole number")
        return size[0], size[1]
    return _DEFAULT_BLOCK


def _object(data: object, name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InputError(f"{name} holds {shown(data)}; expected a JSON object")
    return data


def _quantization_sections(top: Reader) -> list[Reader]:
    text = top.sub("text_config")
    readers = [top] if text is None else [top, text]
    sections = [reader.sub(key) for reader in readers for key in ("quantization_config", "compression_config")]
    return [section for section in sections if section is not None]


def _refuse_quantization(top: Reader) -> None:
    for section in _quantization_sections(top):
        method = section.raw("quant_method")
        if method in (None, "none"):
            continue
        section.require("quant_method", "fp8")
        section.require("fmt", "e4m3", None)
        if section.has("weight_block_size"):
            section.require("activation_scheme", "dynamic", "static", None)
            if section.raw("weight_block_size") is None:
                raise section.unsupported("weight_block_size", None, "a block of rows and columns, [128, 128],")
    weight_block(top.data)


def _tied(top: Reader, text: Reader, names: frozenset[str] | None) -> bool:
    readers = [top] if text is top else [top, text]
    values = [reader.boolean("tie_word_embeddings") for reader in readers if reader.has("tie_word_embeddings")]
    if not values:
        # The default has changed between versions of transformers, and writers leave defaults out.
        if names is None:
            raise text.missing("tie_word_embeddings")
        tied = not any(name.endswith("lm_head.weight") for name in names)
        text.notice(f"{text.where}tie_word_embeddings is missing; {shown(tied)} as the checkpoint's tensors say")
        return tied
    if len(set(values)) > 1:
        raise InputError(
            f"{top.where}tie_word_embeddings is {shown(values[0])} "
            f"but text_config.tie_word_embeddings is {shown(values[1])}"
        )
    return values[0]


def _end_ids(*readers: Reader) -> tuple[int, ...]:
    """Every end id of every file, in order, once."""
    ids: list[int] = []
    for reader in readers:
        value = reader.raw("eos_token_id")
        if value is None:
            continue
        several = value if isinstance(value, list) else [value]
        for i, token in enumerate(several):
            key = f"eos_token_id[{i}]" if isinstance(value, list) else "eos_token_id"
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise reader.wrong(key, token, "a token id: a whole number from 0")
            ids.append(token)
    return tuple(dict.fromkeys(ids))


def _token(top: Reader, text: Reader, key: str) -> int | None:
    value = text.optional_integer(key, low=0)
    return value if value is not None else top.optional_integer(key, low=0)
