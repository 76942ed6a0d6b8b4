"""Laws of generation: what ends an answer, what of it is text, and what the figures count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste import generate as generation
from waste.engine.sampling import Sampler, SamplingParams
from waste.errors import UsageError
from waste.generate import Generation, Prompt, _StopStrings, chat_prompt, generate, raw_prompt

END, OTHER_END, THINK, UNTHINK, CONTROL, TOOL = range(256, 262)

MakeEngine = Callable[..., Any]


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def answer(engine: Any, prompt: Prompt | None = None, **kwargs: Any) -> tuple[Generation, list[tuple[str, str]]]:
    pieces: list[tuple[str, str]] = []
    prompt = prompt or raw_prompt(engine, "Hi")
    done = generate(engine, prompt, on_piece=lambda channel, text: pieces.append((channel, text)), **kwargs)
    for channel, whole in (("text", done.text), ("reasoning", done.reasoning)):
        assert "".join(text for c, text in pieces if c == channel) == whole
    assert all(text for _, text in pieces)
    return done, pieces


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_any_end_id_ends_the_answer_and_is_not_shown(scripted: MakeEngine, end: int) -> None:
    engine = scripted([*ids_of("four"), end, *ids_of("more")])
    done, _ = answer(engine)
    assert (done.text, done.finish_reason, done.ended_by) == ("four", "stop", "end")
    assert done.ids == tuple(ids_of("four"))


def test_an_answer_ends_at_max_tokens_whatever_the_model_wants(scripted: MakeEngine) -> None:
    for count in (1, 2, 31):
        done, _ = answer(scripted([65]), max_tokens=count)
        assert (done.text, done.finish_reason, done.ended_by) == ("A" * count, "length", "max_tokens")
        assert done.completion_tokens == count


def test_no_token_is_evaluated_that_is_not_needed(scripted: MakeEngine) -> None:
    engine = scripted([65])
    answer(engine, max_tokens=3)
    assert engine.sessions[0].evaluated == [ids_of("Hi"), [65], [65]]
    engine = scripted([65, END])
    answer(engine)
    assert engine.sessions[0].evaluated == [ids_of("Hi"), [65]]


def test_times_are_of_the_prompt_the_first_token_and_the_rest(
    scripted: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only work moves: 10 s a prompt, 0.5 s a step, 0.25 s a draw."""
    now = 100.0

    def spend(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += 10 if seconds == 0.5 and len(args[0]) > 1 else seconds
            return work(*args, **kwargs)

        return timed

    engine = scripted([*ids_of("abc"), END])
    session = engine.session()
    session.eval = spend(0.5, session.eval)
    monkeypatch.setattr(Sampler, "sample", spend(0.25, Sampler.sample))
    monkeypatch.setattr(generation.time, "perf_counter", lambda: now)
    done, _ = answer(engine, session=session)
    assert (done.prompt_s, done.ttft_s, done.decode_s) == (10, 10.25, 3 * 0.75)
    assert (done.prompt_tokens_per_s, done.decode_tokens_per_s) == (2 / 10, 3 / 2.25)  # the end id is a step too


def test_zero_tokens_evaluate_nothing(scripted: MakeEngine) -> None:
    engine = scripted([65])
    done, pieces = answer(engine, max_tokens=0)
    assert (done.text, done.completion_tokens, done.finish_reason, pieces) == ("", 0, "length", [])
    assert engine.sessions[0].evaluated == []


def test_a_prompt_too_long_is_refused_with_both_counts_before_any_work(scripted: MakeEngine) -> None:
    engine = scripted([65], context=10)
    for length in (10, 11, 500):
        with pytest.raises(UsageError, match=rf"{length} tokens.*holds 10") as caught:
            answer(engine, Prompt(ids_of("x" * length)))
        assert caught.value.hint == f"--ctx {length + 257}"
    with pytest.raises(UsageError) as caught:
        answer(engine, Prompt(ids_of("x" * 5000)))
    assert "the model goes to 5000 tokens" in (caught.value.hint or "")
    assert all(session.evaluated == [] for session in engine.sessions)
    assert answer(engine, Prompt(ids_of("x" * 9)))[0].text == "A"


def test_the_end_of_the_context_ends_the_answer(scripted: MakeEngine) -> None:
    done, _ = answer(scripted([65], context=10), max_tokens=1000)
    assert (done.text, done.ended_by, done.finish_reason) == ("A" * 8, "context", "length")
    done, _ = answer(scripted([65], context=10), max_tokens=8)
    assert done.ended_by == "max_tokens"


def test_a_session_goes_on_where_it_was(scripted: MakeEngine) -> None:
    engine = scripted([65, END], context=10)
    session = engine.session()
    session.position = 3
    done, _ = answer(engine, Prompt(ids_of("Hello")), session=session)
    assert (done.text, done.prompt_tokens, done.reused_tokens) == ("A", 5, 3)
    assert session.evaluated == [ids_of("lo"), [65]]


def test_after_the_prompt_and_before_the_first_draw_the_session_can_be_saved(scripted: MakeEngine) -> None:
    engine = scripted([65, END])
    session = engine.session()
    seen: list[int] = []
    answer(engine, session=session, on_prompt=lambda: seen.append(session.position))
    assert (seen, session.position) == ([2], 3)
    answer(engine, max_tokens=0, on_prompt=lambda: pytest.fail("nothing was evaluated"))


def test_rows_without_a_token_are_never_drawn(scripted: MakeEngine) -> None:
    engine = scripted([65])  # its rows from 262 have the largest logits
    assert answer(engine, max_tokens=4)[0].text == "AAAA"
    hot = SamplingParams(temperature=1e9, seed=1)
    assert max(answer(engine, max_tokens=300, sampling=hot)[0].ids) < 262


def test_reasoning_is_told_from_the_answer_by_ids(scripted: MakeEngine) -> None:
    script = [*ids_of("hmm </think> "), UNTHINK, *ids_of("<think>yes"), END]
    prompt = Prompt(ids_of("Hi"), (THINK, UNTHINK), inside_reasoning=True)
    done, _ = answer(scripted(script), prompt)
    assert (done.reasoning, done.text, done.answered) == ("hmm </think> ", "<think>yes", True)
    script = [*ids_of("a"), THINK, *ids_of("b"), UNTHINK, *ids_of("c"), END]
    done, pieces = answer(scripted(script), Prompt(ids_of("Hi"), (THINK, UNTHINK)))
    assert pieces == [("text", "a"), ("reasoning", "b"), ("text", "c")]
    done, _ = answer(scripted(script))
    assert done.text == "a<think>b</think>c"  # raw: nothing is told apart


def test_reasoning_that_eats_the_limit_is_no_answer(scripted: MakeEngine) -> None:
    prompt = Prompt(ids_of("Hi"), (THINK, UNTHINK), inside_reasoning=True)
    done, _ = answer(scripted(ids_of("hmm ") * 500), prompt, max_tokens=32)
    assert (done.text, done.reasoning, done.answered, done.finish_reason) == ("", "hmm " * 8, False, "length")
    done, _ = answer(scripted([65, UNTHINK, 66]), prompt, max_tokens=2)
    assert (done.text, done.answered) == ("", False)  # the reasoning just ended
    done, _ = answer(scripted([65, END]), prompt)
    assert (done.text, done.answered, done.finish_reason) == ("", False, "stop")
    done, _ = answer(scripted([65, UNTHINK, END]), prompt)
    assert (done.text, done.answered) == ("", True)  # an empty answer, but the model's own


def test_control_tokens_are_not_text_but_other_added_ones_are(scripted: MakeEngine) -> None:
    done, _ = answer(scripted([65, CONTROL, TOOL, 66, END]))
    assert done.text == "A<tool>B"
    assert done.ids == (65, CONTROL, TOOL, 66)


def test_characters_come_out_whole(scripted: MakeEngine) -> None:
    text = "中\U0001f468\u200d\U0001f469é"
    done, pieces = answer(scripted([*ids_of(text), END]))
    assert [piece for _, piece in pieces] == list(text)
    done, _ = answer(scripted([*ids_of(text)[:-1], END]))
    assert done.text == text[:-1] + "\ufffd"


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["STOP"], "one STO two "),
        (["STOP", "two"], "one STO "),
        (["two STOP three"], "one STO "),
        (["never"], "one STO two STOP three"),
        (["e"], "on"),
        (["three", "th"], "one STO two STOP "),
        (["STOP three!"], "one STO two STOP three"),
    ],
)
def test_a_stop_string_is_found_across_tokens_and_left_out(scripted: MakeEngine, stops: list[str], text: str) -> None:
    done, _ = answer(scripted([*ids_of("one STO two STOP three"), END]), stops=stops)
    assert done.text == text
    assert done.ended_by == ("end" if text.endswith("three") else "stop_string")
    assert done.finish_reason == "stop"


