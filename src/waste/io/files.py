"""Whole reads and safe writes of files, with every failure of the system turned into a `WasteError`.

Memory maps are avoided on purpose: a mapped file that shrinks or cannot be read kills the
process (SIGBUS), while a read reports what happened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from waste.errors import InputError, ResourceError, WasteError
from waste.io.buffers import Data, as_bytes
from waste.units import format_bytes

PART_SUFFIX = ".part"
# Linux transfers at most 0x7ffff000 bytes per call; 1 GiB keeps each call well below.
LONGEST_CALL = 1 << 30


def shown(path: str | os.PathLike[str]) -> str:
    """The path quoted for a message: one line, whatever characters it holds."""
    return repr(os.fspath(path))


def directory_problem(path: Path) -> str | None:
    """Why `path` is no directory that can be listed, to follow its name in a message; None when it is one."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return "is not a directory"
        os.scandir(path).close()
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be read: {reason(error)}"
    return None


def regular_size(path: Path) -> int:
    """Bytes in the regular file at `path`, links followed.

    Raises InputError for a missing file, a link to nothing and anything that is not a regular file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        fault = "is a link to a file that is not there" if os.path.islink(path) else "is missing"
        raise InputError(f"{shown(path)} {fault}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{shown(path)} cannot be read: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a special file"
        raise InputError(f"{shown(path)} is {kind}, expected a regular file")
    return status.st_size


def open_for_reading(path: Path) -> int:
    """A file descriptor of the regular file at `path`; InputError as `regular_size`."""
    regular_size(path)
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{shown(path)} cannot be read: {reason(error)}") from error


def pread_into(fd: int, buffer: npt.NDArray[np.uint8], offset: int, *, where: str) -> None:
    """Fill `buffer`, (n,) uint8 and contiguous, with the bytes at `offset`; short reads are completed.

    The file position is not used, so threads may share `fd`. `where` names the place in messages.
    Raises InputError when the file ends too early or the system cannot read it.
    """
    view = as_bytes(buffer)
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done : done + LONGEST_CALL]], offset + done)
        except OSError as error:
            raise read_failure(where, offset + done, error) from error
        if count == 0:
            raise early_end(where, offset + done, offset + len(view))
        done += count


def read_failure(where: str, at: int, error: OSError) -> InputError:
    """The error for a read that the system could not do at byte `at`; `where` names file and place."""
    return InputError(
        f"{where}: read error at byte {at}: {reason(error)}",
        hint="check the drive and the cable; the file may have to be fetched again",
    )


def early_end(where: str, at: int, expected: int) -> InputError:
    """The error for a file that ends at byte `at` where at least `expected` bytes were promised."""
    return InputError(f"{where}: the file ends at byte {at}, expected {expected}: it was cut short")


def read_file(path: Path, *, limit: int) -> bytes:
    """All bytes of a small file; InputError as `regular_size`, and when it is longer than `limit`."""
    nbytes = regular_size(path)
    if nbytes > limit:
        raise InputError(f"{shown(path)} has {format_bytes(nbytes)}, expected at most {format_bytes(limit)}")
    data = np.empty(nbytes, np.uint8)
    fd = open_for_reading(path)
    try:
        pread_into(fd, data, 0, where=shown(path))
    finally:
        os.close(fd)
    return data.tobytes()


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every OSError of the body into a ResourceError that names `path`."""
    try:
        yield
    except WasteError:
        raise
    except OSError as error:
        raise _write_failure(error, shown(path)) from error


def pwrite_all(fd: int, data: Data, offset: int) -> None:
    """Write all of `data` (contiguous) at `offset`; short writes are completed. OSError as from the system."""
    view = as_bytes(data)
    done = 0
    while done < len(view):
        count = os.pwrite(fd, view[done : done + LONGEST_CALL], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        done += count


def fsync_directory(path: Path) -> None:
    """Make names created or changed in the directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot sync a directory; nothing more can be done there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def part_path(path: Path) -> Path:
    """The temporary name, in the same directory, under which `path` is written."""
    return path.with_name(path.name + PART_SUFFIX)


def publish(part: Path, path: Path) -> None:
    """Give the finished, synced file `part` its final name, durably, replacing what was there."""
    with writing(path):
        os.replace(part, path)
        fsync_directory(path.parent)


def atomic_write(path: Path, data: Data) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old file or the new one, never half.

    Raises ResourceError when the disk is full, read-only or not permitted; `path` is then unchanged
    and no temporary file is left.
    """
    part = part_path(path)
    try:
        with writing(path):
            # Neither through a link to somewhere else, nor waiting at a pipe that somebody put there.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(part, flags, 0o644)
            try:
                pwrite_all(fd, data, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        publish(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def reason(error: BaseException) -> str:
    """The system's own words, on one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())


def _write_failure(error: OSError, where: str) -> ResourceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "no space left" if error.errno == errno.ENOSPC else "disk quota exceeded"
        return ResourceError(
            f"{what} while writing {where}",
            hint="free some space, or choose another drive, and run the same command again",
        )
    if error.errno == errno.EROFS:
        return ResourceError(f"{where} is on a read-only file system", hint="choose another place to write to")
    if error.errno in (errno.EACCES, errno.EPERM):
        return ResourceError(
            f"no permission to write {where}", hint="check its owner and mode, or choose another place"
        )
    if error.errno == errno.EFBIG:
        return ResourceError(
            f"{where} is too large for its file system or the limit of the shell",
            hint="see `ulimit -f`, or choose another drive",
        )
    return ResourceError(f"{where} cannot be written: {reason(error)}")
