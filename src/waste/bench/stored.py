"""Rows as text and back: JSON, JSON Lines and CSV carry every member with its exact value."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waste.bench.flat import csv_text, jsonl
from waste.bench.row import NAMES, SCHEMA, Row
from waste.errors import InputError
from waste.io.files import read_file, shown

_MOST_BYTES = 256 << 20  # some hundred thousand rows


def to_jsonl(rows: Sequence[Row]) -> str:
    """One row on each line."""
    return jsonl([row.as_dict() for row in rows])


def to_csv(rows: Sequence[Row]) -> str:
    """A line of names, then one for each row."""
    return csv_text(NAMES, [row.as_dict() for row in rows])


def load(path: Path) -> list[Row]:
    """The rows in a file that `waste bench` wrote, as json, jsonl or csv.

    Raises InputError for a file that cannot be read, that is something else, that has no rows, or rows without speed.
    """
    where = shown(path)
    try:
        text = read_file(path, limit=_MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 at byte {error.start}", hint=_HINT) from None
    rows = from_text(text, where)
    if not rows:
        raise InputError(f"{where} has no rows", hint=_HINT)
    for row in rows:
        if row.tokens_per_s <= 0:
            raise InputError(f"{where}: {row.title!r} has {row.tokens_per_s:g} tokens_per_s, expected more than 0")
    return rows


_HINT = "waste bench MODEL -o jsonl > old.jsonl writes such a file"


def from_text(text: str, where: str) -> list[Row]:
    """The rows in `text`; `where` names it in messages. Raises InputError."""
    if not text.strip():
        return []
    if not text.lstrip().startswith("{"):
        return _from_csv(text, where)
    try:
        document = _parsed(text)
    except ValueError:
        document = None  # several lines, each a document
    if isinstance(document, dict):
        rows = document.get("rows")
        if rows is None and "test" in document:
            return [_row(document, f"{where}, line 1")]
        if document.get("schema") != SCHEMA or not isinstance(rows, list):
            known = document.get("schema", "unknown")
            raise InputError(f"{where} is not a document of {SCHEMA}: its schema is {known!r:.40}", hint=_HINT)
        return [_row(each, f"{where}, row {i}") for i, each in enumerate(rows, 1)]
    found = []
    for i, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(_row(_parsed(line), f"{where}, line {i}"))
            except ValueError:
                raise InputError(f"{where}, line {i} is not JSON", hint=_HINT) from None
    return found


def _parsed(text: str) -> Any:
    """ValueError, also for nesting that no parser stands."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _row(values: object, where: str) -> Row:
    if not isinstance(values, dict):
        raise InputError(f"{where} is no row", hint=_HINT)
    return Row.from_dict(values, where)


def _from_csv(text: str, where: str) -> list[Row]:
    try:
        lines = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise InputError(f"{where} is not CSV: {error}", hint=_HINT) from None
    if not lines or "schema" not in lines[0]:
        raise InputError(f"{where} holds no rows of {SCHEMA}", hint=_HINT)
    names, found = lines[0], []
    for i, cells in enumerate(lines[1:], 2):
        if len(cells) != len(names):
            raise InputError(f"{where}, line {i} has {len(cells)} cells, expected {len(names)}")
        values = dict(zip(names, cells, strict=True))
        found.append(Row.from_dict({name: _value(name, cell) for name, cell in values.items()}, f"{where}, line {i}"))
    return found


def _value(name: str, cell: str) -> Any:
    if name in Row.texts():
        return cell
    if cell == "":
        return None
    try:
        return _parsed(cell)
    except ValueError:
        return cell  # and is refused as a text
