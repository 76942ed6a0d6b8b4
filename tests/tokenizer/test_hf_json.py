"""A `tokenizer.json` is read as the `tokenizers` library reads it, or refused by name."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from waste.errors import InputError, UnsupportedError, WasteError
from waste.tokenizer import Tokenizer, read_hf_json

Json = dict[str, Any]
Both = Callable[[Json], tuple[Tokenizer, Library]]

TEXTS = [
    *["Hello world", "the experts layer", "A股 维生素C 你好世界", "tabs\tand\r\nlines\n\n\n  end  ", "", " ", "a"],
    *[
        "I'M can't 'Tis 'ſ",
        "1234567 12 3",
        "}\n///doc",
        "e\u0301 \u00e9",
        "👩‍👩‍👧 🇩🇪 emoji",
        "\x00\x01\x1c\x1f\x85 control",
    ],
    *["，。！？——…", "ＡＢＣ　全角", "def f(x):\n    return x  # ok\n", "股A股", "世界world世界", "〇三々カタカナ世界"],
    *["ok.<|user|>", "ok. <|user|>", "x<|user|>y", "<<|user|>>", "<|user|><|assistant|>", "?!<think>\n", "<|user"],
    *[
        "    return",
        "a     b",
        "\n\n    x\n",
        "  <|user|>  ",
        "…<|endoftext|>…",
        "i /nothink[gMASK]",
        "<|us<|user|>er|>",
    ],
]


@pytest.mark.parametrize("pattern", ["glm", "han", "deepseek", "gaps"])
def test_ids_equal_the_librarys(pattern: str, make_json: Callable[..., Json], both: Both) -> None:
    ours, library = both(make_json(pattern))
    for text in TEXTS:
        assert ours.encode(text, markup=True) == library.encode(text, add_special_tokens=False).ids, text


def test_han_pattern_and_glm_pattern_differ(make_json: Callable[..., Json], both: Both) -> None:
    split, whole = both(make_json("han"))[0], both(make_json("glm"))[0]
    assert split.encode("A股") != whole.encode("A股")


def test_merges_as_strings_and_as_pairs_are_the_same(make_json: Callable[..., Json]) -> None:
    pairs = make_json()
    strings = make_json(string_merges=True)
    strings["model"]["merges"].insert(0, "#version: 0.2")
    assert read_hf_json(pairs) == read_hf_json(strings)


def test_byte_level_with_its_own_pattern(make_json: Callable[..., Json], both: Both) -> None:
    data = make_json()
    data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    ours, library = both(data)
    for text in TEXTS:
        assert ours.encode(text, markup=True) == library.encode(text, add_special_tokens=False).ids, text


def test_split_by_a_string(make_json: Callable[..., Json], both: Both) -> None:
    data = make_json()
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"String": "e."}
    ours, library = both(data)
    for text in ["the end. the.experts e.e. e", *TEXTS]:
        assert ours.encode(text, markup=True) == library.encode(text, add_special_tokens=False).ids, text


def _set(*path: Any, to: Any) -> Callable[[Json], None]:
    def change(data: Json) -> None:
        node: Any = data
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = to

    return change


SPLIT = ("pre_tokenizer", "pretokenizers", 0)
BYTE_LEVEL = ("pre_tokenizer", "pretokenizers", 1)
REFUSED = {
    "unigram": (_set("model", "type", to="Unigram"), UnsupportedError, "'Unigram'"),
    "byte_fallback": (_set("model", "byte_fallback", to=True), UnsupportedError, "byte_fallback"),
    "dropout": (_set("model", "dropout", to=0.1), UnsupportedError, "dropout"),
    "suffix": (_set("model", "end_of_word_suffix", to="</w>"), UnsupportedError, "end_of_word_suffix"),
    "normalizer": (_set("normalizer", to={"type": "NFC"}), UnsupportedError, "'NFC'"),
    "normalizers": (
        _set("normalizer", to={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
        UnsupportedError,
        "'Sequence'",
    ),
    "decoder": (_set("decoder", to={"type": "WordPiece"}), UnsupportedError, "'WordPiece'"),
    "no pre-tokenizer": (_set("pre_tokenizer", to=None), InputError, "pre_tokenizer"),
    "metaspace": (_set(*BYTE_LEVEL, to={"type": "Metaspace"}), UnsupportedError, "'Metaspace'"),
    "digits first": (_set(*SPLIT, to={"type": "Digits"}), UnsupportedError, "'Digits'"),
    "split last": (_set(*BYTE_LEVEL, "type", to="Split"), UnsupportedError, "'Split'"),
    "behavior": (_set(*SPLIT, "behavior", to="Removed"), UnsupportedError, "'Removed'"),
    "invert": (_set(*SPLIT, "invert", to=True), UnsupportedError, "invert"),
    "prefix space": (_set(*BYTE_LEVEL, "add_prefix_space", to=True), UnsupportedError, "add_prefix_space"),
    "bad pattern": (_set(*SPLIT, "pattern", to={"Regex": "(("}), UnsupportedError, r"'\(\('"),
    "no pattern": (_set(*SPLIT, "pattern", to={"Glob": "*"}), InputError, "Glob"),
    "no merges": (_set("model", "merges", to=[]), InputError, "merges is empty"),
    "merges missing": (_set("model", "merges", to=None), InputError, "merges"),
    "merge of three": (_set("model", "merges", 3, to="a b c"), InputError, "merge 3"),
    "merge of one": (_set("model", "merges", 3, to=["a"]), InputError, "merge 3"),
    "merge of a number": (_set("model", "merges", 3, to=7), InputError, "merge 3"),
    "merge of unknown": (_set("model", "merges", 3, to=["Ā", "Ā"]), InputError, "merge 3"),
    "merge not byte-level": (_set("model", "merges", 3, to=["世", "a"]), InputError, "merge 3"),
    "vocab missing": (_set("model", "vocab", to=[]), InputError, "vocab"),
    "negative id": (_set("model", "vocab", "a", to=-1), InputError, "'a' is -1"),
    "id too large": (_set("model", "vocab", "a", to=1 << 40), InputError, "'a' is 1099511627776"),
    "id a text": (_set("model", "vocab", "a", to="7"), InputError, "'a' is '7'"),
    "id twice": (_set("model", "vocab", "a", to=1), InputError, "id 1 belongs to both"),
    "added a text": (_set("added_tokens", 0, to="<x>"), InputError, "added token"),
    "added without text": (_set("added_tokens", 0, "content", to=7), InputError, "content 7"),
    "added half a character": (_set("added_tokens", 0, "content", to="\ud83d"), InputError, "not valid Unicode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_encode_differently_is_refused_by_name(name: str, make_json: Callable[..., Json]) -> None:
    change, kind, words = REFUSED[name]
    data = copy.deepcopy(make_json())
    change(data)
    with pytest.raises(kind, match=words) as caught:
        Tokenizer(read_hf_json(data))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("data", [None, [], "x", {}, {"model": None}, {"model": {"type": "BPE"}}])
def test_other_documents_are_refused(data: object) -> None:
    with pytest.raises(WasteError):
        read_hf_json(data)


def test_a_missing_byte_is_refused(make_json: Callable[..., Json]) -> None:
    data = make_json()
    data["model"]["vocab"]["unreachable key"] = data["model"]["vocab"].pop("Ā")  # byte 0
    with pytest.raises(InputError, match="byte 0x00"):
        read_hf_json(data)


def test_merges_out_of_order_are_refused(make_json: Callable[..., Json]) -> None:
    data = make_json()
    merges = data["model"]["merges"]
    merges[10], merges[11] = merges[11], merges[10]
    with pytest.raises(UnsupportedError, match="merge 11 makes id"):
        read_hf_json(data)


def test_an_added_token_that_plain_text_would_produce_is_refused(
    make_json: Callable[..., Json], make_added: Callable[..., Json]
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape("'the' is also an ordinary piece")):
        read_hf_json(make_json(added=[make_added("the")]))


def test_added_tokens_inside_the_vocabulary_keep_that_id(make_json: Callable[..., Json], both: Both) -> None:
    data = make_json()
    data["model"]["vocab"]["<｜begin｜>"] = 1000
    data["model"]["vocab"]["<|pad|>"] = 1001
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    # The library numbers the others on from the size of the vocabulary, which has grown by two.
    for token in data["added_tokens"]:
        token["id"] += 2
    data["added_tokens"][:0] = [
        {"id": 1000, "content": "<｜begin｜>", **flags},
        {"id": 1001, "content": "<|pad|>", **flags},
    ]
    ours, library = both(data)
    assert not ours.spec.warnings
    text = "a<｜begin｜>b<|pad|><|user|>"
    assert ours.encode(text, markup=True) == library.encode(text).ids
    assert not ours.added_ids & set(ours.encode(text))
    assert ours.decode(ours.encode(text)) == text


def test_a_whole_pre_token_that_is_a_control_token_stays_text(make_json: Callable[..., Json], both: Both) -> None:
    """With `ignore_merges` the library, its added tokens removed, would look it up in the vocabulary."""
    data = make_json(added=[])
    data["model"]["ignore_merges"] = True
    data["model"]["vocab"] |= {"endofturn": 1000, "wholeword": 1001}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] = [{"id": 1000, "content": "endofturn", **flags}]
    ours, library = both(data)
    assert ours.encode("endofturn", markup=True) == library.encode("endofturn").ids == [1000]
    assert ours.encode("wholeword") == library.encode("wholeword").ids == [1001]
    assert 1000 not in ours.encode("endofturn")
    assert ours.decode(ours.encode("endofturn")) == "endofturn"


def test_added_tokens_get_the_ids_the_library_gives_and_a_warning(make_json: Callable[..., Json], both: Both) -> None:
    data = make_json()
    for token in data["added_tokens"]:
        token["id"] += 80
    ours, library = both(data)
    assert ours.encode("<|user|>x", markup=True) == library.encode("<|user|>x").ids
    assert len(ours.spec.warnings) == len(data["added_tokens"])
    assert "'<|endoftext|>'" in ours.spec.warnings[0]


def test_an_added_id_that_the_vocabulary_already_uses_is_refused(make_json: Callable[..., Json]) -> None:
    data = make_json()
    vocab = data["model"]["vocab"]
    size = len(vocab)
    last = max(vocab, key=lambda key: vocab[key])
    vocab[last] = size  # leaves a hole, so that the first added token is numbered onto it
    with pytest.raises(InputError, match=f"id {size} belongs to both"):
        read_hf_json(data)


@st.composite
def merge_lists(draw: st.DrawFn) -> tuple[list[tuple[str, str]], dict[str, int], bool]:
    """Merges over three letters in any order, with repeats and rivals, and pieces without merges."""
    letters = ["a", "b", "c"]
    pieces = list(letters)
    merges = []
    for _ in range(draw(st.integers(1, 9))):
        pair = (draw(st.sampled_from(pieces)), draw(st.sampled_from(pieces)))
        if len(pair[0] + pair[1]) <= 6:
            merges.append(pair)
            if pair[0] + pair[1] not in pieces:
                pieces.append(pair[0] + pair[1])
    orphans = draw(st.lists(st.text("abc", min_size=2, max_size=5), max_size=2))
    pieces += [orphan for orphan in dict.fromkeys(orphans) if orphan not in pieces]
    made = pieces[3:]
    if draw(st.booleans()):
        made = draw(st.permutations(made))
    return merges, {piece: 300 + i for i, piece in enumerate(made)}, draw(st.booleans())


@settings(max_examples=400, deadline=None)
@given(case=merge_lists(), texts=st.lists(st.text("abc", max_size=14), min_size=6, max_size=6))
def test_any_merge_list_is_either_refused_or_encoded_as_the_library_does(
    case: tuple[list[tuple[str, str]], dict[str, int], bool], texts: list[str]
) -> None:
    merges, made, ignore_merges = case
    data = json.loads(json.dumps(_bytes_only()))
    data["model"] |= {"merges": [list(pair) for pair in merges], "ignore_merges": ignore_merges}
    data["model"]["vocab"] |= made
    try:
        ours = Tokenizer(read_hf_json(data))
    except UnsupportedError:
        return
    library = Library.from_str(json.dumps(data))
    for text in [*texts, *made]:
        assert ours.encode(text) == library.encode(text).ids, text


def test_harmless_lists_are_not_refused(make_json: Callable[..., Json], both: Both) -> None:
    """A rival merge that never applies, and a piece that no merge makes."""
    data = _bytes_only()
    data["model"]["vocab"] |= {"ab": 300, "bc": 301, "abc": 302, "cc": 303, "orphan": 304}
    data["model"]["merges"] = [["a", "b"], ["b", "c"], ["ab", "c"], ["c", "c"], ["a", "bc"]]
    ours, library = both(data)
    for text in ["abc", "aabcc", "bcabc", "orphan", "ccc"]:
        assert ours.encode(text) == library.encode(text).ids
    assert ours.decode([304]) == "orphan"


def _bytes_only() -> Json:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
