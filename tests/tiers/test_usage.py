"""Learned routing counts: what they say, how they fade, and that many processes, kills and full disks do no harm."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste.container.reader import Container
from waste.container.verify import verify
from waste.tiers import usage as module
from waste.tiers.usage import FILE, LOCK_SUFFIX, WINDOW_USES, Usage

LAYERS, EXPERTS = (1, 2, 5), 8


def some(seed: int = 0, tokens: int = 40) -> Usage:
    usage, rng = Usage(LAYERS, EXPERTS), np.random.default_rng(seed)
    for layer in LAYERS:
        usage.add(layer, rng.integers(0, EXPERTS, (tokens, 2)))
    return usage


def same(one: Usage | None, other: Usage) -> bool:
    return one is not None and all((one.counts[layer] == other.counts[layer]).all() for layer in LAYERS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE


def load(path: Path) -> Usage | None:
    return Usage.load(path, LAYERS, EXPERTS)


# -- counts


def test_every_choice_counts_once() -> None:
    usage = Usage(LAYERS, EXPERTS)
    ids = np.random.default_rng(3).integers(0, EXPERTS, (50, 4), dtype=np.int32)
    usage.add(2, ids)
    usage.add(2, ids[0])
    assert usage.counts[2].tolist() == [(ids == e).sum() + (ids[0] == e).sum() for e in range(EXPERTS)]
    assert not usage.counts[1].any()
    assert usage.uses == 204


@pytest.mark.parametrize("ids", [[8], [-1]])
def test_an_expert_there_is_not_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"."):
        some().add(1, np.array(ids))


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(0, 20))
def test_the_hottest_come_first_and_unused_ones_never(table: list[list[int]], n: int) -> None:
    layers = [3 * i + 1 for i in range(len(table))]
    usage = Usage(layers, 4)
    for layer, row in zip(layers, table, strict=True):
        usage.counts[layer] += row
    every = [
        (-count, layer, e) for layer, row in zip(layers, table, strict=True) for e, count in enumerate(row) if count
    ]
    assert usage.hottest() == [(layer, e) for _, layer, e in sorted(every)]
    assert usage.hottest(n) == usage.hottest()[:n]


# -- the file


def test_what_is_merged_is_what_is_loaded(path: Path) -> None:
    assert load(path) is None
    assert some(1).merge_into(path) is None
    assert same(load(path), some(1))
    assert some(2).merge_into(path) is None
    both = some(1)
    for layer in LAYERS:
        both.counts[layer] += some(2).counts[layer]
    assert same(load(path), both)
    assert sorted(os.listdir(path.parent)) == [FILE, FILE + LOCK_SUFFIX]


def test_nothing_used_writes_nothing(path: Path) -> None:
    assert Usage(LAYERS, EXPERTS).merge_into(path) is None
    assert os.listdir(path.parent) == []


def test_old_runs_fade_as_the_formula_says(path: Path) -> None:
    """And only when the window is full, each by what came after it."""
    expected = np.zeros(EXPERTS)
    for run in range(8):
        usage = Usage(LAYERS, EXPERTS)
        for layer in LAYERS:
            usage.counts[layer][run] = WINDOW_USES / 4
        assert usage.merge_into(path) is None
        expected[run] = WINDOW_USES / 4
        expected *= min(1, WINDOW_USES / expected.sum())
        found = load(path)
        assert found is not None
        for layer in LAYERS:
            np.testing.assert_allclose(found.counts[layer], expected, rtol=1e-6)
    assert expected.sum() == pytest.approx(WINDOW_USES)
    assert (np.diff(expected) > 1).tolist() == [False] * 4 + [True] * 3  # the fifth was there when it became too much
    assert expected[0] < 0.6 * expected[7]


def test_one_run_longer_than_the_window_keeps_the_layers_in_proportion(path: Path) -> None:
    usage = some(4, tokens=500)
    for layer in LAYERS:
        usage.counts[layer] *= 1e6 * layer
    assert usage.merge_into(path) is None
    found = load(path)
    assert found is not None
    assert found.uses == pytest.approx(WINDOW_USES)
    for layer in LAYERS:
        np.testing.assert_allclose(found.counts[layer], usage.counts[layer] * WINDOW_USES / usage.uses, atol=1e-3)


def test_the_file_of_a_large_model_is_small(path: Path) -> None:
    usage, rng = Usage(range(3, 45), 288), np.random.default_rng(0)
    for counts in usage.counts.values():
        counts += rng.random(288) * 3000
    assert usage.merge_into(path) is None
    assert path.stat().st_size < 150_000
    assert Usage.load(path, range(3, 45), 288) is not None


GOOD = json.dumps({"schema": "waste.usage/1", "experts": 8, "counts": {str(layer): [1] * 8 for layer in LAYERS}})


def changed(**members: object) -> str:
    return json.dumps({**json.loads(GOOD), **members})


def test_the_smallest_good_file_is_good(path: Path) -> None:
    path.write_text(GOOD)
    assert load(path) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        GOOD[:-1],
        GOOD + "x",
        "[" * 100_000,
        "1" * 5000,
        GOOD.replace("[1,", "[NaN,"),
        GOOD.replace("[1,", "[1e999,"),
        GOOD.replace("[1,", "[-1,"),
        GOOD.replace("[1,", "[true,"),
        GOOD.replace("[1,", "[null,"),
        GOOD.replace("[1,", '["1",'),
        GOOD.replace("[1,", "[" + "9" * 400 + ","),
        GOOD.replace("[1,", f"[{WINDOW_USES + 1},"),
        GOOD.replace("[1,", "["),
        GOOD.replace("[1,", "[1, 1,"),
        GOOD.replace('"5"', '"6"'),
        GOOD.replace('"5"', '"05"'),
        changed(schema="waste.usage/2"),
        changed(experts=16),
        changed(experts="8"),
        changed(counts=[]),
        changed(counts={}),
        changed(counts={"1": [1] * 8, "2": [1] * 8}),
        changed(counts={str(layer): 1 for layer in LAYERS}),
        GOOD + " " * 10_000_000,
    ],
    ids=lambda text: text[:30] + text[-12:],
)
def test_a_file_that_is_no_use_is_as_if_it_were_not_there(path: Path, text: str) -> None:
    path.write_text(text)
    assert load(path) is None
    assert some().merge_into(path) is None
    assert same(load(path), some())


@given(data=st.binary(max_size=60))
def test_no_bytes_are_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / FILE
    for text in (data, GOOD.encode()[:50] + data, data + GOOD.encode()):
        path.write_bytes(text)
        load(path)


def test_every_truncation_and_every_flipped_bit_loads_or_does_not(path: Path) -> None:
    whole = GOOD.encode()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert load(path) is None
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        found = load(path)
        assert found is None or all(np.isfinite(counts).all() for counts in found.counts.values())


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_is_not_read(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    assert load(path) is None
    problem = some().merge_into(path)
    assert same(load(path), some()) if problem is None else "usage.json" in problem


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere"), Path.mkdir])
def test_what_is_no_lock_does_not_hang(path: Path, make: Callable[[Path], None]) -> None:
    make(path.with_name(FILE + LOCK_SUFFIX))
    problem = some().merge_into(path)
    assert same(load(path), some()) if problem is None else "usage.json" in problem
    assert not (path.parent / "nowhere").exists()


def test_a_folder_that_is_gone_is_said(path: Path) -> None:
    problem = some().merge_into(path.parent / "gone" / FILE)
    assert problem is not None and "usage.json" in problem and "\n" not in problem


def test_a_lock_that_is_not_let_go_is_not_waited_for_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.05)
    with path.with_name(FILE + LOCK_SUFFIX).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        problem = some().merge_into(path)
        assert problem is not None and "another process holds its lock" in problem
    assert some().merge_into(path) is None


def test_a_lock_file_that_is_deleted_under_its_holder_is_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `waste convert --force` deletes it: whoever comes then takes the new one."""
    real, deleted = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        real(fd, how)
        if not deleted:
            deleted.append(fd)
            path.with_name(FILE + LOCK_SUFFIX).unlink()

    monkeypatch.setattr(module.fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    fd = module._lock(path)
    assert os.path.samestat(os.fstat(fd), path.with_name(FILE + LOCK_SUFFIX).stat())
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


# -- the system refuses


@pytest.mark.parametrize(
    ("code", "words"), [("EROFS", "read-only"), ("EACCES", "no permission"), ("ENOSPC", "no space")]
)
@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "replace"])
def test_a_refusal_is_told_and_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str, call: str
) -> None:
    assert some(1).merge_into(path) is None
    number = getattr(module.errno, code)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        problem = some(2).merge_into(path)
    assert problem is not None and words in problem and "usage.json" in problem
    assert same(load(path), some(1))
    assert sorted(os.listdir(path.parent)) == [FILE, FILE + LOCK_SUFFIX]
    assert some(2).merge_into(path) is None