def test_stop_strings_are_not_looked_for_in_reasoning(scripted: MakeEngine) -> None:
    prompt = Prompt(ids_of("Hi"), (THINK, UNTHINK), inside_reasoning=True)
    done, _ = answer(scripted([*ids_of("x STOP y"), UNTHINK, *ids_of("a STOP b"), END]), prompt, stops=["STOP"])
    assert (done.reasoning, done.text) == ("x STOP y", "a ")


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_it_does_not_matter_how_the_text_was_cut(text: str, stops: Sequence[str], cuts: list[int]) -> None:
    def through(pieces: Sequence[str]) -> tuple[str, bool]:
        finder = _StopStrings(stops)
        said = "".join(map(finder.feed, pieces))
        return said + finder.rest(), finder.found

    # By definition: the first moment at which the text so far ends with a stop string.
    ends = [(n, stop) for n in range(1, len(text) + 1) for stop in stops if text[:n].endswith(stop)]
    expected = (text, False)
    if ends:
        first = min(n for n, _ in ends)
        expected = (text[: first - max(len(stop) for n, stop in ends if n == first)], True)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert through([text[a:b] for a, b in pairwise(borders)]) == expected
    assert through(list(text)) == expected


def test_senseless_settings_are_refused(scripted: MakeEngine) -> None:
    with pytest.raises(UsageError, match="stop string"):
        answer(scripted([65]), stops=[""])
    with pytest.raises(UsageError, match="max_tokens"):
        answer(scripted([65]), max_tokens=-1)
    with pytest.raises(UsageError, match="no tokens"):
        answer(scripted([65]), Prompt([]))


