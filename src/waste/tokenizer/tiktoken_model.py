"""Reading a `tiktoken.model` rank file with the tokenizer_config.json beside it (the Kimi releases)."""

from __future__ import annotations

from typing import Any

from waste.errors import InputError, UnsupportedError
from waste.tokenizer.ranks import parse_ranks
from waste.tokenizer.spec import AddedToken, TokenizerSpec

SOURCE = "tiktoken.model"
CONFIG = "tokenizer_config.json"

# The pattern is in no file of these releases but in their Python code, which is never run here: it belongs to the
# tokenizer class. Han runs are pieces of their own; other letters split where upper case follows lower case.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_PATTERNS = {"TikTokenTokenizer": KIMI_PATTERN}


def read_tiktoken(model: bytes, config: object) -> TokenizerSpec:
    """The tokenizer of the rank file `model` and the parsed tokenizer_config.json `config`.

    Added tokens are those of `added_tokens_decoder`; reserved ids without a name there have no text. Raises
    UnsupportedError for a tokenizer class whose pattern is not known, InputError for damaged files.
    """
    if not isinstance(config, dict):
        raise InputError(f"{CONFIG} is {type(config).__name__}, not an object")
    kind = config.get("tokenizer_class")
    pattern = _PATTERNS.get(kind) if isinstance(kind, str) else None
    if pattern is None:
        raise UnsupportedError(
            f"{SOURCE}: the pattern of tokenizer class {kind!r} is not known, only that of {sorted(_PATTERNS)!r}",
            hint="a tokenizer.json beside it would be read instead",
        )
    decoder = config.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise InputError(f"{CONFIG}: added_tokens_decoder is {type(decoder).__name__}, not an object")
    added = sorted((_added(key, value) for key, value in decoder.items()), key=lambda token: token.id)
    spec = TokenizerSpec(ranks=parse_ranks(model, SOURCE), patterns=(pattern,), added=tuple(added), decode_only={})
    spec.check(SOURCE)
    return spec


def _added(key: str, value: object) -> AddedToken:
    flags: dict[str, Any] = value if isinstance(value, dict) else {}
    content = flags.get("content")
    if not (key.isascii() and key.isdigit()) or not isinstance(content, str) or not content:
        raise InputError(f"{CONFIG}: added_tokens_decoder entry {key!r} is not an id with a content")
    # The class matches these tokens by plain search: the stripping flags have no effect in it.
    return AddedToken(int(key[:12]), content, special=flags.get("special", True) is True)
