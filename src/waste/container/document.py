"""Typed access to a parsed JSON document: whatever is not as expected is an InputError that names its place."""

from __future__ import annotations

import json
import math
from typing import Any

from waste.errors import InputError

AGAIN = "copy the file again, or convert the model again"


class Node:
    """One value inside a document; `place` is the file and the path to the value, for messages."""

    def __init__(self, value: object, place: str) -> None:
        self.value = value
        self.place = place

    def wrong(self, expected: str) -> InputError:
        """The error for this value not being `expected`."""
        found = repr(self.value)
        return InputError(
            f"{self.place}: expected {expected}, found {found if len(found) <= 80 else found[:77] + '...'}", hint=AGAIN
        )

    def member(self, key: str) -> Node:
        """The member `key` of an object."""
        members = self.object()
        if key not in members:
            raise InputError(f"{self.place}: {key!r} is missing", hint=AGAIN)
        return Node(members[key], f"{self.place}, {key}")

    def elements(self) -> list[Node]:
        """The elements of an array."""
        if not isinstance(self.value, list):
            raise self.wrong("an array")
        return [Node(value, f"{self.place}[{index}]") for index, value in enumerate(self.value)]

    def object(self, keys: frozenset[str] | None = None) -> dict[str, Any]:
        """This value as an object, with exactly `keys` where given."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if keys is not None and self.value.keys() != keys:
            raise self.wrong(f"an object with exactly {', '.join(sorted(keys))}")
        return self.value

    def text(self) -> str:
        """This value as a string."""
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value

    def integer(self, low: int, high: int) -> int:
        """This value as a whole number with low <= value < high; true and 1.0 are none."""
        if type(self.value) is not int or not low <= self.value < high:
            raise self.wrong(f"a whole number from {low} to {high - 1}")
        return self.value

    def texts(self) -> dict[str, str]:
        """This value as an object of strings."""
        return {key: self.member(key).text() for key in self.object()}


def parse(data: bytes, place: str) -> Node:
    """The document in `data`; InputError when it is no JSON (NaN and infinities included)."""
    try:
        return Node(json.loads(data.decode("utf-8"), parse_float=_finite, parse_constant=_refuse_constant), place)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is damaged: not valid JSON: {' '.join(str(error).split())}", hint=AGAIN) from None


def serialise(value: object) -> bytes:
    """The one canonical text of a JSON value: sorted keys, indented, ASCII, a newline at the end.

    ValueError for what JSON cannot carry: NaN, infinities, keys that are no strings. Tuples become arrays.
    """
    _require_text_keys(value)
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def _finite(text: str) -> float:
    """1e999 reads as infinity, which could not be written again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _require_text_keys(value: object) -> None:
    """`json` would turn other keys into strings silently, so that one would read what nobody wrote."""
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise ValueError(f"key {key!r} is not a string")
            _require_text_keys(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _require_text_keys(member)
