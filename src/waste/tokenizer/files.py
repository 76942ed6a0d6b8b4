"""The tokenizer's two files in a container: `tokenizer.model` (ranks) and `tokenizer.json` (everything else).

`tokenizer.json` is ours, not Hugging Face's:

    {"schema": "waste.tokenizer/1", "vocab_size": rows an embedding needs at least,
     "patterns": [pre-tokenizer patterns, applied in sequence],
     "added_tokens": [{"id", "content", "special", "lstrip", "rstrip", "single_word", "normalized"}, ...],
     "decode_only": [[id, base64 of its bytes], ...]   ids that no text encodes to}
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict, fields
from typing import Any

from waste.errors import InputError
from waste.tokenizer.bpe import Tokenizer
from waste.tokenizer.ranks import format_ranks, parse_ranks
from waste.tokenizer.spec import AddedToken, TokenizerSpec

SCHEMA = "waste.tokenizer/1"
MODEL = "tokenizer.model"
JSON = "tokenizer.json"


def to_files(spec: TokenizerSpec) -> dict[str, bytes]:
    """The container's files by name. Equal specs give equal bytes."""
    document = {
        "schema": SCHEMA,
        "vocab_size": spec.vocab_size,
        "patterns": list(spec.patterns),
        "added_tokens": [asdict(token) for token in sorted(spec.added, key=lambda token: token.id)],
        "decode_only": [[i, base64.b64encode(piece).decode()] for i, piece in sorted(spec.decode_only.items())],
    }
    text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
    return {MODEL: format_ranks(spec.ranks), JSON: text.encode()}


def from_files(model: bytes, document: bytes) -> Tokenizer:
    """The tokenizer stored in the two files. Raises InputError naming the file and what is wrong with it."""
    try:
        data = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{JSON} is not readable JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"{JSON}: schema {SCHEMA!r} expected, {found!r} found")
    patterns = data.get("patterns")
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"{JSON}: patterns is not a list of texts")
    spec = TokenizerSpec(
        ranks=parse_ranks(model, MODEL),
        patterns=tuple(patterns),
        added=tuple(_added(item) for item in _list(data, "added_tokens")),
        decode_only=dict(_decode_only(item) for item in _list(data, "decode_only")),
    )
    tokenizer = Tokenizer(spec)
    if data.get("vocab_size") != spec.vocab_size:
        raise InputError(f"{JSON}: vocab_size is {data.get('vocab_size')!r}, the ids say {spec.vocab_size}")
    return tokenizer


def _list(data: dict[str, Any], name: str) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list):
        raise InputError(f"{JSON}: {name} is not a list")
    return value


def _added(item: object) -> AddedToken:
    names = {field.name: type(field.default) for field in fields(AddedToken)}
    if not isinstance(item, dict) or item.keys() != names.keys():
        raise InputError(f"{JSON}: added token {str(item)[:80]!r} does not have the fields {sorted(names)!r}")
    kinds = {name: int if name == "id" else str if name == "content" else bool for name in names}
    for name, kind in kinds.items():
        if type(item[name]) is not kind:
            raise InputError(f"{JSON}: {name} of added token {item['content']!r} is {item[name]!r}")
    return AddedToken(**item)


def _decode_only(item: object) -> tuple[int, bytes]:
    try:
        if not (isinstance(item, list) and len(item) == 2 and type(item[0]) is int and isinstance(item[1], str)):
            raise ValueError("wrong types")
        piece_id, text = item
        return piece_id, base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InputError(f"{JSON}: decode_only entry {str(item)[:80]!r} is not [id, base64]") from error
