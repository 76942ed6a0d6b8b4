"""Threads that read: a queue for each drive, three priorities, and as many reads in flight as the drive likes.

Threads take jobs from the queues; who submits only puts them there and wakes a thread. So an interrupt (Ctrl-C, which
Python raises in the main thread between any two of its steps) can leave a thread asleep for a second, but never lose
a job.

Python threads, as preadv and the checksum run without the interpreter's lock: from 1 MiB on they read within the noise
of C++ threads (2.5 against 2.7 GB/s at 1 MiB, 2.1 against 2.2 at 12 MiB, depth 8), at 32 KiB they read 60 % of what
those do (1.1 against 1.8; 20 us of CPU time a job). LEARNED: reader-pool.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from types import TracebackType
from typing import Self

from waste.errors import ResourceError, WasteError
from waste.io.depth import FIRST_DEPTH, Depth
from waste.io.throttle import Throttle

Read = Callable[[], int]
Done = Callable[[BaseException | None], None]
Clock = Callable[[], float]


class Priority(IntEnum):
    """Which waiting job goes first: the lowest number, and among equals the one that has waited longest."""

    DEMAND = 0  # somebody waits for it now
    AHEAD = 1  # wanted soon, by all signs
    FILL = 2  # would be good to have


# An urgent read waits behind what is in flight, so jobs that nobody waits for take two places of the drive at most ...
_FILL_DEPTH = 2
# ... until nothing else has been asked for during this time: between two waves of one token there is less than that.
_QUIET_S = 0.5
# A thread without work ends after this time.
_IDLE_S = 1.0
# Closing waits no longer than this for reads under way: a healthy drive takes some milliseconds. Of one that hangs
# nobody knows whether it ever answers, and Ctrl-C must end the command all the same.
CLOSE_S = 1.0
# The rate at a depth is taken over twice the depth and this many jobs, and over at least this time in flight: ends of
# bursts and the scheduler of the system weigh more in less.
_WINDOW_JOBS = 8
_WINDOW_S = 0.02


class Ticket:
    """A job that was submitted, to be hastened or cancelled."""

    __slots__ = ("done", "drive", "priority", "read", "waits")

    def __init__(self, read: Read, done: Done, drive: _Drive, priority: Priority) -> None:
        self.read = read
        self.done = done
        self.drive = drive
        self.priority = priority
        self.waits = True  # it may still begin


class Readers:
    """Reads in the background. Thread-safe. Threads start when there is work for them; `close` ends them."""

    def __init__(
        self, *, limit: Throttle | None = None, depth: int | None = None, clock: Clock = time.perf_counter
    ) -> None:
        """`limit`: a slower drive to simulate, one for all drives together. `depth`: reads in flight on each drive,
        instead of what the drive likes best; ValueError unless it is positive.
        """
        if depth is not None and depth < 1:
            raise ValueError(f"a depth of {depth}")
        self._limit = limit
        self._depth = depth
        self._clock = clock
        self._lock = threading.Lock()
        self._drives: dict[int, _Drive] = {}
        self._closed = False
        self._deadline: float | None = None  # of the wait for reads under way, once it has begun
        self._process = os.getpid()
        _open.add(self)

    def submit(self, read: Read, done: Done, *, drive: int, priority: Priority) -> Ticket:
        """Have a thread call `read()`, which returns the bytes it has read, and then `done`.

        done(None), or done(error) with what `read` raised, is called exactly once, on the reader's thread, after the
        delay of a simulated drive; it should be short and must not raise. Jobs that still wait when the readers are
        closed are done with the WasteError that `submit` itself raises from then on.
        Raises ResourceError when the system has no thread for any reader. After a WasteError the job is never begun;
        after an interrupt (KeyboardInterrupt) nobody knows.
        """
        with self._lock:
            if self._closed:
                raise closed()
            state = self._drives.get(drive)
            if state is None:
                state = self._drives[drive] = _Drive(self._depth)
            ticket = Ticket(read, done, state, priority)
            now = self._clock()
            if priority is not Priority.FILL:
                state.asked_at = now
            state.waiting[priority][ticket] = None
            try:
                self._wake(state, now)
            except ResourceError:
                _take_back(ticket)
                raise
        return ticket

    def hasten(self, ticket: Ticket, priority: Priority) -> None:
        """Move a job that still waits to the end of a more urgent queue; anything else is left as it is."""
        with self._lock:
            state, before = ticket.drive, ticket.priority
            if ticket not in state.waiting[before] or priority >= before:
                return
            # Into the new queue first: interrupted in between, the job is in both, and passed over the second time.
            state.waiting[priority][ticket] = None
            ticket.priority = priority
            state.waiting[before].pop(ticket, None)
            state.asked_at = now = self._clock()
            self._wake(state, now)  # it may have waited only for not being urgent

    def cancel(self, ticket: Ticket) -> bool:
        """True: the job had not begun and never will, and `done` is not called. False: it has begun, or is over."""
        with self._lock:
            return ticket.waits and _take_back(ticket)

    def depth(self, drive: int) -> int:
        """How many reads are kept in flight on `drive`, if there are as many."""
        with self._lock:
            state = self._drives.get(drive)
            return (self._depth or FIRST_DEPTH) if state is None else state.depth

    def busy_s(self, drive: int) -> float:
        """Seconds in which at least one read was in flight on `drive`."""
        with self._lock:
            state = self._drives.get(drive)
            return 0.0 if state is None else state.busy_at(self._clock())

    def close(self) -> None:
        """Give up all jobs that wait, wait for those that run, end the threads. For any thread, any number of times.

        A read that has not ended `CLOSE_S` after the first call is left to itself: its buffer lives as long as it
        does, `done` is called should it ever end, and its thread does not keep the process from ending.
        In a process that was forked since, there are no threads, and nothing is done.
        """
        if os.getpid() != self._process:
            return
        _open.discard(self)
        self._give_up()
        with self._lock:
            threads = [worker.thread for state in self._drives.values() for worker in state.workers]
        if threading.current_thread() in threads:
            return  # closed by a `done`: its own thread, and those that may be doing the same, end by themselves
        if self._deadline is None:
            self._deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, self._deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give_up(self) -> None:
        with self._lock:
            self._closed = True
            tickets = [ticket for state in self._drives.values() for ticket in state.drain()]
            for state in self._drives.values():
                while state.idle:
                    state.idle.pop().gate.release()
        for ticket in tickets:
            _call(ticket.done, closed())

    def _wake(self, state: _Drive, now: float) -> None:
        """Under the lock: one more thread looks for work, if a job may begin. If not, one that works will find it."""
        if len(state.workers) - len(state.idle) >= state.depth:
            state.limited = state.limited or state.more()
        elif state.ready(now) is None:
            return
        elif state.idle:
            state.idle.pop().gate.release()
        else:
            self._start(state)

    def _start(self, state: _Drive) -> None:
        worker = _Worker()
        # A daemon: should its read never end, the process does. Readers that nobody has closed are closed at exit.
        worker.thread = threading.Thread(target=self._work, args=(state, worker), name="waste-reader", daemon=True)
        state.workers.add(worker)
        try:
            worker.thread.start()
        except RuntimeError as error:
            state.workers.discard(worker)
            if not state.workers:
                raise ResourceError(f"no thread for reading: {error}", hint="see `ulimit -u`") from error
        except BaseException:
            if worker.thread.ident is None:
                state.workers.discard(worker)
            raise

    # -- on the reader's thread

    def _work(self, state: _Drive, worker: _Worker) -> None:
        main = threading.main_thread()
        rested = False
        while True:
            if not main.is_alive():  # the process ends, and nobody has closed the readers
                self._give_up()
            with self._lock:
                now = self._clock()
                ticket = None if self._closed else state.take(now)
                if ticket is None:
                    if self._closed or rested:
                        state.workers.discard(worker)
                        return
                    state.idle.append(worker)
                else:
                    self._wake(state, now)
            if ticket is None:
                rested = self._rest(state, worker)
                continue
            rested = False
            nbytes = self._run(ticket)
            priority = ticket.priority
            ticket = None  # a thread at rest keeps nothing of its last job alive
            with self._lock:
                state.finished(self._clock(), nbytes, priority)

    def _rest(self, state: _Drive, worker: _Worker) -> bool:
        """Sleep until woken; True when nobody did for long."""
        if worker.gate.acquire(timeout=_IDLE_S):
            return False
        with self._lock:
            if worker in state.idle:
                state.idle.remove(worker)
                return True
        worker.gate.acquire(blocking=False)  # woken just now
        return False

    def _run(self, ticket: Ticket) -> int:
        limit, nbytes, failure = self._limit, 0, None
        began = 0.0 if limit is None else limit.now()
        try:
            nbytes = ticket.read()
        except BaseException as error:
            failure = error
        if limit is not None and failure is None:
            limit.wait(nbytes, began)
        done = ticket.done
        ticket.read, ticket.done = _nothing, _ignore  # whoever holds the ticket need not hold the buffers
        try:
            _call(done, failure)
        finally:
            failure = None  # an error refers to this frame, which must not refer to it
        return nbytes


class _Worker:
    """A thread and what it sleeps at: locked while it sleeps or works, released to wake it."""

    __slots__ = ("gate", "thread")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.thread: threading.Thread


class _Drive:
    """What is known of one drive. Every method is called under the lock of the readers."""

    def __init__(self, depth: int | None) -> None:
        self._climber = Depth() if depth is None else None
        self.depth = FIRST_DEPTH if depth is None else depth  # reads kept in flight, if there are as many
        self.waiting: tuple[OrderedDict[Ticket, None], ...] = tuple(OrderedDict() for _ in Priority)
        self.workers: set[_Worker] = set()
        self.idle: list[_Worker] = []  # those asleep, the last to fall asleep last: it is woken first
        self.asked_at = float("-inf")  # when a job other than FILL was last wanted
        self.limited = False  # in this window a job had to wait because of the depth
        self._in_flight = self._filling = self._guessing = 0  # of all, those of FILL and of AHEAD
        self._busy_s, self._busy_since = 0.0, 0.0
        self._window_bytes = self._window_jobs = 0
        self._window_from = 0.0  # in seconds of busy time
        self._settling = 0  # jobs to go until a new depth is what is measured

    def busy_at(self, now: float) -> float:
        return self._busy_s + (now - self._busy_since if self._in_flight else 0.0)

    def more(self) -> bool:
        """Whether jobs wait."""
        demand, ahead, fill = self.waiting
        return bool(demand or ahead or fill)

    def ready(self, now: float) -> OrderedDict[Ticket, None] | None:
        """The queue whose first job may begin now."""
        if self._in_flight >= self.depth:
            self.limited = self.limited or self.more()
            return None
        demand, ahead, fill = self.waiting
        if demand:
            return demand
        # What begins on a guess delays what is wanted next, should it be wrong: half the places at most.
        if ahead and self._guessing < max(1, self.depth // 2):
            return ahead
        return fill if fill and (self._filling < _FILL_DEPTH or now - self.asked_at >= _QUIET_S) else None

    def take(self, now: float) -> Ticket | None:
        """The job that begins now, removed from its queue; None when nothing waits, or nothing may begin."""
        while (queue := self.ready(now)) is not None:
            ticket, _ = queue.popitem(last=False)
            if ticket.waits:
                ticket.waits = False
                if self._in_flight == 0:
                    self._busy_since = now
                self._in_flight += 1
                self._filling += queue is self.waiting[Priority.FILL]
                self._guessing += queue is self.waiting[Priority.AHEAD]
                return ticket
        return None

    def finished(self, now: float, nbytes: int, priority: Priority) -> None:
        """A job that was taken has ended."""
        busy = self.busy_at(now)
        self._in_flight -= 1
        self._filling -= priority is Priority.FILL
        self._guessing -= priority is Priority.AHEAD
        self._busy_s, self._busy_since = busy, now
        if self._settling:
            self._settling -= 1
            if not self._settling:
                self._open_window(busy)
            return
        self._window_bytes += nbytes
        self._window_jobs += 1
        seconds = busy - self._window_from
        if self._climber is None or self._window_jobs < 2 * self.depth + _WINDOW_JOBS or seconds < _WINDOW_S:
            return
        before = self.depth
        # A depth that was never reached has not been measured.
        if self.limited:
            self._climber.observe(self._window_bytes / seconds)
            self.depth = self._climber.value
        self._open_window(busy)
        if self.depth != before:
            # At both ends of a window as many reads are half done, or a change of depth would look like a gain.
            self._settling = self.depth

    def drain(self) -> list[Ticket]:
        """All jobs that wait, most urgent first, removed from the queues."""
        tickets = [ticket for queue in self.waiting for ticket in queue if ticket.waits]
        for ticket in tickets:
            ticket.waits = False
        for queue in self.waiting:
            queue.clear()
        return tickets

    def _open_window(self, busy: float) -> None:
        self._window_bytes = self._window_jobs = 0
        self._window_from = busy
        self.limited = False


_open: weakref.WeakSet[Readers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Threads of a process that forgot to close its readers are stopped where they are: not in a `done`."""
    for readers in list(_open):
        readers.close()


def closed() -> WasteError:
    """The error of jobs that come too late, or were still waiting."""
    return WasteError("this engine is closed", hint="open it again, or keep it open as long as its sessions")


def _take_back(ticket: Ticket) -> bool:
    ticket.waits = False  # first: it is passed over should the next line be interrupted
    ticket.drive.waiting[ticket.priority].pop(ticket, None)
    ticket.read, ticket.done = _nothing, _ignore
    return True


def _call(done: Done, failure: BaseException | None) -> None:
    """A callback that raises is a fault of its owner: told as such, and the reader goes on."""
    try:
        done(failure)
    except BaseException:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _nothing() -> int:
    return 0


def _ignore(failure: BaseException | None) -> None:
    """What remains of the callback of a job that is over."""
