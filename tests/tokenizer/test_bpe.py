"""Encoding, decoding and what ids mean."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from waste.errors import InputError, UsageError
from waste.tokenizer import Tokenizer, TokenizerSpec, read_hf_json

Json = dict[str, Any]
Readers = tuple[Tokenizer, Library, Library]

# Characters that all Unicode tables in use agree on: newer ones, and U+0295 (whose category changed), would compare
# versions of tables.
KNOWN = st.characters(codec="utf-8", exclude_characters="\u0295").filter(
    lambda char: unicodedata.category(char) != "Cn"
)
FRAGMENTS = ["<|user|>", "<|us", "er|>", "<think>", "</think>", "<|", "|>", "[gMASK]", "/nothink", "<sop>", "the ", " "]
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(KNOWN, max_size=6)), max_size=8).map("".join)


@pytest.fixture(scope="module")
def readers(make_json: Callable[..., Json], patterns: dict[str, tuple[str, ...]]) -> dict[str, Readers]:
    """Ours, the library, and the library without added tokens, by pattern."""
    found = {}
    for name in patterns:
        data = make_json(name)
        bare = Library.from_str(json.dumps({**data, "added_tokens": []}))
        found[name] = (Tokenizer(read_hf_json(data)), Library.from_str(json.dumps(data)), bare)
    return found


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, pattern=st.sampled_from(["glm", "han", "deepseek", "gaps"]))
def test_any_text_encodes_as_the_library_does(text: str, pattern: str, readers: dict[str, Readers]) -> None:
    ours, library, bare = readers[pattern]
    assert ours.encode(text, markup=True) == library.encode(text).ids
    assert ours.encode(text) == bare.encode(text).ids


@given(text=TEXTS)
def test_plain_text_has_no_control_tokens_and_comes_back(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert not tokenizer.added_ids & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode(text, markup=True)) == text


@given(text=TEXTS, data=st.data())
def test_untrusted_ranges_give_the_ids_of_the_template_alone(
    text: str, data: st.DataObject, tokenizer: Tokenizer
) -> None:
    assert tokenizer.encode_mixed(text, []) == tokenizer.encode(text, markup=True)
    assert tokenizer.encode_mixed(text, [(0, len(text))]) == tokenizer.encode(text)
    start = data.draw(st.integers(0, len(text)))
    mixed = tokenizer.encode_mixed(text, [(start, len(text))])
    found = [i for i in mixed if i in tokenizer.added_ids]
    assert found == [i for i in tokenizer.encode(text[:start], markup=True) if i in tokenizer.added_ids]
    assert tokenizer.decode(mixed) == text


def test_a_range_is_no_border_for_pieces(tokenizer: Tokenizer) -> None:
    # " experts" is one piece; cut at the space it would be two.
    text = "<|user|>the experts"
    assert tokenizer.encode_mixed(text, [(12, len(text))]) == tokenizer.encode(text, markup=True)


@pytest.mark.parametrize("markup", [False, True])
def test_half_characters_are_refused_with_their_place(markup: bool, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"U\+D83D\) at position 2") as caught:
        tokenizer.encode("ab\ud83dc", markup=markup)
    assert caught.value.hint


def test_ids_without_text(tokenizer: Tokenizer) -> None:
    rows = tokenizer.vocab_size + 5
    assert tokenizer.unused_ids(rows) == list(range(tokenizer.vocab_size, rows))
    assert tokenizer.unused_ids(3) == []
    for missing in (tokenizer.vocab_size, 10**9, -1):
        assert tokenizer.token_bytes(missing) == b""
    ids = tokenizer.encode("HI")
    assert tokenizer.decode([-1, *ids, tokenizer.vocab_size, 10**9]) == "HI"


def test_holes_in_the_vocabulary_decode_to_nothing(make_json: Callable[..., Json]) -> None:
    data = make_json(added=[])
    last = max(data["model"]["vocab"].values())
    key = next(key for key, value in data["model"]["vocab"].items() if value == last)
    data["model"]["vocab"][key] = 600
    ours = Tokenizer(read_hf_json(data))
    assert ours.vocab_size == 601
    assert ours.unused_ids(603) == [*range(last, 600), 601, 602]
    assert ours.decode([last, 599, 601]) == ""


def test_names_of_added_tokens(tokenizer: Tokenizer) -> None:
    user = tokenizer.id_of("<|user|>")
    assert user is not None
    assert tokenizer.encode("<|user|>", markup=True) == [user]
    assert tokenizer.id_of("<|nobody|>") is None
    think = tokenizer.id_of("<think>")
    assert user in tokenizer.special_ids
    assert think not in tokenizer.special_ids
    assert think in tokenizer.added_ids


def test_special_tokens_can_be_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|user|>Hi<think>x", markup=True)
    assert tokenizer.decode(ids) == "<|user|>Hi<think>x"
    assert tokenizer.decode(ids, skip_special=True) == "Hi<think>x"


@pytest.mark.parametrize("text", [" ", "a", "\n", "<", "汉", "1", ".", " \n", "<|user|>", "a\u0301"])
def test_long_runs_do_not_overflow(text: str, tokenizer: Tokenizer) -> None:
    long = text * (400_000 // len(text))
    for markup in (False, True):
        assert tokenizer.decode(tokenizer.encode(long, markup=markup)) == long


def test_the_example_model(nano_json: str) -> None:
    ours = Tokenizer(read_hf_json(json.loads(nano_json)))
    assert ours.vocab_size == 4080
    assert ours.unused_ids(4096) == list(range(4080, 4096))
    assert [ours.id_of(t) for t in ("<|endoftext|>", "<|user|>", "<think>", "</think>")] == [4044, 4051, 4065, 4066]


def test_an_inconsistent_spec_is_refused() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    with pytest.raises(InputError, match="id 97 belongs to both"):
        Tokenizer(TokenizerSpec({**ranks, b"ab": 97}, (".",), (), {}))
    with pytest.raises(InputError, match="empty piece"):
        Tokenizer(TokenizerSpec(ranks, (".",), (), {300: b""}))
    with pytest.raises(InputError, match="5000 bytes"):
        Tokenizer(TokenizerSpec({**ranks, b"a" * 5000: 300}, (".",), (), {}))
    with pytest.raises(InputError, match="outside"):
        Tokenizer(TokenizerSpec({**ranks, b"ab": 1 << 30}, (".",), (), {}))
