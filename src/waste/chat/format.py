"""How a model chats: its template, its reasoning markers, the names its template expects; `chat.json`.

{"schema": "waste.chat/1", "think": ["<think>", "</think>"] or null, "starts_inside_reasoning": bool,
 "variables": {"bos_token": ..., "eos_token": ...}}   special tokens that templates refer to by name
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from waste.chat.message import Message
from waste.chat.parse import ReasoningSplitter
from waste.chat.render import render_ids
from waste.chat.template import ChatTemplate
from waste.errors import InputError, UsageError, WasteError
from waste.tokenizer import Tokenizer

SCHEMA = "waste.chat/1"
JSON = "chat.json"

# Known pairs of markers; one counts where both are added tokens of the vocabulary, so that ids tell them apart.
_MARKERS = (("<think>", "</think>"), ("◁think▷", "◁/think▷"))
_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class ChatFormat:
    """`source` is the template (None: the model has none), `think` the markers around reasoning.

    `starts_inside_reasoning` says whether a plain user turn's prompt ends within reasoning; with other template
    variables that may change, so at run time ask `starts_inside` about the prompt at hand.
    """

    source: str | None
    think: tuple[str, str] | None
    starts_inside_reasoning: bool
    variables: Mapping[str, str]

    def render_ids(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """The prompt's ids; see `waste.chat.render`. Raises UsageError where the model has no template."""
        return render_ids(
            self._template(),
            messages,
            tokenizer,
            add_generation_prompt=add_generation_prompt,
            **{**self.variables, **variables},
        )

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """The prompt's text, for people to read: encode with `render_ids`."""
        return self._template().render(
            messages, add_generation_prompt=add_generation_prompt, **{**self.variables, **variables}
        )

    def think_ids(self, tokenizer: Tokenizer) -> tuple[int | None, int | None]:
        """The ids of the markers; None for both where the model has none."""
        if self.think is None:
            return None, None
        return tokenizer.id_of(self.think[0]), tokenizer.id_of(self.think[1])

    def starts_inside(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether generation after `prompt` begins within reasoning: the last marker in it opens."""
        opening, closing = self.think_ids(tokenizer)
        last = next((token_id for token_id in reversed(prompt) if token_id in (opening, closing)), None)
        return last is not None and last == opening

    def splitter(self, prompt: Sequence[int], tokenizer: Tokenizer, *, skip_special: bool = False) -> ReasoningSplitter:
        """A splitter for what the model writes after `prompt`."""
        return ReasoningSplitter(
            tokenizer,
            *self.think_ids(tokenizer),
            starts_inside=self.starts_inside(prompt, tokenizer),
            skip_special=skip_special,
        )

    def _template(self) -> ChatTemplate:
        if self.source is None:
            raise UsageError("this model has no chat template", hint="send the prompt as it is: waste run MODEL --raw")
        return _compiled(self.source)


@lru_cache(maxsize=8)
def _compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def build_format(tokenizer: Tokenizer, source: str | None, tokenizer_config: Mapping[str, Any]) -> ChatFormat:
    """The chat format of a checkpoint, from its template (see `find_template`) and tokenizer_config.json.

    Raises InputError where the template does not parse. One that fails on a plain user turn is kept all the same: it
    may want variables that only the user has.
    """
    think = next((pair for pair in _MARKERS if all(tokenizer.id_of(marker) is not None for marker in pair)), None)
    variables = {}
    for name in _VARIABLES:
        value = tokenizer_config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[name] = value
    plain = ChatFormat(source, think, False, variables)
    if source is None:
        return plain
    _compiled(source)
    try:
        prompt = plain.render_ids([Message("user", "Hello")], tokenizer)
    except WasteError:
        return plain
    return ChatFormat(source, think, plain.starts_inside(prompt, tokenizer), variables)


def to_json(chat: ChatFormat) -> bytes:
    """The bytes of chat.json; the template is a file of its own."""
    document = {
        "schema": SCHEMA,
        "think": None if chat.think is None else list(chat.think),
        "starts_inside_reasoning": chat.starts_inside_reasoning,
        "variables": dict(sorted(chat.variables.items())),
    }
    return (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode()


def from_json(document: bytes, source: str | None) -> ChatFormat:
    """The format stored in chat.json, with the template `source` beside it. Raises InputError naming what is wrong."""
    try:
        data = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{JSON} is not readable JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"{JSON}: schema {SCHEMA!r} expected, {found!r} found")
    think, inside, variables = (data.get(name) for name in ("think", "starts_inside_reasoning", "variables"))
    pair = isinstance(think, list) and len(think) == 2 and all(isinstance(t, str) for t in think)
    if not (think is None or pair):
        raise InputError(f"{JSON}: think is {think!r}, not two markers or null")
    if not isinstance(inside, bool):
        raise InputError(f"{JSON}: starts_inside_reasoning is {inside!r}, not true or false")
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise InputError(f"{JSON}: variables is not an object of texts")
    return ChatFormat(source, (think[0], think[1]) if think else None, inside, variables)
