"""Opening a container and reading from it: nothing is handed out whose checksum has not been verified.

Plain reads, no memory maps: a file that shrinks or a drive that fails is an error here, not a signal.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from waste.container.layout import HEADER_BYTES, RecordLayout, bank_digest, check_record, stored_checksum
from waste.container.load import Loaded, check_size, damaged, load_tensors
from waste.container.manifest import MANIFEST_NAME, BankEntry, Manifest
from waste.errors import InputError
from waste.events import OnEvent, ignore
from waste.io.checksum import checksum, to_hex
from waste.io.direct import DIRECT_ALIGN, DirectFile, address
from waste.io.files import directory_problem, open_for_reading, pread_into, read_file, shown
from waste.io.throttle import Throttle

Bytes = npt.NDArray[np.uint8]

JOURNAL_NAME = "convert.journal"

# The manifests of the largest models take about 1 MiB, tokenizers 20 MiB.
_MAX_MANIFEST = 256 << 20
_MAX_SMALL_FILE = 256 << 20


class Bank:
    """The expert records of one layer, open for reading. Reads are thread-safe; close when done.

    Records are whole pages on whole pages, so they are read past the page cache where the file system can do that.
    """

    def __init__(self, path: Path, entry: BankEntry, *, direct: bool = True, on_event: OnEvent = ignore) -> None:
        """InputError when the file is missing or has not the size that the manifest says.

        `direct=False` reads through the page cache; `on_event` is told when the file system has nothing else.
        """
        check_size(path, entry.experts * entry.layout.stride)
        self._path = path
        self._entry = entry
        self._file = DirectFile(path, direct=direct, on_event=on_event)

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

    @property
    def direct(self) -> bool:
        """Whether reads bypass the page cache, as far as is known: a file system may refuse at the first one."""
        return self._file.direct

    @property
    def drive(self) -> int:
        """The device the file lies on (st_dev): banks of one drive share its queue."""
        return self._file.drive

    def read(self, expert: int, buffer: Bytes) -> None:
        """Fill `buffer`, (stride,) uint8, with the record of `expert`, and verify it.

        A buffer that is not on 4096 bytes is filled through the page cache. Raises InputError naming file and record
        for a read error, a short file and any damage; the buffer then holds nothing of use. ValueError for a wrong
        size, an expert there is not, a closed bank.
        """
        if not 0 <= expert < self.experts:
            raise ValueError(f"expert {expert} of {self.experts}")
        if buffer.shape != (self.layout.stride,) or buffer.dtype != np.uint8:
            raise ValueError(f"expected {self.layout.stride} bytes, found {buffer.dtype} with shape {buffer.shape}")
        where = f"{shown(self._path)}, record {expert}"
        # One read, then one pass of the checksum: at 12 MiB no slower than hashing pieces of 1 to 4 MiB between their
        # reads, for a tenth to a half less CPU time (LEARNED: reader-pool).
        read = self._file.read_cached_into if address(buffer) % DIRECT_ALIGN else self._file.read_into
        read(buffer, expert * self.layout.stride, where=where)
        check_record(buffer, self.layer, expert, self.layout, where)

    def close(self) -> None:
        """Close the file. Not while another thread reads."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Container:
    """A finished container: its manifest, and verified access to what it describes. Holds no open file."""

    def __init__(self, path: Path, manifest: Manifest, moved: Mapping[str, Path] | None = None) -> None:
        """`moved`: where banks lie that are not in the container's directory, by file name."""
        self.path = path
        self.manifest = manifest
        self._moved = dict(moved or {})

    @classmethod
    def open(cls, path: Path, experts_dirs: Sequence[Path] = ()) -> Container:
        """Read the manifest, check the size of every file and the digests of the small ones.

        Banks may lie in the container or, under the same names, in any of `experts_dirs`: on several drives.
        Raises InputError for anything that is no finished, undamaged container, saying what it is
        instead, and for a bank that is nowhere, in two places, or of another conversion; UnsupportedError for a
        container of another version.
        """
        _refuse_other_things(path)
        manifest_path = path / MANIFEST_NAME
        manifest = Manifest.from_bytes(read_file(manifest_path, limit=_MAX_MANIFEST), shown(manifest_path))
        container = cls(path, manifest, _moved_banks(path, manifest, experts_dirs))
        for name, nbytes in manifest.file_sizes().items():
            check_size(container.place(name), nbytes)
        for bank in manifest.banks:
            if bank.file in container._moved:
                _check_origin(container.place(bank.file), bank)
        for entry in manifest.files:
            container.read_file(entry.name)
        return container

    def place(self, name: str) -> Path:
        """Where the file `name` of this container lies."""
        return self._moved.get(name, self.path / name)

    def read_file(self, name: str) -> bytes:
        """The bytes of a small file, verified. InputError when the manifest lists no such file, or it is damaged."""
        for entry in self.manifest.files:
            if entry.name == name:
                break
        else:
            raise InputError(f"the container {shown(self.path)} has no file {name!r}", hint="convert the model again")
        path = self.path / name
        check_size(path, entry.nbytes)
        data = read_file(path, limit=_MAX_SMALL_FILE)
        if checksum(data) != entry.digest:
            raise damaged(shown(path), entry.digest, checksum(data))
        return data

    def load(
        self,
        file_name: str,
        on_event: OnEvent = ignore,
        *,
        skip: Collection[str] = (),
        direct: bool = True,
        limit: Throttle | None = None,
    ) -> Loaded:
        """All tensors of one file but those called in `skip`, as `container.load.load_tensors` brings them in.

        Raises InputError for any damage, ResourceError when the memory is not to be had, ValueError for a file
        without tensors.
        """
        entries = self.manifest.tensors_of(file_name)
        if not entries:
            raise ValueError(f"no tensors in {file_name!r}")
        path = self.path / file_name
        check_size(path, self.manifest.file_sizes()[file_name])
        return load_tensors(
            path, [entry for entry in entries if entry.name not in skip], on_event, direct=direct, limit=limit
        )

    def load_tensors(self, file_name: str, on_event: OnEvent = ignore) -> dict[str, Bytes]:
        """All tensors of one file by name, each (nbytes,) uint8; errors as `load`."""
        return self.load(file_name, on_event).tensors

    def bank(self, layer: int, *, direct: bool = True, on_event: OnEvent = ignore) -> Bank:
        """The experts of `layer`, opened as `Bank` says. ValueError for a layer without a bank, InputError as there."""
        for entry in self.manifest.banks:
            if entry.layer == layer:
                return Bank(self.place(entry.file), entry, direct=direct, on_event=on_event)
        raise ValueError(f"layer {layer} has no experts")


