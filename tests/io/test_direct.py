"""Direct reads: every byte as in the file whatever the system does, and one notice where it refuses."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from waste.errors import InputError
from waste.events import Event, Notice
from waste.io import direct
from waste.io.buffers import aligned
from waste.io.direct import DIRECT_ALIGN, DirectFile

PAGE = DIRECT_ALIGN
PAGES = 40
DATA = np.random.default_rng(3).integers(0, 256, PAGES * PAGE + 1234).astype(np.uint8)

Preadv = Callable[[int, list, int], int]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins in a process that has told nothing yet."""
    monkeypatch.setattr(direct, "_told", set())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "bank.bin"
    DATA.tofile(place)
    return place


@pytest.fixture
def supported(path: Path) -> Path:
    """The file, on a file system that has direct reads."""
    with DirectFile(path) as file:
        if not file.direct:
            pytest.skip("the temporary directory's file system has no direct reads")
    return path


class System:
    """os.preadv as a file system might answer, in front of the real one. Tells descriptors apart by O_DIRECT."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real: Preadv = os.preadv
        self.direct_calls = self.cached_calls = 0
        self.direct_error: int | None = None
        self.error: int | None = None
        self.shorten: Callable[[int], int] = lambda count: count
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, views: list, offset: int) -> int:
        (view,) = views
        flags = int(next(x for x in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines() if "flags" in x)[6:], 8)
        if flags & os.O_DIRECT:
            self.direct_calls += 1
            place = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            # What a drive with sectors of 4096 bytes demands.
            assert place % PAGE == offset % PAGE == len(view) % PAGE == 0
            if self.direct_error is not None:
                raise OSError(self.direct_error, os.strerror(self.direct_error))
        else:
            self.cached_calls += 1
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        count = self.real(fd, views, offset)
        kept = min(count, self.shorten(count))
        view[kept:] = bytes(len(view) - kept)  # what was not moved must not be there by accident
        return kept


@pytest.fixture
def system(supported: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


def notices(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Notice)]


def ranges(rng: random.Random, count: int = 60) -> Iterator[tuple[int, int]]:
    """Page-aligned offsets with any length, up to the ragged end of the file."""
    yield 0, len(DATA)
    yield PAGES * PAGE, 1234
    yield 0, 0
    for _ in range(count):
        offset = rng.randrange(PAGES + 1) * PAGE
        most = len(DATA) - offset
        yield offset, rng.choice((most, most // PAGE * PAGE, rng.randrange(most + 1)))


def check(file: DirectFile, offset: int, length: int) -> None:
    buffer = aligned(length + PAGE)
    file.read_into(buffer[:length], offset, where="x")
    np.testing.assert_array_equal(buffer[:length], DATA[offset : offset + length])
    assert not buffer[length:].any()  # nothing behind the buffer is touched


@pytest.mark.parametrize("asked", [True, False])
def test_every_byte_is_as_in_the_file(path: Path, asked: bool) -> None:
    events: list[Event] = []
    with DirectFile(path, direct=asked, on_event=events.append) as file:
        for offset, length in ranges(random.Random(1)):
            check(file, offset, length)
        assert file.drive == path.stat().st_dev
    assert asked or notices(events) == []


def test_nothing_passes_through_the_page_cache(supported: Path, system: System) -> None:
    with DirectFile(supported) as file:
        for offset, length in ranges(random.Random(2)):
            check(file, offset, length)
        assert file.direct
    assert system.direct_calls
    assert not system.cached_calls


def test_short_reads_of_any_count_are_completed_without_leaving_direct_reads(supported: Path, system: System) -> None:
    rng = random.Random(3)
    system.shorten = lambda count: rng.randrange(min(count, PAGE), count + 1)  # seldom on a page, as after a signal
    with DirectFile(supported) as file:
        for offset, length in ranges(rng):
            check(file, offset, length)
        assert file.direct
    assert not system.cached_calls


def test_reads_that_never_move_a_page_are_left_to_the_page_cache(supported: Path, system: System) -> None:
    system.shorten = lambda count: min(count, 700)
    events: list[Event] = []
    with DirectFile(supported, on_event=events.append) as file:
        check(file, PAGE, 3 * PAGE + 5)
        assert not file.direct
    assert len(notices(events)) == 1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("when", ["open", "first read", "later read"])
def test_a_refusal_is_told_once_for_the_file_system_and_changes_no_byte(
    supported: Path, system: System, monkeypatch: pytest.MonkeyPatch, code: int, when: str
) -> None:
    real = os.open

    def refusing(name: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(name, flags, *rest)

    if when == "open":
        monkeypatch.setattr(os, "open", refusing)
    events: list[Event] = []
    for _ in range(3):
        with DirectFile(supported, on_event=events.append) as file:
            if when == "later read":
                system.direct_error = None
                check(file, 0, 2 * PAGE)
                assert file.direct
            system.direct_error = code
            for offset, length in ranges(random.Random(4), 10):
                if length:
                    check(file, offset, length)
                    assert not file.direct
            # Through the page cache nothing need be aligned.
            buffer = np.zeros(777, np.uint8)
            file.read_into(buffer, 4321, where="x")
            np.testing.assert_array_equal(buffer, DATA[4321:5098])
    (line,) = notices(events)
    assert str(supported) in line
    assert os.strerror(code) in line
    assert "\n" not in line


def test_threads_that_meet_a_refusal_together_all_get_their_bytes(supported: Path, system: System) -> None:
    system.direct_error = errno.EINVAL
    events: list[Event] = []
    failures: list[BaseException] = []
    start = threading.Barrier(8)
    with DirectFile(supported, on_event=events.append) as file:

        def work(number: int) -> None:
            start.wait()
            try:
                for offset, length in ranges(random.Random(number), 20):
                    check(file, offset, length)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(notices(events)) == 1


def test_a_file_system_in_memory_is_never_called_direct(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """tmpfs takes the flag and copies from memory all the same."""
    device = path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    entry = f"36 1 {os.major(device)}:{os.minor(device)} / /a\\040b rw,noatime shared:1 master:2 - {{}} none rw\n"
    monkeypatch.setattr(direct, "_MOUNTS", mounts)
    for kind, memory in (("tmpfs", True), ("ramfs", True), ("ext4", False)):
        mounts.write_text("1 1 0:999 / / rw - tmpfs none rw\n\nnonsense\n" + entry.format(kind))
        monkeypatch.setattr(direct, "_told", set())
        events: list[Event] = []
        with DirectFile(path, on_event=events.append) as file:
            check(file, PAGE, 5000)
            if memory:
                assert not file.direct
        if memory:
            assert kind in notices(events)[0]
    mounts.unlink()  # no /proc: the file system's own word counts
    with DirectFile(path) as file:
        check(file, PAGE, 5000)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm here")
def test_shared_memory_is_no_drive() -> None:
    place = Path(f"/dev/shm/waste-test-direct-{os.getpid()}")
    try:
        DATA.tofile(place)
    except OSError:
        pytest.skip("/dev/shm cannot be written")
    try:
        with DirectFile(place) as file:
            assert not file.direct
            check(file, PAGE, 10_000)
    finally:
        place.unlink()


@pytest.mark.parametrize("cached", [False, True])
def test_an_early_end_and_a_read_error_name_the_place(supported: Path, system: System, cached: bool) -> None:
    end = len(DATA)
    with DirectFile(supported, direct=not cached) as file:
        for offset, length in ((0, end + 1), (PAGES * PAGE, 1235), (PAGES * PAGE, PAGE), (PAGES * PAGE, 3 * PAGE)):
            with pytest.raises(
                InputError, match=rf"record 7: the file ends at byte {end}, expected {offset + length}:"
            ):
                file.read_into(aligned(length), offset, where="record 7")
        beyond = 2 * PAGES * PAGE
        with pytest.raises(InputError, match=f"ends at byte {beyond}, expected {beyond + PAGE}"):
            file.read_into(aligned(PAGE), beyond, where="record 7")
        system.error = errno.EIO
        with pytest.raises(InputError, match=r"record 7: read error at byte 8192: Input/output error"):
            file.read_into(aligned(PAGE), 2 * PAGE, where="record 7")
        assert file.direct is not cached  # a failing drive is no refusal


def test_a_file_that_shrinks_is_an_error_and_one_that_vanishes_is_not(supported: Path) -> None:
    with DirectFile(supported) as file:
        os.truncate(supported, 3 * PAGE + 10)
        check(file, 0, 3 * PAGE + 10)
        for offset, length in ((0, 4 * PAGE), (3 * PAGE, 11), (8 * PAGE, PAGE)):
            with pytest.raises(InputError, match="it was cut short"):
                file.read_into(aligned(length), offset, where="x")
        assert file.direct
        supported.unlink()
        check(file, 0, 3 * PAGE)
        supported.write_bytes(b"another file of that name")
        check(file, PAGE, 2 * PAGE)


def test_unaligned_direct_reads_are_programming_errors_and_have_another_way(supported: Path, system: System) -> None:
    with DirectFile(supported) as file:
        for buffer, offset in ((aligned(2 * PAGE)[512:], 0), (aligned(PAGE), 512), (aligned(PAGE)[:100], 1)):
            with pytest.raises(ValueError, match="multiples of 4096"):
                file.read_into(buffer, offset, where="x")
            file.read_cached_into(buffer, offset, where="x")
            np.testing.assert_array_equal(buffer, DATA[offset : offset + len(buffer)])
        assert not system.direct_calls


def test_missing_and_special_files_and_closed_ones(path: Path, tmp_path: Path) -> None:
    for wrong in (tmp_path / "no", tmp_path, Path("/dev/null"), Path("\0")):
        with pytest.raises(InputError):
            DirectFile(wrong)
    for asked in (True, False):
        file = DirectFile(path, direct=asked)
        file.close()
        file.close()
        with pytest.raises(ValueError, match="closed"):
            file.read_into(aligned(PAGE), 0, where="x")


def test_opening_leaves_no_descriptor_behind(supported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was replaced between the two opens, and a process out of descriptors."""
    real = os.open

    def replaced(name: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            supported.unlink()
            DATA.tofile(supported)
        return real(name, flags, *rest)

    def exhausted(name: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(name, flags, *rest)

    before = sorted(os.listdir("/proc/self/fd"))
    keep = os.open(supported, os.O_RDONLY)  # the old file's number must not be given to the new one
    for fake, words in ((replaced, "was replaced"), (exhausted, "Too many open files")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fake)
            with pytest.raises(InputError, match=words):
                DirectFile(supported)
    os.close(keep)
    assert sorted(os.listdir("/proc/self/fd")) == before
