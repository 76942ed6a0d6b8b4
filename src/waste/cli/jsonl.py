"""`waste run --jsonl`: a request a line in, an answer a line out, each before the next line is read.

One engine answers all of them, so experts that one request has brought into memory serve the next.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from waste.cli.answer import SCHEMA, figures, timing_line
from waste.cli.config import Config
from waste.cli.environment import Environment
from waste.cli.output import Output
from waste.cli.prompt import MAX_BYTES, STDIN, announced
from waste.cli.request import Request
from waste.errors import InputError, UsageError, WasteError
from waste.units import format_bytes

if TYPE_CHECKING:
    from waste.chat import Message
    from waste.engine.engine import Engine

NUMBERS = ("temp", "top_p", "min_p", "repeat_penalty")
WHOLE = ("max_tokens", "top_k", "seed")
FIELDS = ("id", "prompt", "messages", "system", "raw", "effort", "stop", *WHOLE, *NUMBERS)

_SKIPPED = 1 << 20  # how much of a line too long is passed by at a time
_WAITING = "waiting for requests on stdin, one JSON object a line (end with Ctrl-D)"


def request_lines(
    files: Sequence[str], env: Environment, *, read_stdin: bool, named: bool
) -> contextlib.AbstractContextManager[BinaryIO]:
    """The stream that requests come from: the one file, else stdin. named: stdin was asked for by `-`.

    Raises UsageError where there is none, InputError for a file that cannot be opened.
    """
    if len(files) > 1 or (files and named and files[0] != STDIN):
        raise UsageError("--jsonl reads one file, or stdin")
    if files and files[0] != STDIN:
        try:
            return Path(files[0]).open("rb")
        except OSError as error:
            raise InputError(f"cannot read the request file {files[0]!r}: {error.strerror}") from None
    asked = named or bool(files)
    if not read_stdin or (env.stdin.isatty() and not asked):
        raise UsageError(
            "no requests: with --jsonl they come from a pipe or --file", hint="waste run MODEL --jsonl < requests.jsonl"
        )
    return contextlib.nullcontext(env.stdin)


def answer_lines(
    engine: Engine, stream: BinaryIO, defaults: Request, config: Config, out: Output, *, show_reasoning: bool
) -> None:
    """Answer line by line. Raises UsageError when there was no request, WasteError when one of them failed."""
    count = failed = 0
    for number, line in _lines(stream, out):
        count += 1
        identity: str | int | None = None
        try:
            fields = _parse(line)
            identity = _identity(fields)
            request = _request(fields, defaults)
            done = request.answer(engine, request.prompt(engine), config, on_event=out.on_event)
        except WasteError as error:
            failed += 1
            document = {"event": "error", "line": number, "id": identity, "message": error.message, "hint": error.hint}
        else:
            reasoning = done.reasoning if show_reasoning else None
            document = {"event": "done", "line": number, "id": identity, "text": done.text, "reasoning": reasoning}
            document |= figures(done, engine)
            out.detail(f"line {number}: {timing_line(done)}")
        out.json({"schema": SCHEMA, **document}, lines=True)
    if count == 0:
        raise UsageError("no requests: expected one JSON object a line", hint='{"prompt": "Why is the sky blue?"}')
    if failed:
        raise WasteError(f"{failed} of {count} requests failed; their lines say why")


def _lines(stream: BinaryIO, out: Output) -> Iterator[tuple[int, bytes | UsageError]]:
    """Lines that are not blank, numbered from 1; in place of one that is too long, the error it is."""
    number = 0
    with announced(_WAITING, out.notice):
        line = _read_line(stream)
    while line:
        number += 1
        if number == 1 and isinstance(line, bytes):
            line = line.removeprefix(codecs.BOM_UTF8)
        if isinstance(line, UsageError) or line.strip():
            yield number, line
        line = _read_line(stream)


def _read_line(stream: BinaryIO) -> bytes | UsageError:
    """The next line with its end, b"" after the last. One that is too long is read to its end, but never held."""
    try:
        line = stream.readline(MAX_BYTES + 1)
        if len(line) <= MAX_BYTES:
            return line
        while line and not line.endswith(b"\n"):
            line = stream.readline(_SKIPPED)
    except OSError as error:
        raise InputError(f"cannot read the requests: {error.strerror}") from None
    return UsageError(f"the line is longer than {format_bytes(MAX_BYTES)}, too long for a request")


def _parse(line: bytes | UsageError) -> dict[str, Any]:
    """The object in a line, without the members that are null: they are as good as not there."""
    if isinstance(line, UsageError):
        raise line
    try:
        fields = json.loads(line.decode("utf-8"), object_pairs_hook=_members, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise UsageError(f"the line is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the line is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise UsageError(f"the line is {_kind(fields)}, expected an object", hint='{"prompt": "..."}')
    return {key: value for key, value in fields.items() if value is not None}


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:i]))
        raise ValueError(f"member {twice!r:.80} occurs twice")
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _identity(fields: dict[str, Any]) -> str | int | None:
    found = fields.get("id")
    if found is not None and (isinstance(found, bool) or not isinstance(found, str | int)):
        raise _wrong("id", found, "a string or a whole number")
    return found


def _request(fields: dict[str, Any], defaults: Request) -> Request:
    """What the line asks for; what it does not say is as in `defaults`. UsageError naming the field that is wrong."""
    for name in fields:
        if name not in FIELDS:
            near = get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(FIELDS)}"
            raise UsageError(f"unknown field {name!r:.80}", hint=hint)
    raw = _typed(fields, "raw", bool, "true or false")
    if raw and not defaults.raw:  # what the options say of a chat is not meant for this line
        defaults = replace(defaults, system=None, effort=None)
    numbers = {name: _number(fields, name) for name in NUMBERS}
    whole = {name: _typed(fields, name, int, "a whole number") for name in WHOLE}
    limit = whole.pop("max_tokens")
    said = {name: value for name, value in (numbers | whole).items() if value is not None}
    request = Request(
        text=_text(fields, "prompt") or "",
        messages=_messages(fields),
        system=_first(_text(fields, "system"), defaults.system),
        raw=_first(raw, defaults.raw),
        effort=_first(_text(fields, "effort"), defaults.effort),
        max_tokens=_first(limit, defaults.max_tokens),
        stops=_stops(fields, defaults.stops),
        sampling={**defaults.sampling, **said},
    )
    if ("prompt" in fields) == ("messages" in fields):
        raise UsageError('expected either "prompt" or "messages"', hint='{"prompt": "..."}')
    if request.messages is None and not request.text.strip():
        raise UsageError("the prompt is empty")
    if request.messages is not None and "system" in fields:
        raise UsageError('"system" has no place beside "messages"', hint='{"role": "system", "content": "..."}')
    request.check()
    return request


def _messages(fields: dict[str, Any]) -> tuple[Message, ...] | None:
    if "messages" not in fields:
        return None
    from waste.chat import Message

    found = fields["messages"]
    if not isinstance(found, list) or not found or not all(isinstance(turn, dict) for turn in found):
        raise _wrong("messages", found, "a list of objects, at least one")
    turns = []
    for i, turn in enumerate(found):
        if turn.keys() != {"role", "content"}:
            raise UsageError(f"messages[{i}] has {list(turn)!r:.80}, expected 'role' and 'content'")
        role, content = (_text(turn, name, f"messages[{i}].{name}") for name in ("role", "content"))
        turns.append(Message(role or "", content or ""))
    return tuple(turns)


def _stops(fields: dict[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    found = fields.get("stop")
    if found is None:
        return default
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("stop", found, "a string or a list of strings")
    return tuple(stops)


def _text(fields: dict[str, Any], name: str, place: str = "") -> str | None:
    """A text that a tokenizer can take: no half surrogates, and no NUL, as everywhere else."""
    text: str | None = _typed(fields, name, str, "a string", place)
    for char in text or "":
        if char == "\0" or "\ud800" <= char <= "\udfff":
            raise UsageError(f"{place or name} is not text: it has U+{ord(char):04X}")
    return text


def _number(fields: dict[str, Any], name: str) -> float | None:
    found = fields.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise _wrong(name, found, "a number")
    try:
        return float(found)
    except OverflowError:
        return math.inf  # which no setting takes


def _typed(fields: dict[str, Any], name: str, kind: type, expected: str, place: str = "") -> Any:
    found = fields.get(name)
    if found is not None and (not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool)):
        raise _wrong(place or name, found, expected)
    return found


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _wrong(name: str, found: object, expected: str) -> UsageError:
    return UsageError(f"{name} is {_kind(found)}, expected {expected}")


def _kind(value: object) -> str:
    """A value in JSON's own words, shortened."""
    words = {list: "an array", dict: "an object", type(None): "null"}
    if type(value) in words:
        return words[type(value)]
    text = json.dumps(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