def _moved_banks(path: Path, manifest: Manifest, experts_dirs: Sequence[Path]) -> dict[str, Path]:
    """Which banks lie in one of `experts_dirs`, and where. A file that can be reached in two ways is one file."""
    for directory in experts_dirs:
        problem = directory_problem(directory)
        if problem is not None:
            raise InputError(
                f"the experts directory {shown(directory)} {problem}",
                hint="name one that holds experts-*.bin files: --experts-dir DIR",
            )
    moved = {}
    for entry in manifest.banks:
        here = path / entry.file
        found = [
            place for place in (here, *(directory / entry.file for directory in experts_dirs)) if os.path.exists(place)
        ]
        if not found and not experts_dirs and here.is_symlink():
            break  # to nothing, which the check of its size tells
        if not found:
            others = ", ".join(shown(directory) for directory in experts_dirs)
            raise InputError(
                f"{shown(here)} is missing" + (f", and in none of the experts directories {others}" if others else ""),
                hint="name the directory that holds it: --experts-dir DIR",
            )
        for other in found[1:]:
            if not other.samefile(found[0]):
                raise InputError(
                    f"there are two files {entry.file!r}: {shown(found[0])} and {shown(other)}",
                    hint="remove the one that should not be used, or its directory from --experts-dir",
                )
        if found and found[0] != here:
            moved[entry.file] = found[0]
    return moved


def _check_origin(path: Path, entry: BankEntry) -> None:
    """InputError unless the bank at `path` is the one of this container.

    A directory for experts may well hold another model's, of the same names and sizes: every record valid, every answer
    wrong. So the checksums in all records' headers are compared with the digest; 12,096 of them, those of
    GLM-5.3-Flash, take 0.05 s from the page cache.
    """
    head = np.empty(HEADER_BYTES, np.uint8)
    fd = open_for_reading(path)
    try:
        checksums = []
        for expert in range(entry.experts):
            pread_into(fd, head, expert * entry.layout.stride, where=f"{shown(path)}, record {expert}")
            checksums.append(stored_checksum(head))
    finally:
        os.close(fd)
    if bank_digest(checksums) != entry.digest:
        raise InputError(
            f"{shown(path)} is of another conversion: its records have the digest {to_hex(bank_digest(checksums))}, "
            f"expected {to_hex(entry.digest)}",
            hint="name the directory with this container's banks: --experts-dir DIR",
        )


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
