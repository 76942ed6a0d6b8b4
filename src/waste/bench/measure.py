"""Running the tests: arms take turns in one process, round by round, so that a busy minute slows all of them alike.

A round measures every case with every arm, on the same ids. What has been measured can be had at any time, also when
the user has stopped it in the middle.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from waste.bench.arms import Arm
from waste.bench.lanes import Lanes, TimedOps
from waste.bench.limits import drive_rate, memory_rate
from waste.bench.machine import PeakMemory
from waste.bench.workload import Case, Stream
from waste.engine.budget import DEFAULT_CONTEXT
from waste.engine.engine import Engine
from waste.engine.sampling import Sampler, SamplingParams
from waste.engine.session import Session
from waste.errors import ResourceError, UsageError
from waste.events import Notice, OnEvent, Progress, ignore
from waste.hardware.memory import detect, resident_bytes
from waste.kernels import isa
from waste.layers.trace import Trace
from waste.planner.footprint import HEALTHY_SHARE
from waste.tiers.stats import CacheStats
from waste.units import format_bytes

# What `waste run` draws with where a model's makers publish nothing: the cost of sampling is that of such a draw.
SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, seed=0)

# Before anything is measured: code, clocks and CPU caches are warm after a few tokens. Half of them are one prompt.
WARM_UP_TOKENS = 32

# Long enough for the readers to find the depth that the drive likes, which takes some hundredths of a second.
DRIVE_S = 0.7


class RoutingLog(Trace, Protocol):
    """A trace that can be told where a session begins (`waste.bench.trace.TraceWriter`)."""

    def mark(self, text: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How often, and from which state of the cache."""

    repeats: int = 3
    patience_s: float | None = None  # no further round begins after so long
    cold: bool = False
    warm_up_tokens: int = WARM_UP_TOKENS


@dataclass(frozen=True)
class Sample:
    """One prompt, or one run of decoding. Seconds of wall time; lanes by the clocks at stage borders."""

    tokens_s: list[float]  # decode: of each token; prefill: one figure
    lanes: dict[str, float]  # seconds
    stages: dict[str, float]  # seconds
    calls: int  # of stages
    tiers: CacheStats
    resident: int
    peak_rss_bytes: int

    @property
    def seconds(self) -> float:
        return sum(self.tokens_s)


@dataclass
class Result:
    """All samples of one test of one arm, and the limits measured in the same rounds."""

    arm: Arm
    case: Case
    test: str  # "prefill" or "decode"
    samples: list[Sample] = field(default_factory=list)
    memory_rates: list[float] = field(default_factory=list)  # bytes/s
    drive_rates: list[float] = field(default_factory=list)  # bytes/s

    @property
    def tokens(self) -> int:
        """Measured in each sample."""
        return self.case.prompt if self.test == "prefill" else self.case.generated

    def stages_ms(self) -> list[tuple[str, float]]:
        """Milliseconds a token by stage, the longest first; finer than the lanes."""
        total: dict[str, float] = {}
        for sample in self.samples:
            for stage, spent in sample.stages.items():
                total[stage] = total.get(stage, 0.0) + spent
        count = self.tokens * len(self.samples)
        return sorted(((stage, 1e3 * s / count) for stage, s in total.items() if s), key=lambda item: -item[1])


def context_for(wanted: Sequence[Case], warm_up_tokens: int, ctx: int | None) -> int | None:
    """Tokens a session must hold: `ctx`, else what a case needs; None: what `waste run` has is enough. UsageError."""
    needed = max(warm_up_tokens, *(case.tokens for case in wanted))
    if ctx is not None and ctx < needed:
        raise UsageError(f"the tests need a context of {needed} tokens, --ctx is {ctx}", hint=f"--ctx {needed}")
    return ctx if ctx is not None else needed if needed > DEFAULT_CONTEXT else None


@contextmanager
def opened(
    path: Path,
    arms: Sequence[Arm],
    *,
    backend: str,
    ctx: int | None,
    experts_dirs: Sequence[str] = (),
    on_event: OnEvent = ignore,
) -> Iterator[dict[str, Engine]]:
    """An engine for every arm, by its name: one trunk in memory, a cache for each.

    Raises ResourceError where the caches do not fit side by side, and what `Engine.open` raises.
    """
    first = arms[0].settings
    alone = len(arms) == 1
    with ExitStack() as stack:
        trunk = stack.enter_context(
            Engine.open(
                path,
                ram=first.ram if alone else max((arm.settings.ram for arm in arms if arm.settings.ram), default=None),
                vram=first.vram,
                backend=backend,
                threads=first.threads,
                ctx=ctx,
                experts_dirs=experts_dirs,
                # With several arms this one only lends its trunk, and must not read ahead for itself.
                tiers=first.tiers if alone else replace(first.tiers, fill=False, learn=False, lock=False),
                on_event=on_event,
            )
        )
        if alone:
            yield {arms[0].name: trunk}
            return
        budgets = _side_by_side(trunk, arms, on_event)
        engines = {}
        for arm, ram in zip(arms, budgets, strict=True):
            chosen = arm.settings
            engines[arm.name] = stack.enter_context(
                trunk.sibling(ram=ram, vram=chosen.vram, threads=chosen.threads, tiers=chosen.tiers)
            )
        yield engines


