"""Templates are found where checkpoints put them, rendered as `transformers` does, and kept in their sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from waste.chat import ChatTemplate, Message, find_template
from waste.errors import InputError, UnsupportedError, UsageError, WasteError

X = [Message("user", "x")]
CHAT = [Message("system", "Be brief."), Message("user", "1+1?"), Message("assistant", "2"), Message("user", "2+2?")]


@pytest.mark.parametrize(
    ("inline", "file_text", "found"),
    [
        (None, "FILE", "FILE"),
        ("INLINE", None, "INLINE"),
        ("INLINE", "FILE", "FILE"),
        ("INLINE", "", "INLINE"),
        ("INLINE", " \n", "INLINE"),
        (None, None, None),
        (None, "", None),
        ("", None, None),
        ([{"name": "tool_use", "template": "TOOL"}, {"name": "default", "template": "NAMED"}], None, "NAMED"),
    ],
)
def test_the_file_counts_first_then_the_configuration(inline: object, file_text: str | None, found: str | None) -> None:
    config = {} if inline is None else {"chat_template": inline}
    assert find_template(config, file_text) == found


@pytest.mark.parametrize("inline", [7, {"default": "x"}, ["x"], [{"name": "tool_use", "template": "TOOL"}]])
def test_other_configurations_are_refused(inline: object) -> None:
    with pytest.raises(InputError, match=r"chat.template"):
        find_template({"chat_template": inline}, None)


@pytest.mark.parametrize("name", ["glm", "kimi", "deepseek", "plain"])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_rendering_equals_transformers(name: str, add_generation_prompt: bool, templates: dict[str, str]) -> None:
    source = templates[name]
    chats = [X, CHAT, [*CHAT, Message("assistant", " 4 \n", "two and\ntwo"), Message("user", "<think>a</think>")]]
    for chat in chats:
        expected, _ = render_jinja_template(
            [[message.as_dict() for message in chat]],
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            bos_token="<B>",
            reasoning_effort="low",
        )
        ours = ChatTemplate(source).render(
            chat, add_generation_prompt=add_generation_prompt, bos_token="<B>", reasoning_effort="low"
        )
        assert ours == expected[0]


def test_nothing_is_added_between_turns(templates: dict[str, str]) -> None:
    """No newline, no end marker after the old answer, the prelude once."""
    assert ChatTemplate(templates["plain"]).render(CHAT) == (
        "[gMASK]<sop><|system|>Be brief.<|user|>1+1?<|assistant|></think>2<|user|>2+2?<|assistant|><think>"
    )


def test_blocks_take_their_line_with_them() -> None:
    assert ChatTemplate("{% if true %}\n  {% if true %}\na\n  {% endif %}\n{% endif %}\nb").render(X) == "a\nb"


def test_filters_and_globals() -> None:
    source = "{{ messages|length }}{{ messages[0]|tojson }}{{ strftime_now('%Y-%m') }}"
    template = ChatTemplate(source, now=lambda: datetime(2031, 2, 3))
    message = Message("user", "<é & 'x'>")
    assert template.render([message]) == f"1{json.dumps(message.as_dict(), ensure_ascii=False)}2031-02"
    indented = ChatTemplate("{{ {'b': 1, 'a': [2]}|tojson(indent=2, sort_keys=true) }}")
    assert indented.render([]) == json.dumps({"a": [2], "b": 1}, indent=2)
    assert (
        ChatTemplate("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}").render([])
        == "1"
    )
    assert ChatTemplate("{{ tools is none }}{{ documents is none }}").render([]) == "TrueTrue"


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("a\n{% for m in messages %}{{ m", InputError, "line 2"),
        ("{% nosuch %}", InputError, "nosuch"),
        ("{{ raise_exception('no\nsystem role') }}", UsageError, "no system role"),
        ("{{ messages[0].content.nosuch.thing }}", InputError, "nosuch"),
        ("{{ 1 / 0 }}", InputError, "ZeroDivisionError"),
        ("{{ messages[9].content }}", InputError, "UndefinedError"),
        ("{{ nosuch() }}", InputError, "nosuch"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", InputError, "RecursionError"),
    ],
)
def test_failures_are_one_line_in_the_templates_words(source: str, kind: type[WasteError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        ChatTemplate(source).render(X)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__.os.popen('touch HIT').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['__builtins__'].open('HIT', 'w') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ (messages|map(attribute='__class__')|list)[0].mro() }}",
        "{{ range(1000000000)|list }}",
        "{% include 'HIT' %}",
    ],
)
def test_the_sandbox_holds(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WasteError) as caught:
        ChatTemplate(source).render(X)
    assert "\n" not in caught.value.message
    assert not list(tmp_path.iterdir())


def test_the_sandbox_is_named() -> None:
    with pytest.raises(UnsupportedError, match="sandbox"):
        ChatTemplate("{{ messages.append(1) }}").render(X)


@pytest.mark.parametrize("role", ["", "User", "user|><|system", "endoftext", "user\n"])
def test_roles_are_no_free_text(role: str) -> None:
    with pytest.raises(UsageError, match="role"):
        Message(role, "x")
