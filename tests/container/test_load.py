"""Loading tensor files by several threads: the same bytes and the same errors in whatever order blocks arrive."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste.container import load
from waste.container.load import LoadReport, load_tensors, padded_end
from waste.container.manifest import TensorEntry
from waste.container.writer import TensorFileWriter
from waste.errors import InputError
from waste.events import Event, Progress
from waste.io.direct import DirectFile
from waste.io.throttle import Throttle

SHAPES = [(5,), (64, 130), (3, 7), (300, 40), (1, 1), (77, 129), (9,)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load") / "trunk.bin"


@pytest.fixture(scope="module")
def blobs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {f"t{i}": rng.integers(0, 256, 4 * int(np.prod(shape)), np.uint8) for i, shape in enumerate(SHAPES)}


@pytest.fixture(scope="module")
def entries(path: Path, blobs: dict[str, np.ndarray]) -> tuple[TensorEntry, ...]:
    with TensorFileWriter(path) as writer:
        for (name, blob), shape in zip(blobs.items(), SHAPES, strict=True):
            writer.append(name, "f32", shape, blob)
        return writer.seal()


class Reads:
    """Direct reads that are counted, and may be delayed or fail by their offset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offsets: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.before: Callable[[int], None] = lambda offset: None
        real = DirectFile.read_into

        def read_into(file: DirectFile, buffer: np.ndarray, offset: int, *, where: str) -> None:
            self.offsets.append(offset)
            self.spans.append((offset, offset + len(buffer)))
            self.before(offset)
            real(file, buffer, offset, where=where)

        monkeypatch.setattr(DirectFile, "read_into", read_into)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    monkeypatch.setattr(load, "BLOCK", 4096)
    return Reads(monkeypatch)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "waste-reader"]


@given(
    wanted=st.sets(st.integers(0, len(SHAPES) - 1), min_size=1),
    pages=st.integers(1, 40),
    threads=st.integers(1, 8),
    seed=st.integers(0, 1 << 32),
)
def test_any_choice_of_tensors_blocks_and_threads_gives_the_bytes_written(
    path: Path,
    entries: tuple[TensorEntry, ...],
    blobs: dict[str, np.ndarray],
    wanted: set[int],
    pages: int,
    threads: int,
    seed: int,
) -> None:
    chosen = [entries[i] for i in sorted(wanted)]
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "BLOCK", 4096 * pages)
        patch.setattr(load, "READERS", threads)
        reads = Reads(patch)
        reads.before = lambda offset: time.sleep(rng.choice((0, 0, 1e-4)))
        found = load_tensors(path, chosen)
    assert list(found.tensors) == [entry.name for entry in chosen]
    for name, blob in found.tensors.items():
        assert blob.ctypes.data % 64 == 0
        assert blob.tobytes() == blobs[name].tobytes()
    assert len({id(blob.base) for blob in found.tensors.values()}) == 1
    assert found.report.nbytes == sum(end - begin for begin, end in reads.spans)
    for begin, end in reads.spans:  # nothing is read for its own sake, and nothing twice
        assert any(begin < padded_end(entry) and entry.offset < end for entry in chosen)
    ordered = sorted(reads.spans)
    assert all(one[1] <= other[0] for one, other in pairwise(ordered))
    assert not readers()


def test_progress_comes_from_the_caller_and_ends_at_the_total(
    path: Path, entries: tuple[TensorEntry, ...], reads: Reads
) -> None:
    events: list[Event] = []
    callers = set()

    def on_event(event: Event) -> None:
        callers.add(threading.current_thread())
        events.append(event)

    report = load_tensors(path, entries, on_event).report
    total = path.stat().st_size
    assert callers == {threading.current_thread()}
    assert len(events) == len(reads.offsets) > 10
    assert all(isinstance(e, Progress) and (e.phase, e.total, e.unit) == ("load", total, "bytes") for e in events)
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == sorted(done)
    assert done[-1] == total == report.nbytes
    assert 0 < report.drive_s <= report.seconds
    assert report.bytes_per_s == report.nbytes / report.seconds
    with DirectFile(path) as file:
        assert report.direct == file.direct


def damage(path: Path, entry: TensorEntry, copy: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.nbytes // 2] ^= 4
    copy.write_bytes(data)
    return copy


def test_of_several_faults_the_first_in_the_file_is_told(
    path: Path, entries: tuple[TensorEntry, ...], tmp_path: Path, reads: Reads
) -> None:
    """t3 is damaged, and the block behind it cannot be read: whichever is noticed first, t3 is the error."""
    broken = damage(path, entries[3], tmp_path / "trunk.bin")
    behind = padded_end(entries[3]) // 4096 * 4096 + 4096
    first, last = 0, behind
    for slow in (first, last):

        def before(offset: int, slow: int = slow) -> None:
            if offset == slow:
                time.sleep(0.02)
            if offset == behind:
                raise InputError("unreadable")

        reads.before = before
        with pytest.raises(InputError, match=r"trunk\.bin', tensor 't3' is damaged: expected checksum"):
            load_tensors(broken, entries)
        with pytest.raises(InputError, match="unreadable"):  # without t3 only one fault is left
            load_tensors(broken, entries[4:])
    assert not readers()


def test_every_damaged_byte_names_its_tensor(
    path: Path, entries: tuple[TensorEntry, ...], tmp_path: Path, reads: Reads
) -> None:
    clean = path.read_bytes()
    rng = random.Random(1)
    copy = tmp_path / "trunk.bin"
    for entry in entries:
        for at in (entry.offset, padded_end(entry) - 1, rng.randrange(entry.offset, padded_end(entry))):
            data = bytearray(clean)
            data[at] ^= 1 << rng.randrange(8)
            copy.write_bytes(data)
            with pytest.raises(InputError) as caught:
                load_tensors(copy, entries)
            assert f"{str(copy)!r}, tensor {entry.name!r} is damaged" in caught.value.message
            others = [other for other in entries if other is not entry]
            assert len(load_tensors(copy, others).tensors) == len(others)


def test_a_file_that_shrinks_under_way_is_an_error(
    path: Path, entries: tuple[TensorEntry, ...], tmp_path: Path, reads: Reads
) -> None:
    copy = tmp_path / "trunk.bin"
    copy.write_bytes(path.read_bytes())
    reads.before = lambda offset: os.truncate(copy, 9000) if offset == 8192 else None
    with pytest.raises(InputError, match=r"trunk\.bin'.*the file ends at byte 9000"):
        load_tensors(copy, entries)
    assert not readers()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_ends_it_within_the_reads_under_way(
    path: Path,
    entries: tuple[TensorEntry, ...],
    reads: Reads,
    monkeypatch: pytest.MonkeyPatch,
    interruption: type[BaseException],
) -> None:
    monkeypatch.setattr(load, "READERS", 2)
    interrupted = threading.Event()

    def before(offset: int) -> None:
        if offset > 3 * 4096:
            interrupted.wait(10)

    def on_event(event: Event) -> None:
        interrupted.set()
        raise interruption

    reads.before = before
    with pytest.raises(interruption):
        load_tensors(path, entries, on_event)
    assert len(reads.offsets) < path.stat().st_size // 4096 // 2
    assert not readers()


def test_a_simulated_drive_has_its_rate(path: Path, entries: tuple[TensorEntry, ...], reads: Reads) -> None:
    size = path.stat().st_size
    report = load_tensors(path, entries, limit=Throttle(size / 0.05)).report
    assert report.drive_s >= 0.05


def test_a_report_of_nothing_has_no_rate() -> None:
    assert LoadReport(0, 0.0, 0.0, True).bytes_per_s == 0.0
