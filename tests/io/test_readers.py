"""Readers: every job done exactly once, urgent ones first, never deeper than allowed, and closed at any moment."""

from __future__ import annotations

import collections
import heapq
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from waste.errors import ResourceError, WasteError
from waste.io import readers as module
from waste.io.depth import DEPTHS, FIRST_DEPTH
from waste.io.readers import Priority, Readers
from waste.io.throttle import Throttle

LONG = 60  # seconds: what no test reaches unless something hangs

DEMAND, AHEAD, FILL = Priority


class Job:
    """A read that can be held, and what became of it."""

    def __init__(self, log: list[Job] | None = None, *, held: bool = False, error: BaseException | None = None) -> None:
        self.go = threading.Event()
        if not held:
            self.go.set()
        self.began = threading.Event()
        self.over = threading.Event()
        self.error = error
        self.answers: list[BaseException | None] = []
        self.log = log

    def read(self) -> int:
        if self.log is not None:
            self.log.append(self)
        self.began.set()
        assert self.go.wait(LONG)
        if self.error is not None:
            raise self.error
        return 1

    def done(self, error: BaseException | None) -> None:
        self.answers.append(error)
        self.over.set()


def submit(readers: Readers, job: Job, priority: Priority = DEMAND, drive: int = 1) -> module.Ticket:
    return readers.submit(job.read, job.done, drive=drive, priority=priority)


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "waste-reader"]


@pytest.fixture(autouse=True)
def no_thread_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    assert reader_threads() == []


@pytest.mark.parametrize("seed", range(6))
def test_every_job_is_done_exactly_once(seed: int) -> None:
    """Random drives, priorities, failures, haste and cancels; closed while many wait."""
    rng = random.Random(seed)
    jobs: list[tuple[Job, module.Ticket, bool]] = []
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        mine = random.Random(1000 * seed + number)
        try:
            for _ in range(300):
                job = Job(error=OSError(5, "x") if mine.random() < 0.1 else None)
                ticket = submit(readers, job, mine.choice(list(Priority)), mine.randrange(3))
                cancelled = False
                with lock:
                    _, other_ticket, _ = mine.choice(jobs) if jobs else (job, ticket, False)
                if mine.random() < 0.2:
                    readers.hasten(other_ticket, mine.choice(list(Priority)))
                if mine.random() < 0.2:
                    cancelled = readers.cancel(ticket)
                with lock:
                    jobs.append((job, ticket, cancelled))
        except BaseException as error:
            failures.append(error)

    with Readers(depth=rng.choice([None, 1, 3, 8])) as readers:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(jobs) == 900
    for job, ticket, cancelled in jobs:
        assert len(job.answers) == (0 if cancelled else 1)
        assert not (cancelled and job.began.is_set())
        if job.began.is_set():
            assert job.answers[0] is job.error
        elif not cancelled:
            assert isinstance(job.answers[0], WasteError)
        assert not readers.cancel(ticket)
        readers.hasten(ticket, DEMAND)


def test_urgent_jobs_go_first_and_equals_in_their_order() -> None:
    log: list[Job] = []
    with Readers(depth=1) as readers:
        first = Job(log, held=True)
        submit(readers, first, FILL)
        assert first.began.wait(LONG)
        rng = random.Random(4)
        waiting = {priority: [Job(log) for _ in range(20)] for priority in Priority}
        tickets = {}
        order = [(priority, job) for priority in Priority for job in waiting[priority]]
        rng.shuffle(order)
        for priority in Priority:
            waiting[priority] = [job for p, job in order if p is priority]
        for priority, job in order:
            tickets[job] = submit(readers, job, priority)
        # To the end of a more urgent queue; never to a less urgent one.
        moved = [waiting[FILL].pop(3), waiting[AHEAD].pop(5), waiting[FILL].pop(0)]
        for job in moved:
            readers.hasten(tickets[job], DEMAND)
        near = waiting[FILL].pop(7)
        readers.hasten(tickets[near], AHEAD)
        readers.hasten(tickets[waiting[DEMAND][2]], FILL)
        readers.hasten(tickets[waiting[AHEAD][1]], AHEAD)
        dropped = [waiting[DEMAND].pop(1), waiting[FILL].pop()]
        assert all(readers.cancel(tickets[job]) for job in dropped)
        expected = [first, *waiting[DEMAND], *moved, *waiting[AHEAD], near, *waiting[FILL]]
        first.go.set()
        for job in expected:
            assert job.over.wait(LONG)
    assert log == expected
    assert not any(job.answers for job in dropped)


