"""Proof at conversion that our encoder equals the library the model was made with."""

from __future__ import annotations

import json
from collections.abc import Sequence

import tiktoken
import tokenizers

from waste.errors import InputError
from waste.tokenizer.bpe import Tokenizer
from waste.tokenizer.samples import sample_texts


def compare_with_hf(tokenizer: Tokenizer, hf_json_text: str, *, minimum: int = 2000) -> int:
    """Encode at least `minimum` texts here and with the `tokenizers` library, with and without the added tokens.

    Returns the number of encodings compared. Raises InputError naming the first text whose ids differ, or saying that
    the library cannot read `hf_json_text` (the text of a Hugging Face `tokenizer.json`).
    """
    plain = json.loads(hf_json_text)
    markers = [token["content"] for token in plain.pop("added_tokens", None) or []]
    texts = sample_texts(tokenizer, minimum, markers)
    for text, markup in ((hf_json_text, True), (json.dumps(plain), False)):
        try:
            library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises the bare class
            detail = " ".join(str(error).split())
            raise InputError(f"tokenizer.json: the tokenizers library cannot read it: {detail}") from error
        library.no_truncation()
        library.no_padding()
        expected = [found.ids for found in library.encode_batch(texts, add_special_tokens=False)]
        _compare(tokenizer, texts, expected, markup=markup, library="tokenizers")
    return 2 * len(texts)


def compare_with_tiktoken(tokenizer: Tokenizer, *, minimum: int = 2000) -> int:
    """As `compare_with_hf` for a tokenizer read from a rank file: the oracle is `tiktoken` with its own splitting."""
    spec = tokenizer.spec
    library = tiktoken.Encoding(
        "source",
        pat_str="|".join(spec.patterns),
        mergeable_ranks=dict(spec.ranks),
        special_tokens={token.content: token.id for token in spec.added},
    )
    texts = sample_texts(tokenizer, minimum)
    marked = [library.encode(text, allowed_special="all") for text in texts]
    _compare(tokenizer, texts, marked, markup=True, library="tiktoken")
    plain = [library.encode_ordinary(text) for text in texts]
    _compare(tokenizer, texts, plain, markup=False, library="tiktoken")
    return 2 * len(texts)


def _compare(
    tokenizer: Tokenizer, texts: Sequence[str], expected: Sequence[Sequence[int]], *, markup: bool, library: str
) -> None:
    for text, want in zip(texts, expected, strict=True):
        got = tokenizer.encode(text, markup=markup)
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
            kind = "with" if markup else "without"
            raise InputError(
                f"tokenizer: {text[:200]!r} {kind} added tokens encodes to {got[at : at + 4]} from token {at} on, "
                f"the {library} library says {list(want[at : at + 4])}"
            )
