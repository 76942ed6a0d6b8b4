"""Session files: states of one timeline at one or more of its tokens (checkpoints), to go on from in another process.

    block 0     magic, version, length of the JSON, JSON (model digest, positions, size and checksum of the rest),
                zeros, XXH3-64 of the block
    segments    one a checkpoint, in order; what grows with the tokens is stored once:
                    ids of the tokens since the last checkpoint                        int32
                    for each KDA layer   conv tails, memory                            float32, all of it
                    for each MLA layer   latent rows since the last checkpoint         float32
                                         keys of the pools finished since then, and
                                         keys and gates of the pool being filled
                    logits after the checkpoint's last token (V,)

All numbers are little-endian. No shape is stored: with the positions, the model says them all, and its digest says
which model. KDA states cannot be rewound, hence several checkpoints: after a prompt, to ask it again, and after the
answer, to go on. The arrays are those of any backend, whatever the context they were allocated for.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from waste.backends.base import Array, KdaState, Ops
from waste.container.document import Node, parse, serialise
from waste.errors import InputError, UsageError
from waste.events import OnEvent, Progress, ignore
from waste.io.checksum import Hasher, checksum, from_hex, to_hex
from waste.io.files import open_for_reading, pread_into, shown
from waste.io.replace import Replacement
from waste.kvcache.state import SessionState

Ids = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

VERSION = 1
_MAGIC = b"waste-kv"
_BLOCK = 4096
_FRONT = struct.Struct("<8sII")  # magic, version, bytes of JSON
_CHECKSUM = struct.Struct("<Q")
_MAX_CHECKPOINTS = 64
_KEYS = frozenset(("body_bytes", "body_checksum", "model", "positions"))
# Read and written in pieces that are still in the cache when they are hashed; never a second copy of a state.
_PIECE = 4 << 20
_AGAIN = "remove it and start the session anew, or name another file"


class StateWriter:
    """Writes a session file, a checkpoint at a time; nothing is at its name until `publish`.

    A checkpoint is on its way to the disk when `add` returns, so none is held in memory.
    """

    def __init__(self, path: Path, model: int) -> None:
        """model: digest of the weights. ResourceError where `path` cannot be written, InputError as `Replacement`."""
        self._file = Replacement(path)
        self._model = model
        self._hasher = Hasher()
        self._end = _BLOCK
        self._positions: list[int] = []

    @property
    def position(self) -> int:
        """Tokens of the last checkpoint; 0 before the first."""
        return self._positions[-1] if self._positions else 0

    def add(self, ops: Ops, state: SessionState, ids: Ids, logits: F32) -> None:
        """A checkpoint of `state`, which `ids` (position,) led to; `logits` (V,) are those after the last of them.

        States must come from one timeline, later ones last: ValueError for a position that is not beyond the one
        before. ResourceError when the disk is full; the file can then no longer be published.
        """
        begin, end = self.position, state.position
        if begin < 0 or end <= begin or len(ids) != end or len(self._positions) == _MAX_CHECKPOINTS:
            raise ValueError(f"checkpoint {len(self._positions)} at {end} of {len(ids)} tokens after one at {begin}")
        self._positions.append(-1)  # until the whole segment is written
        self._write(np.ascontiguousarray(ids[begin:end], "<i4"))
        for array in _arrays(state, begin, end):
            for piece in _pieces(array):
                self._write(np.ascontiguousarray(ops.numpy(piece), "<f4"))
        self._write(np.ascontiguousarray(logits, "<f4"))
        self._positions[-1] = end

    def publish(self) -> None:
        """Replace what was at the path, durably. ValueError when no checkpoint was added, or one only in part."""
        if not self._positions or -1 in self._positions:
            raise ValueError("no whole checkpoint to publish")
        document = {
            "body_bytes": self._end - _BLOCK,
            "body_checksum": to_hex(self._hasher.value),
            "model": to_hex(self._model),
            "positions": self._positions,
        }
        text = serialise(document)
        block = (_FRONT.pack(_MAGIC, VERSION, len(text)) + text).ljust(_BLOCK - _CHECKSUM.size, b"\0")
        self._file.write(block + _CHECKSUM.pack(checksum(block)), 0)
        self._file.publish()

    def close(self) -> None:
        """Give up what was not published."""
        self._file.close()

    def _write(self, data: npt.NDArray[np.generic]) -> None:
        self._hasher.update(data)
        self._file.write(data, self._end)
        self._end += data.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Restored:
    """What a session file gave: `ids` (position,) and `logits` (V,) of the checkpoint taken, both empty if none."""

    ids: Ids
    logits: F32
    saved_tokens: int  # at the last checkpoint
    common_tokens: int  # how many of them the ids asked for begin with


def restore(
    path: Path,
    model: int,
    ops: Ops,
    state: SessionState,
    *,
    context: int,
    vocabulary: int,
    ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
    on_event: OnEvent = ignore,
) -> Restored:
    """Bring `state`, new and empty, to the last checkpoint that `ids` begins with; without `ids`, to the last one.

    context: tokens the state has room for; vocabulary: V. Every byte of the file is verified, whatever is used of it.
    Raises InputError for a file that is missing, damaged, of another model, of another version or something else
    altogether, UsageError when the context is too small; `state` is then of no use.
    """
    fd = open_for_reading(path)
    try:
        reader = _Reader(fd, path, on_event)
        positions = reader.header(model, state, vocabulary)
        taken, logits, common = np.empty(0, np.int32), np.empty(0, np.float32), 0
        begin, useful = 0, True
        for end in positions:
            if useful:
                tokens = reader.ids(end - begin, vocabulary)
                same = end - begin if ids is None else common_prefix(tokens, ids[begin:end])
                common += same
                useful = same == end - begin
            else:
                reader.skip(4 * (end - begin))
            if useful:
                if end > context:
                    raise UsageError(
                        f"{shown(path)} holds a session of {end} tokens, the context {context}", hint=f"--ctx {end + 1}"
                    )
                for array in _arrays(state, begin, end):
                    reader.fill(ops, array)
                logits = reader.floats(vocabulary)
                taken = np.concatenate([taken, tokens])
                state.position = end
            else:
                reader.skip(_state_bytes(state, begin, end) + 4 * vocabulary)
            begin = end
        reader.verify()
    finally:
        os.close(fd)
    _set_index(state)
    return Restored(taken, logits, positions[-1], common)


class _Reader:
    """The bytes of a session file in order, every one of them hashed."""

    def __init__(self, fd: int, path: Path, on_event: OnEvent) -> None:
        self._fd = fd
        self._where = shown(path)
        self._size = os.fstat(fd).st_size
        self._at = _BLOCK
        self._hasher = Hasher()
        self._expected = 0
        self._on_event = on_event
        self._buffer = np.empty(min(_PIECE, self._size), np.uint8)

    def header(self, model: int, state: SessionState, vocabulary: int) -> list[int]:
        """The positions. After this the file is known to be as long as its segments, whatever their bytes are."""
        front = np.empty(min(self._size, _BLOCK), np.uint8)
        pread_into(self._fd, front, 0, where=self._where)
        block = front.tobytes()
        if not block.startswith(_MAGIC):
            raise InputError(
                f"{self._where} is not a session: it does not begin with {_MAGIC.decode()!r}", hint="name another file"
            )
        if len(block) < _BLOCK:
            raise self._damaged(f"it ends at byte {len(block)}")
        _, version, length = _FRONT.unpack_from(block)
        text, found = block[: -_CHECKSUM.size], _CHECKSUM.unpack_from(block, _BLOCK - _CHECKSUM.size)[0]
        if version != VERSION:  # first, as another version may keep its checksum elsewhere
            raise InputError(
                f"{self._where} is a session of version {version}, this waste reads version {VERSION}", hint=_AGAIN
            )
        if checksum(text) != found:
            raise self._damaged("the checksum of its header is wrong")
        root = parse(text[_FRONT.size : _FRONT.size + length], self._where)
        root.object(_KEYS)
        if root.member("model").text() != to_hex(model):
            raise InputError(f"{self._where} is a session of another model, or of other number formats", hint=_AGAIN)
        self._expected = _digest(root.member("body_checksum"))
        positions = [node.integer(1, 1 << 31) for node in root.member("positions").elements()]
        begins = [0, *positions[:-1]]
        if not positions or any(end <= begin for begin, end in zip(begins, positions, strict=True)):
            raise root.member("positions").wrong("positions that grow")
        body = sum(
            4 * (end - begin) + _state_bytes(state, begin, end) + 4 * vocabulary
            for begin, end in zip(begins, positions, strict=True)
        )
        if root.member("body_bytes").value != body:
            raise root.member("body_bytes").wrong(f"{body}, what {positions[-1]} tokens of this model take")
        if self._size != _BLOCK + body:
            raise self._damaged(f"expected {_BLOCK + body} bytes, found {self._size}")
        return positions

    def ids(self, count: int, vocabulary: int) -> Ids:
        """Token ids, each inside the vocabulary."""
        ids = np.empty(count, "<i4")
        self._read(ids.view(np.uint8))
        if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
            raise self._damaged("a token id is outside the vocabulary")
        return ids.astype(np.int32, copy=False)

    def floats(self, count: int) -> F32:
        values = np.empty(count, "<f4")
        self._read(values.view(np.uint8))
        return values.astype(np.float32, copy=False)

    def fill(self, ops: Ops, array: Array) -> None:
        """Read what `array` holds, a piece at a time."""
        for piece in _pieces(array):
            raw = self._buffer_of(4 * math.prod(piece.shape))
            self._read(raw)
            piece[...] = ops.vector(raw.view("<f4").reshape(tuple(piece.shape)))

    def skip(self, nbytes: int) -> None:
        """Pass by bytes that are not needed, but verified all the same."""
        for begin in range(0, nbytes, _PIECE):
            self._read(self._buffer_of(min(_PIECE, nbytes - begin)))

    def verify(self) -> None:
        if self._hasher.value != self._expected:
            raise self._damaged("the checksum of its contents is wrong")

    def _buffer_of(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if nbytes > len(self._buffer):  # one row of a state is more than a piece; the file is known to have it
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]

    def _read(self, out: npt.NDArray[np.uint8]) -> None:
        pread_into(self._fd, out, self._at, where=self._where)
        self._hasher.update(out)
        self._at += len(out)
        self._on_event(Progress("restore", self._at, self._size))

    def _damaged(self, fault: str) -> InputError:
        return InputError(f"the session {self._where} is damaged: {fault}", hint=_AGAIN)


def _arrays(state: SessionState, begin: int, end: int) -> Iterator[Array]:
    """What a segment stores of `state`, as views to read from and write to."""
    for layer in state.layers:
        if isinstance(layer, KdaState):
            yield layer.conv
            yield layer.s
            continue
        yield layer.rows[begin:end]
        if layer.index is not None:
            pool = len(layer.index.open_keys)
            yield layer.index.keys[begin // pool : end // pool]
            yield layer.index.open_keys
            yield layer.index.open_gates


def _state_bytes(state: SessionState, begin: int, end: int) -> int:
    """Bytes of `_arrays`, also of more tokens than `state` has room for."""
    numbers = 0
    for layer in state.layers:
        if isinstance(layer, KdaState):
            numbers += math.prod(layer.conv.shape) + math.prod(layer.s.shape)
            continue
        numbers += (end - begin) * int(layer.rows.shape[1])
        if layer.index is not None:
            pool, d = layer.index.open_keys.shape
            numbers += (end // pool - begin // pool) * d + 2 * pool * d
    return 4 * numbers


def _pieces(array: Array) -> Iterator[Array]:
    """`array` cut along its first axis into views of about `_PIECE` bytes."""
    rows = max(1, _PIECE // max(1, 4 * math.prod(array.shape[1:])))
    for begin in range(0, len(array), rows):
        yield array[begin : begin + rows]


def _set_index(state: SessionState) -> None:
    for layer in state.layers:
        if not isinstance(layer, KdaState) and layer.index is not None:
            layer.index.tokens = state.position


def common_prefix(held: npt.NDArray[np.int32], ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> int:
    """How many tokens the two begin with alike. held: (n,)."""
    count = min(len(held), len(ids))
    differ = np.flatnonzero(held[:count] != np.asarray(ids[:count]))
    return int(differ[0]) if len(differ) else count


def _digest(node: Node) -> int:
    try:
        return from_hex(node.text())
    except ValueError:
        raise node.wrong("a checksum of 16 hexadecimal digits") from None
