"""Whole reads, safe writes, buffers and checksums: completed, atomic, aligned, and honest about failures."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from waste.errors import InputError, ResourceError
from waste.io import buffers
from waste.io.buffers import aligned
from waste.io.checksum import Hasher, checksum, from_hex, to_hex
from waste.io.files import atomic_write, open_for_reading, part_path, pread_into, pwrite_all, read_file, writing

DATA = np.random.default_rng(5).integers(0, 256, 1000).astype(np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
@pytest.mark.parametrize("alignment", [1, 64, 4096, 1 << 16])
def test_buffers_are_aligned_zero_writable_and_separate(nbytes: int, alignment: int) -> None:
    first, second = aligned(nbytes, alignment), aligned(nbytes, alignment)
    for buffer in (first, second):
        assert (buffer.shape, buffer.dtype) == ((nbytes,), np.uint8)
        assert nbytes == 0 or buffer.ctypes.data % alignment == 0
        assert not buffer.any()
        assert nbytes < buffers.HUGE_PAGE or buffer.ctypes.data % buffers.HUGE_PAGE == 0
    first[:] = 255
    assert not second.any()
    assert first.all()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells how memory is advised")
@pytest.mark.parametrize(("nbytes", "huge"), [((2 << 20) - 1, False), (2 << 20, True), (9 << 20, True)])
def test_large_buffers_ask_for_huge_pages(nbytes: int, huge: bool) -> None:
    """All of the buffer: from its first byte to its last, the system knows of the wish."""
    buffer = aligned(nbytes)
    begin, flags = buffer.ctypes.data, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            low, high = (int(end, 16) for end in words[0].split("-"))
        elif words[0] == "VmFlags:" and low < begin + nbytes and begin < high:
            flags.append(words)
    assert flags
    if huge:
        assert all("hg" in words for words in flags)
    else:
        assert len(flags) > 1 or "hg" not in flags[0]


def test_a_view_keeps_its_buffer_alive() -> None:
    view = aligned(1 << 22)[12345:12355]
    view[:] = 7
    for _ in range(4):
        aligned(1 << 22)[:] = 1
    assert (view == 7).all()


def test_impossible_buffers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match="no memory"):
        aligned(1 << 62)
    with pytest.raises(ValueError, match="power of two"):
        aligned(8, 48)
    with pytest.raises(ValueError, match="-1"):
        aligned(-1)
    monkeypatch.delattr(buffers.mmap, "MADV_HUGEPAGE", raising=False)
    assert len(aligned(3 << 20)) == 3 << 20


def test_short_reads_and_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may move any number of bytes per call; here it moves at most seven."""
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: pwrite(fd, view[:7], at))
    path = tmp_path / "x"
    atomic_write(path, DATA)
    assert path.read_bytes() == DATA.tobytes()
    fd = open_for_reading(path)
    out = np.zeros(900, np.uint8)
    pread_into(fd, out, 100, where="x")
    assert (out == DATA[100:]).all()
    pread_into(fd, out[:0], 5000, where="x")
    os.close(fd)
    assert read_file(path, limit=1000) == DATA.tobytes()


def test_reading_past_the_end_and_long_files_are_input_errors(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    fd = open_for_reading(path)
    with pytest.raises(InputError, match="'x', record 3: the file ends at byte 3, expected 5"):
        pread_into(fd, np.zeros(4, np.uint8), 1, where="'x', record 3")
    os.close(fd)
    with pytest.raises(InputError, match="at most 2 B"):
        read_file(path, limit=2)
    for missing in (tmp_path / "y", tmp_path, path / "z", Path("\0"), tmp_path / ("n" * 300)):
        with pytest.raises(InputError):
            read_file(missing, limit=2)


def test_a_failed_atomic_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    atomic_write(path, b"old")

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ResourceError, match="no space left while writing") as caught:
        atomic_write(path, b"new")
    assert repr(str(path)) in caught.value.message
    assert caught.value.hint
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_sync_that_fails_is_reported_before_the_name_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    atomic_write(path, b"old")

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(ResourceError, match="Input/output error"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"


def test_the_name_appears_only_after_data_and_before_directory_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (steps.append("dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), replace(a, b)))
    atomic_write(tmp_path / "x", b"new")
    assert steps == ["file", "rename", "dir"]
    assert part_path(tmp_path / "x") == tmp_path / "x.part"


def test_a_full_device_is_a_resource_error() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(ResourceError, match="no space left"), writing("/dev/full"):
        pwrite_all(fd, DATA, 0)
    os.close(fd)


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "too large"),
        (errno.EIO, "cannot be written"),
    ],
)
def test_each_failure_of_the_system_has_its_sentence(code: int, word: str) -> None:
    with pytest.raises(ResourceError, match=word) as caught, writing("a\nb"):
        raise OSError(code, os.strerror(code))
    assert "\n" not in caught.value.message


def test_a_directory_that_is_not_there_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="No such file"):
        atomic_write(tmp_path / "no" / "x", b"")


@given(st.lists(st.binary(max_size=600), max_size=6))
def test_checksums_do_not_depend_on_the_split(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    expected = int(xxhash.xxh3_64_hexdigest(whole), 16)
    hasher = Hasher()
    for part in parts:
        hasher.update(np.frombuffer(part, np.uint8))
    assert checksum(*parts) == hasher.value == checksum(whole) == expected


def test_published_values_of_the_checksum() -> None:
    # XXH3 64 bits, seed 0, of nothing: the value in the reference implementation's own sanity tests.
    assert to_hex(checksum(b"")) == "2d06800538d394c2"
    assert checksum(np.zeros((0, 3), np.float32)) == checksum()


@given(st.integers(0, 2**64 - 1))
def test_the_text_form_is_exact(value: int) -> None:
    assert from_hex(to_hex(value)) == value


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "0" * 15 + "G", "0" * 15 + "A", "0x" + "0" * 14, " " * 16])
def test_other_texts_are_no_checksums(text: str) -> None:
    with pytest.raises(ValueError, match="checksum"):
        from_hex(text)
    with pytest.raises(ValueError, match="64-bit"):
        to_hex(1 << 64)
