"""The container's tokenizer files: exact, deterministic, and refused when damaged."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.errors import InputError, WasteError
from waste.tokenizer import Tokenizer, from_files, read_hf_json, to_files

Json = dict[str, Any]


def _document(tokenizer: Tokenizer) -> tuple[bytes, Json]:
    files = to_files(tokenizer.spec)
    return files["tokenizer.model"], json.loads(files["tokenizer.json"])


@pytest.mark.parametrize("pattern", ["glm", "deepseek"])
def test_what_is_written_is_read(pattern: str, make_json: Callable[..., Json]) -> None:
    data = make_json(pattern)
    data["model"]["vocab"] |= {"世": 900, "orphan": 901}  # no text encodes to these
    spec = read_hf_json(data)
    assert set(spec.decode_only) == {900, 901}
    files = to_files(spec)
    assert sorted(files) == ["tokenizer.json", "tokenizer.model"]
    back = from_files(files["tokenizer.model"], files["tokenizer.json"])
    assert back.spec == spec
    assert back.decode([900, 901]) == "世orphan"
    assert to_files(back.spec) == files


def test_the_rank_file_is_base64_and_rank_in_order(tokenizer: Tokenizer) -> None:
    lines = to_files(tokenizer.spec)["tokenizer.model"].decode().splitlines()
    pairs = [line.split(" ") for line in lines]
    ranks = [int(rank) for _, rank in pairs]
    assert ranks == sorted(ranks)
    assert {base64.b64decode(piece): int(rank) for piece, rank in pairs} == tokenizer.spec.ranks


def test_the_order_of_a_mapping_does_not_show(make_json: Callable[..., Json]) -> None:
    data = make_json()
    turned = make_json()
    turned["model"]["vocab"] = dict(reversed(turned["model"]["vocab"].items()))
    assert to_files(read_hf_json(data)) == to_files(read_hf_json(turned))


DAMAGE: dict[str, tuple[Callable[[Json], object], str]] = {
    "schema": (lambda d: d.update(schema="waste.tokenizer/2"), "'waste.tokenizer/2' found"),
    "patterns": (lambda d: d.update(patterns="x"), "patterns"),
    "pattern": (lambda d: d.update(patterns=["[["]), r"'\[\['"),
    "size": (lambda d: d.update(vocab_size=7), "vocab_size is 7"),
    "added": (lambda d: d.update(added_tokens=None), "added_tokens"),
    "flag": (lambda d: d["added_tokens"][0].update(special=1), "special"),
    "field": (lambda d: d["added_tokens"][0].pop("lstrip"), "lstrip"),
    "id": (lambda d: d["added_tokens"][0].update(id="7"), "'7'"),
    "taken": (lambda d: d["added_tokens"][0].update(id=7), "id 7 belongs to both"),
    "twice": (lambda d: d["added_tokens"][0].update(content="<sop>"), "'<sop>' occurs twice"),
    "decode_only": (lambda d: d.update(decode_only=[[7, "%"]]), "decode_only"),
    "decode_only type": (lambda d: d.update(decode_only=["YQ=="]), "decode_only"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_the_json_is_named(name: str, tokenizer: Tokenizer) -> None:
    change, words = DAMAGE[name]
    model, document = _document(tokenizer)
    change(document)
    with pytest.raises(WasteError, match=words) as caught:
        from_files(model, json.dumps(document).encode())
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (b"", "holds no pieces"),
        (b"YQ== 1\nYg==\n", "line 2"),
        (b"YQ== 1\n!!!! 2\n", "line 2"),
        (b"YQ== -1\n", "line 1"),
        (b"YQ== 99999999999999999999\n", "line 1"),
        (b"YQ== 1\nYQ== 2\n", "line 2: piece b'a' occurs twice"),
        (b"YQ== 1\n", "no piece for byte"),
        (b"<html>\n", "line 1"),
    ],
)
def test_damage_to_the_ranks_is_named(model: bytes, words: str, tokenizer: Tokenizer) -> None:
    document = to_files(tokenizer.spec)["tokenizer.json"]
    with pytest.raises(InputError, match=words):
        from_files(model, document)


@pytest.mark.parametrize("document", [b"", b"\xff", b"[]", b"null", b"{}", b"[" * 100_000])
def test_other_documents_are_refused(document: bytes, tokenizer: Tokenizer) -> None:
    model, _ = _document(tokenizer)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        from_files(model, document)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_an_error_or_another_valid_tokenizer(data: st.DataObject, tokenizer: Tokenizer) -> None:
    """Never another exception. (That the bytes are the right ones is what the container's digests are for.)"""
    files = to_files(tokenizer.spec)
    name = data.draw(st.sampled_from(sorted(files)))
    raw = bytearray(files[name])
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    files[name] = bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) // 2]))])
    try:
        other = from_files(files["tokenizer.model"], files["tokenizer.json"])
    except WasteError:
        return
    other.encode("the experts", markup=True)
