"""Flat documents as JSON Lines and CSV, every value exact."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def jsonl(documents: Sequence[Mapping[str, Any]]) -> str:
    """One document on each line. ValueError for NaN and infinities."""
    return "".join(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n" for document in documents)


def csv_text(names: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> str:
    """A line of names, then one for each document: texts as they are, other values as in JSON, nothing for null."""
    lines = [list(names), *([_cell(document[name]) for name in names] for document in documents)]
    return "".join(",".join(map(_quoted, line)) + "\n" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _quoted(cell: str) -> str:
    """As RFC 4180 has it. (`csv.writer` leaves a lone carriage return bare when lines end with a newline.)"""
    return '"' + cell.replace('"', '""') + '"' if any(c in cell for c in ',"\r\n') else cell
