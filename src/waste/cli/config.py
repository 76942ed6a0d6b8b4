"""Settings and where they come from: flag > WASTE_* variable > project waste.toml > user config > default.

This is the only file that reads the environment. A name nobody knows and a value that does not parse are
errors that say which variable, or which file and key, is meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from waste.errors import UsageError
from waste.units import parse_bytes

PREFIX = "WASTE_"
PROJECT_FILE = "waste.toml"
BACKENDS = ("cpu", "reference")
REASONING = ("show", "hide")
ISAS = ("portable", "avx2", "avx512", "amx")  # those of waste.kernels.isa, which settings are read without
POLICIES = ("adaptive", "lru", "lfu")  # those of waste.tiers.policy, likewise


def _size(text: str, name: str) -> int:
    return parse_bytes(text, name=name)


def _size_or_none(text: str, name: str) -> int:
    """A size, or 0 for not at all: so that a flag can take back what is configured."""
    return 0 if text.strip() == "0" else parse_bytes(text, name=name)


def _whole(low: int) -> Callable[[str, str], int]:
    def parse(text: str, name: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise UsageError(f"{name} is {text!r}, expected a whole number of {low} or more")
        return value

    return parse


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}, expected a number") from None


def _choice(*choices: str) -> Callable[[str, str], str]:
    def parse(text: str, name: str) -> str:
        if text not in choices:
            raise UsageError(f"{name} is {text!r}, expected one of {', '.join(choices)}")
        return text

    return parse


def _flag(text: str, name: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise UsageError(f"{name} is {text!r}, expected 1 or 0")


def _path(text: str, name: str) -> str:
    if not text or "\0" in text:
        raise UsageError(f"{name} is {text!r}, expected a directory")
    return text


def _lookahead(text: str, name: str) -> str:
    if text in ("auto", "off"):
        return text
    try:
        return str(_whole(1)(text, name))
    except UsageError:
        raise UsageError(f"{name} is {text!r}, expected auto, off, or a whole number of 1 or more") from None


def lookahead_experts(setting: str) -> int | None:
    """What the setting `lookahead` means: experts to read ahead in each layer, 0 never, None as it pays."""
    return None if setting == "auto" else 0 if setting == "off" else int(setting)


def _formats(option: str) -> Callable[[str, str], str]:
    def parse(text: str, name: str) -> str:
        if not text.strip():
            raise UsageError(f"{name} is empty")
        from waste.models.formats import read_formats  # with NumPy: only where formats are set

        try:
            read_formats(**{option: text})
        except UsageError as error:
            raise UsageError(f"{name} is {text!r}: {error.message}", hint=error.hint) from None
        return text

    return parse


@dataclass(frozen=True)
class Setting:
    """One key of waste.toml, also the variable WASTE_KEY. `parse(text, name)` raises UsageError naming `name`."""

    key: str
    parse: Callable[[str, str], Any]
    default: Any
    meaning: str  # what None stands for, or a unit; shown by `waste info --config`
    many: bool = False  # a tuple: an array in a file, parts between ":" in a variable; `parse` parses one of them

    def read(self, text: str, name: str) -> Any:
        """The value of one text: a variable's, or a file's that is not an array."""
        if self.many:
            return tuple(self.parse(part, name) for part in text.split(os.pathsep))
        return self.parse(text, name)


SETTINGS = (
    Setting("ram", _size, None, "bytes; default: 72 % of what is free"),
    Setting("vram", _size_or_none, None, "bytes of the tier above RAM; default: 0, none"),
    Setting("threads", _whole(1), None, "of the cpu backend and of convert; default: one per core"),
    Setting("backend", _choice(*BACKENDS), "cpu", "cpu, or reference (torch, slow)"),
    Setting("experts_dir", _path, (), "more directories where experts-*.bin files may lie", many=True),
    Setting("policy", _choice(*POLICIES), "adaptive", f"what leaves the expert cache: {', '.join(POLICIES)}"),
    Setting("lookahead", _lookahead, "auto", "experts of the next layer to read ahead: auto (as it pays), off, or N"),
    Setting("learn", _flag, True, "write usage.json beside the model, for a warm next start"),
    Setting("mlock", _flag, False, "keep the expert cache from being swapped out"),
    Setting("ctx", _whole(1), None, "tokens of prompt and answer; default: 8192, or the model's own limit"),
    Setting("max_tokens", _whole(0), 256, "tokens an answer may have"),
    Setting("temp", _number, None, "default: as the model's makers publish, else 0.7; 0 is greedy"),
    Setting("top_p", _number, None, "default: as published, else 0.95; 1 is off"),
    Setting("top_k", _whole(0), None, "default: as published, else 0, off"),
    Setting("min_p", _number, None, "default: as published, else 0, off"),
    Setting("repeat_penalty", _number, 1.0, "1 is off"),
    Setting("seed", _whole(0), None, "default: a new one every run"),
    Setting("reasoning", _choice(*REASONING), "show", "show (on stderr) or hide"),
    Setting("experts", _formats("experts"), None, "number formats of routed experts; default: see waste convert -h"),
    Setting("trunk", _formats("trunk"), None, "number formats of everything else; default: see waste convert -h"),
    Setting("size", _size, None, "bytes a converted container may have; default: as the formats give"),
    Setting("isa", _choice(*ISAS), None, "instruction set of native code; default: the best there is"),
    Setting("debug", _flag, False, "show tracebacks"),
)
_BY_KEY = {setting.key: setting for setting in SETTINGS}


@dataclass(frozen=True)
class Value:
    """A setting's value and where it was found."""

    value: Any
    origin: str  # "flag --ram", "WASTE_RAM", "waste.toml", "/home/me/.config/waste/config.toml", "default"