@pytest.mark.parametrize("depth", [1, 2, 5, 16])
def test_as_many_reads_as_the_depth_are_in_flight_and_no_more(depth: int) -> None:
    with Readers(depth=depth) as readers:
        jobs = [Job(held=True) for _ in range(4 * depth)]
        for job in jobs:
            submit(readers, job)
        assert readers.depth(1) == depth
        for done in range(len(jobs)):
            for job in jobs[: min(done + depth, len(jobs))]:
                assert job.began.wait(LONG)
            assert sum(job.began.is_set() for job in jobs) == min(done + depth, len(jobs))
            jobs[done].go.set()
            assert jobs[done].over.wait(LONG)
        assert len(reader_threads()) <= depth


def test_a_drive_does_not_wait_for_another() -> None:
    with Readers(depth=2) as readers:
        slow = [Job(held=True) for _ in range(6)]
        for job in slow:
            submit(readers, job, drive=1)
        fast = [Job() for _ in range(6)]
        for job in fast:
            submit(readers, job, FILL, drive=2)
        for job in fast:
            assert job.over.wait(LONG)
        assert not any(job.over.is_set() for job in slow)
        for job in slow:
            job.go.set()


def test_fill_leaves_room_for_others_until_they_are_long_quiet() -> None:
    now = [0.0]
    with Readers(depth=6, clock=lambda: now[0]) as readers:
        asked = Job()
        submit(readers, asked)
        assert asked.over.wait(LONG)
        fills = [Job(held=True) for _ in range(20)]
        for job in fills:
            submit(readers, job, FILL)
        for job in fills[:2]:
            assert job.began.wait(LONG)
        # An urgent read finds room at once, and the drive has no more than two others to do beside it.
        urgent = [Job() for _ in range(50)]
        for job in urgent:
            submit(readers, job)
            assert job.over.wait(LONG)
        assert sum(job.began.is_set() for job in fills) == 2
        fills[0].go.set()
        assert fills[2].began.wait(LONG)
        assert sum(job.began.is_set() for job in fills) == 3
        now[0] += 10  # nobody has asked for anything since
        fills[1].go.set()
        for job in fills[3:8]:
            assert job.began.wait(LONG)
        for job in fills:
            job.go.set()
        for job in fills:
            assert job.over.wait(LONG)


def test_a_hastened_fill_begins_at_once() -> None:
    now = [0.0]
    with Readers(depth=4, clock=lambda: now[0]) as readers:
        asked = Job()
        submit(readers, asked)
        jobs = [Job(held=True) for _ in range(4)]
        tickets = [submit(readers, job, FILL) for job in jobs]
        for job in jobs[:2]:
            assert job.began.wait(LONG)
        readers.hasten(tickets[3], DEMAND)
        assert jobs[3].began.wait(LONG)
        assert not jobs[2].began.is_set()
        for job in jobs:
            job.go.set()


def test_close_waits_for_what_runs_and_gives_up_what_waits() -> None:
    readers = Readers(depth=2)
    running = [Job(held=True) for _ in range(2)]
    waiting = [Job() for _ in range(30)]
    for job in running:
        submit(readers, job)
        assert job.began.wait(LONG)
    for job in waiting:
        submit(readers, job, random.Random(1).choice(list(Priority)))
    closer = threading.Thread(target=readers.close)
    closer.start()
    for job in waiting:
        assert job.over.wait(LONG)
        (error,) = job.answers
        assert isinstance(error, WasteError)
        assert "closed" in error.message
    assert closer.is_alive()  # as a read is in flight, and would write into memory that may be gone
    for job in running:
        job.go.set()
    closer.join()
    assert [job.answers for job in running] == [[None], [None]]
    assert not any(job.began.is_set() for job in waiting)
    assert reader_threads() == []
    with pytest.raises(WasteError, match="closed"):
        submit(readers, Job())
    readers.close()


