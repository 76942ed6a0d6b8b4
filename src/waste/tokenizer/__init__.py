"""Text to token ids and back: byte-level BPE read from a checkpoint, stored in and loaded from a container."""

from __future__ import annotations

from waste.tokenizer.bpe import Tokenizer
from waste.tokenizer.files import from_files, to_files
from waste.tokenizer.hf_json import read_hf_json
from waste.tokenizer.spec import AddedToken, TokenizerSpec
from waste.tokenizer.stream import StreamDecoder
from waste.tokenizer.tiktoken_model import read_tiktoken

__all__ = [
    "AddedToken",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerSpec",
    "from_files",
    "read_hf_json",
    "read_tiktoken",
    "to_files",
]
