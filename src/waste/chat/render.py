"""Messages to token ids such that control tokens come from the template only.

Law: the added tokens of the result, in order, are those that the template writes around contents without any control
text, whatever the contents say. And where no content looks like (a part of) an added token, the result is
`encode(rendered text, markup=True)`.

Which characters of a prompt are content cannot be seen from its text: templates strip contents, split them at
`</think>`, or drop them. So the template is rendered again with every content *disguised*: each character that added
tokens are made of is replaced by a private one, each by its own. No disguised content can form a token, or the rest of
one, and stripping, joining and dropping treat it as they treat the original.

1. If undoing the disguise gives the original text, the private characters mark what is content, exactly.
2. Otherwise the template looks into contents. If the original text has the same sequence of added tokens as the
   disguised one, contents add none.
3. Otherwise, in contents that the template looks into, only those tokens are disguised that it does not look for
   (those it does: `</think>` in an assistant turn, to find the thought). If that restores the original text, and its
   sequence of added tokens is that of the disguised one, the private characters mark the tokens that are content.
4. Otherwise the template gets to see disguised contents only, and they are restored in its output: safe, though a
   marker that it would have interpreted is plain text then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from waste.chat.message import Message
from waste.chat.template import ChatTemplate
from waste.errors import WasteError
from waste.tokenizer import Tokenizer

Fields = dict[str, str]
_CONTENTS = ("content", "reasoning_content")


def render_ids(
    template: ChatTemplate,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> list[int]:
    """The prompt's token ids. Contents are plain text; template and `variables` are trusted as markup.

    White-space-only added tokens, which some vocabularies have, are found in contents too. Raises what
    `ChatTemplate.render` and `Tokenizer.encode` raise.
    """
    fields = [message.as_dict() for message in messages]

    def render(contents: list[Fields]) -> str:
        return template.render_fields(contents, add_generation_prompt=add_generation_prompt, **variables)

    text = render(fields)
    disguise = _Disguise(tokenizer, [text, template.source, *(value for field in fields for value in field.values())])
    hidden = [disguise.whole(field) for field in fields]
    shown = render(hidden)
    if disguise.undo(shown) == text:
        return tokenizer.encode_mixed(text, disguise.spans(shown))

    own = _control_ids(tokenizer, shown)
    if _control_ids(tokenizer, text) == own:
        return tokenizer.encode(text, markup=True)

    def restores(contents: list[Fields]) -> bool:
        try:
            return disguise.undo(render(contents)) == text
        except WasteError:
            return False

    partly = list(hidden)
    for index, name in _content_fields(fields):
        if restores(_replaced(fields, index, name, hidden[index][name])):
            continue
        value = fields[index][name]
        opaque = [
            content
            for content in disguise.tokens_in(value)
            if restores(_replaced(fields, index, name, disguise.tokens(value, [content])))
        ]
        partly = _replaced(partly, index, name, disguise.tokens(value, opaque))
    try:
        mixed = render(partly)
    except WasteError:
        mixed = shown
    if disguise.undo(mixed) == text and _control_ids(tokenizer, mixed) == own:
        return tokenizer.encode_mixed(text, disguise.spans(mixed))
    return tokenizer.encode_mixed(disguise.undo(shown), disguise.spans(shown))


class _Disguise:
    """Replaces the characters that added tokens are made of by private ones that occur in no text at hand."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokens = [token.content for token in tokenizer.spec.added if not token.content.isspace()]
        # White space stays: templates strip it, and without the other characters it completes no token.
        alphabet = sorted({char for content in self._tokens for char in content if not char.isspace()})
        used = set().union(*texts)
        unused = (char for char in map(chr, range(0x10FFFD, 0xF0000 - 1, -1)) if char not in used)
        private = list(islice(unused, len(alphabet)))
        self._to = str.maketrans(dict(zip(alphabet, private, strict=True)))
        self._back = str.maketrans(dict(zip(private, alphabet, strict=True)))
        self._runs = re.compile(f"[{''.join(private)}]+") if private else None

    def whole(self, message: Fields) -> Fields:
        return {name: value.translate(self._to) if name in _CONTENTS else value for name, value in message.items()}

    def undo(self, text: str) -> str:
        return text.translate(self._back)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where `text` is disguised: half-open ranges of character positions, ascending."""
        return [match.span() for match in self._runs.finditer(text)] if self._runs else []

    def tokens_in(self, value: str) -> list[str]:
        return [content for content in self._tokens if content in value]

    def tokens(self, value: str, chosen: Sequence[str]) -> str:
        """`value` with only the occurrences of the `chosen` tokens disguised, among all tokens found in it."""
        longest_first = sorted(self.tokens_in(value), key=len, reverse=True)
        if not longest_first:
            return value
        # re.split with one group: text, match, text, match, ..., text.
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", value)
        return "".join(part.translate(self._to) if i % 2 and part in chosen else part for i, part in enumerate(parts))


def _control_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [segment for segment in tokenizer.segments(text) if isinstance(segment, int)]


def _content_fields(fields: Sequence[Fields]) -> Iterator[tuple[int, str]]:
    for index, message in enumerate(fields):
        for name in _CONTENTS:
            if name in message:
                yield index, name


def _replaced(fields: Sequence[Fields], index: int, name: str, value: str) -> list[Fields]:
    return [{**message, name: value} if i == index else message for i, message in enumerate(fields)]
