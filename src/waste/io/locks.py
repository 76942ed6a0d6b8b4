"""A file that one process at a time may write: opened, and locked for as long as it stays open."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from waste.errors import ResourceError

# What file systems without locks answer: better unguarded there than not at all.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def open_locked(path: Path, busy: ResourceError) -> int:
    """A descriptor, to read and write, of the file that has this name now; made empty where there is none.

    The lock goes with the descriptor, also when the process is killed. Raises `busy` when another process holds it,
    OSError as from the system.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise busy from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(fd)
                raise
        # Whoever held it before may have removed or renamed the file that we have opened.
        try:
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)
