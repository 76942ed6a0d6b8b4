"""A whole model measured: tokens per second, what each stage takes, how near it comes to the memory's speed, and what
Python costs. `tools/bench_kernels.py --model` prints it.

The engine is opened once and its backend exchanged, so one and two threads take turns in one process. Every expert is
read into memory first: what disks do is not the question here. Tokens per second are by wall time; stages and the
share of the memory limit by CPU time of the main thread, which takes part in everything and suffers less where the
machine is busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from limits import Arena, best_ahead, shared_read_rate
from stopwatch import Spread

from waste.backends import cpu as backend
from waste.backends.cpu import CpuOps
from waste.bench.lanes import Lanes, TimedOps
from waste.engine.engine import Engine
from waste.engine.session import Session
from waste.kernels import _cpu
from waste.models.spec import TRUNK_FILE

THREADS = (1, 2)
PROMPTS = (128, 512)
_READ_BYTES = 32 << 20
_PATIENCE_S = 15  # for one prompt
_EMBEDDING = "embed_tokens.weight"


@dataclass
class Run:
    """One number of threads. Stages are ms a token by operation; "python" is the time between operations."""

    threads: int
    decode: Spread  # tok/s
    cpu_ms: Spread  # a token, of the main thread
    prefill: dict[int, Spread]  # tok/s by tokens of the prompt
    read_gb_per_s: Spread
    limit_ms: Spread  # a token's weights at the rate memory was read in the same round
    reached_percent: Spread  # of that limit, by a whole token
    token_ms: float  # in the rounds with a clock around every stage
    stages: dict[str, float]


@dataclass
class Model:
    """A container, what a token reads of it, and the runs."""

    path: str
    layers: int
    formats: str
    trunk_bytes: int  # a token reads: all of it but the embedding, of which it reads one row
    expert_bytes: int  # of the experts a token chooses
    state_bytes: int  # of KDA, read and written
    misses: int  # experts read from disk while measuring
    runs: list[Run]

    @property
    def token_bytes(self) -> int:
        return self.trunk_bytes + self.expert_bytes


@dataclass
class Overhead:
    """CPU time of a token on one thread, and what of it is spent outside native stages."""

    layers: int
    calls: float  # native ones, per token
    token_ms: Spread
    python_ms: Spread


@dataclass
class _Samples:
    decode_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    prefill: dict[int, list[float]] = field(default_factory=dict)
    stages: list[dict[str, float]] = field(default_factory=list)
    timed_s: list[float] = field(default_factory=list)


def bench_model(path: Path, ram: str | None, tokens: int, rounds: int, arena: Arena) -> Model:
    """Measure the container at `path`. Raises WasteError as `Engine.open` does."""
    ahead = best_ahead(arena)
    rng = np.random.default_rng(0)
    with Engine.open(path, ram=ram, threads=1) as engine:
        _load_experts(engine)
        missed = engine.cache.stats.misses
        backends = {threads: CpuOps(threads=threads) for threads in THREADS}
        found = {threads: _Samples() for threads in THREADS}
        for turn in range(rounds):
            for threads, ops in backends.items():
                samples = found[threads]
                samples.read.append(shared_read_rate(arena, _READ_BYTES, ahead, threads))
                engine.model.ops = ops
                wall, cpu = _decode(_started(engine, rng), _ids(engine, rng, tokens))
                samples.decode_s.append(wall / tokens)
                samples.cpu_s.append(cpu / tokens)
                if turn % 4 == 0:  # prefill takes far longer than a token
                    _prefill(engine, rng, samples.prefill)
                lanes = Lanes(clock=time.thread_time_ns)
                engine.model.ops = TimedOps(ops, lanes)  # type: ignore[assignment]
                session, ids = _started(engine, rng), _ids(engine, rng, tokens)
                lanes.begin()
                _, cpu = _decode(session, ids)
                lanes.end()
                samples.timed_s.append(cpu / tokens)
                samples.stages.append({stage: ns / 1e9 / tokens for stage, ns in lanes.spent.items() if ns})
        trunk, experts = token_bytes(engine)
        return Model(
            path=str(path),
            layers=engine.config.num_layers,
            formats=" ".join(f"{kind}={fmt}" for kind, fmt in engine.manifest.formats.items()),
            trunk_bytes=trunk,
            expert_bytes=experts,
            state_bytes=_state_bytes(engine),
            misses=engine.cache.stats.misses - missed,
            runs=[_run(threads, found[threads], trunk + experts) for threads in THREADS],
        )


def token_bytes(engine: Engine) -> tuple[int, int]:
    """Bytes of trunk weights, and of expert weights, that one token multiplies with. States and caches not counted."""
    trunk = 0
    for entry in engine.manifest.tensors_of(TRUNK_FILE):
        row_only = entry.name == _EMBEDDING and not engine.config.tie_word_embeddings
        trunk += entry.nbytes // entry.shape[0] if row_only else entry.nbytes
    used = [bank.layout for bank in engine.manifest.banks if bank.layer in engine.config.moe_layers]
    experts = sum(section.nbytes for layout in used for section in layout.sections)
    return trunk, engine.config.router.top_k * experts


def _state_bytes(engine: Engine) -> int:
    kda = engine.config.kda
    return 0 if kda is None else engine.config.attention.count("kda") * 2 * 4 * kda.heads * kda.head_dim**2


def _prefill(engine: Engine, rng: np.random.Generator, rates: dict[int, list[float]]) -> None:
    """Add tokens per second of each prompt length that fits the context and the patience."""
    speed = 0.0
    for n in PROMPTS:
        if n > engine.context or (speed and n / speed > _PATIENCE_S):
            return
        session, ids = engine.session(), _ids(engine, rng, n)
        began = time.perf_counter()
        session.eval(ids)
        speed = n / (time.perf_counter() - began)
        rates.setdefault(n, []).append(speed)


def overhead(path: Path, ram: str | None, tokens: int, rounds: int) -> Overhead:
    """CPU time of a token outside native stages, on one thread.

    A clock runs around every native stage; what the clocks themselves take, known from empty calls, is taken off.
    Stages check their arrays and make their outputs themselves, which counts as theirs: 0.4 to 0.9 us a call.
    """
    rng = np.random.default_rng(0)
    clock = _Clock()
    plain, outside, calls = [], [], []
    with Engine.open(path, ram=ram, threads=1) as engine:
        _load_experts(engine)
        _started(engine, rng)
        for _ in range(rounds):
            plain.append(_decode(_started(engine, rng), _ids(engine, rng, tokens))[1] / tokens)
            session = _started(engine, rng)
            with clock:
                spent = _decode(session, _ids(engine, rng, tokens))[1]
            outside.append((spent - clock.spent - clock.calls * clock.each_s) / tokens)
            calls.append(clock.calls / tokens)
        layers = engine.config.num_layers
    return Overhead(
        layers=layers,
        calls=float(np.median(calls)),
        token_ms=Spread.of([1e3 * spent for spent in plain]),
        python_ms=Spread.of([1e3 * spent for spent in outside]),
    )


class _Clock:
    """Inside a `with`: a clock around every native stage that the CPU backend calls."""

    def __init__(self) -> None:
        self.spent = 0.0
        self.calls = 0
        # Stages take a pool first; what does not is part of what Python does.
        doc = {name: getattr(_cpu, name).__doc__ or "" for name in dir(_cpu) if not name.startswith("_")}
        self._stages = {name: getattr(_cpu, name) for name in doc if f"{name}(pool:" in doc[name]}
        self._empty_s = 0.0
        empty = self._timed(lambda: None)
        began = time.thread_time()
        for _ in range(10000):
            empty()
        self.each_s = (time.thread_time() - began) / self.calls  # what a clock takes, seen from outside
        self._empty_s = self.spent / self.calls  # and what it adds to the stage it is around

    def __enter__(self) -> None:
        self.spent, self.calls = 0.0, 0
        for name, stage in self._stages.items():
            setattr(backend._cpu, name, self._timed(stage))

    def __exit__(self, *_: object) -> None:
        for name, stage in self._stages.items():
            setattr(backend._cpu, name, stage)

    def _timed(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time

        def timed(*args: Any) -> Any:
            began = clock()
            result = stage(*args)
            self.spent += clock() - began - self._empty_s
            self.calls += 1
            return result

        return timed


def _load_experts(engine: Engine) -> None:
    """Read every expert there is room for, the last layers' last."""
    for layer in engine.config.moe_layers:
        for wave in engine.cache.waves(layer, range(engine.config.router.experts)):
            with wave:
                pass


