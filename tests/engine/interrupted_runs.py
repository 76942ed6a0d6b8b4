"""Runs that are to be killed or interrupted, forked from a process that has everything loaded and no thread yet.

    python interrupted_runs.py CONTAINER

reads one JSON request a line from stdin and answers with one a line, {"status": exit code, negative for a signal, or
null for a run that did not end in time, and was killed; "seconds": from its start to its end; "stderr", "stdout"}:

    {"run": "save", "usage": true, "session": FILE, "ids": [...], "new": N, "policy": NAME, "lookahead": N, "ram": N}
        on an engine of its own: restores FILE, where there is one, evaluates as many as N new tokens of `ids` singly,
        saves the session there, and closes, which updates usage.json
    {"run": "command", "argv": [...], "hang": SUFFIX or null}
        `waste` with these arguments; `hang`: reads of files whose names end so never end
    {"run": "foreign", "ids": [...]}
        evaluates on the engine that the parent has opened, and says on stdout what came of it

Each may have "kill_after": seconds, "kill_at": the n-th system call that opens, reads, writes or renames, where the
run kills itself half-way through what it was asked to write, "interrupt_after": seconds to one Ctrl-C, counted for a
`hang` from the moment it hangs. "patience": seconds after which it counts as hanging.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from waste.__main__ import main
from waste.engine.engine import Engine
from waste.errors import WasteError
from waste.tiers.options import TierOptions

Request = dict[str, Any]
SYSTEM_CALLS = ("open", "preadv", "pwrite", "fsync", "replace", "close")


def save(engine: Engine, request: Request) -> int:
    tiers = TierOptions(policy=request["policy"], lookahead=request["lookahead"], learn=True)
    path, ids = request["session"], request["ids"]
    with engine.sibling(ram=request["ram"], tiers=tiers) as own:
        session = own.restore(path) if os.path.exists(path) else own.session()
        for token in ids[session.position : session.position + request["new"]]:
            session.eval([token])
        with own.saving(path) as file:
            session.checkpoint(file)
            file.publish()
    return 0


def command(engine: Engine, request: Request) -> int:
    sys.argv = ["waste", *request["argv"]]
    return main()


def foreign(engine: Engine, request: Request) -> int:
    try:
        engine.session().eval(request["ids"])
    except WasteError as error:
        sys.stdout.write(error.message)
    for counts in engine.cache.counts.values():  # what the parent may have used before the fork
        counts[0] += 1
    engine.close()  # with which the parent alone learns
    return 0


RUNS: dict[str, Callable[[Engine, Request], int]] = {"save": save, "command": command, "foreign": foreign}


def kill_at(count: int) -> None:
    """End this process as a kill would, at its `count`-th system call."""
    left = count
    real_pwrite = os.pwrite

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if real is real_pwrite:
                    data = memoryview(arguments[1]).cast("B")
                    real(arguments[0], data[: len(data) // 2], arguments[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, counted(getattr(os, name)))


def hang(suffix: str, begun: int) -> None:
    """From now on reads of files whose names end in `suffix` hang; the first of them tells `begun`."""
    real = os.preadv
    told = threading.Lock()

    def preadv(fd: int, *arguments: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(suffix):
            if told.acquire(blocking=False):
                os.write(begun, b"x")
            while True:
                time.sleep(3600)
        return real(fd, *arguments)

    os.preadv = preadv


def child(engine: Engine, request: Request, begun: int, out: int, err: int) -> int:
    """In the forked process: as a process of its own would run it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    if request.get("kill_at"):
        kill_at(request["kill_at"])
    try:
        if request.get("hang"):
            hang(request["hang"], begun)
        else:
            os.write(begun, b"x")
        return RUNS[request["run"]](engine, request)
    except KeyboardInterrupt:  # before the command had begun, or after its end
        return 130


def watch(pid: int, request: Request, begun: int) -> tuple[int | None, float]:
    """Its exit code and how long it took, having done to it what the request says."""
    began = time.monotonic()
    deadline = began + request.get("patience", 120)
    os.read(begun, 1)
    for key, number in (("kill_after", signal.SIGKILL), ("interrupt_after", signal.SIGINT)):
        if request.get(key) is not None:
            time.sleep(request[key])
            os.kill(pid, number)  # not waited for yet, so the number is still its own
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), time.monotonic() - began
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, time.monotonic() - began


def serve(container: str) -> int:
    with Engine.open(container, ram="1GiB", ctx=64, threads=1, tiers=TierOptions(fill=False, learn=True)) as engine:
        for line in sys.stdin:
            request = json.loads(line)
            assert threading.active_count() == 1
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                reading, writing = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(reading)
                    code = child(engine, request, writing, out.fileno(), err.fileno())
                    if request["run"] == "command":
                        sys.exit(code)  # through everything that the interpreter does at its end
                    sys.stdout.flush()
                    os._exit(code)
                os.close(writing)
                status, seconds = watch(pid, request, reading)
                os.close(reading)
                texts = {}
                for name, file in (("stdout", out), ("stderr", err)):
                    file.seek(0)
                    texts[name] = file.read().decode(errors="replace")
            sys.stdout.write(json.dumps({"status": status, "seconds": seconds, **texts}) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
