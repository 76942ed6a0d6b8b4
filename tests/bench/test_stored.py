"""Rows survive every format exactly, and files of anything else are refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from waste.bench.row import NAMES, SCHEMA, Row, _kinds
from waste.bench.stored import from_text, load, to_csv, to_jsonl
from waste.errors import InputError

TEXTS = ("", "plain", "a,b", 'say "x"', "two\nlines", "\r", "a\r\nb", "null", "12", " ", "=1+1", "四 ü", "\t|\\")


def random_row(random: Random) -> Row:
    def number() -> float:
        return random.choice((0.0, -0.0, 1e-300, random.random(), random.uniform(-1e12, 1e12), float(2**60)))

    def whole() -> int:
        return random.choice((0, 1, -5, random.getrandbits(70)))

    values: dict[Any, Any] = {
        str: lambda: random.choice(TEXTS),
        int: whole,
        float: number,
        bool: lambda: random.random() < 0.5,
        list[float]: lambda: [number() for _ in range(random.randrange(4))],
        int | None: lambda: random.choice((None, whole())),
        float | None: lambda: random.choice((None, number())),
    }
    return Row(**{**{name: values[kind]() for name, kind in _kinds().items()}, "schema": SCHEMA})


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_every_format_gives_back_equal_rows(count: int) -> None:
    random = Random(count)
    rows = [random_row(random) for _ in range(count)]
    document = json.dumps({"schema": SCHEMA, "rows": [row.as_dict() for row in rows]}, indent=2)
    assert from_text(to_csv(rows), "x") == rows
    assert from_text(to_jsonl(rows), "x") == rows
    assert from_text(document, "x") == rows


def test_json_is_plain_and_flat(row: Callable[..., Row]) -> None:
    (line,) = to_jsonl([row()]).splitlines()
    values = json.loads(line)
    assert tuple(values) == NAMES
    assert all(isinstance(v, str | int | float | bool | None | list) for v in values.values())


def test_rows_are_appended_and_read_together(tmp_path: Path, row: Callable[..., Row]) -> None:
    place = tmp_path / "old.jsonl"
    rows = [row(arm="a"), row(arm="b")]
    place.write_text(to_jsonl(rows[:1]) + "\n" + to_jsonl(rows[1:]))
    assert load(place) == rows


def test_members_of_later_versions_are_left_out(row: Callable[..., Row]) -> None:
    values = {**row().as_dict(), "invented_later": 3}
    assert from_text(json.dumps(values), "x") == [row()]


def broken(row: Row, **changes: Any) -> str:
    return json.dumps({**row.as_dict(), **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": "waste.bench/9"}, "waste.bench/9"),
        ({"tokens_per_s": "fast"}, "'tokens_per_s' is 'fast'"),
        ({"tokens_per_s": None}, "'tokens_per_s' is None"),
        ({"tokens_per_s": float("nan")}, "'tokens_per_s' is nan"),
        ({"tokens_per_s": float("inf")}, "'tokens_per_s' is inf"),
        ({"tokens_per_s": 10**400}, "'tokens_per_s' is 1000"),
        ({"tokens_per_s": True}, "'tokens_per_s' is True"),
        ({"repeats": 1.5}, "'repeats' is 1.5"),
        ({"repeats": True}, "'repeats' is True"),
        ({"samples_s": [1, "x"]}, "'samples_s'"),
        ({"samples_s": 5}, "'samples_s'"),
        ({"cold": 1}, "'cold' is 1"),
        ({"arm": None}, "'arm' is None"),
    ],
)
def test_a_value_of_another_kind_is_named(row: Callable[..., Row], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as failure:
        from_text(broken(row(), **changes), "old.jsonl")
    assert said in failure.value.message and "old.jsonl, line 1" in failure.value.message


def test_a_missing_member_is_named(row: Callable[..., Row]) -> None:
    values = row().as_dict()
    del values["threads"]
    with pytest.raises(InputError, match="has no 'threads'"):
        from_text(json.dumps(values), "x")


def test_a_figure_that_earlier_versions_did_not_have_is_none(row: Callable[..., Row]) -> None:
    values = row().as_dict()
    del values["predicted_tokens_per_s"]
    assert from_text(json.dumps(values), "x") == [row(predicted_tokens_per_s=None)]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"schema": "waste.bench/1"',
        "[" * 100_000,
        "{" + '"a":{' * 100_000,
        '{"rows": 3}',
        '{"schema": "waste.bench/1", "rows": 3}',
        '{"schema": "waste.bench/1", "rows": [3]}',
        '{"schema": "waste.bench/1", "rows": [null]}',
        "hello",
        "a,b\n1,2\n",
        "schema\nwaste.bench/1\n",
        "schema,test\nwaste.bench/1\n",
        'schema,"te\n',
        "{}\n{}\n",
        "\x00\x01",
        "{}\nnot json\n",
    ],
)
def test_anything_else_is_one_line(text: str) -> None:
    with pytest.raises(InputError) as failure:
        from_text(text, "old")
    assert "\n" not in failure.value.message and failure.value.message.startswith("old")


def test_a_document_of_something_else_is_called_by_its_schema() -> None:
    """Pretty-printed, its first line is no JSON."""
    for schema in ("waste.info/1", "waste.bench/2"):
        with pytest.raises(InputError, match=f"is not a document of {SCHEMA}: its schema is '{schema}'"):
            from_text(json.dumps({"schema": schema, "a": 1}, indent=2), "x")


def test_a_single_row_may_stand_on_many_lines(row: Callable[..., Row]) -> None:
    assert from_text(json.dumps(row().as_dict(), indent=2), "x") == [row()]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes(b'{"schema": "\xe4"}')
    for name in ("missing", "empty", "latin", "."):
        with pytest.raises(InputError):
            load(tmp_path / name)
