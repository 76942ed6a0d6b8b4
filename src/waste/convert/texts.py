"""Tokenizer and chat files of a container, from those of the checkpoint; refused unless provably equivalent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from waste.chat import find_template
from waste.chat.format import JSON as CHAT_FILE
from waste.chat.format import build_format, to_json
from waste.convert.source import json_object
from waste.errors import InputError
from waste.io.files import shown
from waste.models.hf_config import GENERATION_FILE
from waste.tokenizer import Tokenizer, read_hf_json, read_tiktoken, to_files
from waste.tokenizer.compare import compare_with_hf, compare_with_tiktoken

HF_TOKENIZER = "tokenizer.json"
TIKTOKEN = "tiktoken.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


def container_texts(small: Mapping[str, bytes], directory: Path, rows: int) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The container's small files by name, and notices. `small`: the checkpoint's files; `rows`: of the embedding.

    Raises InputError when there is no tokenizer, when it needs more rows than the embedding has, or when it encodes
    one of 2,000 and more texts unlike the library it was made with; when the chat template does not parse.
    UnsupportedError for kinds of tokenizer that are not read.
    """
    config = json_object(small.get(TOKENIZER_CONFIG, b"{}"), shown(directory / TOKENIZER_CONFIG))
    tokenizer = _tokenizer(small, directory, config)
    spec = tokenizer.spec
    if spec.vocab_size > rows:
        raise InputError(
            f"the tokenizer of {shown(directory)} has ids up to {spec.vocab_size - 1}, the embedding {rows} rows: "
            "they do not belong together"
        )
    files = to_files(spec)
    notices = list(spec.warnings)
    template = find_template(config, _text(small, TEMPLATE_FILE, directory))
    files[CHAT_FILE] = to_json(build_format(tokenizer, template, config))
    if template is not None:
        files[TEMPLATE_FILE] = template.encode("utf-8", "replace")
    else:
        notices.append(f"{shown(directory)} has no chat template: prompts will be sent as they are")
    if GENERATION_FILE in small:
        # The release's sampling defaults, for `run`.
        files[GENERATION_FILE] = small[GENERATION_FILE]
    return files, tuple(notices)


def _tokenizer(small: Mapping[str, bytes], directory: Path, config: Mapping[str, object]) -> Tokenizer:
    """The checkpoint's tokenizer, compared with the library it was made with."""
    text = _text(small, HF_TOKENIZER, directory)
    if text is not None:
        tokenizer = Tokenizer(read_hf_json(json_object(small[HF_TOKENIZER], shown(directory / HF_TOKENIZER))))
        compare_with_hf(tokenizer, text)
        return tokenizer
    if TIKTOKEN in small:
        tokenizer = Tokenizer(read_tiktoken(small[TIKTOKEN], config))
        compare_with_tiktoken(tokenizer)
        return tokenizer
    raise InputError(
        f"{shown(directory)} has neither {HF_TOKENIZER!r} nor {TIKTOKEN!r}: without one no text can be read",
        hint="download the tokenizer files of the model into the folder",
    )


def _text(small: Mapping[str, bytes], name: str, directory: Path) -> str | None:
    """The text of a small file, None where the checkpoint has none."""
    if name not in small:
        return None
    try:
        return small[name].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown(directory / name)} is not UTF-8: byte {error.start} is 0x{small[name][error.start]:02x}",
            hint="download the file again",
        ) from error
