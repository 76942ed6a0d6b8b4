"""A file of routing: which experts every token chose in every layer, written while a model runs, read by `replay`.

    "waste.trace/1\n\0\0"  u32 length, u64 XXH3-64 of the header   header: canonical JSON (see `TraceHeader`)
    frames, each           u8 kind, 3 zeros, u32 n, u64 start, u64 XXH3-64 of these 16 bytes and the payload; payload

    kind 1 STEPS   n tokens decoded one after another from position `start`    (n, L, K) expert ids
    kind 2 CHUNK   n tokens that passed each layer together (prefill)          (n, L, K) expert ids
    kind 3 MARK    a note in n bytes of UTF-8: a new session, a change of topic

L layers in the order of the header, K choices, best first, in one byte up to 256 experts, in two above. Up to 64 steps
share a frame: a choice takes 1.01 bytes at 7 x 4 of 32 experts and 2.001 at 42 x 8 of 288. Little-endian.

Frames are appended as they fill and never changed: whoever was interrupted has lost at most the last of them.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from waste.backends.base import Routing, Selection
from waste.container.document import Node, parse, serialise
from waste.container.manifest import Manifest
from waste.errors import InputError
from waste.events import Notice, OnEvent, ignore
from waste.io.checksum import checksum, to_hex
from waste.io.files import open_for_reading, regular_size, shown, writing
from waste.models.config import ModelConfig

FORMAT = "waste.trace/1"
_MAGIC = FORMAT.encode() + b"\n\0\0"
_FRONT = struct.Struct("<IQ")
_FRAME = struct.Struct("<B3xIQ")
_SUM = struct.Struct("<Q")
_STEPS, _CHUNK, _MARK = 1, 2, 3

STEPS_PER_FRAME = 64
_MAX_HEADER = 1 << 20
_MAX_TOKENS = 1 << 20  # of a frame
_MAX_PAYLOAD = 1 << 28
_MAX_MARK = 4096
_LIMITS = {_STEPS: (1, STEPS_PER_FRAME), _CHUNK: (2, _MAX_TOKENS), _MARK: (0, _MAX_MARK)}  # of n, by kind
_MAX_START = 1 << 62
_MAX_EXPERTS = 1 << 16
_MAX_LAYERS = 1 << 12
_MAX_RECORD = 1 << 40
_KEYS = frozenset(("format", "model", "layers", "experts", "top_k", "record_bytes"))
_AGAIN = "write the trace again: waste bench MODEL --trace FILE"

Choices = npt.NDArray[np.unsignedinteger[Any]]  # uint8 up to 256 experts, uint16 above


@dataclass(frozen=True)
class TraceHeader:
    """Whose routing it is.

    model: digest of the container's manifest; layers: those with routed experts, ascending; record_bytes: of one
    expert of each of these layers.
    """

    model: str
    layers: tuple[int, ...]
    experts: int  # per layer
    top_k: int
    record_bytes: tuple[int, ...]

    @staticmethod
    def of(config: ModelConfig, manifest: Manifest) -> TraceHeader:
        """Of a container's model."""
        record = {bank.layer: bank.layout.stride for bank in manifest.banks}
        layers = config.moe_layers
        router = config.router
        digest = to_hex(checksum(manifest.to_bytes()))
        return TraceHeader(digest, layers, router.experts, router.top_k, tuple(record[layer] for layer in layers))

    @property
    def strides(self) -> dict[int, int]:
        """Bytes of a record by layer."""
        return dict(zip(self.layers, self.record_bytes, strict=True))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an expert id in the file."""
        return np.dtype("<u1" if self.experts <= 256 else "<u2")

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return serialise(
            {
                "format": FORMAT,
                "model": self.model,
                "layers": list(self.layers),
                "experts": self.experts,
                "top_k": self.top_k,
                "record_bytes": list(self.record_bytes),
            }
        )

    @staticmethod
    def from_bytes(data: bytes, where: str) -> TraceHeader:
        """The inverse; InputError for anything `to_bytes` would not write."""
        root = parse(data, where)
        root.object(_KEYS)
        experts = root.member("experts").integer(1, _MAX_EXPERTS + 1)
        header = TraceHeader(
            model=root.member("model").text(),
            layers=_integers(root.member("layers"), _MAX_LAYERS),
            experts=experts,
            top_k=root.member("top_k").integer(1, experts + 1),
            record_bytes=_integers(root.member("record_bytes"), _MAX_RECORD),
        )
        if not header.layers or list(header.layers) != sorted(set(header.layers)):
            raise root.member("layers").wrong("layers in ascending order")
        if len(header.record_bytes) != len(header.layers) or 0 in header.record_bytes:
            raise root.member("record_bytes").wrong(f"{len(header.layers)} sizes")
        return header


@dataclass(frozen=True)
class Steps:
    """Tokens that were decoded one by one: ids (T, L, K), best first."""

    start: int
    ids: Choices


@dataclass(frozen=True)
class Chunk:
    """Tokens that passed each layer together, as in prefill: ids (T, L, K), best first."""

    start: int
    ids: Choices


@dataclass(frozen=True)
class Mark:
    """What was noted at this point of the trace."""

    text: str


Entry = Steps | Chunk | Mark


class TraceWriter:
    """Writes what it is told as `waste.layers.trace.Trace`. Made by `write_trace`.

    A pass that ends early (a read error) leaves no trace. Not thread-safe.
    """

    def __init__(self, file: BinaryIO, path: Path, header: TraceHeader) -> None:
        self._file = file
        self._path = path
        self._header = header
        self._place = {layer: i for i, layer in enumerate(header.layers)}
        self._pass: list[Choices] = []  # of the layers so far: (T, K)
        self._steps: list[Choices] = []  # whole passes of one token: (L, K)
        self._start = 0  # of the first step
        head = header.to_bytes()
        with writing(path):
            file.write(_MAGIC + _FRONT.pack(len(head), checksum(head)) + head)

    def routing(self, layer: int, start: int, routing: Routing) -> None:
        """One layer of one pass. Layers that the header does not know (a draft's) are left out."""
        place = self._place.get(layer)
        if place is None:
            return
        if place != len(self._pass):
            if place:
                raise ValueError(f"layer {layer} without the layers below it")
            self._pass = []  # the pass before did not reach its end
        self._pass.append(routing.ids.astype(self._header.dtype))
        if len(self._pass) < len(self._place):
            return
        ids = np.stack(self._pass, axis=1)
        self._pass = []
        if len(ids) > 1:
            self._flush()
            self._frame(_CHUNK, len(ids), start, ids.tobytes())
            return
        if start != self._start + len(self._steps):
            self._flush()
        if not self._steps:
            self._start = start
        self._steps.append(ids[0])
        if len(self._steps) == STEPS_PER_FRAME:
            self._flush()

    def selection(self, layer: int, start: int, tokens: int, selection: Selection | None) -> None:
        """Attended positions are not kept."""

    def mark(self, text: str) -> None:
        """Note something here: "session", a topic. At most 4,096 bytes of UTF-8; what is more is cut off."""
        data = text.encode("utf-8", "replace")[:_MAX_MARK].decode("utf-8", "ignore").encode()
        self._flush()
        self._frame(_MARK, len(data), 0, data)

    def close(self) -> None:
        """Write what has not been written. The file is the caller's."""
        self._flush()

    def _flush(self) -> None:
        steps, self._steps = self._steps, []
        if steps:
            self._frame(_STEPS, len(steps), self._start, np.stack(steps).tobytes())

    def _frame(self, kind: int, count: int, start: int, payload: bytes) -> None:
        front = _FRAME.pack(kind, count, start)
        with writing(self._path):
            self._file.write(front + _SUM.pack(checksum(front, payload)) + payload)
            self._file.flush()


class write_trace:
    """`with write_trace(path, header) as trace: session.eval(ids, trace=trace)`. Replaces a file that was there.

    Raises ResourceError when the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], header: TraceHeader) -> None:
        self._path = Path(path)
        self._header = header

    def __enter__(self) -> TraceWriter:
        with writing(self._path):
            self._file = self._path.open("wb")
        try:
            self._writer = TraceWriter(self._file, self._path, self._header)
        except BaseException:
            self._file.close()
            raise
        return self._writer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._writer.close()
        finally:
            with writing(self._path):
                self._file.close()


@dataclass(frozen=True)
class RoutingTrace:
    """A trace in memory."""

    header: TraceHeader
    entries: tuple[Entry, ...]

    @property
    def tokens(self) -> int:
        return sum(len(entry.ids) for entry in self.entries if not isinstance(entry, Mark))


def read_trace(path: str | os.PathLike[str], on_event: OnEvent = ignore) -> RoutingTrace:
    """The trace in the file at `path`.

    One that ends inside a frame was interrupted while it was written: its whole frames are used, and a Notice says so.
    Raises InputError for anything else that `write_trace` would not have written.
    """
    source = Path(path)
    with _Source(source) as file:
        header = _read_header(file)
        entries: list[Entry] = []
        while file.left:
            entry = _read_frame(file, header)
            if entry is None:
                tokens = sum(len(e.ids) for e in entries if not isinstance(e, Mark))
                on_event(Notice(f"{shown(source)} was cut short: the {tokens} tokens that are whole are used"))
                break
            entries.append(entry)
    return RoutingTrace(header, tuple(entries))


class _Source:
    """A file read from front to back. Its end may come at any byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left = regular_size(path)
        self.at = 0

    def __enter__(self) -> _Source:
        self._file = os.fdopen(open_for_reading(self.path), "rb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, nbytes: int) -> bytes | None:
        """The next bytes; None, and nothing is left, when the file ends before."""
        try:
            data = self._file.read(nbytes) if nbytes <= self.left else b""
        except OSError as error:
            raise InputError(f"{shown(self.path)} cannot be read: {error.strerror}") from error
        if len(data) < nbytes:
            self.left = 0
            return None
        self.at += nbytes
        self.left -= nbytes
        return data

    def damaged(self, at: int, what: str) -> InputError:
        return InputError(f"{shown(self.path)} is damaged at byte {at}: {what}", hint=_AGAIN)


def _read_header(file: _Source) -> TraceHeader:
    if file.take(len(_MAGIC)) != _MAGIC:
        raise InputError(f"{shown(file.path)} is not a routing trace: it does not begin with {FORMAT!r}", hint=_AGAIN)
    front = file.take(_FRONT.size)
    length, expected = _FRONT.unpack(front) if front else (0, 0)
    if length > _MAX_HEADER:
        raise file.damaged(len(_MAGIC), f"a header of {length} bytes")
    head = file.take(length) if front else None
    if head is None:
        raise InputError(f"{shown(file.path)} ends in its header: it was cut short", hint=_AGAIN)
    if checksum(head) != expected:
        raise file.damaged(len(_MAGIC), "the header does not match its checksum")
    return TraceHeader.from_bytes(head, shown(file.path))


def _read_frame(file: _Source, header: TraceHeader) -> Entry | None:
    """The next frame; None when the file ends inside it."""
    at = file.at
    front = file.take(_FRAME.size + _SUM.size)
    if front is None:
        return None
    (expected,) = _SUM.unpack(front[_FRAME.size :])
    front = front[: _FRAME.size]
    kind, count, start = _FRAME.unpack(front)
    shape = (count, len(header.layers), header.top_k)
    if kind not in _LIMITS:
        raise file.damaged(at, f"a frame of the unknown kind {kind}")
    low, high = _LIMITS[kind]
    nbytes = count if kind == _MARK else header.dtype.itemsize * math.prod(shape)
    if not low <= count <= high or nbytes > _MAX_PAYLOAD or start >= _MAX_START:
        raise file.damaged(at, f"a frame of {count} from position {start}")
    payload = file.take(nbytes)
    if payload is None:
        return None
    if checksum(front, payload) != expected:
        raise file.damaged(at, "a frame that does not match its checksum")
    if kind == _MARK:
        try:
            return Mark(payload.decode("utf-8"))
        except UnicodeDecodeError:
            raise file.damaged(at, "a note that is not UTF-8") from None
    ids: Choices = np.frombuffer(payload, header.dtype).reshape(shape)
    ordered = np.sort(ids, axis=-1)
    if ids.max() >= header.experts or (ordered[..., 1:] == ordered[..., :-1]).any():
        raise file.damaged(at, f"choices that are not {header.top_k} different ones of {header.experts} experts")
    return Steps(start, ids) if kind == _STEPS else Chunk(start, ids)


def _integers(node: Node, limit: int) -> tuple[int, ...]:
    return tuple(element.integer(0, limit) for element in node.elements())
