"""What is decided about a model's chat at conversion, stored, and used at run time."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from waste.chat import ChatFormat, Message
from waste.chat.format import build_format, from_json, to_json
from waste.errors import InputError, UsageError
from waste.tokenizer import Tokenizer

HELLO = [Message("user", "Hello")]


def test_glm_thinks_from_the_start(templates: dict[str, str], tokenizer: Tokenizer) -> None:
    chat = build_format(tokenizer, templates["glm"], {"eos_token": "<|endoftext|>", "bos_token": None})
    assert chat.think == ("<think>", "</think>")
    assert chat.starts_inside_reasoning
    assert chat.variables == {"eos_token": "<|endoftext|>"}
    assert chat.think_ids(tokenizer) == (tokenizer.id_of("<think>"), tokenizer.id_of("</think>"))


def test_kimi_does_not(templates: dict[str, str], tokenizer: Tokenizer) -> None:
    chat = build_format(tokenizer, templates["kimi"], {})
    assert not chat.starts_inside_reasoning


def test_the_prompt_at_hand_decides(templates: dict[str, str], tokenizer: Tokenizer) -> None:
    chat = build_format(tokenizer, templates["plain"], {})
    thinking = chat.render_ids(HELLO, tokenizer)
    silent = chat.render_ids(HELLO, tokenizer, enable_thinking=False)
    assert chat.starts_inside(thinking, tokenizer)
    assert not chat.starts_inside(silent, tokenizer)
    assert chat.splitter(thinking, tokenizer).inside_reasoning
    assert not chat.splitter(silent, tokenizer).inside_reasoning
    # The last marker decides, not the closed thought of an old answer.
    later = chat.render_ids([*HELLO, Message("assistant", "Hi"), *HELLO], tokenizer)
    assert chat.starts_inside(later, tokenizer)
    # A question about markers opens nothing.
    asked = chat.render_ids([Message("user", "<think>")], tokenizer, enable_thinking=False)
    assert not chat.starts_inside(asked, tokenizer)


def test_markers_must_be_added_tokens(templates: dict[str, str], make_tokenizer: Callable[..., Tokenizer]) -> None:
    chat = build_format(make_tokenizer(["<think>"]), templates["plain"], {})
    assert chat.think is None
    assert not chat.starts_inside_reasoning
    assert chat.think_ids(make_tokenizer([])) == (None, None)


def test_special_tokens_by_name(templates: dict[str, str], tokenizer: Tokenizer) -> None:
    bos = "<｜begin▁of▁sentence｜>"
    for value in (bos, {"content": bos, "lstrip": False}):
        chat = build_format(tokenizer, templates["deepseek"], {"bos_token": value})
        assert chat.render(HELLO) == f"{bos}<｜User｜>Hello<｜Assistant｜>"
        assert chat.render_ids(HELLO, tokenizer)[0] == tokenizer.id_of(bos)
    assert chat.render(HELLO, bos_token="", add_generation_prompt=False) == "<｜User｜>Hello"


def test_without_a_template_a_raw_prompt_is_the_way(tokenizer: Tokenizer) -> None:
    chat = build_format(tokenizer, None, {})
    with pytest.raises(UsageError, match="no chat template") as caught:
        chat.render_ids(HELLO, tokenizer)
    assert caught.value.hint is not None
    with pytest.raises(UsageError, match="no chat template"):
        chat.render(HELLO)


def test_a_template_that_does_not_parse_is_refused_at_once(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="line 1"):
        build_format(tokenizer, "{{ m", {})


def test_a_template_that_fails_on_a_plain_turn_is_kept(tokenizer: Tokenizer) -> None:
    chat = build_format(tokenizer, "{{ raise_exception('tools needed') }}", {})
    assert not chat.starts_inside_reasoning
    with pytest.raises(UsageError, match="tools needed"):
        chat.render_ids(HELLO, tokenizer)


@pytest.mark.parametrize("name", ["glm", "kimi"])
def test_what_is_written_is_read(name: str, templates: dict[str, str], tokenizer: Tokenizer) -> None:
    chat = build_format(tokenizer, templates[name], {"eos_token": "é", "bos_token": "b"})
    document = to_json(chat)
    assert from_json(document, templates[name]) == chat
    turned = ChatFormat(chat.source, chat.think, chat.starts_inside_reasoning, dict(reversed(chat.variables.items())))
    assert to_json(turned) == document


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "waste.chat/9"}, "'waste.chat/9' found"),
        ({"think": ["a"]}, "think"),
        ({"think": "ab"}, "think"),
        ({"starts_inside_reasoning": 1}, "starts_inside_reasoning"),
        ({"variables": []}, "variables"),
        ({"variables": {"bos_token": 1}}, "variables"),
    ],
)
def test_damage_is_named(change: dict[str, object], words: str, tokenizer: Tokenizer) -> None:
    document = json.loads(to_json(build_format(tokenizer, None, {})))
    with pytest.raises(InputError, match=words):
        from_json(json.dumps({**document, **change}).encode(), None)


@pytest.mark.parametrize("document", [b"", b"\xff", b"[]", b"{}", b"[" * 100_000])
def test_other_documents_are_refused(document: bytes) -> None:
    with pytest.raises(InputError, match=r"chat\.json"):
        from_json(document, None)