def test_readers_may_be_closed_by_a_callback_and_by_many_threads_at_once() -> None:
    for _ in range(20):
        readers = Readers(depth=4)
        start = threading.Barrier(5)  # four reads in flight, and this thread, which has submitted all

        def read(start: threading.Barrier = start) -> int:
            start.wait(LONG)
            return 1

        answers: list[BaseException | None] = []

        def done(error: BaseException | None, readers: Readers = readers, answers: list = answers) -> None:
            answers.append(error)
            readers.close()

        for _ in range(12):
            readers.submit(read, done, drive=1, priority=DEMAND)
        start.wait(LONG)
        closers = [threading.Thread(target=readers.close) for _ in range(3)]
        for thread in closers:
            thread.start()
        for thread in closers:
            thread.join()
        readers.close()
        assert len(answers) == 12


def test_closing_does_not_wait_for_a_read_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.02)
    readers, job, waiting = Readers(depth=1), Job(held=True), Job()
    submit(readers, job)
    submit(readers, waiting)
    assert job.began.wait(LONG)
    readers.close()
    readers.close()
    assert job.answers == [] and len(waiting.answers) == 1
    assert all(thread.daemon for thread in reader_threads())
    job.go.set()  # it ends after all
    assert job.over.wait(LONG)
    assert job.answers == [None]
    for thread in reader_threads():
        thread.join(LONG)
    assert reader_threads() == []


