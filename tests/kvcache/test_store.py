"""Session files by themselves: every byte counts, nothing is lost to a failure, no state is ever in memory twice."""

from __future__ import annotations

import errno
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.backends.base import IndexState, KdaState
from waste.errors import ExitCode, InputError, ResourceError, UsageError, WasteError
from waste.events import Progress
from waste.io.checksum import checksum
from waste.kvcache.state import MlaState, SessionState
from waste.kvcache.store import Restored, StateWriter, common_prefix, restore

MODEL, VOCABULARY = 0x1234_5678_9ABC_DEF0, 11


class Arrays:
    """The two operations of a backend that the store uses; everything else would be an error."""

    @staticmethod
    def numpy(array: np.ndarray) -> np.ndarray:
        return array

    @staticmethod
    def vector(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, np.float32)


OPS: Any = Arrays()


def empty(context: int, *, pool: int = 4) -> SessionState:
    """One layer of each kind: recurrent, latent without an index, latent with a pooled one."""

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    index = IndexState(zeros(context // pool, 3), zeros(pool, 3), zeros(pool, 3))
    return SessionState(
        [
            KdaState(zeros(3, 2, 6), zeros(2, 3, 3)),
            MlaState(zeros(context, 5), None),
            MlaState(zeros(context, 5), index),
        ]
    )


def parts(state: SessionState) -> list[np.ndarray]:
    """All that counts of a state at its position."""
    found: list[np.ndarray] = []
    for layer in state.layers:
        if isinstance(layer, KdaState):
            found += [layer.conv, layer.s]
            continue
        found.append(layer.rows[: state.position])
        if layer.index is not None:
            pool = len(layer.index.open_keys)
            found += [layer.index.keys[: state.position // pool], layer.index.open_keys, layer.index.open_gates]
            assert layer.index.tokens == state.position
    return found


class Timeline:
    """A state that random numbers advance, and what it was at every token."""

    def __init__(self, tokens: int, context: int, seed: int = 0, pool: int = 4) -> None:
        self.random = np.random.default_rng(seed)
        self.state = empty(context, pool=pool)
        self.ids = self.random.integers(0, VOCABULARY, tokens).astype(np.int32)

    def _noise(self, array: np.ndarray) -> None:
        array[...] = self.random.integers(0, 1 << 32, array.shape, np.uint32).view(np.float32)  # NaNs and all

    def advance(self, to: int) -> None:
        begin = self.state.position
        for layer in self.state.layers:
            if isinstance(layer, KdaState):
                self._noise(layer.conv)
                self._noise(layer.s)
                continue
            self._noise(layer.rows[begin:to])
            if layer.index is not None:
                pool = len(layer.index.open_keys)
                self._noise(layer.index.keys[begin // pool : to // pool])
                self._noise(layer.index.open_keys)
                self._noise(layer.index.open_gates)
                layer.index.tokens = to
        self.state.position = to
        self.logits = np.empty(VOCABULARY, np.float32)
        self._noise(self.logits)

    def snapshot(self) -> list[bytes]:
        return [part.tobytes() for part in [*parts(self.state), self.logits]]


def write(path: Path, timeline: Timeline, positions: list[int], model: int = MODEL) -> list[list[bytes]]:
    """Save `timeline` at each of `positions`; what it was there."""
    snapshots = []
    with StateWriter(path, model) as file:
        for position in positions:
            timeline.advance(position)
            file.add(OPS, timeline.state, timeline.ids[:position], timeline.logits)
            snapshots.append(timeline.snapshot())
        file.publish()
    return snapshots


def read(path: Path, ids: Any = None, *, context: int = 64, model: int = MODEL, **more: Any) -> tuple[Any, Restored]:
    state = empty(context)
    return state, restore(path, model, OPS, state, context=context, vocabulary=VOCABULARY, ids=ids, **more)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Timeline, list[list[bytes]]]:
    timeline = Timeline(30, 40)
    return tmp_path / "s.kv", timeline, write(tmp_path / "s.kv", timeline, [10, 23])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_restored_is_what_was_saved_bit_for_bit(tmp_path_factory: Any, data: st.DataObject) -> None:
    positions = sorted(data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=4)))
    timeline = Timeline(positions[-1], data.draw(st.integers(positions[-1], 60)), data.draw(st.integers(0, 9)))
    path = tmp_path_factory.mktemp("laws") / "s.kv"
    snapshots = write(path, timeline, positions)
    wanted = timeline.ids[: data.draw(st.integers(0, 40))]
    if len(wanted) and data.draw(st.booleans()):
        wanted = wanted.copy()
        wanted[data.draw(st.integers(0, len(wanted) - 1))] ^= 1
    common = common_prefix(timeline.ids, wanted)
    reached = [position for position in positions if position <= common]
    state, found = read(path, wanted, context=data.draw(st.integers(positions[-1], 90)))
    assert (found.saved_tokens, found.common_tokens) == (positions[-1], min(common, positions[-1]))
    assert state.position == len(found.ids) == (reached[-1] if reached else 0)
    np.testing.assert_array_equal(found.ids, timeline.ids[: state.position])
    if reached:
        assert [p.tobytes() for p in [*parts(state), found.logits]] == snapshots[len(reached) - 1]
    state, found = read(path)
    assert [p.tobytes() for p in [*parts(state), found.logits]] == snapshots[-1]


@pytest.mark.parametrize("ids", [None, [3]])  # the last checkpoint, and none: bytes that nobody uses count too
def test_every_flipped_bit_is_found(saved: Any, ids: list[int] | None) -> None:
    path = saved[0]
    whole = path.read_bytes()
    used = len(whole[:4088].rstrip(b"\0")) if ids is None else 0
    # All of the header, then a sample of everything: 13 is prime to the size of a number.
    for at in [*range(used), *range(used, 4096, 97), *range(4088, 4096), *range(4096, len(whole), 13)]:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1 << (at % 8)]))
        with pytest.raises(InputError, match=r"s\.kv"):
            read(path, ids)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(whole[at : at + 1])
    read(path, ids)


