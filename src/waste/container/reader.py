"""Opening a container and reading from it: nothing is handed out whose checksum has not been verified.

Plain reads, no memory maps: a file that shrinks or a drive that fails is an error here, not a signal.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from waste.container.document import AGAIN
from waste.container.layout import TRUNK_ALIGN, RecordLayout, align_up, check_record
from waste.container.manifest import MANIFEST_NAME, BankEntry, Manifest, TensorEntry
from waste.errors import InputError
from waste.events import OnEvent, Progress, ignore
from waste.io.buffers import aligned
from waste.io.checksum import Hasher, checksum, to_hex
from waste.io.files import directory_problem, open_for_reading, pread_into, read_file, regular_size, shown

Bytes = npt.NDArray[np.uint8]

JOURNAL_NAME = "convert.journal"

# The manifests of the largest models take about 1 MiB, tokenizers 20 MiB.
_MAX_MANIFEST = 256 << 20
_MAX_SMALL_FILE = 256 << 20
# Large enough for a drive to run at full speed, small enough to be still in the cache when hashed.
_PIECE = 4 << 20


class Bank:
    """The expert records of one layer, open for reading. Reads are thread-safe; close when done."""

    def __init__(self, path: Path, entry: BankEntry) -> None:
        """InputError when the file is missing or has not the size that the manifest says."""
        _check_size(path, entry.experts * entry.layout.stride)
        self._path = path
        self._entry = entry
        self._fd = open_for_reading(path)

    @property
    def layer(self) -> int:
        """The layer whose experts these are."""
        return self._entry.layer

    @property
    def experts(self) -> int:
        """How many records there are."""
        return self._entry.experts

    @property
    def layout(self) -> RecordLayout:
        """What every record looks like; `layout.stride` is the size of the buffer that `read` wants."""
        return self._entry.layout

    def read(self, expert: int, buffer: Bytes) -> None:
        """Fill `buffer`, (stride,) uint8, with the record of `expert`, and verify it.

        Raises InputError naming file and record for a read error, a short file and any damage; the
        buffer then holds nothing of use. ValueError for a wrong size, an expert there is not, a closed bank.
        """
        if not 0 <= expert < self.experts:
            raise ValueError(f"expert {expert} of {self.experts}")
        if buffer.shape != (self.layout.stride,) or buffer.dtype != np.uint8:
            raise ValueError(f"expected {self.layout.stride} bytes, found {buffer.dtype} with shape {buffer.shape}")
        if self._fd < 0:
            raise ValueError("the bank is closed")
        where = f"{shown(self._path)}, record {expert}"
        pread_into(self._fd, buffer, expert * self.layout.stride, where=where)
        check_record(buffer, self.layer, expert, self.layout, where)

    def close(self) -> None:
        """Close the file. Not while another thread reads."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Container:
    """A finished container: its manifest, and verified access to what it describes. Holds no open file."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path) -> Container:
        """Read the manifest, check the size of every file and the digests of the small ones.

        Raises InputError for anything that is no finished, undamaged container, saying what it is
        instead; UnsupportedError for a container of another version.
        """
        _refuse_other_things(path)
        manifest_path = path / MANIFEST_NAME
        manifest = Manifest.from_bytes(read_file(manifest_path, limit=_MAX_MANIFEST), shown(manifest_path))
        container = cls(path, manifest)
        for name, nbytes in manifest.file_sizes().items():
            _check_size(path / name, nbytes)
        for entry in manifest.files:
            container.read_file(entry.name)
        return container

    def read_file(self, name: str) -> bytes:
        """The bytes of a small file, verified. InputError when the manifest lists no such file, or it is damaged."""
        for entry in self.manifest.files:
            if entry.name == name:
                break
        else:
            raise InputError(f"the container {shown(self.path)} has no file {name!r}", hint="convert the model again")
        path = self.path / name
        _check_size(path, entry.nbytes)
        data = read_file(path, limit=_MAX_SMALL_FILE)
        if checksum(data) != entry.digest:
            raise _damaged(shown(path), entry.digest, checksum(data))
        return data

    def load_tensors(self, file_name: str, on_event: OnEvent = ignore) -> dict[str, Bytes]:
        """All tensors of one file, each a (nbytes,) uint8 view into one page-aligned buffer, on 64 bytes, verified.

        Reports `Progress("load", ...)` in bytes of this file. Raises InputError naming file and tensor
        for any damage, ResourceError when the memory is not to be had, ValueError for a file without tensors.
        """
        entries = self.manifest.tensors_of(file_name)
        if not entries:
            raise ValueError(f"no tensors in {file_name!r}")
        nbytes = self.manifest.file_sizes()[file_name]
        path = self.path / file_name
        _check_size(path, nbytes)
        buffer = aligned(nbytes)
        fd = open_for_reading(path)
        try:
            for entry in entries:
                read_tensor(fd, path, entry, buffer[entry.offset : padded_end(entry)], on_event, nbytes)
        finally:
            os.close(fd)
        return {entry.name: buffer[entry.offset : entry.offset + entry.nbytes] for entry in entries}

    def bank(self, layer: int) -> Bank:
        """The experts of `layer`, opened. ValueError for a layer without a bank, InputError as `Bank`."""
        for entry in self.manifest.banks:
            if entry.layer == layer:
                return Bank(self.path / entry.file, entry)
        raise ValueError(f"layer {layer} has no experts")


def padded_end(entry: TensorEntry) -> int:
    """Where a tensor's padding ends: at the next tensor, or the end of the file."""
    return align_up(entry.offset + entry.nbytes, TRUNK_ALIGN)


