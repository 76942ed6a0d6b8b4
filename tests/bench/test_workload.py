"""The tokens of a measurement: the same ones every time, new ones in every repeat."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste.bench.text import PARAGRAPHS
from waste.bench.workload import Case, Stream, cases
from waste.engine.engine import Engine
from waste.errors import UsageError


def encode(text: str) -> list[int]:
    return list(text.encode())


@given(st.lists(st.integers(0, 3000), max_size=12))
def test_a_stream_is_the_same_however_it_is_taken(parts: list[int]) -> None:
    whole = Stream(encode).take(sum(parts))
    stream = Stream(encode)
    assert [i for count in parts for i in stream.take(count)] == whole


def test_every_pass_has_every_paragraph_in_an_order_of_its_own() -> None:
    length = sum(len(encode(text)) + 2 for text in PARAGRAPHS)
    stream = Stream(encode)
    passes = [bytes(stream.take(length)).decode() for _ in range(3)]
    assert len(set(passes)) == 3
    for text in passes:
        assert all(text.count(f"{paragraph}\n\n") == 1 for paragraph in PARAGRAPHS)


def test_the_text_is_long_enough_for_a_default_run(cpu_engine: Engine) -> None:
    """Four runs of 96 tokens, the warm-up among them, do not come upon a paragraph twice."""
    count = sum(len(cpu_engine.tokenizer.encode(text)) for text in PARAGRAPHS)
    assert count > 4 * (64 + 32)


def test_all_ids_are_of_the_vocabulary(cpu_engine: Engine) -> None:
    ids = Stream(cpu_engine.tokenizer.encode).take(20_000)
    assert min(ids) >= 0 and max(ids) < cpu_engine.config.vocab_size
    assert len(set(ids)) > 200


def test_cases_are_depths_times_prompts() -> None:
    assert cases([0, 9], [64, 5, 64], 3) == (Case(0, 64, 3), Case(0, 5, 3), Case(9, 64, 3), Case(9, 5, 3))
    assert Case(9, 5, 3).tokens == 17
    assert cases([0], [0], 1) == (Case(0, 0, 1),)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        cases([100], [64, 0], 0)