def test_a_process_ends_though_a_read_never_does() -> None:
    script = """
import threading, time
from waste.io.readers import Priority, Readers
began = threading.Event()
def read():
    began.set()
    time.sleep(3600)
readers = Readers()
readers.submit(read, print, drive=1, priority=Priority.DEMAND)
assert began.wait(60)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_failing_callback_is_told_and_the_readers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def wrong(error: BaseException | None) -> None:
        raise RuntimeError("a callback must not raise")

    with Readers(depth=1) as readers:
        for _ in range(3):
            readers.submit(lambda: 1, wrong, drive=1, priority=DEMAND)
        after = Job()
        submit(readers, after)
        assert after.over.wait(LONG)
    assert len(told) == 3


def test_done_is_called_while_the_submitting_thread_sits_in_a_native_call() -> None:
    ends = os.pipe()
    try:
        with Readers() as readers:
            readers.submit(lambda: 1, lambda error: os.write(ends[1], b"x"), drive=1, priority=DEMAND)
            assert os.read(ends[0], 1) == b"x"
    finally:
        for fd in ends:
            os.close(fd)


def test_a_simulated_drive_delays_done_by_what_it_would_take() -> None:
    steps: list[str] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        steps.append(f"sleep {seconds:.1f}")
        now[0] += seconds

    drive = Throttle(100.0, clock=lambda: now[0], sleep=sleep)
    over = threading.Event()

    def done(error: BaseException | None) -> None:
        steps.append(f"done {type(error).__name__}")
        if len(steps) == 6:
            over.set()

    def broken() -> int:
        steps.append("broken")
        raise OSError(5, "x")

    with Readers(limit=drive, depth=1) as readers:
        for nbytes in (50, 300):
            readers.submit(lambda n=nbytes: n, done, drive=1, priority=DEMAND)
        readers.submit(broken, done, drive=2 - 1, priority=DEMAND)
        assert over.wait(LONG)
    assert steps == ["sleep 0.5", "done NoneType", "sleep 3.0", "done NoneType", "broken", "done OSError"]


def test_busy_time_counts_reads_in_flight_once_and_idle_time_never() -> None:
    now = [0.0]
    lock = threading.Lock()
    with Readers(depth=3, clock=lambda: now[0]) as readers:
        assert readers.busy_s(1) == 0
        for _ in range(3):
            now[0] += 100  # idle
            jobs = [Job(held=True) for _ in range(3)]
            for job in jobs:
                submit(readers, job)
            for job in jobs:
                assert job.began.wait(LONG)
            before = readers.busy_s(1)
            with lock:
                now[0] += 2  # three in flight
            assert readers.busy_s(1) == pytest.approx(before + 2)
            for job in jobs:
                job.go.set()
                assert job.over.wait(LONG)
            while any(state._in_flight for state in readers._drives.values()):
                time.sleep(0.001)
        now[0] += 100
        assert readers.busy_s(1) == pytest.approx(6)
        assert readers.busy_s(7) == 0
        assert readers.depth(7) == 3


def test_threads_that_rest_hold_on_to_nothing() -> None:
    class Buffer:
        pass

    import weakref

    with Readers(depth=1) as readers:
        buffer = Buffer()
        gone = weakref.ref(buffer)
        job = Job()

        def read(buffer: Buffer = buffer) -> int:
            raise OSError(5, "x")

        ticket = readers.submit(read, job.done, drive=1, priority=DEMAND)
        del buffer, read
        assert job.over.wait(LONG)
        job.answers.clear()
        deadline = time.monotonic() + LONG
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert gone() is None
        assert not readers.cancel(ticket)


def test_threads_end_when_there_is_nothing_to_do_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    with Readers() as readers:
        for _ in range(3):
            jobs = [Job() for _ in range(10)]
            for job in jobs:
                submit(readers, job)
            for job in jobs:
                assert job.over.wait(LONG)
            deadline = time.monotonic() + LONG
            while reader_threads() and time.monotonic() < deadline:
                time.sleep(0.005)
            assert reader_threads() == []


@pytest.mark.parametrize("lost", ["before waking", "after choosing whom to wake"])
def test_an_interrupt_while_submitting_loses_no_job(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.05)
    with Readers(depth=2) as readers:
        warm = Job()
        submit(readers, warm)
        assert warm.over.wait(LONG)
        deadline = time.monotonic() + LONG
        while not readers._drives[1].idle and time.monotonic() < deadline:
            time.sleep(0.001)

        def interrupted(state: module._Drive, now: float) -> None:
            if lost == "after choosing whom to wake":
                state.idle.pop()
            raise KeyboardInterrupt

        job = Job()
        with monkeypatch.context() as patch:
            patch.setattr(readers, "_wake", interrupted)
            with pytest.raises(KeyboardInterrupt):
                submit(readers, job)
        if lost == "before waking":
            submit(readers, Job())
        assert job.over.wait(LONG)
        assert job.answers == [None]


@pytest.mark.parametrize("idle", [False, True])
def test_an_interrupt_anywhere_in_submit_leaves_a_job_that_is_done_once_or_never_begun(idle: bool) -> None:
    """Raised at every line of every function that `submit` runs through, as a signal may be."""
    lines = Path(module.__file__).read_text().splitlines()
    for point in range(1, 200):
        left = [point]
        guard = [False]

        def interrupt(
            frame: FrameType, event: str, arg: object, left: list[int] = left, guard: list[bool] = guard
        ) -> Any:
            if frame.f_code.co_filename != module.__file__:
                return None
            if event == "line":
                # Signals are raised after calls and jumps; so not between taking a lock and the body that it guards,
                # nor at a "try:", of which nothing remains to be interrupted.
                line = lines[frame.f_lineno - 1].strip()
                before, guard[0] = guard[0], line.startswith("with ")
                if not before and not line.startswith(("with ", "try:")):
                    left[0] -= 1
                    if left[0] == 0:
                        raise KeyboardInterrupt
            return interrupt

        with Readers(depth=2) as readers:
            if idle:
                warm = Job()
                submit(readers, warm)
                assert warm.over.wait(LONG)
            job = Job()
            sys.settrace(interrupt)
            try:
                submit(readers, job)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            after = Job()
            submit(readers, after)
            assert after.over.wait(LONG)
        # A job that was queued comes before this one, or ends with the readers.
        assert len(job.answers) == job.began.is_set()
        if left[0] > 0:
            break  # it ran to its end
    else:
        pytest.fail("submit has no end")
    assert point > 5


def test_without_any_thread_there_is_an_error_and_with_one_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Readers(depth=4) as readers:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            job = Job()
            with pytest.raises(ResourceError, match="no thread for reading"):
                submit(readers, job)
            assert not job.answers
        first = Job(held=True)
        submit(readers, first)
        assert first.began.wait(LONG)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            others = [Job() for _ in range(5)]
            for other in others:
                submit(readers, other)
            first.go.set()
            for other in others:
                assert other.over.wait(LONG)
        assert not job.began.is_set()


def test_a_depth_is_positive() -> None:
    for depth in (0, -1):
        with pytest.raises(ValueError, match="depth"):
            Readers(depth=depth)
    assert Readers().depth(0) == FIRST_DEPTH


@pytest.mark.parametrize("jobs", [1, 500])
def test_a_process_that_forgets_to_close_still_ends(jobs: int) -> None:
    """Every job is answered before the interpreter stops its threads: what had begun, and what still waited."""
    script = f"""