def test_every_truncation_and_extension_is_found(saved: Any) -> None:
    path = saved[0]
    whole = path.read_bytes()
    for length in [*range(0, 4096, 53), *range(4090, len(whole), 3)]:
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"s\.kv"):
            read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(InputError, match="damaged"):
        read(path)


def test_what_is_no_session_of_this_model_is_named(saved: Any, tmp_path: Path) -> None:
    path = saved[0]
    with pytest.raises(InputError, match="another model") as caught:
        read(path, model=MODEL + 1)
    assert "remove it" in (caught.value.hint or "")
    front = bytearray(path.read_bytes())
    front[8] = 2
    front[4088:4096] = struct.pack("<Q", checksum(bytes(front[:4088])))
    path.write_bytes(front)
    with pytest.raises(InputError, match="version 2, this waste reads version 1"):
        read(path)
    for data in (b"", b"hello", b"\x7fELF" + bytes(9000)):
        path.write_bytes(data)
        with pytest.raises(InputError, match="not a session"):
            read(path)
    for other in (tmp_path / "missing.kv", tmp_path, Path("/dev/null")):
        with pytest.raises(InputError):
            read(other)


def forged(whole: bytes, **changes: Any) -> bytes:
    """The file with other words in its header, and the checksum that fits."""
    length = struct.unpack_from("<I", whole, 12)[0]
    text = json.dumps({**json.loads(whole[16 : 16 + length]), **changes}).encode()
    front = (whole[:12] + struct.pack("<I", len(text)) + text).ljust(4088, b"\0")
    return front + struct.pack("<Q", checksum(front)) + whole[4096:]


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": [10, 1 << 30], "body_bytes": 1 << 40},
        {"positions": []},
        {"positions": [23, 10]},
        {"positions": [0, 23]},
        {"positions": [10.0, 23]},
        {"positions": "all"},
        {"positions": [10]},
        {"positions": [10, 24]},
        {"body_bytes": 0},
        {"body_bytes": 10**30},
        {"body_checksum": "x"},
        {"body_checksum": 7},
        {"model": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused_before_memory_is_taken(saved: Any, changes: dict[str, Any]) -> None:
    path = saved[0]
    path.write_bytes(forged(path.read_bytes(), **changes))
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_id_outside_the_vocabulary_is_damage(saved: Any) -> None:
    path = saved[0]
    for bad in (VOCABULARY, -1, -(1 << 31)):
        whole = bytearray(path.read_bytes())
        whole[4096 + 8 : 4096 + 12] = struct.pack("<i", bad)
        path.write_bytes(forged(bytes(whole), body_checksum=f"{checksum(bytes(whole[4096:])):016x}"))
        with pytest.raises(InputError, match="vocabulary"):
            read(path)


def test_a_context_too_small_is_refused_with_what_is_needed(saved: Any) -> None:
    path, timeline, _ = saved
    with pytest.raises(UsageError, match="session of 23 tokens, the context 22") as caught:
        read(path, context=22)
    assert caught.value.hint == "--ctx 24"
    state, _ = read(path, timeline.ids[:12], context=12)  # the checkpoint that is wanted does fit
    assert state.position == 10


@pytest.mark.parametrize("limit", [0, 100, 4000, 4400, 5000])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file(saved: Any, monkeypatch: pytest.MonkeyPatch, limit: int, code: int) -> None:
    path, _, _ = saved
    before = path.read_bytes()
    real, written = os.pwrite, 0

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(memoryview(data).cast("B"))
        if written > limit:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ResourceError) as caught:
        write(path, Timeline(30, 40, seed=1), [12, 30])
    assert caught.value.exit_code is ExitCode.RESOURCE
    assert "s.kv'" in caught.value.message
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["s.kv"]


