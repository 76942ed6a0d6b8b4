"""A regression is found, noise is not called one, and only equal settings are compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from waste.bench.compare import SAME, compare
from waste.bench.row import NAMES, Row
from waste.bench.spread import Spread


def test_settings_are_members_of_a_row() -> None:
    assert set(SAME) <= set(NAMES)


@pytest.fixture
def measured(row: Callable[..., Row]) -> Callable[..., Row]:
    """`measured([...tok/s...])`"""

    def make(rates: list[float], **changes: object) -> Row:
        spread = Spread.of(rates)
        return row(
            repeats=len(rates),
            tokens_per_s=spread.median,
            tokens_per_s_p10=spread.p10,
            tokens_per_s_p90=spread.p90,
            **changes,
        )

    return make


def test_a_planted_regression_is_found(measured: Callable[..., Row]) -> None:
    (found,) = compare([measured([10, 10.2, 10.4])], [measured([8.0, 8.2, 8.1])])
    assert found.verdict == "slower"
    assert found.ratio == pytest.approx(8.1 / 10.2)
    assert found.falls_below(0.9) and not found.falls_below(0.7)
    (back,) = compare([found.new], [found.old])
    assert back.verdict == "faster" and not back.falls_below(5)


def test_noise_within_the_spread_is_no_verdict(measured: Callable[..., Row]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        old, new = (measured((10 + rng.uniform(-1, 1, 9)).tolist()) for _ in range(2))
        (found,) = compare([old], [new])
        assert found.verdict == "within the spread"
        assert not found.falls_below(1.5)


def test_one_repeat_has_no_spread(measured: Callable[..., Row]) -> None:
    (found,) = compare([measured([10.0])], [measured([5.0])])
    assert found.verdict == "spread unknown" and not found.falls_below(0.9)
    assert compare([measured([10.0])], [measured([5.0, 5.0])])[0].verdict == "spread unknown"


@pytest.mark.parametrize("name", SAME)
def test_other_settings_are_not_compared(measured: Callable[..., Row], name: str) -> None:
    new = measured([1.0, 1.0])
    value = getattr(new, name)
    other = {str: "other", bool: not value, int: 77, float: 7.5, type(None): 9}[type(value)]
    assert compare([measured([1.0, 1.0], **{name: other})], [new]) == []


def test_the_last_of_several_counts_and_the_order_is_that_of_now(measured: Callable[..., Row]) -> None:
    old = [measured([5.0]), measured([1.0], tokens=8), measured([4.0])]
    found = compare(old, [measured([2.0]), measured([2.0], tokens=9), measured([2.0], tokens=8)])
    assert [(each.old.tokens_per_s, each.new.tokens) for each in found] == [(4.0, 3), (1.0, 8)]


def test_arms_are_known_by_their_settings_not_by_their_names(measured: Callable[..., Row]) -> None:
    assert len(compare([measured([5.0], arm="threads=3")], [measured([5.0], arm="")])) == 1


def test_another_machine_is_said(measured: Callable[..., Row]) -> None:
    (found,) = compare([measured([5.0], cpu="old one")], [measured([5.0])])
    assert found.remarks == ["cpu was old one, is a text"]
