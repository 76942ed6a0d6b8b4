"""The comparison made at conversion accepts what is equal and finds what is not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from waste.errors import InputError
from waste.tokenizer import Tokenizer, read_hf_json
from waste.tokenizer.compare import compare_with_hf, compare_with_tiktoken
from waste.tokenizer.samples import sample_texts

Json = dict[str, Any]


def test_the_example_model_is_equal(nano_json: str) -> None:
    ours = Tokenizer(read_hf_json(json.loads(nano_json)))
    assert compare_with_hf(ours, nano_json) >= 4000


def test_truncation_in_the_file_does_not_matter(make_json: Callable[..., Json], tokenizer: Tokenizer) -> None:
    data = make_json()
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    compare_with_hf(tokenizer, json.dumps(data), minimum=300)


def test_samples_are_many_and_the_same_each_time(tokenizer: Tokenizer) -> None:
    texts = sample_texts(tokenizer, 2000)
    assert len(texts) >= 2000
    assert texts == sample_texts(tokenizer, 2000)
    assert all(text == text.encode().decode() for text in texts)
    assert any("<|user|>" in text for text in texts)


def _changed(tokenizer: Tokenizer, name: str) -> Tokenizer:
    spec = tokenizer.spec
    if name == "digits in pairs":
        return Tokenizer(replace(spec, patterns=(spec.patterns[0].replace("{1,3}", "{1,2}"),)))
    if name == "contractions":
        return Tokenizer(replace(spec, patterns=(spec.patterns[0].replace("'t|", ""),)))
    if name == "no lookahead":
        return Tokenizer(replace(spec, patterns=(spec.patterns[0].replace(r"|\s+(?!\S)", ""),)))
    if name == "two ids swapped":
        by_id = {rank: piece for piece, rank in spec.ranks.items()}
        return Tokenizer(replace(spec, ranks={**spec.ranks, by_id[300]: 301, by_id[301]: 300}))
    if name == "an added token missing":
        return Tokenizer(replace(spec, added=spec.added[:-1]))
    if name == "lstrip":
        return Tokenizer(replace(spec, added=(replace(spec.added[0], lstrip=True), *spec.added[1:])))
    raise KeyError(name)


@pytest.mark.parametrize(
    "name",
    ["digits in pairs", "contractions", "no lookahead", "two ids swapped", "an added token missing", "lstrip"],
)
def test_a_difference_is_found_and_named(name: str, make_json: Callable[..., Json], tokenizer: Tokenizer) -> None:
    changed = _changed(tokenizer, name)
    with pytest.raises(InputError, match="the tokenizers library says") as caught:
        compare_with_hf(changed, json.dumps(make_json()))
    assert "\n" not in caught.value.message


def test_a_file_the_library_cannot_read(make_json: Callable[..., Json], tokenizer: Tokenizer) -> None:
    data = copy.deepcopy(make_json())
    data["model"]["merges"] = [["no", "such"]]
    with pytest.raises(InputError, match="cannot read it"):
        compare_with_hf(tokenizer, json.dumps(data))


def test_a_spec_that_tiktoken_encodes_otherwise_is_found(tokenizer: Tokenizer) -> None:
    """`tiktoken` drops what a pattern does not match; here it stays."""
    gaps = Tokenizer(replace(tokenizer.spec, patterns=(r"\p{L}+",)))
    with pytest.raises(InputError, match="the tiktoken library says"):
        compare_with_tiktoken(gaps, minimum=300)