def _started(engine: Engine, rng: np.random.Generator) -> Session:
    """A session some tokens in, so that caches and clocks are warm."""
    session = engine.session()
    session.eval(_ids(engine, rng, 16))
    return session


def _ids(engine: Engine, rng: np.random.Generator, count: int) -> list[int]:
    """Random tokens: a synthetic model has nothing to say, and these spread over its experts."""
    return [int(i) for i in rng.integers(0, engine.config.vocab_size, count)]


def _decode(session: Session, ids: list[int]) -> tuple[float, float]:
    """Seconds of evaluating `ids` one by one: wall time, and CPU time of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for i in ids:
        session.eval([i])
    return time.perf_counter() - wall, time.thread_time() - cpu


def _run(threads: int, samples: _Samples, nbytes: int) -> Run:
    limits = [nbytes / (rate * 1e9) for rate in samples.read]
    reached = [100 * limit / spent for limit, spent in zip(limits, samples.cpu_s, strict=True)]
    names = dict.fromkeys(name for stages in samples.stages for name in stages)
    stages = {name: 1e3 * float(np.median([s.get(name, 0.0) for s in samples.stages])) for name in names}
    return Run(
        threads=threads,
        decode=Spread.of([1 / spent for spent in samples.decode_s]),
        cpu_ms=Spread.of([1e3 * spent for spent in samples.cpu_s]),
        prefill={n: Spread.of(rates) for n, rates in samples.prefill.items()},
        read_gb_per_s=Spread.of(samples.read),
        limit_ms=Spread.of([1e3 * limit for limit in limits]),
        reached_percent=Spread.of(reached),
        token_ms=1e3 * float(np.median(samples.timed_s)),
        stages=dict(sorted(stages.items(), key=lambda item: (item[0] == "python", -item[1]))),
    )
