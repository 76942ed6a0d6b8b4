"""Routing traces: what was written is read back, damage is never read as something else, and a choice is two bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from waste.backends.base import Routing, Selection
from waste.bench.trace import (
    STEPS_PER_FRAME,
    Chunk,
    Entry,
    Mark,
    RoutingTrace,
    Steps,
    TraceHeader,
    TraceWriter,
    read_trace,
    write_trace,
)
from waste.engine.engine import Engine
from waste.errors import InputError, ResourceError
from waste.events import Event, Notice


def header(experts: int = 32, top_k: int = 4, layers: tuple[int, ...] = (1, 2, 5)) -> TraceHeader:
    return TraceHeader("0123456789abcdef", layers, experts, top_k, tuple(4096 * (1 + i) for i in range(len(layers))))


def choices(rng: np.random.Generator, head: TraceHeader, tokens: int) -> np.ndarray:
    """(T, L, K) int32, different experts in each row."""
    keys = rng.random((tokens, len(head.layers), head.experts))
    return np.argsort(keys, axis=-1)[..., : head.top_k].astype(np.int32)


def forward(trace: TraceWriter, head: TraceHeader, start: int, ids: np.ndarray) -> None:
    """Tell `trace` of one pass of (T, L, K) choices, as a model would."""
    for i, layer in enumerate(head.layers):
        trace.selection(layer, start, len(ids), Selection(np.zeros(0, np.int32), np.zeros(1, np.int64)))
        trace.routing(layer, start, Routing(ids[:, i], None))


def same(a: Entry, b: Entry) -> bool:
    if isinstance(a, Mark) or isinstance(b, Mark):
        return a == b
    return type(a) is type(b) and a.start == b.start and np.array_equal(a.ids, b.ids)


passes = st.lists(st.one_of(st.integers(0, 5), st.just(1), st.text(max_size=8)), max_size=40)  # 0: a new session


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=passes, experts=st.sampled_from([4, 32, 256, 257, 288]), seed=st.integers(0, 99))
def test_round_trip(tmp_path: Path, work: list[int | str], experts: int, seed: int) -> None:
    head, rng, path = header(experts), np.random.default_rng(seed), tmp_path / "t.trace"
    expected: list[tuple[int, bool, np.ndarray] | str] = []
    at = 0
    with write_trace(path, head) as trace:
        for item in work:
            if isinstance(item, str):
                trace.mark(item)
                expected.append(item)
                at = 0
                continue
            if item == 0:
                at = 0
                continue
            ids = choices(rng, head, item)
            forward(trace, head, at, ids)
            expected.append((at, item == 1, ids))
            at += item
    found = read_trace(path)
    assert found.header == head
    assert found.tokens == sum(item for item in work if isinstance(item, int))
    flat: list[tuple[int, bool, np.ndarray] | str] = []
    for entry in found.entries:
        if isinstance(entry, Mark):
            flat.append(entry.text)
        elif isinstance(entry, Chunk):
            flat.append((entry.start, False, entry.ids))
        else:
            flat += [(entry.start + i, True, entry.ids[i : i + 1]) for i in range(len(entry.ids))]
    assert len(flat) == len(expected)
    for a, b in zip(flat, expected, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            assert a == b
        else:
            assert a[:2] == b[:2]
            assert np.array_equal(a[2], b[2])


@pytest.mark.parametrize(
    ("head", "most"), [(header(32, 4, tuple(range(7))), 1.02), (header(288, 8, tuple(range(42))), 2.002)]
)
def test_bytes_of_a_choice(tmp_path: Path, head: TraceHeader, most: float) -> None:
    path, rng = tmp_path / "t.trace", np.random.default_rng(0)
    sizes = []
    for tokens in (STEPS_PER_FRAME, 5 * STEPS_PER_FRAME):
        with write_trace(path, head) as trace:
            for at in range(tokens):
                forward(trace, head, at, choices(rng, head, 1))
        sizes.append(path.stat().st_size)
    per_choice = (sizes[1] - sizes[0]) / (4 * STEPS_PER_FRAME * len(head.layers) * head.top_k)
    assert per_choice <= most


def example(path: Path) -> RoutingTrace:
    head, rng = header(), np.random.default_rng(3)
    with write_trace(path, head) as trace:
        trace.mark("first")
        forward(trace, head, 0, choices(rng, head, 6))
        for at in range(6, 9):
            forward(trace, head, at, choices(rng, head, 1))
        trace.mark("second")
        forward(trace, head, 0, choices(rng, head, 1))
    return read_trace(path)


def test_a_file_cut_anywhere_is_refused_or_gives_its_whole_frames(tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    whole = example(path)
    data = path.read_bytes()
    lengths = set()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        told: list[Event] = []
        try:
            found = read_trace(path, told.append)
        except InputError as error:
            assert repr(str(path)) in error.message  # noqa: PT017
            continue
        assert all(same(a, b) for a, b in zip(found.entries, whole.entries, strict=False))
        lengths.add(len(found.entries))
        assert [type(event) for event in told] in ([], [Notice])
        assert told or end in _boundaries(data)
    assert lengths == set(range(len(whole.entries)))


def _boundaries(data: bytes) -> set[int]:
    """Where frames begin, by walking the file."""
    at = 28 + int.from_bytes(data[16:20], "little")
    found = {at}
    while at < len(data):
        kind, n = data[at], int.from_bytes(data[at + 4 : at + 8], "little")
        at += 24 + (n if kind == 3 else n * 12)
        found.add(at)
    return found


def test_no_flipped_bit_is_read_as_something_else(tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    whole = example(path)
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            found = read_trace(path)
        except InputError:
            pass
        else:  # a longer frame than there is: as if cut short
            assert len(found.entries) < len(whole.entries)
            assert found.header == whole.header
            assert all(same(a, b) for a, b in zip(found.entries, whole.entries, strict=False))
        data[at] ^= 1 << at % 8


def forged(path: Path, head: TraceHeader, ids: np.ndarray) -> None:
    """A trace whose checksums fit, of choices that no router makes."""
    with write_trace(path, head) as trace:
        forward(trace, head, 0, ids)


def test_choices_that_no_router_makes_are_refused(tmp_path: Path) -> None:
    path, head = tmp_path / "t.trace", header(30)
    ids = choices(np.random.default_rng(0), head, 3)
    for wrong in (30, 255, ids[1, 1, 1]):
        bad = ids.copy()
        bad[1, 1, 0] = wrong
        forged(path, head, bad)
        with pytest.raises(InputError, match="4 different ones of 30 experts"):
            read_trace(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "ascending"),
        ({"layers": (2, 1, 5)}, "ascending"),
        ({"top_k": 33}, "top_k"),
        ({"experts": 1 << 17}, "experts"),
        ({"record_bytes": (1, 2)}, "3 sizes"),
        ({"record_bytes": (1, 2, 0)}, "3 sizes"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    path, fields = tmp_path / "t.trace", header().__dict__ | change
    with write_trace(path, TraceHeader(**fields)):
        pass
    with pytest.raises(InputError, match=message):
        read_trace(path)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for data in (b"", b"GGUF" * 20, os.urandom(100)):
        path.write_bytes(data)
        with pytest.raises(InputError, match="not a routing trace"):
            read_trace(path)
    with pytest.raises(InputError, match="is missing"):
        read_trace(tmp_path / "nothing")


def test_a_pass_that_did_not_end_leaves_no_trace(tmp_path: Path) -> None:
    head, path = header(), tmp_path / "t.trace"
    first, second = choices(np.random.default_rng(0), head, 1), choices(np.random.default_rng(1), head, 1)
    with write_trace(path, head) as trace:
        trace.routing(1, 0, Routing(first[:, 0], None))
        trace.routing(2, 0, Routing(first[:, 1], None))
        forward(trace, head, 0, second)
        trace.routing(1, 1, Routing(first[:, 0], None))
    (steps,) = read_trace(path).entries
    assert same(steps, Steps(0, second.astype(np.uint8)))


def test_layers_out_of_order_are_a_mistake_of_the_caller(tmp_path: Path) -> None:
    head = header()
    ids = choices(np.random.default_rng(0), head, 1)
    with pytest.raises(ValueError, match="layer 2"), write_trace(tmp_path / "t.trace", head) as trace:
        trace.routing(2, 0, Routing(ids[:, 1], None))
    with write_trace(tmp_path / "t.trace", head) as trace:
        trace.routing(9, 0, Routing(ids[:, 1], None))  # a draft's layer
    assert read_trace(tmp_path / "t.trace").tokens == 0


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(ResourceError, match="no space left"):
        TraceWriter(full, Path("/dev/full"), header())  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match="cannot be written"), write_trace(tmp_path, header()):
        pass


def test_what_a_model_chose(tmp_path: Path, cpu_engine: Engine) -> None:
    """Through an engine: a prompt in two chunks, then four tokens."""
    path, ids = tmp_path / "nano.trace", list(range(50, 92))
    seen: dict[int, list[np.ndarray]] = {}

    class Listener:
        def routing(self, layer: int, start: int, routing: Routing) -> None:
            seen.setdefault(layer, []).extend(np.array(routing.ids))

        def selection(self, layer: int, start: int, tokens: int, selection: Selection | None) -> None:
            pass

    for listener in (Listener(), None):
        session = cpu_engine.session(chunk=20)
        with write_trace(path, TraceHeader.of(cpu_engine.config, cpu_engine.manifest)) as trace:
            session.eval(ids[:38], trace=listener or trace)
            for token in ids[38:]:
                session.eval([token], trace=listener or trace)
    found = read_trace(path)
    assert [(type(e).__name__, e.start, len(e.ids)) for e in found.entries if not isinstance(e, Mark)] == [
        ("Chunk", 0, 20),
        ("Chunk", 20, 18),
        ("Steps", 38, 4),
    ]
    told = np.concatenate([entry.ids for entry in found.entries if not isinstance(entry, Mark)])
    assert np.array_equal(told, np.stack([seen[layer] for layer in found.header.layers], axis=1))
    assert found.header.layers == cpu_engine.config.moe_layers