@dataclass(frozen=True)
class Config:
    """Every setting, resolved. `load` does the reading; commands ask `get` and hand over their flag's value."""

    values: Mapping[str, Value]
    cache_dir: Path  # for what can be made again
    files: tuple[Path, ...] = field(default=())  # the config files that were read

    def get(self, key: str, flag: Any = None) -> Any:
        """The value of `key`: the command line's if it gave one (already parsed), else the configured one."""
        return self.values[key].value if flag is None else flag

    def parse(self, key: str, flag: str | Sequence[str] | None) -> Any:
        """As `get`, for a flag that arrives as text: parsed as the setting is, the option named when it does not.

        A repeatable option arrives as a list; given at least once, it replaces what is configured.
        """
        setting, option = _BY_KEY[key], "--" + key.replace("_", "-")
        if flag is None or isinstance(flag, str):
            return self.get(key, None if flag is None else setting.parse(flag, option))
        return self.get(key, tuple(setting.parse(part, option) for part in flag) or None)

    @staticmethod
    def load(environ: Mapping[str, str], project: Path = Path()) -> Config:
        """Read the environment, `project`/waste.toml and the user's config.

        Raises UsageError for unknown names and values that do not parse, InputError never: a config file that
        cannot be read is a UsageError too, as it is the setting that is wrong.
        """
        user_file = _xdg(environ, "XDG_CONFIG_HOME", ".config") / "waste" / "config.toml"
        values = {setting.key: Value(setting.default, "default") for setting in SETTINGS}
        files = []
        for path, label in ((user_file, str(user_file)), (project / PROJECT_FILE, PROJECT_FILE)):
            text = _read(path, label)
            if text is not None:
                files.append(path)
                values |= _from_file(text, label)
        values |= _from_variables(environ)
        return Config(values, _xdg(environ, "XDG_CACHE_HOME", ".cache") / "waste", tuple(files))


def environment() -> Mapping[str, str]:
    """The process environment, read here and nowhere else."""
    return os.environ


def wants_debug(environ: Mapping[str, str]) -> bool:
    """Whether failures should show their traceback. Never fails: it is asked while a failure is being shown."""
    return environ.get(PREFIX + "DEBUG", "").lower() not in ("", "0", "false", "no", "off")


def allows_color(environ: Mapping[str, str]) -> bool:
    """Whether the environment lets terminals have colour (no-color.org; a dumb terminal has none)."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def allows_cursor(environ: Mapping[str, str]) -> bool:
    """Whether a line can be redrawn in place."""
    return environ.get("TERM") != "dumb"


def _xdg(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    """The XDG base directory; relative values are to be ignored, says the specification."""
    value = environ.get(variable, "")
    if value.startswith("/"):
        return Path(value)
    home = environ.get("HOME", "")
    return (Path(home) if home.startswith("/") else Path.home()) / fallback


def _unknown(what: str, name: str, known: list[str]) -> UsageError:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return UsageError(f"{what}: no such setting", hint=f"{hint}`waste info --config` lists them all")


def _from_variables(environ: Mapping[str, str]) -> dict[str, Value]:
    found = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX):
            continue
        setting = _BY_KEY.get(variable.removeprefix(PREFIX).lower())
        if setting is None or variable != PREFIX + setting.key.upper():
            raise _unknown(f"environment variable {variable!r}", variable, [PREFIX + s.key.upper() for s in SETTINGS])
        text = environ[variable]
        if text or setting.key == "debug":  # set but empty means not set, as for most tools
            found[setting.key] = Value(setting.read(text.strip(), variable), variable)
    return found


def _read(path: Path, label: str) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        raise UsageError(f"{label!r} is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise UsageError(f"cannot read {label!r}: {error.strerror}") from None


def _from_file(text: str, label: str) -> dict[str, Value]:
    import tomllib

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{label!r} is not TOML: {error}") from None
    found = {}
    for key, value in document.items():
        setting = _BY_KEY.get(key)
        where = f"{key!r} in {label!r}"
        if setting is None:
            raise _unknown(where, key, list(_BY_KEY))
        if setting.many and not isinstance(value, str):
            if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
                raise UsageError(f"{where} is {value!r}, expected an array of texts")
            found[key] = Value(tuple(setting.parse(part, where) for part in value), label)
            continue
        if not isinstance(value, str | int | float):
            raise UsageError(f"{where} is a {type(value).__name__}, expected one value")
        written = str(value).lower() if isinstance(value, bool) else str(value)
        found[key] = Value(setting.read(written, where), label)
    return found
