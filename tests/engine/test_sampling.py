"""Laws of the sampler: what is greedy, what is never drawn, what a seed fixes, what each filter keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.engine.sampling import Sampler, SamplingParams, published
from waste.errors import ExitCode, UsageError, WasteError

N = 512
RNG = np.random.default_rng(8)
ROWS = {
    "plain": RNG.standard_normal(N),
    "peaked": np.r_[100.0, np.zeros(N - 1)],
    "flat": np.zeros(N),
    "tie": np.r_[5, 5, 5, np.zeros(N - 3)],
    "late_tie": np.r_[np.zeros(N - 3), 5, 5, 5],
    "huge": RNG.standard_normal(N) * 1e4,
    "minus_inf": np.r_[[0.5, 0.25], np.full(N - 2, -np.inf)],
    "tiny": RNG.standard_normal(N) * 1e-8,
}
GREEDY = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, top_p=0.5, seed=3),
    SamplingParams(temperature=1, top_k=1),
    SamplingParams(temperature=1, top_p=0),
    SamplingParams(temperature=1, min_p=1),
    SamplingParams(temperature=100, top_k=1, top_p=0.5),
]


def logits(name: str) -> np.ndarray:
    return ROWS[name].astype(np.float32)


def lowest_best(row: np.ndarray) -> int:
    """Greedy by definition: the first position of the largest value, in plain Python."""
    best = max(float(v) for v in row)
    return next(i for i, v in enumerate(row) if float(v) == best)


def draws(params: SamplingParams, row: np.ndarray, count: int, **kwargs: object) -> list[int]:
    sampler = Sampler(params, **kwargs)  # type: ignore[arg-type]
    return [sampler.sample(row) for _ in range(count)]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("params", GREEDY, ids=str)
def test_greedy_is_the_lowest_id_among_the_best_every_time(name: str, params: SamplingParams) -> None:
    assert set(draws(params, logits(name), 5)) == {lowest_best(logits(name))}


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324, 100.0, 1e300])
@pytest.mark.parametrize("name", ROWS)
def test_no_temperature_overflows(name: str, temperature: float) -> None:
    row = logits(name)
    with np.errstate(all="raise", under="ignore"):
        ids = draws(SamplingParams(temperature=temperature, seed=1), row, 20)
    assert all(np.isfinite(row[i]) for i in ids)
    if temperature <= 1e-30:
        assert all(row[i] == row.max() for i in ids)


def test_ids_with_minus_infinity_are_never_drawn() -> None:
    ids = draws(SamplingParams(temperature=50, seed=2), logits("minus_inf"), 10_000)
    assert set(ids) == {0, 1}


def test_masked_ids_are_never_drawn_even_when_they_are_best() -> None:
    row = logits("tie")
    masked = [0, 2, *range(10, N), N + 7]
    assert set(draws(SamplingParams(temperature=1, seed=4), row, 2000, masked_ids=masked)) <= {1, *range(3, 10)}
    assert draws(SamplingParams(), row, 1, masked_ids=masked) == [1]
    assert row[0] == 5  # the caller's array is untouched


def test_a_seed_fixes_the_draws_and_another_one_changes_them() -> None:
    row = logits("plain")
    for params in (SamplingParams(temperature=1, seed=7), SamplingParams(temperature=1, top_k=40, top_p=0.9, seed=7)):
        first, other = draws(params, row, 50), SamplingParams(**{**vars(params), "seed": 8})
        assert draws(params, row, 50) == first
        assert draws(other, row, 50) != first


def test_without_a_seed_the_sampler_tells_the_one_it_drew() -> None:
    row = logits("plain")
    sampler = Sampler(SamplingParams(temperature=1))
    ids = [sampler.sample(row) for _ in range(30)]
    assert draws(SamplingParams(temperature=1, seed=sampler.seed), row, 30) == ids


def test_frequencies_follow_the_softmax() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32)) + 3
    for temperature in (0.5, 1.0, 2.0):
        weights = np.array([0.5, 0.3, 0.15, 0.05]) ** (1 / temperature)
        ids = draws(SamplingParams(temperature=temperature, seed=5), row, 6000)
        seen = np.bincount(ids, minlength=4) / 6000
        assert np.abs(seen - weights / weights.sum()).max() < 0.026  # four standard deviations


def kept_by_definition(row: np.ndarray, params: SamplingParams) -> set[int]:
    """top_k, then top_p, then min_p, each renormalised, with plain Python floats."""
    ids = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    if params.top_k:
        ids = ids[: params.top_k]
    weight = {i: math.exp(float(row[i]) - float(row.max())) for i in ids}
    if params.top_p < 1:
        total, mass, nucleus = math.fsum(weight.values()), 0.0, []
        for i in ids:
            nucleus.append(i)
            mass += weight[i]
            if mass >= params.top_p * total:
                break
        ids = nucleus
    return {i for i in ids if weight[i] >= params.min_p * weight[ids[0]]}


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.integers(-30, 30), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.001, 0.999),  # both sums are rounded; ties on the border itself are not the point
    min_p=st.floats(0.0001, 0.99),
)
def test_filters_keep_what_their_definition_says(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    row = np.array(values, dtype=np.float32) / 7
    params = SamplingParams(temperature=1e6, top_k=top_k, top_p=top_p, min_p=min_p, seed=0)
    if not params.greedy:  # the temperature makes the kept ones equally likely
        assert set(draws(params, row, 60)) <= kept_by_definition(row, params)


def test_every_kept_token_is_drawn_sooner_or_later() -> None:
    row = logits("plain")
    for params in (
        SamplingParams(temperature=1e6, top_k=9, seed=1),
        SamplingParams(temperature=1e6, top_p=0.07, seed=1),
        SamplingParams(temperature=1e6, min_p=0.5, seed=1),
    ):
        assert set(draws(params, row, 3000)) == kept_by_definition(row, params)


def test_ties_on_the_border_of_a_filter_go_to_the_lower_ids() -> None:
    row = np.random.default_rng(3).integers(0, 3, 3000).astype(np.float32)
    for params in (
        SamplingParams(temperature=1e6, top_k=1500, seed=1),
        SamplingParams(temperature=1e6, top_p=0.8, seed=1),
        SamplingParams(temperature=1e6, top_k=2000, top_p=0.9, seed=1),
    ):
        kept = kept_by_definition(row, params)
        drawn = set(draws(params, row, 600))
        assert drawn <= kept
        assert len(drawn) > len(kept) // 5


def test_a_nucleus_wider_than_the_first_guess() -> None:
    row = np.zeros(5000, dtype=np.float32)
    ids = draws(SamplingParams(temperature=1, top_p=0.9, seed=1), row, 3000)
    assert max(ids) < 4500  # ties go to the lower ids
    assert max(ids) > 4000


def test_filters_off_and_filters_wider_than_the_vocabulary_are_the_same() -> None:
    row = logits("plain")
    plain = draws(SamplingParams(temperature=1, seed=3), row, 50)
    assert draws(SamplingParams(temperature=1, top_k=10**6, top_p=1.0, min_p=0.0, seed=3), row, 50) == plain


def test_the_filters_do_not_widen_with_the_temperature() -> None:
    row = logits("peaked")
    assert set(draws(SamplingParams(temperature=1e9, top_p=0.9, seed=1), row, 200)) == {0}


def test_the_penalty_pushes_recent_tokens_down_whatever_their_sign() -> None:
    sampler = Sampler(SamplingParams(repeat_penalty=2, repeat_last_n=3))
    assert sampler.sample(np.array([4.0, 3.0, 1.0]), [0]) == 1
    assert sampler.sample(np.array([-1.0, -1.5, -4.0]), [0]) == 1
    assert sampler.sample(np.array([4.0, 3.0, 1.0]), [0, 2, 2, 2]) == 0  # too long ago
    assert sampler.sample(np.array([4.0, 3.0, 1.0]), [0, 0, 0]) == 1  # once, however often it came: 2 < 3
    assert sampler.sample(np.array([4.0, 1.5, 1.0]), [0, 0, 0]) == 0  # and not 0.5
    assert sampler.sample(np.array([4.0, 3.0, 1.0]), [0, 99]) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 1.5},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"min_p": 1.01},
        {"min_p": -1},
        {"min_p": math.nan},
        {"top_k": -1},
        {"repeat_penalty": 0},
        {"repeat_penalty": -2},
        {"repeat_penalty": math.nan},
        {"repeat_penalty": math.inf},
        {"repeat_last_n": -1},
        {"seed": -1},
    ],
    ids=str,
)
def test_values_without_meaning_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            b'{"temperature": 1.0, "top_p": 0.95, "do_sample": true, "eos_token_id": [1]}',
            {"temperature": 1, "top_p": 0.95},
        ),
        (b'{"temperature": 0.6, "top_k": 40, "min_p": 0.05}', {"temperature": 0.6, "top_k": 40, "min_p": 0.05}),
        (b'{"temperature": 0.6, "do_sample": false}', {"temperature": 0}),
        (b'{"temperature": null, "top_k": -1, "top_p": 2, "min_p": "x"}', {}),
        (b'{"temperature": true, "top_k": Infinity, "top_p": NaN}', {}),
        (b"[1]", {}),
        (b"{", {}),
        (b"\xff", {}),
    ],
)
def test_published_values_are_taken_where_they_mean_something(text: bytes, values: dict[str, float]) -> None:
    found = published(text)
    assert found == values
    SamplingParams(**found)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1, seed=0)], ids=str)
def test_logits_that_mean_nothing_are_an_error(value: float, params: SamplingParams) -> None:
    row = logits("plain")
    row[17] = value
    with pytest.raises(WasteError, match="logit") as caught:
        Sampler(params).sample(row, [1, 2])
    assert caught.value.exit_code is ExitCode.BUG


def test_nothing_left_to_draw_is_an_error() -> None:
    with pytest.raises(WasteError, match="no token can be drawn"):
        Sampler(SamplingParams(), masked_ids=range(N)).sample(logits("plain"))
