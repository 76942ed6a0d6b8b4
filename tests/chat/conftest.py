"""Templates in the manner of three families, and a small tokenizer that has their control tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from waste.chat import ChatTemplate
from waste.tokenizer import AddedToken, Tokenizer, TokenizerSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "nano-glm"

KIMI = """\
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
{{- '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' -}}
{%- endif -%}
{%- set tag = 'user' if m.role == 'user' else ('assistant' if m.role == 'assistant' else 'system') -%}
{{- '<|im_' ~ tag ~ '|>' ~ m.role ~ '<|im_middle|>' ~ m.content ~ '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}
"""
DEEPSEEK = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<｜User｜>' ~ m.content -}}
{%- elif m.role == 'assistant' -%}
{%- set body = m.content -%}
{%- if '</think>' in body -%}{%- set body = body.split('</think>')[-1] -%}{%- endif -%}
{{- '<｜Assistant｜>' ~ body ~ '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
"""
# Without spaces or newlines of its own, and the turn's marker put together from the role.
PLAIN = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}</think>{% endif %}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}<think>{% endif %}{% endif %}"
)
TOKENS = [
    *["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    *["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"],
    *["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
    *["<think>", "</think>", "<tool_response>", "</tool_response>", "/nothink"],
]
GLM_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Template sources by family; "glm" is the bundled example's."""
    glm = (EXAMPLE / "chat_template.jinja").read_text(encoding="utf-8")
    return {"glm": glm, "kimi": KIMI, "deepseek": DEEPSEEK, "plain": PLAIN}


@pytest.fixture(scope="session")
def compiled(templates: dict[str, str]) -> dict[str, ChatTemplate]:
    """The same, compiled."""
    return {name: ChatTemplate(source) for name, source in templates.items()}


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Tokenizer]:
    """A function from added tokens to a tokenizer with a few multi-byte pieces that reach over turns' edges."""

    def make(tokens: list[str] | None = None) -> Tokenizer:
        ranks = {bytes([byte]): byte for byte in range(256)}
        words = [
            b".H",
            b"He",
            b"ll",
            b"Hell",
            b"Hello",
            b"us",
            b"er",
            b"user",
            b"<|",
            b"|>",
            b"th",
            b"the",
            b" the",
            b"os",
        ]
        ranks |= {word: 256 + i for i, word in enumerate(words)}
        base = len(ranks)
        added = [
            AddedToken(base + i, content, special="think" not in content)
            for i, content in enumerate(TOKENS if tokens is None else tokens)
        ]
        return Tokenizer(TokenizerSpec(ranks, (GLM_PATTERN,), tuple(added), {}))

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    """The tokenizer that knows the control tokens of all templates."""
    return make_tokenizer()
