"""The depth settles at what a simulated drive likes best, noise or not, and follows a drive that changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from waste.io.depth import DEPTHS, FIRST_DEPTH, Depth

Drive = Callable[[int], float]  # depth -> rate

# What is best: the least depth from which no step brings 3 %.
KNEES: dict[str, tuple[Drive, int]] = {
    "one is enough": (lambda d: 1.0, 1),
    "deeper is worse": (lambda d: 1 / (1 + 0.1 * (d - 1)), 1),
    "two": (lambda d: min(d, 2), 2),
    "best at three": (lambda d: min(d, 3) * 0.95 ** max(0, d - 3), 3),
    "four": (lambda d: min(d, 4), 4),
    "eight": (lambda d: min(d, 8), 8),
    "sixteen": (lambda d: d, 16),
    "more than there are": (lambda d: d / (d + 30), 16),
}


def run(depth: Depth, drive: Drive, noise: float, windows: int, rng: random.Random) -> list[int]:
    used = []
    for _ in range(windows):
        used.append(depth.value)
        depth.observe(1e9 * drive(depth.value) * math.exp(rng.gauss(0, noise)))
    return used


def settled(used: list[int]) -> int:
    """Where it stays, as opposed to what it tries."""
    return max(set(used), key=used.count)


@pytest.mark.parametrize("name", KNEES)
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_it_settles_within_one_step_of_the_best(name: str, noise: float) -> None:
    drive, best = KNEES[name]
    near, shares = 0, []
    for seed in range(40):
        used = run(Depth(), drive, noise, 600, random.Random(seed))
        off = DEPTHS.index(settled(used[-300:])) - DEPTHS.index(best)
        near += abs(off) <= 1
        assert noise > 0 or off == 0
        shares.append(sum(map(drive, used[-300:])) / 300 / max(map(drive, DEPTHS)))
    assert near >= (38 if noise <= 0.05 else 32)
    # Trials included, hardly anything of the rate is lost.
    assert sum(shares) / len(shares) > 0.95


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_small_steps_of_a_smooth_drive_cost_little(noise: float) -> None:
    for half in (0.5, 1, 2, 4):
        shares = []
        for seed in range(40):
            used = run(Depth(), lambda d, half=half: d / (d + half), noise, 600, random.Random(seed))
            shares.append(sum(d / (d + half) for d in used[-300:]) / 300 / (16 / (16 + half)))
        assert sum(shares) / len(shares) > 0.9


def test_it_follows_a_drive_that_changes() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        depth = Depth()
        for best in (16, 2, 8):
            used = run(depth, lambda d, best=best: min(d, best), 0.03, 1500, rng)
            assert abs(DEPTHS.index(settled(used[-300:])) - DEPTHS.index(best)) <= 1


def test_a_drift_of_the_whole_drive_is_no_reason_to_move() -> None:
    """A drive that others use slows down and recovers: neighbours are compared in turns."""
    depth, used, rng = Depth(), [], random.Random(1)
    for window in range(2000):
        used.append(depth.value)
        level = 1 + 0.8 * math.sin(window / 50)
        depth.observe(level * min(depth.value, 4) * math.exp(rng.gauss(0, 0.03)))
    assert abs(DEPTHS.index(settled(used[-1000:])) - DEPTHS.index(4)) <= 1


def test_trials_become_rare_when_nothing_changes() -> None:
    used = run(Depth(), lambda d: min(d, 4), 0.0, 3000, random.Random(0))
    assert sum(d != 4 for d in used[-1000:]) < 60


def test_depths_stay_on_the_ladder_whatever_is_measured() -> None:
    rng = random.Random(2)
    for first in DEPTHS:
        depth = Depth(first)
        assert depth.value == first
        for _ in range(3000):
            rate = rng.choice([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300, rng.random()])
            depth.observe(rate)
            assert depth.value in DEPTHS
    assert FIRST_DEPTH in DEPTHS


def test_rates_that_mean_nothing_change_nothing() -> None:
    rng, other = random.Random(3), random.Random(3)
    plain, mixed = Depth(), Depth()
    for _ in range(300):
        plain.observe(min(plain.value, 6) * math.exp(rng.gauss(0, 0.05)))
        for rate in (0.0, -5.0, math.nan, math.inf):
            mixed.observe(rate)
        mixed.observe(min(mixed.value, 6) * math.exp(other.gauss(0, 0.05)))
        assert plain.value == mixed.value
