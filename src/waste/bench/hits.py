"""Rows of a replay for people and programs: hit share by cache size, a column for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from waste.bench.replay import ReplayRow
from waste.bench.report import Table
from waste.errors import UsageError

SCHEMA = "waste.replay/1"


def parse_sizes(text: str) -> tuple[list[int] | None, list[float] | None]:
    """Sizes as "500,2000" (slots) or "2%,10%" (shares of all experts): (slots, None) or (None, shares).

    Raises UsageError for anything else, a mixture, and what is outside 0 to 100 %.
    """
    words = [word.strip() for word in text.split(",")]
    numbers = [word.removesuffix("%") for word in words]
    shares = [word.endswith("%") for word in words]
    if len(set(shares)) > 1 or not all(map(_is_number if shares[0] else _is_count, numbers)):
        raise UsageError(f"--slots is {text!r}, expected sizes as 500,2000 or shares as 2%,10%")
    if not shares[0]:
        return [int(number) for number in numbers], None
    found = [float(number) / 100 for number in numbers]
    if not all(0 < share <= 1 for share in found):
        raise UsageError(f"--slots is {text!r}, expected shares above 0% and up to 100%")
    return None, found


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 9


def _is_number(word: str) -> bool:
    whole, _, part = word.partition(".")
    return _is_count(whole) and (part == "" or _is_count(part)) and not word.endswith(".")


def as_dicts(rows: Sequence[ReplayRow]) -> list[dict[str, Any]]:
    """Flat and plain, one for each row."""
    return [{"schema": SCHEMA, **asdict(row), "hit_share": row.hit_share} for row in rows]


def table(rows: Sequence[ReplayRow]) -> Table:
    """A line for each size. Hits of all uses, prompts among them."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    lines: dict[tuple[int, float], dict[str, float]] = {}
    for row in rows:
        lines.setdefault((row.slots, row.share_resident), {})[row.policy] = row.hit_share
    head = ["slots", "resident", *policies]
    body = [
        [str(slots), f"{100 * share:.1f} %", *(f"{100 * hits[p]:.2f} %" if p in hits else "-" for p in policies)]
        for (slots, share), hits in lines.items()
    ]
    uses = rows[0].uses if rows else 0
    tokens = rows[0].tokens if rows else 0
    return Table(f"Hits of {uses} uses, {tokens} tokens", [head, *body], tuple(range(len(head))))
