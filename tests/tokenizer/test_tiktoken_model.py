"""Rank files with a tokenizer_config.json (Kimi) against `tiktoken` and `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer as Library

from waste.errors import InputError, UnsupportedError
from waste.tokenizer import Tokenizer, read_hf_json, read_tiktoken
from waste.tokenizer.compare import compare_with_tiktoken
from waste.tokenizer.ranks import format_ranks
from waste.tokenizer.tiktoken_model import KIMI_PATTERN

Json = dict[str, Any]

TEXTS = [
    *[
        "Hello WorldWide HTTPServer iPhone",
        "世界world世界 A股 维生素C",
        "don't DON'T X'S",
        "〇三々カタカナ世界",
        "ÀÉîõü ǅ ʰa",
    ],
    *["1234567", "   x\n\n  y", "<|im_user|>user<|im_middle|>Hi<|im_end|>", "<|im_end", "e\u0301E\u0301", "…、。\r\n"],
]
NAMES = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_middle|>"]


# As published, alternative by alternative.
PUBLISHED = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


def test_the_pattern_is_the_published_one() -> None:
    assert "|".join(PUBLISHED) == KIMI_PATTERN


@pytest.fixture(scope="module")
def source(make_json: Callable[..., Json]) -> tuple[bytes, Json, Json]:
    """A rank file, its configuration, and the same vocabulary as a `tokenizer.json` with Kimi's pattern."""
    data = make_json(added=[])
    ranks = dict(read_hf_json(data).ranks)
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    # Ids with gaps: the ones between are reserved and have no text.
    decoder = {str(len(ranks) + 2 * i): {"content": name, **flags} for i, name in enumerate(NAMES)}
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": KIMI_PATTERN}
    return format_ranks(ranks), {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder}, data


def test_ids_equal_both_libraries(source: tuple[bytes, Json, Json]) -> None:
    model, config, data = source
    spec = read_tiktoken(model, config)
    ours = Tokenizer(spec)
    specials = {token.content: token.id for token in spec.added}
    oracle = tiktoken.Encoding("x", pat_str=KIMI_PATTERN, mergeable_ranks=dict(spec.ranks), special_tokens=specials)
    plain = Library.from_str(json.dumps(data))
    for text in TEXTS:
        assert ours.encode(text, markup=True) == oracle.encode(text, allowed_special="all"), text
        assert ours.encode(text) == oracle.encode_ordinary(text) == plain.encode(text).ids, text
    assert compare_with_tiktoken(ours, minimum=500) >= 1000


def test_reserved_ids_have_no_text(source: tuple[bytes, Json, Json]) -> None:
    model, config, _ = source
    ours = Tokenizer(read_tiktoken(model, config))
    first = ours.id_of("[BOS]")
    assert first is not None
    assert ours.unused_ids(ours.vocab_size) == [first + 1, first + 3, first + 5, first + 7]
    assert ours.special_ids == ours.added_ids


def test_another_class_is_refused_as_its_pattern_is_not_known(source: tuple[bytes, Json, Json]) -> None:
    model, config, _ = source
    for kind in ("LlamaTokenizer", None, 7):
        with pytest.raises(UnsupportedError, match="pattern of tokenizer class"):
            read_tiktoken(model, {**config, "tokenizer_class": kind})


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ([], "added_tokens_decoder is list"),
        ({"x": {"content": "y"}}, "entry 'x'"),
        ({"700": {}}, "entry '700'"),
        ({"700": "y"}, "entry '700'"),
        ({"65": {"content": "y"}}, "id 65 belongs to both"),
        ({"99999999999999999999": {"content": "y"}}, "outside"),
    ],
)
def test_damaged_configurations_are_named(decoder: object, words: str, source: tuple[bytes, Json, Json]) -> None:
    with pytest.raises(InputError, match=words):
        read_tiktoken(source[0], {**source[1], "added_tokens_decoder": decoder})


def test_other_documents_are_refused(source: tuple[bytes, Json, Json]) -> None:
    with pytest.raises(InputError, match="not an object"):
        read_tiktoken(source[0], [])
    with pytest.raises(InputError, match=r"tiktoken\.model"):
        read_tiktoken(b"version https://git-lfs.github.com/spec/v1\n", source[1])
