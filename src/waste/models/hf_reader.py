"""Typed reading of a Hugging Face config: every refusal names the key and the value found there.

A config is written by many hands. `Reader` accepts the spellings that are known to vary (with a notice), and nothing
else: a missing key, a word where a number belongs or a value nobody implements ends with one line naming the key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from waste.errors import InputError, UnsupportedError

MAX_INT = 2**31 - 1  # dimensions are stored and multiplied as such; no real model comes near

_ABSENT = object()


def shown(value: object) -> str:
    """`value` as JSON writers know it, on one line, cut to 60 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Reader:
    """One JSON object of a config file. `where` prefixes the key in messages ("config.json: text_config.")."""

    def __init__(self, data: dict[str, Any], where: str, notices: list[str]) -> None:
        self.data = data
        self.where = where
        self.notices = notices
        self.usual: frozenset[str] = frozenset()  # other spellings that are the family's own: no notice

    def sub(self, key: str) -> Reader | None:
        """The object under `key`; None where it is missing or null. InputError for anything but an object."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return Reader(value, f"{self.where}{key}.", self.notices)

    # -- failures and notices

    def wrong(self, key: str, value: object, expected: str) -> InputError:
        """The error for a value of the wrong kind."""
        return InputError(f"{self.where}{key} is {shown(value)}; expected {expected}")

    def missing(self, key: str) -> InputError:
        """The error for a key that has to be there, because any default could be wrong."""
        return InputError(
            f"{self.where}{key} is missing", hint="use the config.json of the release: there is no safe default for it"
        )

    def unsupported(self, key: str, value: object, supported: str) -> UnsupportedError:
        """The error for a value that is understood and not implemented."""
        return UnsupportedError(f"{self.where}{key} is {shown(value)}; only {supported} is supported")

    def notice(self, message: str) -> None:
        """Something the user should know although the config is accepted."""
        if message not in self.notices:
            self.notices.append(message)

    # -- lookup

    def raw(self, key: str, aliases: Sequence[str] = ()) -> Any:
        """The value under `key` or one of its other spellings; None where all are missing or null.

        Raises InputError when two spellings are present and disagree.
        """
        value = self._find(key, aliases)[1]
        return None if value is _ABSENT else value

    def has(self, key: str, aliases: Sequence[str] = ()) -> bool:
        """Whether any spelling is present, null included."""
        return self._find(key, aliases)[1] is not _ABSENT

    def _find(self, key: str, aliases: Sequence[str]) -> tuple[str, Any]:
        found = [(name, self.data[name]) for name in (key, *aliases) if name in self.data]
        if not found:
            return key, _ABSENT
        name, value = next((item for item in found if item[1] is not None), found[0])
        for other, second in found:
            if second is not None and second != value:
                raise InputError(
                    f"{self.where}{name} is {shown(value)} but {other} is {shown(second)}; they mean the same setting"
                )
        if name != key and name not in self.usual:
            self.notice(f"{self.where}{name} is read as {key}")
        return name, value

    # -- typed values

    def integer(
        self,
        key: str,
        *aliases: str,
        default: int | None = None,
        low: int = 1,
        high: int = MAX_INT,
        nullable: bool = False,
    ) -> int:
        """A whole number in [low, high]. Without `default`, a missing (and, unless `nullable`, null) key is refused."""
        name, value = self._find(key, aliases)
        if value is _ABSENT or (value is None and nullable):
            if default is None:
                raise self.missing(key)
            return default
        return self._integer(name, value, low, high)

    def optional_integer(self, key: str, *aliases: str, low: int = 1, high: int = MAX_INT) -> int | None:
        """As `integer`, None where the key is missing or null."""
        name, value = self._find(key, aliases)
        return None if value is _ABSENT or value is None else self._integer(name, value, low, high)

    def _integer(self, name: str, value: object, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            expected = "a positive whole number" if low == 1 else f"a whole number of at least {low}"
            if isinstance(value, int) and not isinstance(value, bool) and value > high:
                expected = f"at most {high}"
            raise self.wrong(name, value, expected)
        return value

    def number(self, key: str, *aliases: str, default: float | None = None, positive: bool = True) -> float:
        """A finite number, above zero if `positive`. Without `default`, a missing key is refused."""
        name, value = self._find(key, aliases)
        if value is _ABSENT:
            if default is None:
                raise self.missing(key)
            return default
        return self._number(name, value, positive)

    def optional_number(self, key: str, *aliases: str, positive: bool = True) -> float | None:
        """As `number`, None where the key is missing or null."""
        name, value = self._find(key, aliases)
        return None if value is _ABSENT or value is None else self._number(name, value, positive)

    def _number(self, name: str, value: object, positive: bool) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or (positive and number <= 0):
            raise self.wrong(name, value, "a finite number above zero" if positive else "a finite number")
        return number

    def boolean(self, key: str, *aliases: str, default: bool | None = None) -> bool:
        """true or false. Without `default`, a missing key is refused; null counts as missing only with one."""
        name, value = self._find(key, aliases)
        if value is _ABSENT or (value is None and default is not None):
            if default is None:
                raise self.missing(key)
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def strings(self, key: str, length: int) -> list[str] | None:
        """A list of `length` strings, None where the key is missing or null."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, value, "a list of strings")
        if len(value) != length:
            raise InputError(f"{self.where}{key} has {len(value)} entries; expected {length}, one a layer")
        return value

    def integers(self, key: str) -> list[int] | None:
        """A list of whole numbers from zero up, None where the key is missing or null."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list of whole numbers")
        return [self._integer(f"{key}[{i}]", item, 0, MAX_INT) for i, item in enumerate(value)]

    def require(self, key: str, *supported: object, aliases: Sequence[str] = ()) -> None:
        """Refuse `key` unless it is missing or holds one of `supported`. A missing key means a supported value."""
        name, value = self._find(key, aliases)
        if value is _ABSENT or any(type(value) is type(item) and value == item for item in supported):
            return
        words = [item if isinstance(item, str) else shown(item) for item in supported if item is not None]
        raise self.unsupported(name, value, " or ".join(words) or "null")
