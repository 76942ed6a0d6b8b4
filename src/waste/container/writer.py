"""Writing tensor files and banks so that a conversion can be killed at any point and resumed.

Data grows in NAME.part and takes its final name only when sealed: flushed, synced, renamed,
directory synced. A writer that resumes first has `verify_prefix` compare what lies there with
what the journal promises; whatever follows the last intact entry is cut off and written again,
so a resumed file is byte-identical to one written in one go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from waste import quant
from waste.container.layout import (
    RECORD_ALIGN,
    TRUNK_ALIGN,
    Bytes,
    RecordLayout,
    align_up,
    bank_digest,
    check_record,
    matrix_shape,
    pack_record,
    stored_checksum,
)
from waste.container.manifest import BankEntry, TensorEntry
from waste.errors import InputError
from waste.io.buffers import aligned
from waste.io.checksum import Hasher
from waste.io.files import part_path, pread_into, publish, pwrite_all, shown, writing

_PIECE = 16 << 20  # bytes read at a time when checking


class _PartFile:
    """NAME.part, written at explicit offsets: a failed write leaves nothing that a later one would build on."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.part = part_path(path)
        self._fd = -1
        with writing(path):
            if resume and not os.path.lexists(self.part) and path.exists():
                # Sealed before the interruption. It goes back to its temporary name, so that one way of
                # resuming serves both and an unverified file is never under the final name.
                os.replace(path, self.part)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if resume else os.O_TRUNC)
            self._fd = os.open(self.part, flags, 0o644)

    @property
    def fd(self) -> int:
        """The open descriptor; ValueError once closed."""
        if self._fd < 0:
            raise ValueError(f"the writer of {self.path.name!r} is closed")
        return self._fd

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def write(self, data: Bytes, offset: int) -> None:
        with writing(self.path):
            pwrite_all(self.fd, data, offset)

    def truncate(self, nbytes: int) -> None:
        with writing(self.path):
            os.ftruncate(self.fd, nbytes)

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self.fd)

    def seal(self, nbytes: int) -> None:
        self.truncate(nbytes)
        self.sync()
        self.close()
        publish(self.part, self.path)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # Everything that counts has been synced; a file that is only closed will be verified again.
            with contextlib.suppress(OSError):
                os.close(fd)