def test_the_figures_count_this_answer_only(scripted: MakeEngine) -> None:
    engine = scripted([65, 66, END])
    session = engine.session()
    session.position = 100
    done, _ = answer(engine, Prompt(ids_of("x" * 102)), session=session)
    assert (done.prompt_tokens, done.completion_tokens, done.decode_steps) == (102, 2, 2)
    assert done.prompt_tokens_per_s == 2 / done.prompt_s
    assert (done.expert_hits, done.expert_misses, done.bytes_read) == (7 * 4, 2 * 4, 1000 * 4)  # Hi, A, B
    assert 0 < done.prompt_s <= done.ttft_s
    assert done.decode_s > 0


def test_the_penalty_sees_prompt_and_answer(scripted: MakeEngine) -> None:
    params = SamplingParams(repeat_penalty=100)
    done, _ = answer(scripted([65]), Prompt([65]), sampling=params, max_tokens=2)
    assert done.ids == (0, 1)


def test_a_chat_prompt_is_the_template_with_the_text_as_plain_text(scripted: MakeEngine) -> None:
    engine = scripted()
    prompt = chat_prompt(engine, "a <|ctl|> b", system="s", effort="low")
    expected = [CONTROL, *ids_of("system:s"), CONTROL, *ids_of("user:a <|ctl|> b[low]"), THINK]
    assert list(prompt.ids) == expected
    assert prompt.think == (THINK, UNTHINK)
    assert prompt.inside_reasoning
    assert CONTROL not in raw_prompt(engine, "a <|ctl|> b").ids
    with pytest.raises(UsageError, match="no chat template"):
        chat_prompt(scripted(template=None), "x")
