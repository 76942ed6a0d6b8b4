"""What a model writes is split at marker ids into reasoning and answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from waste.chat import Piece, ReasoningSplitter
from waste.tokenizer import Tokenizer


def _marks(tokenizer: Tokenizer) -> tuple[int, int]:
    opening, closing = tokenizer.id_of("<think>"), tokenizer.id_of("</think>")
    assert opening is not None
    assert closing is not None
    return opening, closing


def _run(splitter: ReasoningSplitter, ids: list[int]) -> list[Piece]:
    return [piece for i in ids for piece in splitter.feed(i)] + splitter.flush()


def _joined(pieces: list[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def test_a_thought_and_an_answer(tokenizer: Tokenizer) -> None:
    opening, closing = _marks(tokenizer)
    splitter = ReasoningSplitter(tokenizer, opening, closing, starts_inside=True)
    pieces = _run(splitter, [*tokenizer.encode("Hello"), closing, *tokenizer.encode("the user")])
    assert _joined(pieces, "reasoning") == "Hello"
    assert _joined(pieces, "answer") == "the user"
    assert not splitter.inside_reasoning


def test_the_text_of_a_marker_is_text(tokenizer: Tokenizer) -> None:
    opening, closing = _marks(tokenizer)
    splitter = ReasoningSplitter(tokenizer, opening, closing, starts_inside=False)
    pieces = _run(splitter, tokenizer.encode("<think>x</think>"))
    assert _joined(pieces, "answer") == "<think>x</think>"
    assert _joined(pieces, "reasoning") == ""


def test_unclosed_reasoning_is_reported(tokenizer: Tokenizer) -> None:
    opening, closing = _marks(tokenizer)
    splitter = ReasoningSplitter(tokenizer, opening, closing, starts_inside=False)
    pieces = _run(splitter, [*tokenizer.encode("a"), opening, *tokenizer.encode("b")])
    assert pieces == [Piece("answer", "a"), Piece("reasoning", "b")]
    assert splitter.inside_reasoning


def test_without_markers_everything_is_answer(tokenizer: Tokenizer) -> None:
    splitter = ReasoningSplitter(tokenizer, None, None, starts_inside=True)
    pieces = _run(splitter, tokenizer.encode("Hello"))
    assert _joined(pieces, "answer") == "Hello"
    assert not splitter.inside_reasoning


def test_a_character_cut_by_a_marker_stays_on_its_side(tokenizer: Tokenizer) -> None:
    opening, closing = _marks(tokenizer)
    splitter = ReasoningSplitter(tokenizer, opening, closing, starts_inside=True)
    cut = tokenizer.encode("é")[:1]
    assert _run(splitter, [*cut, closing, *cut]) == [Piece("reasoning", "\ufffd"), Piece("answer", "\ufffd")]


@given(data=st.data(), starts_inside=st.booleans())
def test_each_stretch_decodes_by_itself(data: st.DataObject, starts_inside: bool, tokenizer: Tokenizer) -> None:
    opening, closing = _marks(tokenizer)
    ids = data.draw(st.lists(st.one_of(st.sampled_from([opening, closing]), st.integers(0, 300)), max_size=30))
    splitter = ReasoningSplitter(tokenizer, opening, closing, starts_inside=starts_inside)
    pieces = _run(splitter, ids)

    expected = {"reasoning": "", "answer": ""}
    inside, stretch = starts_inside, []
    for token_id in [*ids, opening]:
        if token_id in (opening, closing):
            expected["reasoning" if inside else "answer"] += tokenizer.decode(stretch)
            inside, stretch = token_id == opening, []
        else:
            stretch.append(token_id)
    assert {kind: _joined(pieces, kind) for kind in expected} == expected
