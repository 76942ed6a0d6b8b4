"""`convert.journal`: what an unfinished conversion is made from, and which of its items are finished.

A line for each fact, each with its own checksum: "XXXXXXXXXXXXXXXX {json}\\n". The first line is the identity of the
conversion; then one line for every tensor and expert record that was written, with the checksum of what was written
and the digests of what it was made from; and one for every file that got its final name. A line that a crash cut
short ends the journal: what it would have said is done again.

Lines promise nothing: whoever resumes compares every promised item with the bytes that are there. Only files that have
their final name, and so were synced before the journal said it, are taken by their size: comparing them would read
hundreds of gigabytes at every resume, and `waste info --verify` does it at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from waste.container.manifest import TensorEntry
from waste.container.reader import JOURNAL_NAME
from waste.errors import ResourceError
from waste.io.checksum import checksum, from_hex, to_hex
from waste.io.files import fsync_directory, pwrite_all, read_file, shown, writing
from waste.io.locks import open_locked

_LIMIT = 1 << 30
_HEX = 16

Item = TypeVar("Item")


class Journal:
    """The journal of one target folder, open and locked: one conversion at a time writes there.

    `identity` is None for a journal without one (new, or cut short in its first line).
    """

    def __init__(self, directory: Path) -> None:
        """Open or create it. ResourceError when another conversion holds it or the folder cannot be written."""
        self.path = directory / JOURNAL_NAME
        self._fd = _locked(self.path)
        self.identity: dict[str, Any] | None = None
        self._tensors: dict[tuple[str, int], tuple[TensorEntry, dict[str, int]]] = {}
        self._records: dict[tuple[str, int], tuple[int, dict[str, int]]] = {}
        self._sealed: set[str] = set()
        self._end = 0
        self._read()

    # -- what it says

    def tensors(self, file: str) -> list[tuple[TensorEntry, dict[str, int]]]:
        """Entries of the tensors written to `file`, from the first up to the first gap, with their source digests."""
        return _prefix(self._tensors, file)

    def records(self, file: str) -> list[tuple[int, dict[str, int]]]:
        """Checksums of the records written to bank `file`, from the first up to the first gap, with source digests."""
        return _prefix(self._records, file)

    def sealed(self, file: str) -> bool:
        """Whether `file` was finished under its final name."""
        return file in self._sealed

    # -- what is added

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Start anew with `identity`: whatever stood here is gone."""
        with writing(self.path):
            os.ftruncate(self._fd, 0)
        self._end = 0
        self._tensors.clear()
        self._records.clear()
        self._sealed.clear()
        self._append({"identity": dict(identity)})
        self.identity = dict(identity)
        self.sync()
        with writing(self.path):
            fsync_directory(self.path.parent)

    def add_tensor(self, index: int, entry: TensorEntry, sources: Mapping[str, int]) -> None:
        """Tensor number `index` of its file is written; `sources` are digests by source tensor."""
        fact = {**vars(entry), "shape": list(entry.shape), "checksum": to_hex(entry.checksum)}
        self._append({"tensor": index, "entry": fact, "sources": _hex(sources)})

    def add_record(self, file: str, expert: int, record: int, sources: Mapping[str, int]) -> None:
        """The record of `expert`, with checksum `record`, is written to bank `file`."""
        self._append({"record": expert, "file": file, "checksum": to_hex(record), "sources": _hex(sources)})

    def add_sealed(self, file: str) -> None:
        """`file` has its final name; everything before is made durable."""
        self._append({"sealed": file})
        self._sealed.add(file)
        self.sync()

    def sync(self) -> None:
        """Make every line durable."""
        with writing(self.path):
            os.fsync(self._fd)

    def remove(self) -> None:
        """The conversion is finished: delete the journal, durably."""
        with writing(self.path):
            self.path.unlink(missing_ok=True)
            fsync_directory(self.path.parent)

    def close(self) -> None:
        """Release the lock; the journal stays for a resume."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    # -- lines

    def _append(self, fact: Mapping[str, Any]) -> None:
        text = json.dumps(fact, sort_keys=True, separators=(",", ":")).encode("ascii")
        line = to_hex(checksum(text)).encode("ascii") + b" " + text + b"\n"
        with writing(self.path):
            pwrite_all(self._fd, line, self._end)
        self._end += len(line)

    def _read(self) -> None:
        """Take in all intact lines and cut off what follows them."""
        data = read_file(self.path, limit=_LIMIT)
        begin = 0
        while (newline := data.find(b"\n", begin)) >= 0:
            fact = _fact(data[begin:newline])
            if fact is None or not self._take(fact, first=begin == 0):
                break
            begin = newline + 1
        self._end = begin
        if begin != len(data):
            with writing(self.path):
                os.ftruncate(self._fd, begin)

    def _take(self, fact: dict[str, Any], *, first: bool) -> bool:
        """Remember one fact; False when it is none that this version writes."""
        try:
            if first:
                self.identity = dict(fact["identity"])
            elif "tensor" in fact:
                entry = dict(fact["entry"])
                shape, check = tuple(entry.pop("shape")), from_hex(entry.pop("checksum"))
                tensor = TensorEntry(**entry, shape=shape, checksum=check)
                self._tensors[tensor.file, int(fact["tensor"])] = tensor, _digests(fact["sources"])
            elif "record" in fact:
                key = str(fact["file"]), int(fact["record"])
                self._records[key] = from_hex(fact["checksum"]), _digests(fact["sources"])
            else:
                self._sealed.add(str(fact["sealed"]))
        except (KeyError, TypeError, ValueError):
            return False
        return True


def begun_identity(directory: Path) -> dict[str, Any] | None:
    """The identity of the conversion that was begun in `directory`, None where no journal tells. Changes nothing."""
    try:
        with (directory / JOURNAL_NAME).open("rb") as file:
            line = file.readline(_LIMIT)
    except OSError:
        return None
    fact = _fact(line[:-1]) if line.endswith(b"\n") else None
    identity = None if fact is None else fact.get("identity")
    return identity if isinstance(identity, dict) else None


def _locked(path: Path) -> int:
    """The journal's descriptor, locked."""
    busy = ResourceError(
        f"another conversion is writing to {shown(path.parent)}", hint="wait for it to end, or choose another DST"
    )
    with writing(path):
        return open_locked(path, busy)


def _fact(line: bytes) -> dict[str, Any] | None:
    """The fact of one line, None when the line is damaged."""
    head, _, text = line.partition(b" ")
    if len(head) != _HEX or head != to_hex(checksum(text)).encode("ascii"):
        return None
    try:
        fact = json.loads(text)
    except ValueError:
        return None
    return fact if isinstance(fact, dict) else None


def _prefix(items: Mapping[tuple[str, int], Item], file: str) -> list[Item]:
    found: list[Item] = []
    while (file, len(found)) in items:
        found.append(items[file, len(found)])
    return found


def _hex(digests: Mapping[str, int]) -> dict[str, str]:
    return {name: to_hex(value) for name, value in digests.items()}


def _digests(found: Mapping[str, str]) -> dict[str, int]:
    return {name: from_hex(value) for name, value in found.items()}
