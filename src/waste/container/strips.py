"""Single strips of a stored matrix, each with a checksum of its own: a row can be read and trusted without its tensor.

NAME.sums, one of the container's small files, belongs to tensor NAME.weight: an XXH3-64 for each strip in order, 8
little-endian bytes. A strip is 16 rows, as every format encodes them independently of all others; the last one may
have fewer, and its checksum covers the tensor's padding too, so no byte of the tensor is outside them.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from waste import quant
from waste.container.document import AGAIN
from waste.container.layout import TRUNK_ALIGN, Bytes, align_up, matrix_shape
from waste.container.manifest import TensorEntry
from waste.container.reader import Container
from waste.errors import InputError
from waste.io.checksum import Hasher, checksum, to_hex
from waste.io.files import open_for_reading, pread_into, shown
from waste.quant.strips import STRIP_ROWS

Sums = npt.NDArray[np.uint64]

_SUM = np.dtype("<u8")
_PIECE = 4 << 20  # bytes read at a time where all strips are read


def sums_name(tensor: str) -> str:
    """The small file with the strip checksums of `tensor`."""
    return tensor.removesuffix(".weight") + ".sums"


@dataclass(frozen=True)
class Strips:
    """How a tensor divides into strips: `count` of them, `nbytes` each, but for the last that ends with the tensor."""

    count: int
    nbytes: int
    end: int  # of the tensor with its padding, counted from its start

    @classmethod
    def of(cls, fmt: str, shape: tuple[int, ...]) -> Strips:
        """The strips of a tensor of `shape` in format `fmt`."""
        rows, cols = matrix_shape(shape)
        form = quant.get(fmt)
        end = align_up(form.nbytes(rows, cols), TRUNK_ALIGN)
        return cls(-(-rows // STRIP_ROWS), form.nbytes(STRIP_ROWS, cols), end)

    @property
    def sums_bytes(self) -> int:
        """Size of the file with their checksums."""
        return self.count * _SUM.itemsize

    @property
    def longest(self) -> int:
        """Bytes of the longest one, padding included: at most 63 more than `nbytes`."""
        return max(self.nbytes, self.end - (self.count - 1) * self.nbytes)

    def size(self, strip: int) -> int:
        """Bytes of one strip, the last one's padding included."""
        return self.nbytes if strip + 1 < self.count else self.end - strip * self.nbytes

    def sums(self, blob: Bytes) -> Sums:
        """The checksums of all strips in `blob`, (end,) uint8: the tensor with its padding."""
        begins = range(0, self.count * self.nbytes, self.nbytes)
        sizes = (self.size(strip) for strip in range(self.count))
        return np.array([checksum(blob[at : at + n]) for at, n in zip(begins, sizes, strict=True)], _SUM)


def computed_sums(path: Path, entry: TensorEntry) -> bytes:
    """The content of the file with the strip checksums of `entry`, from the tensor in its finished file at `path`.

    Raises InputError when the tensor there is not the one that `entry` describes, or cannot be read.
    """
    strips = Strips.of(entry.fmt, entry.shape)
    where = f"{shown(path)}, tensor {entry.name!r}"
    whole, sums = Hasher(), np.zeros(strips.count, _SUM)
    step = max(1, _PIECE // strips.nbytes)
    buffer = np.empty((step - 1) * strips.nbytes + strips.longest, np.uint8)
    fd = open_for_reading(path)
    try:
        for first in range(0, strips.count, step):
            last = min(first + step, strips.count) - 1
            begin = first * strips.nbytes
            piece = buffer[: last * strips.nbytes + strips.size(last) - begin]
            pread_into(fd, piece, entry.offset + begin, where=where)
            whole.update(piece)
            for strip in range(first, last + 1):
                at = strip * strips.nbytes - begin
                sums[strip] = checksum(piece[at : at + strips.size(strip)])
    finally:
        os.close(fd)
    if whole.value != entry.checksum:
        raise InputError(
            f"{where} is damaged: expected checksum {to_hex(entry.checksum)}, its bytes give {to_hex(whole.value)}",
            hint=AGAIN,
        )
    return sums.tobytes()


def stored_sums(container: Container, entry: TensorEntry) -> Sums | None:
    """The strip checksums of `entry` as the container has them, verified; None where it has none.

    Raises InputError for a damaged file, or one that belongs to another tensor.
    """
    name = sums_name(entry.name)
    if all(file.name != name for file in container.manifest.files):
        return None
    data = container.read_file(name)
    strips = Strips.of(entry.fmt, entry.shape)
    if len(data) != strips.sums_bytes:
        raise InputError(
            f"{shown(container.path / name)} has {len(data)} bytes, expected {strips.sums_bytes}: 8 for each of the "
            f"{strips.count} strips of {entry.name!r}",
            hint="convert the model again",
        )
    return np.frombuffer(data, _SUM)


class StripFile:
    """A tensor that stays on disk, read a strip at a time, through the page cache. Thread-safe; close when done."""

    def __init__(self, path: Path, entry: TensorEntry, sums: Sums) -> None:
        """`path`: the tensor's file; `sums`: (strips,) their checksums. InputError when it cannot be opened."""
        self.entry = entry
        self.strips = Strips.of(entry.fmt, entry.shape)
        self._sums = sums
        self._where = f"{shown(path)}, tensor {entry.name!r}"
        self._fd = open_for_reading(path)
        # Rows of a text lie far apart, so reading ahead would only evict what others need.
        self._advise(entry.offset, entry.nbytes, os.POSIX_FADV_RANDOM)
        self._close = weakref.finalize(self, os.close, self._fd)

    def read(self, strips: Sequence[int], out: Bytes) -> None:
        """strips[i] into out[i * nbytes :], verified. Ascending, each once; `out` has room for the last's padding too.

        Raises InputError naming file, tensor and rows for damage, a short file, a read error. ValueError once closed.
        """
        if not self._close.alive:
            raise ValueError(f"{self._where} is closed")
        nbytes, offset = self.strips.nbytes, self.entry.offset
        if len(strips) > 1:
            # The drive gets all of them at once, and each is there, or on its way, when it is read: 34 instead of 59 ms
            # for 256 strips of 65 KiB that no cache holds, no difference for those that one does (LEARNED: trunk-load).
            for strip in strips:
                self._advise(offset + strip * nbytes, self.strips.size(strip), os.POSIX_FADV_WILLNEED)
        for i, strip in enumerate(strips):
            piece = out[i * nbytes : i * nbytes + self.strips.size(strip)]
            pread_into(self._fd, piece, offset + strip * nbytes, where=self._where)
            found = checksum(piece)
            if found != self._sums[strip]:
                first = strip * STRIP_ROWS
                raise InputError(
                    f"{self._where} is damaged in rows {first} to {min(first + STRIP_ROWS, self.entry.shape[0]) - 1}: "
                    f"expected checksum {to_hex(int(self._sums[strip]))}, the bytes give {to_hex(found)}",
                    hint=AGAIN,
                )

    def close(self) -> None:
        """Close the file. Not while another thread reads."""
        self._close()

    def _advise(self, offset: int, nbytes: int, advice: int) -> None:
        """A wish: a system that does not take it reads all the same."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, offset, nbytes, advice)
