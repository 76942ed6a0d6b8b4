"""Reads past the page cache (O_DIRECT), and what happens instead where a file system refuses them.

A read through the page cache copies every byte once more and fills memory with a second cache that nobody asked for;
records go straight into their slots. File systems that cannot do that (overlays, some network and FUSE file systems)
say so at the open or only at the first read; those that keep their files in memory accept the flag and ignore it.
Their files are read through the page cache, and the user is told once for each file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from waste.errors import InputError
from waste.events import Notice, OnEvent, ignore
from waste.io.buffers import PAGE, aligned, as_bytes
from waste.io.files import LONGEST_CALL, early_end, open_for_reading, pread_into, read_failure, reason, shown

# Addresses, offsets and lengths of direct reads are multiples of this: right for sectors of 512 and of 4096 bytes.
DIRECT_ALIGN = PAGE

_REFUSALS = frozenset((errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS))
# These take O_DIRECT (tmpfs since Linux 6.6) and copy from memory all the same.
_IN_MEMORY = frozenset(("tmpfs", "ramfs"))
_MOUNTS = Path("/proc/self/mountinfo")


class DirectFile:
    """A regular file open for positioned reads past the page cache. Threads may share it; close when done.

    A file that is removed or replaced while it is open stays readable as it was until it is closed; one that is cut
    short is an error of the read that misses bytes.
    """

    def __init__(self, path: Path, *, direct: bool = True, on_event: OnEvent = ignore) -> None:
        """Open `path`; `direct=False` asks for the page cache, without a notice.

        Raises InputError for a missing file, one that cannot be read and anything that is not a regular file.
        """
        self.path = path
        self._on_event = on_event
        # Open all the time: it serves buffers that are not aligned, and goes on where direct reads are refused, even
        # when the name has long gone to another file.
        self._fd = open_for_reading(path)
        self._direct_fd = -1
        try:
            status = os.fstat(self._fd)
            self.drive = status.st_dev
            if direct:
                self._open_direct(status)
            if self._direct_fd < 0:
                self._advise_random()
        except BaseException:
            self.close()
            raise
        self.direct = self._direct_fd >= 0  # whether reads bypass the page cache; may turn False at a read

    def read_into(self, buffer: npt.NDArray[np.uint8], offset: int, *, where: str) -> None:
        """Fill `buffer`, (n,) uint8 and contiguous, with the bytes at `offset`; short reads are completed.

        While `direct`, address and offset are multiples of DIRECT_ALIGN (ValueError); n may be anything: what is less
        than a page at the end goes through a page of its own. `where` names the place in messages.
        Raises InputError when the file ends too early or the system cannot read it.
        """
        if not self.direct:
            self.read_cached_into(buffer, offset, where=where)
            return
        view = as_bytes(buffer)
        if address(buffer) % DIRECT_ALIGN or offset % DIRECT_ALIGN:
            raise ValueError(
                f"direct reads want multiples of {DIRECT_ALIGN}: address {address(buffer):#x}, offset {offset}"
            )
        whole = len(view) - len(view) % DIRECT_ALIGN
        if self._fill(view[:whole], whole, offset, where) and self._fill_rest(view[whole:], offset + whole, where):
            return
        self.read_cached_into(buffer, offset, where=where)

    def read_cached_into(self, buffer: npt.NDArray[np.uint8], offset: int, *, where: str) -> None:
        """As `read_into`, through the page cache, for any address, offset and length."""
        if self._fd < 0:
            raise ValueError(f"{shown(self.path)} is closed")
        try:
            pread_into(self._fd, buffer, offset, where=where)
        finally:
            # What was read lives in the caller's memory now. Kept here as well it would be memory beyond the budget.
            # It costs nothing that could be measured (LEARNED: reader-pool).
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset, buffer.nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file. Not while another thread reads."""
        fds, self._fd, self._direct_fd, self.direct = (self._fd, self._direct_fd), -1, -1, False
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _open_direct(self, status: os.stat_result) -> None:
        """Set the descriptor for direct reads, unless the file system has none."""
        kind = file_system(status.st_dev)
        if kind in _IN_MEMORY:
            self._tell(f"{kind} keeps them in memory")
            return
        try:
            self._direct_fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise InputError(f"{shown(self.path)} cannot be read: {reason(error)}") from error
            self._tell(reason(error))
            return
        if not os.path.samestat(status, os.fstat(self._direct_fd)):
            raise InputError(f"{shown(self.path)} was replaced while it was opened", hint="run the command again")

    def _fill(self, view: memoryview, need: int, offset: int, where: str) -> bool:
        """Read whole pages until `need` bytes of `view` are there. False when direct reads are refused."""
        done = 0
        while done < need:
            at = offset + done
            # Interrupted calls are repeated by Python itself (PEP 475).
            try:
                count = os.preadv(self._direct_fd, [view[done : done + LONGEST_CALL]], at)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise read_failure(where, at, error) from error
                self._refuse(reason(error))
                return False
            if done + count >= need:
                return True
            if at + count >= os.fstat(self._direct_fd).st_size:
                raise early_end(where, at + count, offset + need)
            # The next call begins on a page again, so a ragged rest of this one is read twice.
            whole = count - count % DIRECT_ALIGN
            if whole == 0:
                self._refuse(f"a read of {len(view) - done} bytes gave {count}")
                return False
            done += whole
        return True

    def _fill_rest(self, view: memoryview, offset: int, where: str) -> bool:
        """Read the last bytes, less than a page, through an aligned one."""
        if not view:
            return True
        page = aligned(DIRECT_ALIGN).data
        if not self._fill(page, len(view), offset, where):
            return False
        view[:] = page[: len(view)]
        return True

    def _refuse(self, why: str) -> None:
        # The descriptor stays open: other threads may be reading from it, and its number must not become another file.
        self.direct = False
        self._advise_random()
        self._tell(why)

    def _tell(self, why: str) -> None:
        with _lock:
            known = self.drive in _told
            _told.add(self.drive)
        if not known:
            self._on_event(
                Notice(
                    f"the file system of {shown(self.path)} has no direct reads ({why}): its files are read through "
                    f"the page cache"
                )
            )

    def _advise_random(self) -> None:
        """No reading ahead beyond what is asked for: the next record lies elsewhere."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def address(buffer: npt.NDArray[np.uint8]) -> int:
    """Where the first byte of `buffer` lies in memory."""
    return int(buffer.__array_interface__["data"][0])


# File systems (st_dev) of which the user knows that they have no direct reads.
_told: set[int] = set()
_lock = threading.Lock()


def file_system(device: int) -> str | None:
    """The type of the mounted file system with this st_dev, None where the system does not tell."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        # "36 35 98:0 /root /mount options optional... - type source options" (proc(5))
        mount, _, rest = line.partition(" - ")
        if mount.split(" ", 3)[2:3] == [wanted]:
            return rest.split(" ", 1)[0]
    return None