class TensorFileWriter:
    """Writes trunk tensors one after another, each on 64 bytes.

    Not thread-safe. Leaving a `with` without `seal` keeps the .part file for a resume.
    Every method raises ResourceError when the disk is full or refuses.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        """Start `path` anew, or with `resume` continue what is there; then call `verify_prefix` first."""
        self._file = _PartFile(path, resume=resume)
        self._entries: list[TensorEntry] = []
        self._names: set[str] = set()

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """What has been written, in order."""
        return tuple(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes written, padding included: where the next tensor begins."""
        if not self._entries:
            return 0
        last = self._entries[-1]
        return align_up(last.offset + last.nbytes, TRUNK_ALIGN)

    def verify_prefix(self, entries: Sequence[TensorEntry]) -> int:
        """How many of `entries`, from the first, are intact in the file; the rest is cut off.

        Those count as written; append continues behind them. ValueError after the first append.
        """
        if self._entries:
            raise ValueError("verify_prefix comes before the first append")
        for entry in entries:
            placed = entry.file == self._file.path.name and entry.offset == self.nbytes
            if not placed or entry.name in self._names or not self._intact(entry):
                break
            self._add(entry)
        self._file.truncate(self.nbytes)
        return len(self._entries)

    def append(self, name: str, fmt: str, shape: tuple[int, ...], blob: Bytes) -> TensorEntry:
        """Write one tensor. blob: (nbytes,) uint8, as format `fmt` encodes `matrix_shape(shape)`.

        ValueError for a blob of another size, a name that is taken, a non-matrix that is not f32.
        """
        return self.append_parts(name, fmt, shape, (blob,))

    def append_parts(self, name: str, fmt: str, shape: tuple[int, ...], parts: Iterable[Bytes]) -> TensorEntry:
        """As `append`, the blob in pieces, so that an embedding need not be in memory as a whole.

        All formats encode a multiple of 16 rows to a piece of the whole blob.
        """
        if name in self._names:
            raise ValueError(f"tensor {name!r} was written already")
        if len(shape) != 2 and fmt != "f32":
            raise ValueError(f"tensor {name!r} with shape {shape} is no matrix and must be f32")
        expected = quant.get(fmt).nbytes(*matrix_shape(shape))
        offset = self.nbytes
        hasher = Hasher()
        done = 0
        for part in parts:
            if done + part.nbytes > expected:
                raise ValueError(f"tensor {name!r}: more than the expected {expected} bytes")
            self._file.write(part, offset + done)
            hasher.update(part)
            done += part.nbytes
        if done != expected:
            raise ValueError(f"tensor {name!r}: expected {expected} bytes, found {done}")
        padding = np.zeros(-done % TRUNK_ALIGN, np.uint8)
        self._file.write(padding, offset + done)
        hasher.update(padding)
        entry = TensorEntry(name, self._file.path.name, fmt, shape, offset, expected, hasher.value)
        self._add(entry)
        return entry

    def sync(self) -> None:
        """Make everything appended durable: only then may a journal mention it."""
        self._file.sync()

    def seal(self) -> tuple[TensorEntry, ...]:
        """Sync the file and give it its final name. The writer is closed then."""
        self._file.seal(self.nbytes)
        return self.entries

    def close(self) -> None:
        """Close without sealing; the .part file stays."""
        self._file.close()

    def _add(self, entry: TensorEntry) -> None:
        self._entries.append(entry)
        self._names.add(entry.name)

    def _intact(self, entry: TensorEntry) -> bool:
        end = align_up(entry.offset + entry.nbytes, TRUNK_ALIGN)
        if end > self._file.size():
            return False
        hasher = Hasher()
        buffer = np.empty(min(_PIECE, end - entry.offset), np.uint8)
        for at in range(entry.offset, end, _PIECE):
            piece = buffer[: min(_PIECE, end - at)]
            try:
                pread_into(self._file.fd, piece, at, where=shown(self._file.part))
            except InputError:
                return False
            hasher.update(piece)
        return hasher.value == entry.checksum

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BankWriter:
    """Writes the expert records of one layer, expert 0 first.

    Not thread-safe. Leaving a `with` without `seal` keeps the .part file for a resume.
    Every method raises ResourceError when the disk is full or refuses.
    """

    def __init__(self, path: Path, layer: int, layout: RecordLayout, *, resume: bool = False) -> None:
        """Start `path` anew, or with `resume` continue what is there; then call `verify_prefix` first."""
        self._file = _PartFile(path, resume=resume)
        self._layer = layer
        self._layout = layout
        self._checksums: list[int] = []

    @property
    def checksums(self) -> tuple[int, ...]:
        """The checksum of every record written, in order: what a journal should keep."""
        return tuple(self._checksums)

    @property
    def experts(self) -> int:
        """Records written; the number of the next expert."""
        return len(self._checksums)

    def verify_prefix(self, checksums: Sequence[int]) -> int:
        """How many records, from the first, are intact and have these checksums; the rest is cut off.

        Those count as written; append continues behind them. ValueError after the first append.
        """
        if self._checksums:
            raise ValueError("verify_prefix comes before the first append")
        record = aligned(self._layout.stride, RECORD_ALIGN)
        for expert, expected in enumerate(checksums):
            where = f"{shown(self._file.part)}, record {expert}"
            try:
                pread_into(self._file.fd, record, expert * self._layout.stride, where=where)
                check_record(record, self._layer, expert, self._layout, where)
            except InputError:
                break
            if stored_checksum(record) != expected:
                break
            self._checksums.append(expected)
        self._file.truncate(self.experts * self._layout.stride)
        return self.experts

    def append(self, gate: Bytes, up: Bytes, down: Bytes) -> int:
        """Write the next expert from its three blobs; returns the checksum of its record.

        ValueError when a blob has not the size of its section.
        """
        record = pack_record(self._layer, self.experts, self._layout, gate, up, down)
        self._file.write(record, self.experts * self._layout.stride)
        self._checksums.append(stored_checksum(record))
        return self._checksums[-1]

    def sync(self) -> None:
        """Make everything appended durable: only then may a journal mention it."""
        self._file.sync()

    def seal(self) -> BankEntry:
        """Sync the file and give it its final name. The writer is closed then. ValueError without any record."""
        if not self._checksums:
            raise ValueError("a bank without experts")
        self._file.seal(self.experts * self._layout.stride)
        return BankEntry(self._layer, self._file.path.name, self.experts, self._layout, bank_digest(self._checksums))

    def close(self) -> None:
        """Close without sealing; the .part file stays."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