import time
from waste.io.readers import Priority, Readers
readers = Readers(depth=2)
answers = []
def done(error):
    answers.append(error)
    if len(answers) == {jobs}:
        print(len(answers), {jobs} == 1 or sum(answer is not None for answer in answers) > {jobs} // 2, flush=True)
for _ in range({jobs}):
    readers.submit(lambda: time.sleep(0.05) or 1, done, drive=1, priority=Priority.FILL)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG, check=True)
    # Of many most are given up; a single one has begun by then, or has not.
    assert ended.stdout in ({f"{jobs} True\n"} if jobs > 1 else {"1 True\n", "1 False\n"})
    assert ended.stderr == ""


@pytest.mark.parametrize(("depth", "guesses"), [(1, 1), (4, 2), (8, 4)])
def test_guesses_take_half_the_places_at_most(depth: int, guesses: int) -> None:
    drive = module._Drive(depth)

    def submit(priority: Priority) -> None:
        drive.waiting[priority][module.Ticket(lambda: 0, lambda error: None, drive, priority)] = None

    for _ in range(20):
        submit(AHEAD)
    begun = []
    while (ticket := drive.take(0.0)) is not None:
        begun.append(ticket)
    assert len(begun) == guesses
    submit(DEMAND)
    assert (drive.take(0.0) is not None) == (depth > 1)
    drive.finished(1.0, 1, begun[0].priority)
    assert drive.take(1.0) is not None


# -- the depth follows the drive


class Simulation:
    """A drive with `channels` that take `service` seconds a job each, fed by the bookkeeping of the readers."""

    def __init__(self, channels: int, service: float, seed: int) -> None:
        self.state = module._Drive(None)
        self.now = 0.0
        self.rng = random.Random(seed)
        self.service = service
        self.channels = [0.0] * channels  # when each is free
        self.flying: list[tuple[float, int, module.Ticket]] = []
        self.count = 0

    def submit(self, priority: Priority = DEMAND) -> None:
        ticket = module.Ticket(lambda: 0, lambda error: None, self.state, priority)
        self.state.waiting[priority][ticket] = None
        self.begin()

    def begin(self) -> None:
        while (ticket := self.state.take(self.now)) is not None:
            free = heapq.heappop(self.channels)
            end = max(free, self.now) + self.service * self.rng.uniform(0.8, 1.2)
            heapq.heappush(self.channels, end)
            self.count += 1
            heapq.heappush(self.flying, (end, self.count, ticket))

    def step(self) -> None:
        self.now, _, ticket = heapq.heappop(self.flying)
        self.state.finished(self.now, 1 << 20, ticket.priority)
        self.begin()


def steady(drive: Simulation) -> None:
    """Always more waiting than can begin."""
    while len(drive.state.waiting[DEMAND]) < 40:
        drive.submit()
    drive.step()


def bursts(drive: Simulation) -> None:
    """24 at once, then nothing for a while: what misses of a layer look like."""
    for _ in range(24):
        drive.submit()
    while drive.flying:
        drive.step()
    drive.now += 0.01


@pytest.mark.parametrize("feed", [steady, bursts])
@pytest.mark.parametrize("channels", [1, 3, 8, 16])
def test_the_depth_in_use_settles_near_the_channels_of_the_drive(
    feed: Callable[[Simulation], None], channels: int
) -> None:
    for seed in range(4):
        drive = Simulation(channels, 0.004, seed)
        used: collections.Counter[int] = collections.Counter()
        for step in range(12_000 if feed is steady else 600):
            feed(drive)
            if step > (6_000 if feed is steady else 300):
                used[drive.state.depth] += 1
        (most, _), *_ = used.most_common()
        best = DEPTHS.index(channels)
        assert abs(DEPTHS.index(most) - best) <= 1, used


def test_a_depth_that_is_never_reached_is_left_alone() -> None:
    drive = Simulation(1, 0.004, 0)
    for _ in range(3000):
        drive.submit()
        drive.submit()
        while drive.flying:
            drive.step()
    assert drive.state.depth == FIRST_DEPTH
