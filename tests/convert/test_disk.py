"""Drives that are full, read-only, slow in pieces or broken: one line with the file, nothing that looks finished."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waste.container.reader import Container
from waste.convert import ConvertOptions, convert, plan_conversion
from waste.convert.journal import Journal
from waste.convert.target import existing_parent, reusable_bytes, same_drive
from waste.errors import ExitCode, InputError, ResourceError

Files = Callable[[Path], dict[str, bytes]]


def fill_after(monkeypatch: pytest.MonkeyPatch, limit: int, code: int = errno.ENOSPC) -> Callable[[], None]:
    """Let `limit` bytes be written, then fail; returns what makes room again."""
    real, written = os.pwrite, 0

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(memoryview(data).cast("B"))
        if written > limit:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return lambda: monkeypatch.setattr(os, "pwrite", real)


@pytest.mark.parametrize("limit", [0, 1, 700, 5000, 200_000, 600_000])
def test_disk_full(
    tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch, clean: dict[str, bytes], files_of: Files, limit: int
) -> None:
    make_room = fill_after(monkeypatch, limit)
    with pytest.raises(ResourceError, match="no space left") as caught:
        convert(str(tiny.path), dst, ConvertOptions())
    assert caught.value.exit_code == ExitCode.RESOURCE
    assert dst.name in caught.value.message
    assert "\n" not in caught.value.message
    assert not (dst / "manifest.json").exists()
    with pytest.raises(InputError):
        Container.open(dst)
    make_room()
    if limit >= 200_000:
        assert plan_conversion(str(tiny.path), dst, ConvertOptions()).done_bytes > 0
    result = convert(str(tiny.path), dst, ConvertOptions())
    assert files_of(dst) == clean
    assert bool(result.resumed_bytes) == (limit >= 200_000)


def test_space_is_checked_first(tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_conversion(str(tiny.path), dst, ConvertOptions())
    monkeypatch.setattr("waste.convert.target.free_bytes", lambda _: plan.needed_bytes - 1)
    with pytest.raises(ResourceError) as caught:
        convert(str(tiny.path), dst, ConvertOptions())
    assert "MiB are free" in caught.value.message
    assert not dst.exists()
    assert plan_conversion(str(tiny.path), dst, ConvertOptions()).free_bytes == plan.needed_bytes - 1
    monkeypatch.setattr("waste.convert.target.free_bytes", lambda _: plan.needed_bytes)
    convert(str(tiny.path), dst, ConvertOptions())


def test_what_must_be_free_is_enough_and_not_much_more(
    nano_checkpoint: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Container and journal, in whole blocks, at the moment when most lies there: before the journal goes."""
    occupied = []
    real = Journal.remove

    def measured(journal: Journal) -> None:
        files = [path.stat().st_size for path in dst.iterdir()]
        occupied.append((sum(-(-size // 4096) * 4096 for size in files), journal.path.stat().st_size))
        real(journal)

    monkeypatch.setattr(Journal, "remove", measured)
    plan = plan_conversion(str(nano_checkpoint), dst, ConvertOptions())
    convert(str(nano_checkpoint), dst, ConvertOptions())
    ((blocks, journal),) = occupied
    slack = 4096 * (len(list(dst.iterdir())) + 1)
    assert blocks <= plan.needed_bytes
    assert plan.write_bytes + journal + slack <= plan.needed_bytes <= plan.write_bytes + 2 * journal + slack


def test_a_smaller_container_is_offered_where_there_can_be_one(
    nano_checkpoint: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offered(free: int, **options: Any) -> int | None:
        monkeypatch.setattr("waste.convert.target.free_bytes", lambda _: free)
        with pytest.raises(ResourceError) as caught:
            convert(str(nano_checkpoint), dst, ConvertOptions(**options))
        found = re.search(r"--size (\d+)MiB", caught.value.hint or "")
        return int(found[1]) << 20 if found else None

    plan = plan_conversion(str(nano_checkpoint), dst, ConvertOptions())
    needed = plan.needed_bytes
    least = plan_conversion(str(nano_checkpoint), dst, ConvertOptions(experts="wt2", trunk="wt3")).write_bytes
    assert offered(least + needed - plan.write_bytes) is None  # it would fit, were it not for whole MiB
    assert offered(needed - 1, experts="wt3", trunk="q8") is None  # nothing is left to choose
    assert offered(needed - 1, experts="f32") is None  # no choice is so small
    assert offered(10 << 20) is None
    size = offered(needed - 1)
    assert size is not None
    assert size > needed - (2 << 20)
    convert(str(nano_checkpoint), dst, ConvertOptions(size=size))  # and it fits


def test_what_is_there_need_not_fit_twice(tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_room = fill_after(monkeypatch, 600_000)
    with pytest.raises(ResourceError):
        convert(str(tiny.path), dst, ConvertOptions())
    make_room()
    plan = plan_conversion(str(tiny.path), dst, ConvertOptions())
    there = reusable_bytes(dst)
    assert there > 300_000
    monkeypatch.setattr("waste.convert.target.free_bytes", lambda _: plan.needed_bytes)
    assert plan.needed_bytes < plan.write_bytes
    convert(str(tiny.path), dst, ConvertOptions())


def test_same_drive(tmp_path: Path) -> None:
    assert same_drive(tmp_path / "not" / "yet", tmp_path)
    assert not same_drive(tmp_path, Path("/proc"))


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "a" / "b" / "c") == tmp_path
    assert existing_parent(tmp_path) == tmp_path


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_targets_that_cannot_be_written(tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    fill_after(monkeypatch, 0, code)
    with pytest.raises(ResourceError) as caught:
        convert(str(tiny.path), dst, ConvertOptions())
    assert dst.name in caught.value.message


def test_folder_that_cannot_be_made(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if "ro" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(ResourceError, match="read-only"):
        convert(str(tiny.path), tmp_path / "ro" / "out.waste", ConvertOptions())


def test_short_writes_are_completed(
    tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch, clean: dict[str, bytes], files_of: Files
) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        view = memoryview(data).cast("B")
        return real(fd, view[: max(len(view) // 2, min(len(view), 7))], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    convert(str(tiny.path), dst, ConvertOptions())
    assert files_of(dst) == clean


def test_short_reads_are_completed(
    tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch, clean: dict[str, bytes], files_of: Files
) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        view = memoryview(buffers[0]).cast("B")
        return real(fd, [view[: max(len(view) // 2, min(len(view), 5))]], offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    convert(str(tiny.path), dst, ConvertOptions())
    assert files_of(dst) == clean


def test_read_errors_name_shard_and_place(tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = sorted(tiny.path.glob("*.safetensors"))[1]
    inode, real = shard.stat().st_ino, os.preadv
    bad = 100_000

    def preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if os.fstat(fd).st_ino == inode and offset <= bad < offset + len(buffers[0]) and len(buffers[0]) > 2000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(InputError) as caught:
        convert(str(tiny.path), dst, ConvertOptions())
    assert shard.name in caught.value.message
    assert "byte" in caught.value.message
    assert not (dst / "manifest.json").exists()
    monkeypatch.setattr(os, "preadv", real)
    convert(str(tiny.path), dst, ConvertOptions())


def test_memory_stays_bounded_for_large_matrices(tiny: Any, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices pass in blocks of rows: no piece that is encoded is larger than a block, whatever the matrix."""
    import waste.io.dense
    from waste.convert import encode as module

    largest = 0
    real = module.encode

    def watched(weight: Any, fmt: str, source: str) -> Any:
        nonlocal largest
        if "embed_tokens" in source or "lm_head" in source:
            largest = max(largest, weight.shape[0])
        return real(weight, fmt, source)

    convert(str(tiny.path), dst, ConvertOptions())
    whole = (dst / "trunk.bin").read_bytes()
    monkeypatch.setattr(waste.io.dense, "_CHUNK_BYTES", 16 * 160 * 2 * 3)
    monkeypatch.setattr(module, "encode", watched)
    again = dst.with_name("again.waste")
    convert(str(tiny.path), again, ConvertOptions())
    assert largest == 48
    assert (again / "trunk.bin").read_bytes() == whole
