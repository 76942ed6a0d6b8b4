"""Where everything lies on disk: alignments, expert records, and the 128 bytes in front of each record.

A record is one routed expert: header, then gate, up and down in kernel layout, each on 64
bytes, padded to a multiple of 4096 so that a bank is an array of records, expert e at
e * stride, and one aligned read fetches everything. Header, little-endian:

    0  4s  magic      8  u32 layer     16 u64 stride
    4  u32 version   12  u32 expert    24 u64 checksum
    32, 64, 96: gate, up, down: u32 format code, rows, cols, 0; u64 offset, nbytes

The checksum is XXH3-64 over the whole stride, its own field taken as zero; so the padding is
covered too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waste import quant
from waste.errors import InputError
from waste.io.buffers import aligned
from waste.io.checksum import checksum

Bytes = npt.NDArray[np.uint8]

VERSION = 1
RECORD_MAGIC = b"WREC"
TRUNK_ALIGN = 64
SECTION_ALIGN = 64
RECORD_ALIGN = 4096
HEADER_BYTES = 128

_FRONT = struct.Struct("<4sIIIQQ")
_SECTION = struct.Struct("<IIIIQQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = 24
_SUMMED_FROM = _CHECKSUM_AT + _CHECKSUM.size
_RECONVERT = "copy the file again, or convert the model again"


def align_up(nbytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, cols) as which a trunk tensor is encoded: a matrix as it is, anything else shape[0] by the rest.

    A scalar is 1 by 1. Only matrices are quantised; all others (norms, convolutions) are f32.
    """
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


@dataclass(frozen=True)
class Section:
    """One matrix of a record: (rows, cols) in format `fmt`, `nbytes` bytes at `offset` from the record's start."""

    fmt: str
    rows: int
    cols: int
    offset: int
    nbytes: int


def _section(fmt: str, rows: int, cols: int, offset: int) -> Section:
    return Section(fmt, rows, cols, offset, quant.get(fmt).nbytes(rows, cols))


def _end(section: Section) -> int:
    """Where the next section may begin."""
    return align_up(section.offset + section.nbytes, SECTION_ALIGN)


@dataclass(frozen=True)
class RecordLayout:
    """What all records of a bank share: their three sections and their distance in bytes."""

    gate: Section
    up: Section
    down: Section
    stride: int

    @classmethod
    def of(cls, fmt_gate: str, fmt_up: str, fmt_down: str, hidden: int, inner: int) -> RecordLayout:
        """The only layout for these formats and sizes: gate and up (inner, hidden), down (hidden, inner).

        UsageError for an unknown format.
        """
        gate = _section(fmt_gate, inner, hidden, HEADER_BYTES)
        up = _section(fmt_up, inner, hidden, _end(gate))
        down = _section(fmt_down, hidden, inner, _end(up))
        return cls(gate, up, down, stride=align_up(_end(down), RECORD_ALIGN))

    @property
    def sections(self) -> tuple[Section, Section, Section]:
        """gate, up, down: the order in which they lie."""
        return self.gate, self.up, self.down


def pack_record(layer: int, expert: int, layout: RecordLayout, gate: Bytes, up: Bytes, down: Bytes) -> Bytes:
    """One record: (stride,) uint8, page-aligned, checksum filled in.

    gate, up, down are blobs as their formats encode them; ValueError when a size differs.
    """
    record = aligned(layout.stride, RECORD_ALIGN)
    record[:HEADER_BYTES] = np.frombuffer(_header(layer, expert, layout), np.uint8)
    for section, blob in zip(layout.sections, (gate, up, down), strict=True):
        if blob.shape != (section.nbytes,) or blob.dtype != np.uint8:
            raise ValueError(f"expected {section.nbytes} bytes, found {blob.dtype} with shape {blob.shape}")
        record[section.offset : section.offset + section.nbytes] = blob
    record[_CHECKSUM_AT:_SUMMED_FROM] = np.frombuffer(_CHECKSUM.pack(record_checksum(record)), np.uint8)
    return record


def record_checksum(record: Bytes) -> int:
    """The checksum that belongs into the header of `record`, (stride,) uint8, whatever stands there now."""
    return checksum(record[:_CHECKSUM_AT], bytes(_CHECKSUM.size), record[_SUMMED_FROM:])


def stored_checksum(record: Bytes) -> int:
    """The checksum that stands in the header of `record`."""
    return int(_CHECKSUM.unpack(record[_CHECKSUM_AT:_SUMMED_FROM].tobytes())[0])


def bank_digest(checksums: Sequence[int]) -> int:
    """The digest of a bank: the checksum of its record checksums, each as 8 little-endian bytes."""
    return checksum(np.array(checksums, "<u8"))


def check_record(buffer: Bytes, layer: int, expert: int, layout: RecordLayout, where: str) -> None:
    """InputError unless `buffer`, (stride,) uint8, is exactly the undamaged record of this layer and expert.

    `where` names file and record in the message.
    """
    if buffer.shape != (layout.stride,):
        raise ValueError(f"expected a record of {layout.stride} bytes, found shape {buffer.shape}")
    head = buffer[:HEADER_BYTES].tobytes()
    stored, computed = stored_checksum(buffer), record_checksum(buffer)
    if stored != computed:
        raise InputError(
            f"{where} is damaged: its checksum says {stored:016x}, its bytes give {computed:016x}", hint=_RECONVERT
        )
    expected = _header(layer, expert, layout)
    if _without_checksum(head) == _without_checksum(expected):
        return
    magic, version, found_layer, found_expert, _, _ = _FRONT.unpack(head[: _FRONT.size])
    if magic != RECORD_MAGIC:
        raise InputError(f"{where} is not an expert record: expected magic {RECORD_MAGIC!r}, found {magic!r}")
    if version != VERSION:
        raise InputError(f"{where} has version {version}, expected {VERSION}")
    if (found_layer, found_expert) != (layer, expert):
        raise InputError(
            f"{where} holds layer {found_layer}, expert {found_expert}, expected layer {layer}, expert {expert}",
            hint=_RECONVERT,
        )
    raise InputError(f"{where} has formats or sizes other than its manifest says", hint=_RECONVERT)


def _header(layer: int, expert: int, layout: RecordLayout) -> bytes:
    """The header with its checksum zero."""
    parts = [_FRONT.pack(RECORD_MAGIC, VERSION, layer, expert, layout.stride, 0)]
    for section in layout.sections:
        code = quant.get(section.fmt).code
        parts.append(_SECTION.pack(code, section.rows, section.cols, 0, section.offset, section.nbytes))
    return b"".join(parts)


def _without_checksum(head: bytes) -> bytes:
    return head[:_CHECKSUM_AT] + head[_SUMMED_FROM:]
