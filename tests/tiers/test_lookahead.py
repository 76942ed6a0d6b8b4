"""The lookahead's width against simulated drives: it finds what is fastest, and stays away where it does not pay."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from waste.tiers.lookahead import Lookahead


def settled(cost: Callable[[int], float], noise: float, seed: int, *, top_k: int = 8, experts: int = 64) -> list[int]:
    """The widths of the last 1,000 of 3,000 tokens of `cost(width)` seconds, give or take `noise` of that."""
    rng = random.Random(seed)
    lookahead = Lookahead(top_k, experts)
    widths = []
    for _ in range(3000):
        widths.append(lookahead.width)
        lookahead.token(cost(lookahead.width) * rng.uniform(1 - noise, 1 + noise))
    return widths[-1000:]


def mean_cost(cost: Callable[[int], float], widths: list[int]) -> float:
    return sum(map(cost, widths)) / len(widths)


SHAPES = {
    "every read ahead is wasted": lambda width: 1 + 0.05 * width,
    "the drive has time to spare": lambda width: 2 - 0.05 * width,
    "a few pay": lambda width: 1 + 0.01 * (width - 4) ** 2,
    "as many as a token takes pay": lambda width: 1 + 0.01 * (width - 8) ** 2,
    "only off and all are good": lambda width: 1.0 if width in (0, 16) else 1.02,
}


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_settles_near_the_fastest_width(shape: str, noise: float) -> None:
    cost = SHAPES[shape]
    best = min(cost(width) for width in (0, 4, 8, 12, 16))
    for seed in range(10):
        assert mean_cost(cost, settled(cost, noise, seed)) <= 1.06 * best


def test_it_switches_itself_off_and_rarely_tries_again() -> None:
    widths = settled(SHAPES["every read ahead is wasted"], 0.05, 0)
    assert widths.count(0) >= 0.9 * len(widths)


def test_it_notices_when_the_drive_changes() -> None:
    rng = random.Random(0)
    lookahead = Lookahead(8, 64)
    for token in range(6000):
        slope = 0.05 if token < 2000 else -0.05
        lookahead.token((2 + slope * lookahead.width) * rng.uniform(0.95, 1.05))
    assert lookahead.width >= 12


@pytest.mark.parametrize("fixed", [0, 3, 8, 100])
def test_a_fixed_width_stays(fixed: int) -> None:
    lookahead = Lookahead(8, 64, fixed)
    for token in range(100):
        assert lookahead.width == min(fixed, 64)
        lookahead.token(float(token))


def test_widths_are_no_more_than_there_are_experts() -> None:
    rng = random.Random(1)
    for top_k, experts in ((1, 1), (2, 3), (4, 6), (8, 8)):
        lookahead = Lookahead(top_k, experts)
        for _ in range(500):
            assert 0 <= lookahead.width <= experts
            lookahead.token(rng.random())


def test_a_gain_of_one_per_cent_is_not_worth_a_move() -> None:
    lookahead, at_first = Lookahead(8, 64), 0
    for _ in range(4000):
        at_first += lookahead.width == 4
        lookahead.token(1.0 if lookahead.width == 4 else 0.99)
    assert at_first > 0.9 * 4000