def test_a_checkpoint_half_written_is_never_published(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = saved
    before = path.read_bytes()
    timeline = Timeline(30, 40, seed=1)
    with StateWriter(path, MODEL) as file:
        timeline.advance(5)
        file.add(OPS, timeline.state, timeline.ids[:5], timeline.logits)
        timeline.advance(9)
        with monkeypatch.context() as patch:
            patch.setattr(Arrays, "numpy", staticmethod(lambda array: 1 / 0))
            with pytest.raises(ZeroDivisionError):
                file.add(OPS, timeline.state, timeline.ids[:9], timeline.logits)
        for forbidden in (
            file.publish,
            lambda: file.add(OPS, timeline.state, timeline.ids[:9], timeline.logits),
        ):
            with pytest.raises(ValueError, match="checkpoint"):
                forbidden()
    assert path.read_bytes() == before
    with StateWriter(path, MODEL) as file, pytest.raises(ValueError, match="no whole checkpoint"):
        file.publish()
    with StateWriter(path, MODEL) as file, pytest.raises(ValueError, match="checkpoint 0 at 9 of 8"):
        file.add(OPS, timeline.state, timeline.ids[:8], timeline.logits)


def test_equal_timelines_make_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, Timeline(30, 33 if name == "a" else 77), [10, 23])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_state_is_never_in_memory_twice(tmp_path: Path) -> None:
    context, progress = 300_000, list[Progress]()
    big = SessionState([MlaState(np.ones((context, 32), np.float32), None)], position=context)
    ids, logits = np.zeros(context, np.int32), np.zeros(VOCABULARY, np.float32)
    tracemalloc.start()
    try:
        with StateWriter(tmp_path / "big.kv", MODEL) as file:
            file.add(OPS, big, ids, logits)
            file.publish()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # of 37 MiB
        fresh = SessionState([MlaState(np.zeros((context, 32), np.float32), None)])
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        path = tmp_path / "big.kv"
        restore(
            path,
            MODEL,
            OPS,
            fresh,
            context=context,
            vocabulary=VOCABULARY,
            on_event=progress.append,  # type: ignore[arg-type]
        )
        assert tracemalloc.get_traced_memory()[1] - before < 16 << 20
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(fresh.layers[0].rows, big.layers[0].rows)  # type: ignore[union-attr]
    assert (progress[-1].phase, progress[-1].done) == ("restore", progress[-1].total)


def test_a_failing_drive_is_an_error_that_names_the_file(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(WasteError, match=r"s\.kv.*read error"):
        read(saved[0])
