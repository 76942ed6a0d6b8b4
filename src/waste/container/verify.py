"""Reading a whole container against its checksums, past the first damage to the last."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from waste.container.layout import RECORD_ALIGN, Bytes, bank_digest, stored_checksum
from waste.container.load import damaged, padded_end
from waste.container.manifest import BankEntry, TensorEntry
from waste.container.reader import Bank, Container
from waste.container.strips import Strips, stored_sums, sums_name
from waste.errors import InputError
from waste.events import OnEvent, Progress, ignore
from waste.io.buffers import aligned
from waste.io.checksum import Hasher, to_hex
from waste.io.files import open_for_reading, pread_into, shown

# Large enough for a drive to run at full speed, small enough to be still in the cache when hashed.
_PIECE = 4 << 20


def verify(container: Container, on_event: OnEvent = ignore) -> list[str]:
    """Check every byte; one line for each damaged place, naming file and tensor or record. Empty: all is well.

    Beyond what every read checks, the digests of banks show a record that was replaced by a valid
    one of another conversion. Reports `Progress("verify", ...)` in bytes of the whole container.
    """
    manifest = container.manifest
    report = _Report(on_event, sum(manifest.file_sizes().values()))
    for entry in manifest.files:
        try:
            container.read_file(entry.name)
        except InputError as error:
            report.damage.append(error.message)
        report.advance(entry.nbytes)
    for name in manifest.tensor_files():
        _verify_tensors(container, name, report)
    for bank in manifest.banks:
        _verify_bank(container, bank, report)
    return report.damage


class _Report:
    """What has been found so far, and how far the reading has come."""

    def __init__(self, on_event: OnEvent, total: int) -> None:
        self.damage: list[str] = []
        self._on_event = on_event
        self._total = total
        self._done = 0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_event(Progress("verify", self._done, self._total))


def _verify_tensors(container: Container, name: str, report: _Report) -> None:
    path = container.path / name
    entries = container.manifest.tensors_of(name)
    try:
        fd = open_for_reading(path)
    except InputError as error:
        report.damage.append(error.message)
        report.advance(container.manifest.file_sizes()[name])
        return
    try:
        buffer = np.empty(max(padded_end(entry) - entry.offset for entry in entries), np.uint8)
        for entry in entries:
            nbytes = padded_end(entry) - entry.offset
            try:
                _verify_tensor(fd, path, entry, buffer[:nbytes])
                _verify_strips(container, entry, buffer[:nbytes], report)
            except InputError as error:
                report.damage.append(error.message)
            report.advance(nbytes)
        extra = os.fstat(fd).st_size - padded_end(entries[-1])
    finally:
        os.close(fd)
    if extra > 0:
        report.damage.append(f"{shown(path)} has {extra} bytes behind its last tensor")


def _verify_tensor(fd: int, path: Path, entry: TensorEntry, blob: Bytes) -> None:
    """Read a tensor into `blob`, (nbytes with padding,) uint8; InputError for any damage."""
    where = f"{shown(path)}, tensor {entry.name!r}"
    hasher = Hasher()
    for begin in range(0, len(blob), _PIECE):
        piece = blob[begin : begin + _PIECE]
        pread_into(fd, piece, entry.offset + begin, where=where)
        hasher.update(piece)
    if hasher.value != entry.checksum:
        raise damaged(where, entry.checksum, hasher.value)


def _verify_strips(container: Container, entry: TensorEntry, blob: Bytes, report: _Report) -> None:
    """Compare an undamaged tensor, (nbytes with padding,) uint8, with the checksums of its strips, if there are any."""
    try:
        stored = stored_sums(container, entry)
    except InputError as error:
        if error.message not in report.damage:  # where it is, the small file itself was found damaged
            report.damage.append(error.message)
        return
    if stored is None:
        return
    wrong = np.flatnonzero(Strips.of(entry.fmt, entry.shape).sums(blob) != stored)
    if len(wrong):
        report.damage.append(
            f"{shown(container.path / sums_name(entry.name))} does not belong to tensor {entry.name!r}: "
            f"{len(wrong)} of {len(stored)} strips have other checksums, the first is strip {wrong[0]}"
        )


def _verify_bank(container: Container, entry: BankEntry, report: _Report) -> None:
    path = container.place(entry.file)
    try:
        bank = Bank(path, entry)
    except InputError as error:
        report.damage.append(error.message)
        report.advance(entry.experts * entry.layout.stride)
        return
    before = len(report.damage)
    checksums = []
    with bank:
        record = aligned(entry.layout.stride, RECORD_ALIGN)
        for expert in range(entry.experts):
            try:
                bank.read(expert, record)
                checksums.append(stored_checksum(record))
            except InputError as error:
                report.damage.append(error.message)
            report.advance(entry.layout.stride)
    if len(report.damage) == before and bank_digest(checksums) != entry.digest:
        report.damage.append(
            f"{shown(path)} holds a record of another conversion: every record is valid, but their digest is "
            f"{to_hex(bank_digest(checksums))}, expected {to_hex(entry.digest)}"
        )
