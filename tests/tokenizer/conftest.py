"""Small byte-level BPE tokenizers, trained on the spot, and the library that reads the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from waste.tokenizer import Tokenizer, read_hf_json

Json = dict[str, Any]

PATTERNS = {
    "glm": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "han": (
        r"\p{Han}+|(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    # Leaves gaps between its matches, which are pieces too.
    "gaps": (r"[aeiou]+", r"\d"),
}
ADDED = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<think>", "</think>", "/nothink"]
CORPUS = [
    "the mixture of experts layer routes each token to a few experts, and the rest stay idle, don't they?",
    "def relu(x):\n    return x if x > 0 else 0\n\nfor i in range(10):\n    print(i, relu(i - 5))\n",
    "路由器选择专家，然后把结果加权求和。世界，你好！A股 维生素C 1234567890 12 3",
    "Быстрая лиса перепрыгнула. こんにちは世界。 한국어 문장도 있습니다. Ünïcödé naïve café — “quotes” 😀🚀",
]


def _added(content: str, **flags: bool) -> Json:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": content, **{name: flags.get(name, False) for name in names}}


@cache
def _trained(patterns: tuple[str, ...], size: int) -> str:
    library = Library(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    library.train_from_iterator(CORPUS * 3, trainer)
    return library.to_str()


def build(
    pattern: str = "glm", *, size: int = 420, added: list[Json] | None = None, string_merges: bool = False
) -> Json:
    """A `tokenizer.json`, with the added tokens numbered on from the vocabulary unless they bring ids."""
    data: Json = json.loads(_trained(PATTERNS[pattern], size))
    if string_merges:
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    tokens = [_added(content, special="think" not in content) for content in ADDED] if added is None else added
    base = len(data["model"]["vocab"])
    data["added_tokens"] = [{"id": base + i, **token} for i, token in enumerate(tokens)]
    return data


@pytest.fixture(scope="session")
def make_json() -> Callable[..., Json]:
    """The function that builds a `tokenizer.json`."""
    return build


@pytest.fixture(scope="session")
def make_added() -> Callable[..., Json]:
    """The function that builds one entry of its `added_tokens`, without an id."""
    return _added


@pytest.fixture(scope="session")
def patterns() -> dict[str, tuple[str, ...]]:
    """The pre-tokenizer patterns by name."""
    return PATTERNS


@pytest.fixture(scope="session")
def both() -> Callable[[Json], tuple[Tokenizer, Library]]:
    """Our tokenizer and the library's for one `tokenizer.json`."""

    def read(data: Json) -> tuple[Tokenizer, Library]:
        return Tokenizer(read_hf_json(data)), Library.from_str(json.dumps(data))

    return read


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The default small tokenizer."""
    return Tokenizer(read_hf_json(build()))


@pytest.fixture(scope="session")
def nano_json() -> str:
    """The text of the bundled example's `tokenizer.json`."""
    return (Path(__file__).parents[2] / "examples" / "nano-glm" / "tokenizer.json").read_text(encoding="utf-8")
