"""What is compared: settings, and the arms that `--vary KEY=A,B` makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import product
from typing import Any

from waste.errors import UsageError
from waste.kernels import isa
from waste.tiers.options import TierOptions
from waste.tiers.policy import POLICIES
from waste.units import parse_bytes, parse_rate

# Caches side by side, and a table of as many rows for each test.
MOST_ARMS = 64


@dataclass(frozen=True)
class Settings:
    """How one arm runs; None: as `Engine.open` chooses."""

    ram: int | None = None  # bytes
    vram: int | None = None  # bytes
    threads: int | None = None
    isa: str | None = None
    tiers: TierOptions = field(default_factory=TierOptions)


@dataclass(frozen=True)
class Arm:
    """`name`: "ram=2GiB policy=lru"; empty where nothing is compared."""

    name: str
    settings: Settings


def arms(base: Settings, varied: Sequence[str]) -> tuple[Arm, ...]:
    """Every combination of the values in `varied`, each "KEY=A,B,...", in place of those of `base`.

    Raises UsageError for keys nobody knows, values that mean nothing, and the same one twice.
    """
    found = [_read(text) for text in varied]
    keys = [key for key, _ in found]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"--vary {key} is given twice", hint=f"--vary {key}=A,B,C takes all values at once")
    made = []
    for chosen in product(*(values for _, values in found)):
        settings = base
        for key, (_, value) in zip(keys, chosen, strict=True):
            settings = _KEYS[key].apply(settings, value)
        made.append(Arm(" ".join(f"{key}={text}" for key, (text, _) in zip(keys, chosen, strict=True)), settings))
        if len(made) > MOST_ARMS:
            raise UsageError(f"--vary makes more than {MOST_ARMS} combinations")
    return tuple(made)


@dataclass(frozen=True)
class _Key:
    parse: Callable[[str, str], Any]  # text, name in messages
    apply: Callable[[Settings, Any], Settings]


def _setting(name: str) -> Callable[[Settings, Any], Settings]:
    return lambda settings, value: replace(settings, **{name: value})


def _tier(name: str) -> Callable[[Settings, Any], Settings]:
    return lambda settings, value: replace(settings, tiers=replace(settings.tiers, **{name: value}))


def _size(text: str, name: str) -> int:
    return parse_bytes(text, name=name)


def _whole(text: str, name: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= least):
        raise UsageError(f"{name} is {text!r}, expected a whole number of {least} or more")
    return int(text)


def _one_of(text: str, name: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise UsageError(f"{name} is {text!r}, expected one of {', '.join(choices)}")
    return text


def _switch(text: str, name: str) -> bool:
    return _one_of(text, name, ("on", "off")) == "on"


def parse_policy(text: str, name: str) -> str:
    """The name of a policy. Raises UsageError."""
    return _one_of(text, name, tuple(POLICIES))


def parse_lookahead(text: str, name: str) -> int | None:
    """auto is None, off is 0, else a number of experts. Raises UsageError."""
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    try:
        return _whole(text, name, 1)
    except UsageError:
        raise UsageError(f"{name} is {text!r}, expected auto, off, or a whole number of 1 or more") from None


def parse_drive(text: str, name: str) -> float | None:
    """A rate of a simulated drive; off is None, the real one. Raises UsageError."""
    return None if text == "off" else float(parse_rate(text, name=name))


_KEYS = {
    "ram": _Key(_size, _setting("ram")),
    "vram": _Key(lambda text, name: 0 if text == "0" else _size(text, name), _setting("vram")),
    "threads": _Key(lambda text, name: _whole(text, name, 1), _setting("threads")),
    "isa": _Key(lambda text, name: _one_of(text, name, isa.usable()), _setting("isa")),
    "policy": _Key(parse_policy, _tier("policy")),
    "lookahead": _Key(parse_lookahead, _tier("lookahead")),
    "fill": _Key(_switch, _tier("fill")),
    "direct": _Key(_switch, _tier("direct")),
    "drive": _Key(parse_drive, _tier("drive_bytes_per_s")),
}
VARIABLE = tuple(_KEYS)


def _read(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The key of one --vary, and its values as they are written and as they are meant."""
    key, equals, rest = text.partition("=")
    if key not in _KEYS:
        near = get_close_matches(key, VARIABLE, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(VARIABLE)}"
        raise UsageError(f"--vary {text!r}: there is no setting {key!r} to compare", hint=hint)
    written = [value.strip() for value in rest.split(",")]
    if not equals or "" in written:
        raise UsageError(f"--vary {text!r} has no values", hint=f"--vary {key}=A,B compares A with B")
    values = [(value, _KEYS[key].parse(value, f"--vary {key}")) for value in written]
    for i, (value, meaning) in enumerate(values):
        if meaning in [other for _, other in values[:i]]:
            raise UsageError(f"--vary {text!r} names {value} twice")
    return key, values
