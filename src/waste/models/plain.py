"""A frozen dataclass from plain JSON: every field there, no other, each value of the kind that its field declares."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from waste.errors import InputError

_MAX_INT = 2**31 - 1  # dimensions and ids; everything is counted and multiplied as such


def build(cls: type[Any], data: object, place: str) -> Any:
    """An instance of the dataclass `cls` from a JSON object, its dataclass fields from objects inside.

    Fields may be int (0 to 2**31 - 1), float (finite), bool, str, a Literal, a tuple of one kind, a dataclass, or one
    of these or None. Raises InputError naming `place` and the field.
    """
    if not isinstance(data, dict):
        raise _wrong(place, data, "an object")
    names = [field.name for field in fields(cls)]
    for name in names:
        if name not in data:
            raise InputError(f"{place}: {name!r} is missing")
    for name in data:
        if name not in names:
            raise InputError(f"{place}: {name!r} is unknown")
    hints = typing.get_type_hints(cls)
    return cls(**{name: _value(hints[name], data[name], f"{place}, {name}") for name in names})


def _value(hint: Any, value: object, place: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _value(kind, value, place)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(place, value, "an array")
        return tuple(_value(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    if origin is typing.Literal:
        if not isinstance(value, str) or value not in arguments:
            raise _wrong(place, value, f"one of {', '.join(arguments)}")
        return value
    if is_dataclass(hint):
        return build(typing.cast(type[Any], hint), value, place)
    if hint is float:
        return _number(value, place)
    if hint is int:
        if type(value) is not int or not 0 <= value <= _MAX_INT:
            raise _wrong(place, value, f"a whole number from 0 to {_MAX_INT}")
        return value
    if type(value) is not hint:
        raise _wrong(place, value, {bool: "true or false", str: "a string"}[hint])
    return value


def _number(value: object, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(place, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(place, value, "a finite number")
    return number


def _wrong(place: str, value: object, expected: str) -> InputError:
    found = repr(value)
    return InputError(f"{place}: expected {expected}, found {found if len(found) <= 60 else found[:57] + '...'}")
