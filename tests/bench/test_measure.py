"""What a measurement does: arms in turns on the same tokens, counts that are the cache's, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from waste.backends.cpu import CpuOps
from waste.bench.arms import Arm, Settings, arms
from waste.bench.lanes import LANES
from waste.bench.machine import look_around
from waste.bench.measure import Measurement, Plan, Result, context_for, opened
from waste.bench.row import BUFFERED, NOTHING_READ, REFUSED, SCHEMA, SIMULATED, Row
from waste.bench.rows import row_of
from waste.bench.workload import Case
from waste.container.reader import Bank
from waste.engine.engine import Engine
from waste.engine.session import Session
from waste.errors import ResourceError, UsageError
from waste.events import Event, Notice, OnEvent, Progress, ignore
from waste.models.formats import Formats
from waste.planner.footprint import sizes
from waste.tiers.options import TierOptions

QUICK = Plan(repeats=3, warm_up_tokens=4)
TESTS = (Case(0, 5, 3), Case(7, 4, 2))
STILL = TierOptions(learn=False, lookahead=0, fill=False)


class Seen:
    """What sessions were asked to evaluate, by the engine's cache they belong to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self.caches: list[int] = []
        self.interrupt_at: int | None = None
        evaluate = Session.eval

        def watched(session: Session, ids: Any, **options: Any) -> Any:
            if len(self.calls) == self.interrupt_at:
                raise KeyboardInterrupt
            cache = id(session._cache)
            if cache not in self.caches:
                self.caches.append(cache)
            self.calls.append((self.caches.index(cache), tuple(int(i) for i in ids)))
            return evaluate(session, ids, **options)

        monkeypatch.setattr(Session, "eval", watched)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.setattr("waste.bench.measure.memory_rate", lambda threads: 1e9 * threads)
    monkeypatch.setattr("waste.bench.measure.DRIVE_S", 0.01)
    return Seen(monkeypatch)


@pytest.fixture(scope="module")
def trunk(default_nano: Path) -> Iterator[Engine]:
    """What the arms of these tests stand on."""
    with Engine.open(default_nano, ram="2GiB", threads=1, ctx=64, tiers=STILL) as engine:
        yield engine


class Bench:
    """Measures on siblings of one engine, with room for `slots` experts each."""

    def __init__(self, trunk: Engine) -> None:
        self.trunk = trunk

    def engines(self, chosen: Sequence[Arm]) -> dict[str, Engine]:
        return {
            arm.name: self.trunk.sibling(ram=arm.settings.ram, threads=arm.settings.threads, tiers=arm.settings.tiers)
            for arm in chosen
        }

    def arms(self, *varied: str, slots: int = 224, tiers: TierOptions = STILL) -> tuple[Arm, ...]:
        budget = self.trunk.budget
        ram = budget.fixed_bytes + slots * budget.slot_bytes + budget.slot_bytes // 2
        return arms(Settings(ram=ram, threads=1, tiers=tiers), varied)

    def __call__(
        self,
        *varied: str,
        plan: Plan = QUICK,
        slots: int = 224,
        tiers: TierOptions = STILL,
        tests: Sequence[Case] = TESTS,
        on_event: OnEvent = ignore,
    ) -> tuple[list[Result], dict[str, Engine]]:
        """The results; the engines are closed."""
        chosen = self.arms(*varied, slots=slots, tiers=tiers)
        engines = self.engines(chosen)
        measurement = Measurement(engines, chosen, tests, plan, on_event=on_event)
        measurement.run()
        for engine in engines.values():
            engine.close()
            assert isinstance(engine.model.ops, CpuOps)
        return measurement.results, engines


@pytest.fixture
def measure(trunk: Engine, seen: Seen) -> Bench:
    return Bench(trunk)


