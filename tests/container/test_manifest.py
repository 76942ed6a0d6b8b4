"""manifest.json: canonical, self-checking, and refused in full when anything contradicts anything."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.container.manifest import FileEntry, Manifest
from waste.errors import InputError, UnsupportedError, WasteError

EMPTY = Manifest("1", {}, {}, "a", {}, (), {}, (), (), ())

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=4)


def sign(document: dict[str, Any]) -> bytes:
    """The canonical text with a digest that fits, written independently of the module."""
    body = {key: value for key, value in document.items() if key != "digest"}
    digest = xxhash.xxh3_64_hexdigest((json.dumps(body, sort_keys=True, indent=1) + "\n").encode())
    return (json.dumps({**body, "digest": digest}, sort_keys=True, indent=1) + "\n").encode()


@settings(max_examples=50, deadline=None)
@given(json_objects, json_objects, st.text(), st.lists(st.integers(0, 2**31 - 1)))
def test_what_is_written_is_what_is_read(config: dict, options: dict, text: str, stops: list[int]) -> None:
    manifest = replace(EMPTY, config=config, options=options, architecture=text, stop_ids=tuple(stops))
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data, "m") == manifest
    assert data == sign(json.loads(data))


def test_a_full_manifest_comes_back_and_does_not_depend_on_key_order(tiny: Any) -> None:
    data = tiny.manifest.to_bytes()
    assert Manifest.from_bytes(data, "m") == tiny.manifest
    backwards = replace(tiny.manifest, config=dict(reversed(tiny.manifest.config.items())))
    assert backwards.to_bytes() == data
    assert data.isascii()
    assert data.endswith(b"}\n")


def test_sizes_follow_from_the_entries(tiny: Any) -> None:
    found = {path.name: path.stat().st_size for path in tiny.path.iterdir() if path.name != "manifest.json"}
    assert tiny.manifest.file_sizes() == found


def test_every_changed_byte_is_refused(tiny: Any) -> None:
    data = tiny.manifest.to_bytes()
    rng = random.Random(3)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= rng.randrange(1, 256)
        with pytest.raises(WasteError) as caught:
            Manifest.from_bytes(bytes(damaged), "m")
        assert "\n" not in caught.value.message


def test_every_truncation_and_insertion_is_refused(tiny: Any) -> None:
    data = tiny.manifest.to_bytes()
    for position in range(0, len(data), 17):
        for changed in (
            data[:position],
            data[:position] + b" " + data[position:],
            data[:position] + data[position + 1 :],
        ):
            with pytest.raises(WasteError):
                Manifest.from_bytes(changed, "m")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[1]", "an object"),
        (b"{}", "not belong to a waste container"),
        (b'{"format": "waste2"}', "not belong to a waste container"),
        (b'{"format": "waste"}', "'version' is missing"),
        (b'{"format": "waste", "version": "1"}', "version"),
        (b'{"format": "waste", "version": true}', "version"),
        (b'{"format": "waste", "version": 1}', "exactly"),
        (b'{"format": "waste", "version": NaN}', "NaN"),
        (b'{"format_version": 0, "arch": "x", "layers": {}, "trunk": []}', "sqliteai/waste"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"format": "waste", "version": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_other_documents_are_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        Manifest.from_bytes(data, "'m'")
    assert caught.value.message.startswith("'m'")


def test_another_version_is_unsupported_not_damaged(tiny: Any) -> None:
    document = json.loads(tiny.manifest.to_bytes()) | {"version": 2}
    with pytest.raises(UnsupportedError, match="version 2, this waste reads version 1"):
        Manifest.from_bytes(sign(document), "m")


def test_deep_nesting_and_infinite_numbers_under_a_valid_key_are_refused(tiny: Any) -> None:
    text = tiny.manifest.to_bytes().decode()
    for value in ("[" * 900 + "]" * 900, "1e999"):
        with pytest.raises(InputError):
            Manifest.from_bytes(text.replace('"eps": 1e-05', f'"eps": {value}').encode(), "m")


def _set(*path: str | int, to: object) -> Callable[[dict], None]:
    def edit(document: dict) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return edit


def _duplicate(key: str, **change: object) -> Callable[[dict], None]:
    return lambda document: document[key].append({**document[key][-1], **change})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_set("unknown", to=1), "exactly"),
        (_set("tool", to=3), "tool: expected a string, found 3"),
        (_set("options", to=[]), "options: expected an object"),
        (_set("stop_ids", to=[1, -1]), r"stop_ids\[1\]"),
        (_set("stop_ids", to=[1.0]), r"stop_ids\[0\]"),
        (_set("formats", to={"a": 1}), "formats, a"),
        (_set("tensors", to={}), "tensors: expected an array"),
        (_set("tensors", 0, "extra", to=1), "exactly"),
        (_set("tensors", 0, "shape", to=[2**31]), "shape"),
        (_set("tensors", 0, "shape", to=[0]), "shape"),
        (_set("tensors", 0, "shape", to=[True]), "shape"),
        (_set("tensors", 0, "shape", to=[5] + [1] * 8), "shape"),
        (_set("tensors", 0, "shape", to=[6]), "nbytes: expected 24, the bytes of"),
        (_set("tensors", 0, "nbytes", to=24), "nbytes"),
        (_set("tensors", 0, "fmt", to="q8"), "shape of a matrix"),
        (_set("tensors", 0, "offset", to=64), "'norm' lies at 64"),
        (_set("tensors", 1, "offset", to=0), "'conv' lies at 0 of 'trunk.bin', expected 64"),
        (_set("tensors", 1, "offset", to=128), "expected 64"),
        (_set("tensors", 1, "offset", to=-64), "offset"),
        (_set("tensors", 1, "name", to="norm"), "tensor 'norm' occurs twice"),
        (_set("tensors", 1, "file", to="../trunk.bin"), "plain name"),
        (_set("tensors", 0, "checksum", to="00"), "checksum"),
        (_set("tensors", 0, "checksum", to=7), "checksum: expected a string"),
        (_set("banks", 0, "experts", to=0), "experts"),
        (_set("banks", 0, "layer", to=4), "layer 4 occurs twice"),
        (_set("banks", 0, "layer", to=-1), "layer"),
        (_set("banks", 0, "file", to="experts-004.bin"), "file 'experts-004.bin' occurs twice"),
        (_set("banks", 0, "file", to="trunk.bin"), "file 'trunk.bin' occurs twice"),
        (_set("banks", 0, "layout", "stride", to=4096), "layout"),
        (_set("banks", 0, "layout", "gate", "rows", to=25), "layout"),
        (_set("banks", 0, "layout", "up", "fmt", to="q8"), "layout"),
        (_set("banks", 0, "layout", "down", "offset", to=0), "layout"),
        (_set("banks", 0, "layout", "down", "nbytes", to=1), "layout"),
        (_set("banks", 0, "layout", to={}), "exactly"),
        (_set("banks", 0, "digest", to="g" * 16), "digest"),
        (_duplicate("files"), "file 'chat_template.jinja' occurs twice"),
        *((_duplicate("files", name=name), "plain name") for name in ("", ".", "..", "a/b", "/a", "a\\b", "a\0")),
        (_duplicate("files", name="x" * 256), "plain name"),
        (_duplicate("files", name="manifest.json"), "plain name"),
        (_duplicate("files", name="a", nbytes=-1), "nbytes"),
        (_duplicate("files", name="a", nbytes=2**62), "nbytes"),
    ],
)  # fmt: skip
def test_contradictions_with_a_valid_digest_are_refused_by_place(
    tiny: Any, edit: Callable[[dict], None], words: str
) -> None:
    document = json.loads(tiny.manifest.to_bytes())
    edit(document)
    with pytest.raises(InputError, match=words) as caught:
        Manifest.from_bytes(sign(document), "'m'")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("place", [("tensors", 2, "fmt"), ("banks", 0, "layout", "gate", "fmt")])
def test_unknown_number_formats_are_unsupported(tiny: Any, place: tuple) -> None:
    document = json.loads(tiny.manifest.to_bytes())
    _set(*place, to="wt9")(document)
    with pytest.raises(UnsupportedError, match="'wt9'"):
        Manifest.from_bytes(sign(document), "m")


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": {"a": float("nan")}},
        {"config": {"a": [float("inf")]}},
        {"config": {1: 2}},
        {"options": {"a": [{None: 1}]}},
        {"stop_ids": (-1,)},
        {"files": (FileEntry("../x", 1, 1),)},
        {"files": (FileEntry("x", 1, 1), FileEntry("x", 1, 1))},
        {"files": (FileEntry("x", 1, 1 << 64),)},
    ],
)
def test_what_could_not_be_read_is_never_written(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        replace(EMPTY, **wrong).to_bytes()
    assert not isinstance(caught.value, WasteError)
