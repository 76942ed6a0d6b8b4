"""A thousand random interruptions lose nothing and compute nothing wrong.

The mix, every case from its own seed. `--interruptions 1000` runs all of them (80 s on a core), 300 are the default.

    500  a drive that fails during a session, at one read or for good at one record: EIO, a short count, direct reads
         refused, an early end, a flipped bit, the bytes of another record, a read that brings nothing, a slow one
    150  an interrupt in the process, at a random time or at a random line of the books; the engine goes on
    270  SIGKILL of a process that saves a session and usage.json, at a random time or at a random system call
     80  Ctrl-C to `waste run --session`, at a random time

with any policy, lookahead, number of slots in RAM and VRAM, fill, chunk, direct and cached reads. After every one of
them the bits are those of an undisturbed run, or an error names file and record; and the engine, or what lies on the
drive, goes on with the right bits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import linecache
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from waste.container.reader import Bank
from waste.engine.engine import Engine
from waste.engine.session import Session
from waste.errors import InputError, WasteError
from waste.events import ignore
from waste.io.checksum import checksum
from waste.tiers.build import TierBudget, build
from waste.tiers.cache import ExpertCache
from waste.tiers.options import TierOptions
from waste.tiers.policy import POLICIES
from waste.tiers.usage import Usage

CASES = {"drive": 500, "interrupt": 150, "kill": 270, "ctrl-c": 80}  # in a thousand
PARTS = 4  # of the cases of one kind: a failure is found again without running all of them
HANGS_S = 120  # far beyond anything that takes its time on a busy machine

TEXTS = ([5, 7, 9, 2000], [17], [4000, 3, 77, 1205, 88, 640, 2, 11, 3999])
GOING_ON = [12, 900, 33, 2754]


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    """What waits for ever is a failure of its test, not of the whole suite."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"hangs for {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, HANGS_S, 10)  # again and again: what cleans up may hang, too
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# -- what should come out


@dataclass(frozen=True)
class Truth:
    """Of an undisturbed run with every expert in memory."""

    engine: Engine
    logits: dict[tuple[int, ...], bytes]  # after these tokens
    records: dict[tuple[int, int], bytes]


def timelines() -> Iterator[tuple[list[int], list[int]]]:
    """All (tokens, new ones of them) that the cases evaluate."""
    for text in TEXTS:
        yield text, text
        for i in range(len(GOING_ON)):
            yield [*text, *GOING_ON[: i + 1]], GOING_ON[i : i + 1]


@pytest.fixture(scope="module")
def truth(default_nano: Path) -> Iterator[Truth]:
    with Engine.open(default_nano, ram="4GiB", ctx=64) as engine:
        logits = {}
        for tokens, new in timelines():
            if tokens == new:
                session = engine.session()
            logits[tuple(tokens)] = session.eval(new).tobytes()
        records = {}
        for layer, bank in engine.banks.items():
            (name,) = (entry.file for entry in engine.manifest.banks if entry.layer == layer)
            data, stride = engine.container.place(name).read_bytes(), bank.layout.stride
            for expert in range(bank.experts):
                records[layer, expert] = data[expert * stride : (expert + 1) * stride]
        yield Truth(engine, logits, records)


def evaluate(truth: Truth, session: Session, text: list[int], more: int) -> None:
    """A text and `more` tokens after it, each with the right bits. Raises what `eval` raises."""
    assert session.eval(text).tobytes() == truth.logits[tuple(text)]
    for i in range(more):
        bits = truth.logits[(*text, *GOING_ON[: i + 1])]
        assert session.eval(GOING_ON[i : i + 1]).tobytes() == bits


def whole(truth: Truth, cache: ExpertCache) -> None:
    """No slot is lost, none holds anything but the record that the books name."""
    cache.settle()
    assert not cache._held and not cache._reading and not cache._writing
    for pool in cache._pools:
        mine = [slot for slots in cache._slots.values() for slot in slots.values() if slot.pool is pool]
        assert len(mine) == pool.ready and pool.reading == 0 and not pool.background
        places = {slot.memory.index for slot in (*mine, *pool._free)}
        assert len(places) == len(mine) + len(pool._free)
        assert len(places) + pool._most - pool._made == pool.capacity
    for layer, slots in cache._slots.items():
        assert slots.keys() == cache._records[layer].keys()
        for expert, slot in slots.items():
            assert slot.record is not None
            assert slot.record.data.tobytes() == truth.records[layer, expert]


