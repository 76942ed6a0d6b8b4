"""Chat templates: finding the model's, and rendering it in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from waste.chat.message import Message
from waste.errors import InputError, UnsupportedError, UsageError, WasteError


class _RaisedByTemplate(Exception):
    """The template called `raise_exception`."""


class ChatTemplate:
    """A Jinja template that turns messages into the text of a prompt, as `transformers` renders it.

    Templates come with checkpoints and are not trusted: they run in Jinja's immutable sandbox, without access to
    files, modules or Python internals.
    """

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        """`now` is what `strftime_now` formats. Raises InputError with the template's line where it does not parse."""
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InputError(f"chat template, line {error.lineno}: {_one_line(error)}") from error
        except (RecursionError, MemoryError, ValueError) as error:
            raise InputError(f"chat template cannot be compiled: {_one_line(error)}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """The prompt's text. `variables` (reasoning_effort, enable_thinking, bos_token, ...) are trusted markup.

        Raises UsageError where the template refuses the messages, UnsupportedError where it tries what the sandbox
        forbids, InputError where it fails otherwise; each on one line, with the template's own message.
        """
        return self.render_fields(
            [message.as_dict() for message in messages], add_generation_prompt=add_generation_prompt, **variables
        )

    def render_fields(self, messages: Sequence[Mapping[str, str]], **variables: object) -> str:
        """As `render`, of messages that are already mappings."""
        # `tools` and `documents` are defined, as None, when `transformers` renders: templates test `is not none`.
        given = {"tools": None, "documents": None, **variables, "messages": list(messages)}
        try:
            return self._template.render(given)
        except _RaisedByTemplate as error:
            raise UsageError(f"the chat template refuses these messages: {_one_line(error)}") from error
        except SecurityError as error:
            raise UnsupportedError(f"the chat template does what its sandbox forbids: {_one_line(error)}") from error
        except WasteError:
            raise
        except Exception as error:  # a template can fail in as many ways as a program
            raise InputError(f"the chat template failed: {type(error).__name__}: {_one_line(error)}") from error


def find_template(tokenizer_config: Mapping[str, Any], file_text: str | None) -> str | None:
    """The template of a checkpoint, or None: chat_template.jinja if it holds text, then tokenizer_config.json.

    In the latter `chat_template` is a text or a list of named ones, of which "default" counts. Raises InputError where
    it is neither, or a list without "default".
    """
    if file_text is not None and file_text.strip():
        return file_text
    inline = tokenizer_config.get("chat_template")
    if inline is None or inline == []:
        return None
    if isinstance(inline, str):
        return inline if inline.strip() else None
    if isinstance(inline, list) and all(isinstance(item, dict) for item in inline):
        named = {item.get("name"): item.get("template") for item in inline}
        if isinstance(named.get("default"), str):
            return str(named["default"])
        raise InputError(f"tokenizer_config.json: no chat template is called 'default', only {list(named)!r}")
    raise InputError(f"tokenizer_config.json: chat_template is {type(inline).__name__}, not a text or a list of them")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, which models have not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> str:
    raise _RaisedByTemplate(str(message))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
