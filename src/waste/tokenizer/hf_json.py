"""Reading a Hugging Face `tokenizer.json` of the byte-level BPE kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import regex  # type: ignore[import-untyped]

from waste.errors import InputError, UnsupportedError
from waste.tokenizer.merges import Merge, check_order, joined_by_rank, live_merges
from waste.tokenizer.spec import MAX_ID, AddedToken, TokenizerSpec

SOURCE = "tokenizer.json"

# What the ByteLevel pre-tokenizer splits by when it brings its own pattern (GPT-2's).
BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def read_hf_json(data: object) -> TokenizerSpec:
    """The tokenizer in `data`, the parsed `tokenizer.json`, encoding exactly as the `tokenizers` library does.

    Raises UnsupportedError for whatever would encode differently here (another model type, a normalizer, other
    pre-tokenizers, merges out of order), InputError for a file that is damaged or inconsistent.
    """
    root = _object(data, "the file")
    model = _object(root.get("model"), "model")
    _check_model(model)
    _check_normalizer(root.get("normalizer"))
    _check_decoder(root.get("decoder"))
    patterns = _patterns(root.get("pre_tokenizer"))
    vocab = _vocab(model.get("vocab"))
    ignore_merges = bool(model.get("ignore_merges"))
    added, warnings = _added(root.get("added_tokens"), vocab)

    to_bytes = _byte_of_char()
    pieces: dict[bytes, int] = {}
    foreign: dict[int, bytes] = {}  # keys that are no byte-level text: no text encodes to them
    for key, piece_id in vocab.items():
        piece = _piece(key, to_bytes)
        if piece == b"":
            continue  # an id without text
        if piece is None:
            foreign[piece_id] = key.encode("utf-8", "replace")
        else:
            pieces[piece] = piece_id
    merges = _merges(model.get("merges"), vocab, to_bytes)
    _check_products(pieces, merges)

    live = live_merges(pieces, merges)
    check_order(pieces, live, SOURCE)
    added_ids = {token.id for token in added}
    for token in added:
        if token.id in live:
            raise UnsupportedError(
                f"{SOURCE}: added token {token.content!r} is also an ordinary piece (id {token.id}) that plain text "
                "produces, so control tokens could not be kept out of it"
            )
    keep = {p: i for p, i in pieces.items() if i not in added_ids and (ignore_merges or i in live)}
    if ignore_merges:
        for piece, piece_id in keep.items():
            if piece_id not in live and joined_by_rank(piece, keep):
                raise UnsupportedError(
                    f"{SOURCE}: no merges make piece {piece!r} (id {piece_id}), but its parts would join by rank"
                )
    decode_only = {i: p for p, i in pieces.items() if p not in keep} | foreign
    spec = TokenizerSpec(
        ranks=keep,
        patterns=patterns,
        added=tuple(added),
        decode_only={i: p for i, p in sorted(decode_only.items()) if i not in added_ids},
        warnings=tuple(warnings),
    )
    spec.check(SOURCE)
    return spec


def _check_model(model: Mapping[str, Any]) -> None:
    kind = model.get("type")
    # Files older than the field are BPE if they have merges.
    if kind != "BPE" and not (kind is None and "merges" in model):
        raise UnsupportedError(f"{SOURCE}: model type {kind!r} is not supported, only byte-level BPE is")
    for name in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UnsupportedError(f"{SOURCE}: model.{name} = {model[name]!r} is not supported, only byte-level BPE is")


def _check_normalizer(node: object) -> None:
    if node is None:
        return
    kind = _object(node, "normalizer").get("type")
    inner = _object(node, "normalizer").get("normalizers")
    if kind != "Sequence" or inner != []:
        raise UnsupportedError(f"{SOURCE}: normalizer {kind!r} is not supported, only none is")


def _check_decoder(node: object) -> None:
    if node is None:
        return
    kind = _object(node, "decoder").get("type")
    if kind != "ByteLevel":
        raise UnsupportedError(f"{SOURCE}: decoder {kind!r} is not supported, only ByteLevel is")


def _patterns(node: object) -> tuple[str, ...]:
    root = _object(node, "pre_tokenizer")
    steps = root.get("pretokenizers") if root.get("type") == "Sequence" else [root]
    if not isinstance(steps, list) or not steps:
        raise InputError(f"{SOURCE}: pre_tokenizer.pretokenizers is not a list of steps")
    patterns = []
    for position, step in enumerate(steps):
        step = _object(step, f"pre_tokenizer step {position}")
        last = position == len(steps) - 1
        kind = step.get("type")
        if kind == "ByteLevel" and last:
            # Absent means true in the library, for both flags.
            if step.get("add_prefix_space", True):
                raise UnsupportedError(f"{SOURCE}: pre-tokenizer ByteLevel with add_prefix_space is not supported")
            if step.get("use_regex", True):
                patterns.append(BYTE_LEVEL_PATTERN)
        elif kind == "Split" and not last:
            patterns.append(_split_pattern(step))
        else:
            raise UnsupportedError(
                f"{SOURCE}: pre-tokenizer {kind!r} as step {position + 1} of {len(steps)} is not supported, "
                "only Split steps before one ByteLevel are"
            )
    return tuple(patterns)


def _split_pattern(step: Mapping[str, Any]) -> str:
    behavior, invert = step.get("behavior"), step.get("invert", False)
    if behavior != "Isolated" or invert:
        raise UnsupportedError(
            f"{SOURCE}: pre-tokenizer Split with behavior {behavior!r}, invert {invert!r} is not supported, "
            "only 'Isolated', False is"
        )
    pattern = _object(step.get("pattern"), "a Split pattern")
    if isinstance(pattern.get("Regex"), str):
        return str(pattern["Regex"])
    if isinstance(pattern.get("String"), str):
        return str(regex.escape(pattern["String"]))
    raise InputError(f"{SOURCE}: a Split pattern has neither 'Regex' nor 'String', but {sorted(pattern)!r}")


def _vocab(node: object) -> dict[str, int]:
    vocab = _object(node, "model.vocab")
    owners: dict[int, str] = {}
    for key, piece_id in vocab.items():
        if not isinstance(piece_id, int) or isinstance(piece_id, bool) or not 0 <= piece_id <= MAX_ID:
            raise InputError(f"{SOURCE}: id of {key!r} is {piece_id!r}, not a number in 0..{MAX_ID}")
        if piece_id in owners:
            raise InputError(f"{SOURCE}: id {piece_id} belongs to both {owners[piece_id]!r} and {key!r}")
        owners[piece_id] = key
    return dict(vocab)


def _added(node: object, vocab: Mapping[str, int]) -> tuple[list[AddedToken], list[str]]:
    """The added tokens under the ids the library gives them, which are not always those in the file.

    A content that is in the vocabulary has its id from there; all others are numbered on from the size of the
    vocabulary, in the order of the file. The model was trained on those ids, so they count; a difference is a warning.
    """
    if node is None:
        return [], []
    if not isinstance(node, list):
        raise InputError(f"{SOURCE}: added_tokens is not a list")
    tokens: dict[str, AddedToken] = {}
    warnings = []
    taken = {piece_id: key for key, piece_id in vocab.items()}
    next_id = len(vocab)
    for item in node:
        item = _object(item, "an added token")
        content, stated = item.get("content"), item.get("id")
        if not isinstance(content, str):
            raise InputError(f"{SOURCE}: an added token has content {content!r}, not a text")
        if not content:
            continue
        if content in tokens:
            token_id = tokens[content].id
        elif content in vocab:
            token_id = vocab[content]
        else:
            token_id = next_id
            next_id += 1
            if token_id in taken:
                raise InputError(f"{SOURCE}: id {token_id} belongs to both {taken[token_id]!r} and {content!r}")
        if stated != token_id:
            warnings.append(f"{SOURCE} gives {content!r} the id {stated!r}, but by its place it has {token_id}")
        flags = {name: item.get(name, False) is True for name in _FLAGS}
        tokens[content] = AddedToken(token_id, content, **flags)
    return list(tokens.values()), warnings


_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


def _merges(node: object, vocab: Mapping[str, int], to_bytes: Mapping[str, int]) -> list[Merge]:
    if not isinstance(node, list):
        raise InputError(f"{SOURCE}: model.merges is missing or no list")
    if not node and len(vocab) > 256:
        raise InputError(f"{SOURCE}: model.merges is empty, but there are {len(vocab)} pieces")
    merges = []
    for position, item in enumerate(node):
        if isinstance(item, str):
            if item.startswith("#version"):
                continue
            item = item.split(" ")
        if not (isinstance(item, list) and len(item) == 2 and all(isinstance(part, str) and part for part in item)):
            raise InputError(f"{SOURCE}: merge {position} is not a pair of pieces: {str(node[position])[:80]!r}")
        left, right = (_piece(part, to_bytes) for part in item)
        if left is None or right is None:
            raise InputError(f"{SOURCE}: merge {position} is not byte-level text: {str(node[position])[:80]!r}")
        merges.append((left, right))
    return merges


def _check_products(pieces: Mapping[bytes, int], merges: Iterable[Merge]) -> None:
    for position, (left, right) in enumerate(merges):
        for piece in (left, right, left + right):
            if piece not in pieces:
                raise InputError(f"{SOURCE}: merge {position} needs the piece {piece!r}, which has no id")


def _byte_of_char() -> dict[str, int]:
    """The inverse of GPT-2's map of bytes to printable characters.

    Printable Latin-1 stands for itself; the other 68 bytes, ascending, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _piece(key: str, to_bytes: Mapping[str, int]) -> bytes | None:
    try:
        return bytes([to_bytes[char] for char in key])
    except KeyError:
        return None


def _object(node: object, name: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise InputError(f"{SOURCE}: {name} is {type(node).__name__}, not an object")
    return node
