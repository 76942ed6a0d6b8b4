"""Streamed text equals decoding everything at once, character by character."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from waste.tokenizer import StreamDecoder, Tokenizer, TokenizerSpec
from waste.tokenizer.spec import AddedToken


@pytest.fixture(scope="module")
def bytes_only() -> Tokenizer:
    """Byte b is token b; 256 is a special token, 257 has no text."""
    added = (AddedToken(256, "<|end|>", special=True), AddedToken(258, "<think>"))
    return Tokenizer(TokenizerSpec({bytes([byte]): byte for byte in range(256)}, (".",), added, {}))


SEQUENCES = {
    "emoji": "🔥ok👍".encode(),
    "zwj": "👩‍👩‍👧".encode(),
    "cjk": "三國志".encode(),
    "flag": "🇩🇪".encode(),
    "stray continuation": b"a\x80b",
    "bad lead": b"x\xff\xfey",
    "overlong": b"\xc0\xafz",
    "surrogate": b"\xed\xa0\xbdq",
    "cut, then ascii": b"\xf0\x9f\x94A",
    "cut at the end": "ok🔥".encode()[:-1],
    "wall": ("汉" * 50).encode(),
    "nul": b"a\0b",
    "combining": "e\u0301".encode(),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_byte_by_byte(name: str, bytes_only: Tokenizer) -> None:
    raw = SEQUENCES[name]
    decoder = StreamDecoder(bytes_only)
    pieces = [decoder.feed(byte) for byte in raw]
    assert "".join(pieces) + decoder.flush() == raw.decode("utf-8", "replace") == bytes_only.decode(raw)


def test_a_character_comes_with_its_last_byte(bytes_only: Tokenizer) -> None:
    decoder = StreamDecoder(bytes_only)
    assert [decoder.feed(byte) for byte in "汉é🔥".encode()] == ["", "", "汉", "", "é", "", "", "", "🔥"]
    assert decoder.flush() == ""


@example(ids=[0xED, 0xA0])  # half a surrogate, which Python's own decoder holds back
@example(ids=[0xED, 0x9F, 0xBF])
@given(ids=st.lists(st.one_of(st.integers(-1, 260), st.sampled_from(list("🔥é汉".encode()))), max_size=40))
def test_any_ids(ids: list[int], bytes_only: Tokenizer) -> None:
    for skip in (False, True):
        decoder = StreamDecoder(bytes_only, skip_special=skip)
        text = ""
        for i, token_id in enumerate(ids):
            piece = decoder.feed(token_id)
            piece.encode()  # valid by itself
            text += piece
            so_far = bytes_only.decode(ids[: i + 1], skip_special=skip)
            # Nothing is taken back, and at most one unfinished character is held.
            assert so_far.startswith(text)
            assert so_far[len(text) :].strip("\ufffd") == ""
            assert len(so_far) - len(text) <= 1
        assert text + decoder.flush() == bytes_only.decode(ids, skip_special=skip)


def test_the_decoder_can_be_used_again_after_a_flush(bytes_only: Tokenizer) -> None:
    decoder = StreamDecoder(bytes_only)
    assert decoder.feed(0xF0) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.feed(0x9F) == "\ufffd"
    assert decoder.feed(ord("a")) == "a"


def test_special_tokens_can_be_left_out(bytes_only: Tokenizer) -> None:
    decoder = StreamDecoder(bytes_only, skip_special=True)
    assert "".join(decoder.feed(i) for i in (97, 256, 258, 98)) == "a<think>b"