def _side_by_side(trunk: Engine, arms: Sequence[Arm], on_event: OnEvent) -> list[int]:
    """The RAM budget of each arm, the trunk counted in all of them and there once."""
    fixed, most = trunk.budget.fixed_bytes, trunk.budget.cache_bytes
    available, resident = detect().available_bytes, resident_bytes()
    healthy = int(HEALTHY_SHARE * available) + resident
    asked = [arm.settings.ram for arm in arms]
    given = sum(min(max(0, ram - fixed), most) for ram in asked if ram is not None)
    open_ones = asked.count(None)
    room = max(0, healthy - fixed - given)
    if open_ones and room < open_ones * most:
        share = fixed + room // open_ones
        on_event(Notice(f"{open_ones} caches share the memory: a RAM budget of {format_bytes(share)} for each arm"))
        return [share if ram is None else ram for ram in asked]
    if fixed + given > available + resident:
        raise ResourceError(
            f"the caches of {len(arms)} arms need {format_bytes(fixed + given)} side by side, "
            f"{format_bytes(healthy)} would be healthy",
            hint="compare smaller budgets, or fewer of them",
        )
    return [trunk.budget.ram_bytes if ram is None else ram for ram in asked]


class Measurement:
    """`run` measures; `results` are there at any time, those without samples left out."""

    def __init__(
        self,
        engines: dict[str, Engine],
        arms: Sequence[Arm],
        cases: Sequence[Case],
        plan: Plan,
        *,
        trace: RoutingLog | None = None,
        on_event: OnEvent = ignore,
    ) -> None:
        """trace: hears of the routing of the first arm's sessions, the warm-up left out."""
        self._engines = engines
        self._arms = list(arms)
        self._cases = list(cases)
        self._plan = plan
        self._trace = trace
        self._on_event = on_event
        _check_context(engines, cases, plan.warm_up_tokens)
        self._stream = Stream(engines[arms[0].name].tokenizer.encode)
        self._peak = PeakMemory()
        self._results = {
            (arm.name, case, test): Result(arm, case, test)
            for case in cases
            for test in ("prefill", "decode")
            for arm in arms
        }
        per_round = len(arms) * sum(case.tokens for case in cases)
        self._total = plan.repeats * per_round + len(arms) * plan.warm_up_tokens
        self._done = 0

    @property
    def results(self) -> list[Result]:
        """Of what has been measured, by case, test and arm."""
        return [result for result in self._results.values() if result.samples]

    def run(self) -> None:
        """Measure. Whatever ends it, the samples so far are kept, and the instruction set is as it was."""
        was = isa.active()
        try:
            began = time.monotonic()
            self._warm_up()
            for turn in range(self._plan.repeats):
                if turn and self._plan.patience_s is not None and time.monotonic() - began > self._plan.patience_s:
                    break
                self._round(turn)
            self._progress(self._total)
        finally:
            isa.force(was)

    def _warm_up(self) -> None:
        if not self._plan.cold:
            for arm in self._arms:
                if arm.settings.tiers.fill:
                    _load_all(self._engines[arm.name], self._on_event)
        count = self._plan.warm_up_tokens
        if not count:
            return
        ids = self._stream.take(count)
        for arm in self._arms:
            engine = self._use(arm)
            session = engine.session()
            session.eval(ids[: -(-count // 2)])
            self._progress(-(-count // 2))
            for i in ids[-(-count // 2) :]:
                session.eval([i])
                self._progress(1)

    def _round(self, turn: int) -> None:
        """Every case with every arm; who begins changes from round to round, as the first finds other CPU caches."""
        gc.collect()  # rather here than inside of what is measured
        shift = turn % len(self._arms)
        order = self._arms[shift:] + self._arms[:shift]
        rates: dict[int, float] = {}
        read: dict[str, bool] = {}
        for case in self._cases:
            ids = self._stream.take(case.tokens)
            for arm in order:
                engine = self._use(arm)
                threads = threads_of(engine)
                if threads not in rates:
                    rates[threads] = memory_rate(threads)
                for test, sample in self._measured(arm, case, ids):
                    result = self._results[arm.name, case, test]
                    result.samples.append(sample)
                    result.memory_rates.append(rates[threads])
                    read[arm.name] = read.get(arm.name, False) or sample.tiers.bytes_read > 0
        for arm in order:
            if read.get(arm.name):
                banks = list(self._engines[arm.name].banks.values())
                rate = drive_rate(banks, arm.settings.tiers.drive_bytes_per_s, DRIVE_S)
                for (name, _, _), result in self._results.items():
                    if name == arm.name:
                        result.drive_rates.append(rate)

    def _use(self, arm: Arm) -> Engine:
        isa.force(arm.settings.isa)
        return self._engines[arm.name]

    def _measured(self, arm: Arm, case: Case, ids: Sequence[int]) -> Iterator[tuple[str, Sample]]:
        """One session: its depth, the prompt, and what comes after it."""
        engine = self._engines[arm.name]
        session = engine.session()
        depth, prompt, rest = ids[: case.depth], ids[case.depth : case.depth + case.prompt], ids[-case.generated :]
        trace = self._trace if arm is self._arms[0] else None
        if trace is not None:
            trace.mark("session")
        for begin in range(0, len(depth), 512):  # in parts, so that progress is seen
            part = depth[begin : begin + 512]
            session.eval(part, trace=trace)
            self._progress(len(part))
        if self._plan.cold:
            engine.cache.drop()
        with _Clocks(engine, session, self._peak, trace) as clocks:
            if case.prompt:
                yield "prefill", clocks.prefill(prompt)
                self._progress(len(prompt))
            if case.generated:
                yield "decode", clocks.decode(rest, lambda: self._progress(1))

    def _progress(self, tokens: int) -> None:
        self._done = min(self._total, self._done + tokens)
        self._on_event(Progress("bench", self._done, self._total, "tokens"))


class _Clocks:
    """Inside the `with` block the engine's backend has clocks at its stage borders."""

    def __init__(self, engine: Engine, session: Session, peak: PeakMemory, trace: Trace | None) -> None:
        self._engine = engine
        self._session = session
        self._peak = peak
        self._trace = trace
        self._ops = engine.model.ops
        self._lanes = Lanes(lambda: engine.cache.stats.stall_s)
        sampler = Sampler(SAMPLING, engine.tokenizer.unused_ids(engine.config.vocab_size))
        self._draw = self._lanes.clocked("sample", sampler.sample)

    def __enter__(self) -> _Clocks:
        self._engine.model.ops = TimedOps(self._ops, self._lanes)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.model.ops = self._ops

    def prefill(self, ids: Sequence[int]) -> Sample:
        """The whole prompt at once."""
        before = self._begin()
        took = self._step(ids)
        return self._sample([took], before)

    def decode(self, ids: Sequence[int], after_each: Callable[[], None]) -> Sample:
        """Token by token. `after_each` runs between them, outside of all clocks."""
        before = self._begin()
        took = []
        for i in ids:
            took.append(self._step((i,)))
            after_each()
        return self._sample(took, before)

    def _step(self, ids: Sequence[int]) -> float:
        began = time.perf_counter()
        self._lanes.begin()
        logits = self._session.eval(ids, trace=self._trace)
        self._draw(logits)
        took = time.perf_counter() - began
        self._lanes.end()  # which adds up what the clocks have told
        return took

    def _begin(self) -> CacheStats:
        self._lanes.reset()
        self._peak.reset()
        return self._engine.cache.stats.copy()

    def _sample(self, took: list[float], before: CacheStats) -> Sample:
        after = self._engine.cache.stats.copy()
        return Sample(
            tokens_s=took,
            lanes=self._lanes.seconds(),
            stages={stage: spent / 1e9 for stage, spent in self._lanes.spent.items()},
            calls=self._lanes.calls,
            tiers=after - before,
            resident=len(self._engine.cache.resident()),
            peak_rss_bytes=self._peak.bytes(),
        )


def _load_all(engine: Engine, on_event: OnEvent) -> None:
    """Read all experts, where there is room for all: what the background does in the first minutes of a session."""
    layers, experts = engine.config.moe_layers, engine.config.router.experts
    if engine.budget.slots < len(layers) * experts:
        return
    for i, layer in enumerate(layers, 1):
        for part in engine.cache.waves(layer, range(experts)):
            with part as wave:
                wave.wait()
        done = i * experts * engine.budget.slot_bytes
        on_event(Progress("experts", done, len(layers) * experts * engine.budget.slot_bytes))


def _check_context(engines: dict[str, Engine], wanted: Sequence[Case], warm_up_tokens: int) -> None:
    """UsageError where a model's own limit is less than a case, or the warm-up, needs."""
    needed = max(warm_up_tokens, *(case.tokens for case in wanted))
    for engine in engines.values():
        if engine.context < needed:
            raise UsageError(
                f"the tests need a context of {needed} tokens, the model goes to {engine.context}",
                hint="ask for less: -p, -n, --depth and -w",
            )


def threads_of(engine: Engine) -> int:
    """How many threads compute."""
    threads = getattr(engine.model.ops, "threads", None)
    if isinstance(threads, int):
        return threads
    import torch  # the reference backend's

    return torch.get_num_threads()