def read_tensor(fd: int, path: Path, entry: TensorEntry, out: Bytes, on_event: OnEvent, total: int) -> None:
    """Read a tensor with its padding into `out`, piece by piece, and verify it: InputError for any damage."""
    where = f"{shown(path)}, tensor {entry.name!r}"
    hasher = Hasher()
    for begin in range(0, len(out), _PIECE):
        piece = out[begin : begin + _PIECE]
        pread_into(fd, piece, entry.offset + begin, where=where)
        hasher.update(piece)
        on_event(Progress("load", entry.offset + begin + len(piece), total))
    if hasher.value != entry.checksum:
        raise _damaged(where, entry.checksum, hasher.value)


def _damaged(where: str, expected: int, found: int) -> InputError:
    return InputError(
        f"{where} is damaged: expected checksum {to_hex(expected)}, its bytes give {to_hex(found)}", hint=AGAIN
    )


def _check_size(path: Path, expected: int) -> None:
    found = regular_size(path)
    if found != expected:
        fault = "is cut short" if found < expected else "is too long"
        raise InputError(f"{shown(path)} {fault}: expected {expected} bytes, found {found}", hint=AGAIN)


def _refuse_other_things(path: Path) -> None:
    """InputError, saying what lies there, unless `path` is a directory with a manifest."""
    problem = directory_problem(path)
    if problem is not None:
        raise InputError(
            f"{shown(path)} {problem}: expected a waste container, which is a directory",
            hint="convert a checkpoint first: waste convert SRC DST",
        )
    if os.path.lexists(path / MANIFEST_NAME):
        return
    if os.path.lexists(path / JOURNAL_NAME):
        raise InputError(
            f"{shown(path)} is an unfinished conversion: it has no {MANIFEST_NAME} yet",
            hint="run the same `waste convert` again to resume it",
        )
    names = os.listdir(path)
    if "config.json" in names or any(name.endswith(".safetensors") for name in names):
        raise InputError(
            f"{shown(path)} is a Hugging Face checkpoint, not a waste container",
            hint=f"convert it first: waste convert {shown(path)} DST",
        )
    raise InputError(
        f"{shown(path)} is not a waste container: it has no {MANIFEST_NAME}",
        hint="convert a checkpoint first: waste convert SRC DST",
    )
