"""The lanes of a token are all of its time, each part counted once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from waste.backends.base import Ops
from waste.bench.lanes import LANES, STAGES, Lanes, TimedOps, clock_s

TOKENS = 60
MEMORY = {"weight", "vector", "zeros", "numpy"}  # no stages: nothing is computed


class Clock:
    """Nanoseconds that pass only when somebody says so, and the stall of a cache."""

    def __init__(self) -> None:
        self.now = 5_000
        self.stall_s = 0.25

    def __call__(self) -> int:
        return self.now

    def spend(self, ns: int, waiting: int = 0) -> None:
        """`ns`, of which `waiting` are a wait for the drive."""
        self.now += ns
        self.stall_s += waiting / 1e9


class Backend:
    """Stages that take the time they are told."""

    name = "fake"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def stage(self, ns: int, waiting: int = 0) -> int:
        self._clock.spend(ns, waiting)
        return ns

    kda = route = expert_group = linear = mlp = mla_attend = experts = stage


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lanes(clock: Clock) -> Lanes:
    return Lanes(lambda: clock.stall_s, clock)


def test_every_stage_of_a_backend_has_a_lane() -> None:
    operations = {name for name in vars(Ops) if not name.startswith("_") and callable(getattr(Ops, name))}
    assert set(STAGES) == operations - MEMORY | {"sample"}
    assert set(STAGES.values()) | {"wait", "python"} == set(LANES)


def test_time_goes_to_the_lane_that_spent_it(clock: Clock, lanes: Lanes) -> None:
    ops = TimedOps(Backend(clock), lanes)
    sample = lanes.clocked("sample", lambda: clock.spend(50))
    lanes.begin()
    clock.spend(7)
    assert ops.kda(100) == 100
    clock.spend(2)
    ops.mla_attend(10)
    ops.route(30)
    ops.mlp(5)
    clock.spend(1)
    ops.linear(400)
    sample()
    clock.spend(11)
    lanes.end()
    clock.spend(1_000)  # nobody's: the token is over
    found = {lane: round(1e9 * seconds) for lane, seconds in lanes.seconds().items()}
    expected = {"trunk": 405, "attention": 110, "experts": 0, "router": 30, "sampling": 50, "wait": 0, "python": 21}
    assert found == expected
    assert lanes.calls == 6


def test_a_wait_is_taken_off_what_it_happened_in(clock: Clock, lanes: Lanes) -> None:
    """Inside of an expert stage, and between stages, where a slot had to be waited for."""
    ops = TimedOps(Backend(clock), lanes)
    lanes.begin()
    ops.expert_group(100, 60)
    clock.spend(30, waiting=20)
    ops.experts(10, 10)
    clock.spend(9, waiting=4)
    ops.kda(3)
    clock.spend(5, waiting=5)
    lanes.end()
    found = {lane: round(1e9 * seconds) for lane, seconds in lanes.seconds().items() if seconds}
    assert found == {"experts": 40, "wait": 99, "python": 15, "attention": 3}


def test_tokens_add_up_and_a_reset_forgets_them(clock: Clock, lanes: Lanes) -> None:
    ops = TimedOps(Backend(clock), lanes)
    for _ in range(3):
        lanes.begin()
        clock.spend(1)
        ops.kda(10)
        lanes.end()
        clock.spend(100)  # between tokens
    assert lanes.seconds()["attention"] == pytest.approx(30e-9)
    assert lanes.seconds()["python"] == pytest.approx(3e-9)
    lanes.reset()
    assert not any(lanes.seconds().values()) and lanes.calls == 0
    lanes.begin()
    ops.kda(4)
    lanes.end()
    assert lanes.seconds()["attention"] == pytest.approx(4e-9)


def test_what_is_no_stage_goes_through(clock: Clock, lanes: Lanes) -> None:
    ops = TimedOps(Backend(clock), lanes)
    assert ops.name == "fake"
    with pytest.raises(AttributeError):
        ops.nothing_of_that_name  # noqa: B018
    assert lanes.calls == 0


@pytest.mark.parametrize("slots", [30, 224])
def test_lanes_are_the_whole_token(engine_with: Callable[..., Any], slots: int) -> None:
    """Within 3 % of a clock of its own around each, with and without reads from the drive."""
    with engine_with(slots) as engine:
        plain, ops = engine.session(), engine.model.ops
        lanes = Lanes(lambda: engine.cache.stats.stall_s)
        ids = np.random.default_rng(slots).integers(0, 256, TOKENS).tolist()
        expected = [plain.eval([i]) for i in ids]
        timed = engine.session()
        sample = lanes.clocked("sample", np.argmax)
        engine.model.ops = TimedOps(ops, lanes)
        try:
            found, wall = [], 0.0
            for i in ids:
                began = time.perf_counter()
                lanes.begin()
                found.append(timed.eval([i]))
                sample(found[-1])
                wall += time.perf_counter() - began
                lanes.end()
        finally:
            engine.model.ops = ops
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
        by_lane = lanes.seconds()
        assert sum(by_lane.values()) == pytest.approx(wall, rel=0.03)
        assert all(by_lane[lane] > 0 for lane in LANES if lane != "wait")
        assert min(by_lane.values()) >= 0


def test_the_clocks_know_what_they_take(engine_with: Callable[..., Any]) -> None:
    assert 0 < clock_s() < 1e-4