def test_arms_take_turns_and_see_the_same_tokens(measure: Bench, seen: Seen) -> None:
    measure("policy=lru,lfu,adaptive")
    warm, rest = seen.calls[: 3 * 3], seen.calls[3 * 3 :]
    assert [arm for arm, _ in warm] == [0, 0, 0, 1, 1, 1, 2, 2, 2]  # half of four tokens at once, then one by one
    first, second = (5, *[1] * 3), (7, 4, *[1] * 2)
    order, ids = [], []
    for _ in range(3):
        for lengths in (first, second):
            for _ in range(3):
                part, rest = rest[: len(lengths)], rest[len(lengths) :]
                assert tuple(len(each) for _, each in part) == lengths
                assert len({arm for arm, _ in part}) == 1
                order.append(part[0][0])
                ids.append([i for _, each in part for i in each])
    assert rest == []
    assert order == [0, 1, 2] * 2 + [1, 2, 0] * 2 + [2, 0, 1] * 2
    for begin in range(0, len(ids), 3):
        assert ids[begin] == ids[begin + 1] == ids[begin + 2]
    fresh = [tuple(each) for each in ids[::3]]
    assert len(set(fresh)) == len(fresh)  # every round and case has tokens of its own


def test_results_are_complete_and_in_order(measure: Bench, seen: Seen) -> None:
    results, _ = measure("threads=1,2")
    assert [(each.case, each.test, each.arm.name) for each in results] == [
        (case, test, arm) for case in TESTS for test in ("prefill", "decode") for arm in ("threads=1", "threads=2")
    ]
    for result in results:
        assert len(result.samples) == len(result.memory_rates) == 3
        for sample in result.samples:
            assert len(sample.tokens_s) == (1 if result.test == "prefill" else result.case.generated)
            assert min(sample.lanes.values()) >= 0 and sample.seconds > 0
            assert sample.lanes["sampling"] > 0 and sample.lanes["experts"] > 0


@pytest.mark.parametrize("slots", [40, 224])
def test_counts_are_those_of_the_cache(measure: Bench, slots: int) -> None:
    """Without a warm-up and depths, all that the cache has counted is in the samples. Uses are as routing says."""
    config = measure.trunk.config
    results, engines = measure(plan=Plan(3, warm_up_tokens=0), slots=slots, tests=(Case(0, 5, 3), Case(0, 0, 6)))
    (engine,) = engines.values()
    samples = [sample for result in results for sample in result.samples]
    for name, counted in vars(engine.cache.stats).items():
        assert sum(getattr(sample.tiers, name) for sample in samples) == pytest.approx(counted), name
    for result in results:
        for tiers in (sample.tiers for sample in result.samples):
            assert tiers.bytes_read == tiers.reads * 32768 and tiers.reads == tiers.misses
            if result.test == "decode":
                assert tiers.uses == result.tokens * config.router.top_k * len(config.moe_layers)
    assert engine.cache.stats.misses > (224 if slots < 224 else 0)


def test_cold_begins_every_repeat_with_nothing(measure: Bench, seen: Seen) -> None:
    cold, _ = measure(plan=replace(QUICK, cold=True))
    for result in cold:
        if result.test == "prefill":  # of a cache without room limits: all of it was read, and each record once
            assert all(s.tiers.hits == 0 and s.tiers.misses == s.tiers.reads > 0 for s in result.samples)
    warm, _ = measure(tiers=replace(STILL, fill=True))
    assert all(s.tiers.misses == 0 and s.tiers.reads == 0 for result in warm for s in result.samples)
    assert all(s.resident == 224 for result in warm for s in result.samples)


def test_an_interrupted_measurement_keeps_what_it_has(measure: Bench, seen: Seen) -> None:
    chosen = measure.arms("threads=1,2")
    engines = measure.engines(chosen)
    seen.interrupt_at = 2 * 3 + 2 * 4 + 1  # the second case's first prompt, when its depth has been evaluated
    measurement = Measurement(engines, chosen, TESTS, QUICK)
    with pytest.raises(KeyboardInterrupt):
        measurement.run()
    found = [(each.case, each.test, each.arm.name, len(each.samples)) for each in measurement.results]
    assert found == [(TESTS[0], test, f"threads={n}", 1) for test in ("prefill", "decode") for n in (1, 2)]
    assert all(isinstance(engine.model.ops, CpuOps) for engine in engines.values())


def test_patience_ends_rounds_not_tests(measure: Bench, seen: Seen) -> None:
    results, _ = measure(plan=replace(QUICK, patience_s=0.0))
    assert [len(result.samples) for result in results] == [1] * 4