# -- several processes

MERGE = """
import os, sys
from pathlib import Path
import numpy as np
from waste.tiers.usage import Usage

path, seed, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(seed)
print("ready", flush=True)
sys.stdin.read()
for _ in range(times):
    usage = Usage((1, 2, 5), 8)
    for layer in (1, 2, 5):
        usage.add(layer, rng.integers(0, 8, (3, 2)))
    problem = usage.merge_into(path)
    assert problem is None, problem
"""


def merging(path: Path, seed: int, times: int) -> subprocess.Popen[str]:
    """A process that begins to merge when its stdin is closed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", MERGE, path, str(seed), str(times)], text=True, **pipes)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_processes_that_merge_at_once_lose_nothing(path: Path) -> None:
    expected = Usage(LAYERS, EXPERTS)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        for _ in range(25):
            for layer in LAYERS:
                expected.add(layer, rng.integers(0, EXPERTS, (3, 2)))
    processes = [merging(path, seed, 25) for seed in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        assert process.stderr is not None and process.stdout is not None
        assert process.stderr.read() == ""
        assert process.wait() == 0
        process.stderr.close()
        process.stdout.close()
    assert same(load(path), expected)


def test_a_process_killed_while_it_merges_leaves_a_file_and_no_lock(path: Path) -> None:
    rng = np.random.default_rng(0)
    assert some().merge_into(path) is None
    for seed in range(6):
        before = load(path)
        with merging(path, seed, 100_000) as process:
            assert process.stdin is not None
            process.stdin.close()
            time.sleep(rng.random() * 0.05)
            process.send_signal(signal.SIGKILL)
        after = load(path)
        assert before is not None and after is not None
        assert after.uses >= before.uses
        assert (after.uses - before.uses) % 6 == 0  # whole merges only
        assert some().merge_into(path) is None  # at once


# Ends the process, as a kill would, before the n-th call of the system: every point there is, one after the other.
STEPS = """
import itertools, os, sys
from pathlib import Path
import numpy as np
from waste.tiers.usage import Usage