@dataclass
class World:
    """A small cache of random settings over banks of its own."""

    cache: ExpertCache
    banks: dict[int, Bank]
    rng: random.Random
    chunk: int
    engine: Engine

    def session(self) -> Session:
        return Session(self.engine.model, self.cache, 64, chunk=self.chunk)


@contextlib.contextmanager
def world(truth: Truth, rng: random.Random) -> Iterator[World]:
    engine, router = truth.engine, truth.engine.config.router
    options = TierOptions(
        policy=rng.choice(sorted(POLICIES)),
        lookahead=rng.choice([None, 0, 2, 8]),
        fill=rng.random() < 0.5,
        direct=rng.random() < 0.7,
    )
    usage = Usage(tuple(engine.banks), router.experts)
    for counts in usage.counts.values():
        counts += [rng.randrange(9) for _ in counts]
    banks = {layer: engine.container.bank(layer, direct=options.direct) for layer in engine.banks}
    slots, above = rng.randrange(router.top_k, 60), rng.choice([0, 0, router.top_k, 5, 20])
    cache = build(
        banks,
        TierBudget(slots * engine.budget.slot_bytes, above * engine.budget.slot_bytes),
        options,
        experts=router.experts,
        top_k=router.top_k,
        usage=usage,
        between_tokens=None,
        on_event=ignore,
    )
    try:
        yield World(cache, banks, rng, rng.choice([1, 2, 256]), engine)
    finally:
        cache.close()
        for bank in banks.values():
            bank.close()


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> dict[str, int]:
    """How many of each kind to run."""
    return {kind: count * request.config.getoption("--interruptions") // 1000 for kind, count in CASES.items()}


def seeds(count: int, part: int) -> range:
    return range(count * part // PARTS, count * (part + 1) // PARTS)


# -- a drive that fails


class Drive:
    """In the place of `os.preadv`: the n-th read of a bank goes wrong, and so do, if it is `lasting`, later ones of
    the same record."""

    def __init__(self, banks: dict[int, Bank], kind: str, nth: int, lasting: bool, rng: random.Random) -> None:
        self.kind, self.nth, self.lasting, self.rng = kind, nth, lasting, rng
        self.bent: set[tuple[int, int]] = set()  # layer and record of reads that went wrong
        self.delay_s = 0.0  # of every read
        self.direct = False  # whether it was a direct read that went wrong
        self._real = os.preadv
        self._count = 0
        self._lock = threading.Lock()
        self._banks = {}
        for bank in banks.values():
            for fd in (bank._file._fd, bank._file._direct_fd):
                self._banks[fd] = bank

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        bank = self._banks.get(fd)
        if bank is None:
            return self._real(fd, buffers, offset, flags)
        key = (bank.layer, offset // bank.layout.stride)
        with self._lock:
            hit = self._count == self.nth or (self.lasting and key in self.bent)
            self._count += 1
            if hit:
                self.bent.add(key)
                self.direct = fd == bank._file._direct_fd
        if self.delay_s:
            time.sleep(self.delay_s)
        (view,) = buffers
        return self._wrong(fd, view, offset, bank) if hit else self._real(fd, buffers, offset, flags)

    def _wrong(self, fd: int, view: memoryview, offset: int, bank: Bank) -> int:
        stride = bank.layout.stride
        match self.kind:
            case "EIO":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "refused":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            case "short":
                count = self.rng.randrange(1, len(view)) if len(view) > 1 else 1
                got = self._real(fd, [view], offset)
                view[count:] = b"\xee" * (len(view) - count)
                return min(got, count)
            case "end":
                return 0
            case "flip":
                got = self._real(fd, [view], offset)
                at = self.rng.randrange(got)
                view[at] ^= 1 << self.rng.randrange(8)
                return got
            case "elsewhere":
                record, rest = divmod(offset, stride)
                other = (record + self.rng.randrange(1, bank.experts)) % bank.experts
                return self._real(fd, [view], other * stride + rest)
            case "nothing":
                return len(view)
            case "slow":
                time.sleep(self.rng.uniform(0.001, 0.02))
        return self._real(fd, [view], offset)


KINDS = ("EIO", "refused", "short", "end", "flip", "elsewhere", "nothing", "slow")
NAMED = re.compile(r"/experts-(\d+)\.bin', record (\d+)")


@pytest.mark.parametrize("part", range(PARTS))
def test_a_drive_that_fails_gives_the_right_bits_or_an_error_with_file_and_record(
    truth: Truth, monkeypatch: pytest.MonkeyPatch, cases: dict[str, int], part: int
) -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in seeds(cases["drive"], part):
        rng = random.Random(f"drive {seed}")
        kind = KINDS[seed % len(KINDS)]
        with monkeypatch.context() as patch, world(truth, rng) as here:
            drive = Drive(here.banks, kind, rng.randrange(60), rng.random() < 0.6, rng)
            patch.setattr(os, "preadv", drive.preadv)
            session, told = here.session(), ""
            try:
                evaluate(truth, session, TEXTS[rng.randrange(len(TEXTS))], len(GOING_ON))
            except InputError as error:
                told = error.message
                name = NAMED.search(told)
                assert name is not None and (int(name[1]), int(name[2])) in drive.bent, told
                with pytest.raises(WasteError, match="stopped in the middle"):
                    session.eval([1])
            # Where a copy of the bytes is not to be had either, there is no way around an error.
            if kind in ("short", "slow") or (kind == "refused" and drive.direct):
                assert not told
            outcomes[kind, "told" if told else "right" if drive.bent else "never read"] += 1
            drive.lasting, drive.nth = False, -1
            evaluate(truth, here.session(), TEXTS[1], 1)
            whole(truth, here.cache)
    assert sum(count for (_, what), count in outcomes.items() if what == "told") >= cases["drive"] // PARTS // 10, (
        outcomes
    )
    for kind in KINDS:
        assert outcomes[kind, "right"] + outcomes[kind, "told"] > 0, outcomes


# -- interrupts inside the process


BOOKS = ("/waste/tiers/", "/waste/io/readers.py", "/waste/engine/session.py")


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """KeyboardInterrupt in this block, as Ctrl-C does it, unless it ends earlier."""
    inside = True

    def handler(number: int, frame: FrameType | None) -> None:
        if inside:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        inside = False
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def interrupt_at_line(count: int) -> Iterator[None]:
    """KeyboardInterrupt at the `count`-th line of the books that this thread runs in this block."""
    left = count

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if not any(part in name for part in BOOKS):
            return None
        # Python looks for signals after calls and at jumps back: never where nothing happens (`try`), nor between the
        # body of a `with` and its exit, which is a visit to its first line.
        line = linecache.getline(name, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith(("with ", "try:")):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("part", range(PARTS))
def test_after_an_interrupt_anywhere_the_engine_goes_on(
    truth: Truth, monkeypatch: pytest.MonkeyPatch, cases: dict[str, int], part: int
) -> None:
    """Also when reads that nobody waits for any more end later than the next pass begins."""
    interrupted = 0
    for seed in seeds(cases["interrupt"], part):
        rng = random.Random(f"interrupt {seed}")
        with monkeypatch.context() as patch, world(truth, rng) as here:
            drive = Drive(here.banks, "none", -1, False, rng)
            drive.delay_s = rng.choice([0, 0.001, 0.003])
            patch.setattr(os, "preadv", drive.preadv)
            evaluate(truth, here.session(), TEXTS[0], rng.randrange(2))
            for _ in range(2):
                session = here.session()
                by_line = rng.random() < 0.6
                how = interrupt_at_line(rng.randrange(1, 4000)) if by_line else interrupt_after(rng.uniform(0, 0.04))
                try:
                    with how:
                        evaluate(truth, session, rng.choice(TEXTS), len(GOING_ON))
                except KeyboardInterrupt:
                    interrupted += 1
            evaluate(truth, here.session(), rng.choice(TEXTS), 2)
            whole(truth, here.cache)
    assert interrupted >= cases["interrupt"] // PARTS // 2


# -- processes that are killed or interrupted


# Python itself says so, and goes on, where the interrupt hits what runs when an object is freed.
IGNORED = re.compile(r"^Exception ignored in.*?^KeyboardInterrupt: *$", re.DOTALL | re.MULTILINE)


class Forks:
    """Runs of `interrupted_runs.py` on a container of its own."""

    def __init__(self, container: Path) -> None:
        self.container = container
        script = Path(__file__).with_name("interrupted_runs.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(container)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert answer["status"] is not None, f"hangs: {request}"
        assert "Traceback" not in IGNORED.sub("", answer["stderr"]), answer["stderr"]
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait() == 0


@pytest.fixture
def forks(default_nano: Path, tmp_path: Path) -> Iterator[Forks]:
    container = tmp_path / "copy.waste"
    shutil.copytree(default_nano, container, ignore=shutil.ignore_patterns("usage.json*"))
    made = Forks(container)
    yield made
    made.close()


def digests(container: Path) -> dict[str, int]:
    """Of every file that a run has no business with."""
    return {
        file.name: checksum(file.read_bytes()) for file in container.iterdir() if not file.name.startswith("usage.json")
    }


TIMELINE = [(31 * i * i + 7 * i + 5) % 4096 for i in range(40)]


def test_a_kill_at_any_moment_leaves_a_session_and_usage_as_they_were_or_as_they_were_to_be(
    truth: Truth, forks: Forks, cases: dict[str, int], tmp_path: Path
) -> None:
    engine, path, usage_path = truth.engine, tmp_path / "s.kv", forks.container / "usage.json"
    layers, experts = tuple(engine.banks), engine.config.router.experts
    floor = engine.budget.fixed_bytes + engine.config.router.top_k * engine.budget.slot_bytes
    session = engine.session()
    expected = [session.eval([token]).tobytes() for token in TIMELINE]
    before = digests(forks.container)
    sound: dict[int, int] = {}  # files that go on with the right bits: their length in tokens, by digest

    def saved() -> int:
        """Tokens of the session file, 0 for none, which goes on with the right bits."""
        if not path.exists():
            return 0
        digest = checksum(path.read_bytes())
        if digest not in sound:
            found = engine.restore(path)
            sound[digest] = at = found.position
            assert found.ids.tolist() == TIMELINE[:at]
            assert found.sync(TIMELINE[:at]).tobytes() == expected[at - 1]
            assert found.eval([TIMELINE[at]]).tobytes() == expected[at]
        return sound[digest]

    def uses() -> float:
        usage = Usage.load(usage_path, layers, experts)
        assert usage is not None or not usage_path.exists()
        return 0.0 if usage is None else usage.uses

    longest = 0.0
    outcomes: Counter[str] = Counter()
    for seed in range(cases["kill"]):
        rng = random.Random(f"kill {seed}")
        if saved() > len(TIMELINE) - 5:
            path.unlink()
        tokens, used, new = saved(), uses(), rng.randrange(1, 5)
        how: dict[str, Any] = {}
        if seed >= 5:  # the first few say how long it takes
            how = {"kill_after": rng.uniform(0, longest)} if seed % 2 else {"kill_at": rng.randrange(1, 250)}
        answer = forks(
            run="save",
            session=str(path),
            ids=TIMELINE,
            new=new,
            policy=rng.choice(sorted(POLICIES)),
            lookahead=rng.choice([None, 0, 4]),
            ram=floor + (rng.randrange(60) * engine.budget.slot_bytes) + (64 << 20),
            **how,
        )
        after, learned = saved(), uses()
        assert after in (tokens, tokens + new)
        # Usage is written at the end, and whole: each layer of a token uses as many experts.
        assert learned in (used, used + new * engine.config.router.top_k)
        assert learned == used or after == tokens + new
        assert digests(forks.container) == before
        if answer["status"] == 0:
            longest = max(longest, answer["seconds"])
            assert (after, learned) == (tokens + new, used + new * engine.config.router.top_k)
            outcomes["ended"] += 1
        else:
            assert answer["status"] == -signal.SIGKILL and how, answer
            outcomes["saved, not learned" if after > tokens and learned == used else "killed"] += 1
    assert outcomes["killed"] > cases["kill"] // 4, outcomes


@pytest.fixture(scope="module")
def least_mib(default_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """A --ram that leaves room for few experts, as the hint of a refusal says."""
    argv = [sys.executable, "-m", "waste", "run", str(default_nano), "-p", "x", "--ram", "1MiB", "--ctx", "64"]
    refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = re.search(r"--ram (\d+)MiB", refused.stderr)
    assert found is not None, refused.stderr
    return int(found[1])


def test_ctrl_c_at_any_moment_ends_with_130_and_leaves_a_whole_session(
    truth: Truth, forks: Forks, least_mib: int, cases: dict[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "s.kv"
    prompts = ["Once", "Once upon", "Once upon a time"]
    known: set[bytes] = set()

    def argv(prompt: str) -> list[str]:
        common = "--raw -n 6 --temp 0 --no-stdin --ctx 64 --threads 1".split()
        return [
            "run",
            str(forks.container),
            "-p",
            prompt,
            *common,
            "--ram",
            f"{least_mib + 48}MiB",
            "--session",
            str(path),
        ]

    answers, shortest = {}, 60.0
    for prompt in prompts:
        path.unlink(missing_ok=True)
        answer = forks(run="command", argv=argv(prompt))
        assert answer["status"] == 0, answer
        answers[prompt] = answer["stdout"]
        shortest = min(shortest, answer["seconds"])
        known.add(path.read_bytes())
    before = digests(forks.container)
    interrupted = 0
    for seed in range(cases["ctrl-c"]):
        rng = random.Random(f"ctrl-c {seed}")
        prompt = rng.choice(prompts)
        if rng.random() < 0.5:
            path.unlink(missing_ok=True)
        old = path.read_bytes() if path.exists() else None
        answer = forks(run="command", argv=argv(prompt), interrupt_after=rng.uniform(0, shortest))
        # The interpreter is past its own handling of signals then: a shell says 130 all the same.
        assert answer["status"] in (0, 130, -signal.SIGINT), answer
        interrupted += answer["status"] == 130
        now = path.read_bytes() if path.exists() else None
        if now != old:  # it had been saved when the interrupt came
            assert now is not None
            if now not in known:
                known.add(now)
                found = truth.engine.restore(path)
                assert found.position > 0
        assert answers[prompt].startswith(answer["stdout"].rstrip("\n"))
        if answer["status"] != 130:
            assert answer["stdout"] == answers[prompt]
        assert sorted(os.listdir(tmp_path)) in (["copy.waste", "s.kv"], ["copy.waste"])
    assert digests(forks.container) == before
    assert interrupted > cases["ctrl-c"] // 4


@pytest.mark.parametrize("suffix", [".bin", "trunk.bin", "experts-002.bin"])
def test_ctrl_c_ends_a_run_whose_reads_never_end(forks: Forks, least_mib: int, suffix: str) -> None:
    argv = ["run", str(forks.container), "-p", "x", "--raw", "-n", "4", "--no-stdin", "--ctx", "64"]
    answer = forks(
        run="command", argv=[*argv, "--ram", f"{least_mib + 48}MiB"], hang=suffix, interrupt_after=0.1, patience=60
    )
    assert answer["status"] == 130, answer


def test_a_forked_process_is_told_that_the_engine_stayed_behind(forks: Forks) -> None:
    answer = forks(run="foreign", ids=[1, 2])
    assert answer["status"] == 0
    assert "opened before the process was forked" in answer["stdout"]
    assert not (forks.container / "usage.json").exists()