def test_progress_reaches_its_end(measure: Bench, seen: Seen) -> None:
    heard: list[Event] = []
    measure("threads=1,2", on_event=heard.append)
    steps = [(event.done, event.total) for event in heard if isinstance(event, Progress) and event.phase == "bench"]
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert {total for _, total in steps} == {2 * 4 + 3 * 2 * (8 + 13)}
    assert steps[-1][0] == steps[-1][1]


def test_logits_are_those_without_clocks(trunk: Engine, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    logits: list[Any] = []
    evaluate = Session.eval
    monkeypatch.setattr(Session, "eval", lambda *a, **b: logits.append(evaluate(*a, **b)) or logits[-1])
    only = (Arm("", Settings(tiers=STILL)),)
    Measurement({"": trunk}, only, (Case(3, 5, 4),), Plan(repeats=1, warm_up_tokens=0)).run()
    ids = [i for _, each in seen.calls for i in each]
    monkeypatch.undo()
    whole = trunk.session().eval(ids, all_logits=True)
    for position, found in zip((2, 7, 8, 9, 10, 11), logits, strict=True):
        assert np.array_equal(found, whole[position])


# -- rows


def rows_of(measure: Bench, *varied: str, **options: Any) -> list[Row]:
    results, engines = measure(*varied, **options)
    machine = look_around()
    return [row_of(result, engines[result.arm.name], QUICK, machine, "m", 1e-7) for result in results]


def test_a_row_adds_up(measure: Bench, seen: Seen) -> None:
    for row in rows_of(measure, "threads=1,2", slots=60):
        assert row.schema == SCHEMA and Row.from_dict(row.as_dict(), "x") == row
        lanes = [getattr(row, f"{lane}_ms") for lane in LANES]
        assert sum(lanes) == pytest.approx(row.token_ms, rel=0.03)
        assert row.token_ms == pytest.approx(1e3 * sum(row.samples_s) / (row.tokens * row.repeats))
        rates = [row.tokens / seconds for seconds in row.samples_s]
        assert row.tokens_per_s == pytest.approx(float(np.median(rates)))
        assert min(rates) <= row.tokens_per_s_p10 <= row.tokens_per_s <= row.tokens_per_s_p90 <= max(rates)
        assert f"threads={row.threads}" == row.arm
        assert row.reads * row.slot_bytes == pytest.approx(row.read_bytes)
        assert 0 < row.clock_ms < row.token_ms
        assert 0 < row.resident_experts <= row.slots < row.all_experts == 224
        assert row.peak_rss_bytes > 10 << 20
        if row.test == "decode":
            uses = row.vram_hits + row.ram_hits + row.late + row.misses
            assert uses == pytest.approx(4 * 7)
            assert row.hit_share == pytest.approx(row.ram_hits / uses)


def test_shares_of_the_limits(measure: Bench, seen: Seen) -> None:
    """Weights over decode time over the memory's rate; bytes read over wall time over the drive's."""
    weights = sizes(measure.trunk.config, Formats(**measure.trunk.manifest.formats)).token_bytes
    rows = rows_of(measure, "drive=50MB/s", slots=60)
    for row in rows:
        assert row.drive_note == SIMULATED and row.simulated_drive_bytes_per_s == 5e7
        assert row.drive_bytes_per_s == pytest.approx(1e3 * row.read_bytes / row.token_ms)
        assert row.drive_limit_bytes_per_s is not None and 0 < row.drive_limit_bytes_per_s <= 5e7
        assert row.drive_share == pytest.approx(row.drive_bytes_per_s / row.drive_limit_bytes_per_s)
        if row.test == "prefill":
            assert row.weights_bytes is row.memory_share is row.memory_bytes_per_s is None
            continue
        assert row.weights_bytes == weights and row.memory_limit_bytes_per_s == 1e9
        assert row.memory_share == pytest.approx(weights / (row.token_ms / 1e3) / 1e9)


def test_the_page_cache_is_no_drive(measure: Bench, seen: Seen) -> None:
    for row in rows_of(measure, "direct=off", slots=60):
        assert row.reads > 0
        figures = (row.drive_bytes_per_s, row.drive_limit_bytes_per_s, row.drive_share)
        assert (figures, row.drive_note) == ((None, None, None), BUFFERED)
        assert (row.direct_asked, row.direct) == (False, False)


def test_a_refusal_of_direct_reads_is_in_the_rows(measure: Bench, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """`direct` is what happened, also where nothing was read while it was measured."""
    monkeypatch.setattr(Bank, "direct", property(lambda bank: False))  # engines on one trunk share what is open
    monkeypatch.setattr("waste.bench.rows.file_system", lambda device: "tmpfs")
    for slots, note in ((60, REFUSED), (224, NOTHING_READ)):
        for row in rows_of(measure, tiers=replace(STILL, fill=slots == 224), slots=slots):
            assert (row.direct_asked, row.direct, row.drive_note) == (True, False, note)
            assert (row.drives, row.file_systems, row.predicted_tokens_per_s) == (1, "tmpfs", None)


def test_nothing_read_is_said(measure: Bench, seen: Seen) -> None:
    for row in rows_of(measure, tiers=replace(STILL, fill=True)):
        assert (row.drive_bytes_per_s, row.drive_share, row.drive_note) == (0.0, None, NOTHING_READ)


# -- what is opened


def test_a_context_holds_every_case() -> None:
    assert context_for(TESTS, 32, None) is None
    assert context_for(TESTS, 32, 40) == 40
    assert context_for((Case(9000, 5, 1),), 32, None) == 9006
    with pytest.raises(UsageError, match="context of 32 tokens, --ctx is 31"):
        context_for(TESTS, 32, 31)
    with pytest.raises(UsageError, match="context of 13 tokens"):
        context_for(TESTS, 0, 12)


def test_a_model_with_a_shorter_limit_is_refused(trunk: Engine) -> None:
    with pytest.raises(UsageError, match="context of 65 tokens, the model goes to 64"):
        Measurement({"": trunk}, (Arm("", Settings()),), (Case(60, 4, 1),), QUICK)


@pytest.fixture
def fixed(trunk: Engine, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a budget that are not for experts, when this process always occupies 100 MB."""
    monkeypatch.setattr("waste.hardware.memory.resident_bytes", lambda: 10**8)
    fixed = 10**8 + trunk.budget.fixed_bytes - trunk.budget.baseline_bytes
    monkeypatch.setattr("waste.bench.measure.resident_bytes", lambda: fixed)
    return fixed


def test_each_arm_has_a_budget_of_its_own_on_one_trunk(default_nano: Path, fixed: int) -> None:
    small, large = fixed + 20 * 32768, fixed + 90 * 32768
    chosen = arms(Settings(tiers=STILL), [f"ram={small},{large}"])
    with opened(default_nano, chosen, backend="cpu", ctx=64) as engines:
        first, second = (engines[arm.name] for arm in chosen)
        assert (first.budget.ram_bytes, second.budget.ram_bytes) == (small, large)
        assert (first.budget.slots, second.budget.slots) == (20, 90)
        assert first.model is second.model and first.cache is not second.cache


class Little:
    """A machine with room for 300 experts."""

    available_bytes = 300 * 32768


def test_arms_that_do_not_fit_side_by_side_are_refused(
    default_nano: Path, fixed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = arms(Settings(ram=fixed + 224 * 32768, tiers=STILL), ["policy=lru,lfu"])
    with opened(default_nano, chosen, backend="cpu", ctx=64):
        pass
    monkeypatch.setattr("waste.bench.measure.detect", Little)
    with pytest.raises(ResourceError, match="of 2 arms need"), opened(default_nano, chosen, backend="cpu", ctx=64):
        pass


def test_memory_nobody_asked_for_is_shared(default_nano: Path, fixed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    chosen = arms(Settings(tiers=STILL), ["policy=lru,lfu"])
    monkeypatch.setattr("waste.bench.measure.detect", Little)
    with opened(default_nano, chosen, backend="cpu", ctx=64, on_event=heard.append) as engines:
        slots = [engines[arm.name].budget.slots for arm in chosen]
    assert slots[0] == slots[1] > 20 and sum(slots) <= 0.72 * 300
    assert any("2 caches share the memory" in event.message for event in heard if isinstance(event, Notice))