path = Path(sys.argv[1])
usage = Usage((1, 2, 5), 8)
usage.add(1, np.array([7]))

def counted(real):
    def call(*arguments, **names):
        global left
        left -= 1
        if left == 0:
            if real is pwrite:
                pwrite(arguments[0], bytes(arguments[1])[:40], arguments[2])  # half of it
            os._exit(9)
        return real(*arguments, **names)
    return call

pwrite = os.pwrite
reals = {name: getattr(os, name) for name in ("open", "pwrite", "fsync", "replace", "close", "fstat")}
for n in itertools.count(1):
    child = os.fork()
    if child == 0:
        left = n
        for name, real in reals.items():
            setattr(os, name, counted(real))
        usage.merge_into(path)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = Usage.load(path, (1, 2, 5), 8)
    print(status, None if found is None else int(found.counts[1][7]), flush=True)
    if status == 0:
        break
"""


def test_a_kill_at_any_point_leaves_the_file_before_or_after(path: Path) -> None:
    assert some().merge_into(path) is None
    start = int(some().counts[1][7])
    done = subprocess.run([sys.executable, "-c", STEPS, path], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    counts = [start, *(int(count) for _, count in lines)]
    assert {after - before for before, after in itertools.pairwise(counts)} == {0, 1}
    assert len(lines) >= 10 and lines[-1][0] == "0"
    assert counts[-1] == counts[-2] + 1


# -- beside a model


def test_a_container_does_not_mind_it(default_nano: Path, tmp_path: Path) -> None:
    place = tmp_path / "copy.waste"
    place.mkdir()
    for file in default_nano.iterdir():
        if not file.name.startswith(FILE):  # of another test's run
            (place / file.name).symlink_to(file)
    assert some().merge_into(place / FILE) is None
    (place / (FILE + ".part")).write_text("half of i")
    assert verify(Container.open(place)) == []
