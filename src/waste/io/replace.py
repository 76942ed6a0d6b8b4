"""Replacing a file by one that is written bit by bit: the streaming counterpart of `files.atomic_write`.

The new bytes go to a temporary name in the same directory; the old file stays whole until `publish`, whatever
happens before. The temporary file is locked, so that two processes never write into the same one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from waste.errors import ResourceError
from waste.io.buffers import Data
from waste.io.files import part_path, publish, pwrite_all, regular_size, shown, writing
from waste.io.locks import open_locked


class Replacement:
    """The file that will be `path`. Leaving the `with` block without `publish` leaves `path` as it was.

    A link is followed: what it points to is replaced. Every failure of the system is a ResourceError that
    names `path`.
    """

    def __init__(self, path: Path) -> None:
        """ResourceError when another process is replacing the same file; InputError when it is no regular file."""
        self.path = Path(os.path.realpath(path))
        self._fd = -1
        if os.path.lexists(self.path):
            regular_size(self.path)
        self._part = part_path(self.path)
        busy = ResourceError(
            f"{shown(self.path)} is being written by another process", hint="wait for it to end, or name another file"
        )
        with writing(self.path):
            self._fd = open_locked(self._part, busy)
            os.ftruncate(self._fd, 0)  # what a killed process left

    def write(self, data: Data, offset: int) -> None:
        """Put `data`, contiguous, at `offset`."""
        with writing(self.path):
            pwrite_all(self._fd, data, offset)

    def publish(self) -> None:
        """Make it `path`, durably. Nothing can be written afterwards."""
        with writing(self.path):
            os.fsync(self._fd)
        # Renamed while it is locked, so that nobody takes the temporary name for one that was left behind.
        publish(self._part, self.path)
        self._release()

    def close(self) -> None:
        """Give up what was not published. Twice is no harm."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._part.unlink()
            self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
