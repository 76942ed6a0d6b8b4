"""Every array of every stage of the `cpu` backend: what is not as expected is refused by name, nothing is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from waste.backends.base import (
    HcMix,
    HcWeights,
    IndexerWeights,
    IndexState,
    KdaState,
    KdaWeights,
    MlaWeights,
    MlpWeights,
    Record,
    Routing,
    Selection,
)
from waste.backends.shapes import ExpertShape, HcShape, IndexerShape, KdaShape, MlaShape, RouterShape
from waste.container.layout import RecordLayout
from waste.quant import get

F32 = npt.NDArray[np.float32]
T, D, S = 3, 6, 2
EXPERT, LAYOUT = ExpertShape(D, 5, None), RecordLayout.of("f32", "f32", "f32", D, 5)
INDEX = IndexerShape(2, 4, 6, 3, None)
CHOICES = ("ids", "positions", "offsets")


@dataclass
class Stage:
    """A call that works, its arrays by the names errors have for them, and which of those it writes to or may lack."""

    name: str
    call: Callable[..., Any]
    given: dict[str, Any]
    written: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def arrays(self) -> dict[str, Any]:
        return {name: array.copy() for name, array in self.given.items()}


@dataclass
class Here:
    """A wave."""

    records: Any

    def wait(self) -> None:
        raise AssertionError("all records are here")

    stalled = None


class Bench:
    """Weights of every kind of layer, small and random."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.rng = np.random.default_rng(7)
        vec, mat = self.vec, self.mat
        hc = HcShape(S, sinkhorn_iters=2, eps=1e-6, norm_eps=1e-5)
        self.hc = hc
        self.site = HcWeights(vec(hc.outputs, S * D), vec(hc.outputs), vec(3)), hc, vec(D), 1e-5
        self.kda = KdaWeights(
            *(mat(8, D) for _ in range(3)),
            *(vec(8, 3) for _ in range(3)),
            *(mat(4, D), mat(8, 4), mat(2, D), mat(4, D), mat(8, 4)),
            *(vec(2), vec(8), vec(4), mat(D, 8)),
        )
        self.mla = MlaWeights(mat(5, D), vec(5), mat(10, 5), mat(6, D), vec(4), mat(8, 3), mat(4, 4), mat(D, 4))
        self.index = IndexerWeights(mat(8, 5), mat(4, D), vec(4), vec(4), mat(2, D), mat(4, D), vec(3, 4))
        self.mlp = MlpWeights(mat(5, D), mat(5, D), mat(D, 5))
        self.records = [self.record(expert) for expert in range(2)]
        self.ids = np.array([[0, 1], [1, 0], [0, 1]], np.int32)

    def vec(self, *shape: int) -> F32:
        return self.rng.standard_normal(shape, np.float32)

    def mat(self, rows: int, cols: int) -> Any:
        return self.ops.weight(get("f32").encode(self.vec(rows, cols)), "f32", rows, cols)

    def record(self, expert: int) -> Record:
        data = np.zeros(LAYOUT.stride, np.uint8)
        for section in LAYOUT.sections:
            blob = get("f32").encode(self.vec(section.rows, section.cols))
            data[section.offset : section.offset + section.nbytes] = blob
        return Record.of(expert, data)

    def group(self, records: Any, shared: MlpWeights | None = None, **given: Any) -> Any:
        routing = Routing(given.get("ids", self.ids), given.get("weights", np.ones((T, 2), np.float32)))
        x = given.get("x", np.ones((T, D), np.float32))
        return self.ops.expert_group(x, routing, LAYOUT, Here(records), EXPERT, shared)


@pytest.fixture
def bench(lab: Any) -> Bench:
    return Bench(lab.crews[1])


@pytest.fixture
def stages(bench: Bench) -> list[Stage]:
    ops, vec = bench.ops, bench.vec
    x, ids = vec(T, D), bench.ids
    spread = {"streams": vec(T, S, D), "out": x, "post": vec(T, S), "comb": vec(T, S, S)}
    kda, mla = KdaShape(2, 4, 3, None, 1e-5), MlaShape(2, 5, 4, 3, 2, 2, 1.0, 1e-6, None)
    linear, gate, bias, router = bench.mat(7, D), bench.mat(8, D), vec(8), RouterShape(8, 2, 1, 1, 1.0, True)

    def attend(q: F32, cache: F32, positions: Any, offsets: Any) -> Any:
        return ops.mla_attend(q, cache, 1, Selection(positions, offsets), bench.mla, mla)

    def index(x: F32, q_latent: F32, keys: F32, open_keys: F32, open_gates: F32) -> Any:
        return ops.index(x, q_latent, bench.index, INDEX, IndexState(keys, open_keys, open_gates, 7))

    def experts(x: F32, ids: Any, out: F32) -> None:
        ops.experts(x, Routing(ids, out), LAYOUT, Here(bench.records), EXPERT, out)

    return [
        Stage("linear", lambda x: ops.linear(x, linear), {"x": x}),
        Stage("rms_norm", lambda x, weight: ops.rms_norm(x, weight, 1e-5), {"x": x, "weight": vec(D)}),
        Stage("add", ops.add, {"x": x, "y": vec(T, D)}),
        Stage(
            "add_norm",
            lambda x, y, weight: ops.add_norm(x, y, weight, 1e-5),
            {"x": x, "y": vec(T, D), "weight": vec(D)},
        ),
        Stage(
            "combine",
            lambda out, weights, shared: ops.combine(out, Routing(ids, weights), shared),
            {"out": vec(T, 2, D), "weights": vec(T, 2), "shared": x},
            optional=("shared",),
        ),
        Stage("hc_expand", lambda x: ops.hc_expand(x, bench.hc), {"x": x}),
        Stage("hc_mean", ops.hc_mean, {"streams": spread["streams"]}),
        Stage("hc_pre", lambda streams: ops.hc_pre(streams, *bench.site), {"streams": spread["streams"]}),
        Stage(
            "hc_post",
            lambda streams, out, post, comb: ops.hc_post(streams, out, HcMix(out, post, comb)),
            spread,
            written=("streams",),
        ),
        Stage(
            "hc_seam",
            lambda streams, out, post, comb: ops.hc_seam(streams, out, HcMix(out, post, comb), *bench.site),
            spread,
            written=("streams",),
        ),
        Stage(
            "kda",
            lambda x, conv, s: ops.kda(x, bench.kda, kda, KdaState(conv, s)),
            {"x": x, "conv": vec(3, 2, 8), "s": vec(2, 4, 4)},
            written=("conv", "s"),
        ),
        Stage("mla_project", lambda x: ops.mla_project(x, bench.mla, mla, 2), {"x": x}),
        Stage(
            "mla_attend",
            attend,
            {
                "q": vec(T, 2, 6),
                "cache": vec(5, 6),
                "positions": np.array([0, 1, 0, 2, 3], np.int32),
                "offsets": np.array([0, 2, 3, 5]),
            },
            optional=("positions", "offsets"),
        ),
        Stage(
            "index",
            index,
            {"x": x, "q_latent": vec(T, 5), "keys": vec(4, 4), "open_keys": vec(3, 4), "open_gates": vec(3, 4)},
            written=("keys", "open_keys", "open_gates"),
        ),
        Stage("mlp", lambda x: ops.mlp(x, bench.mlp, None), {"x": x}),
        Stage("route", lambda x: ops.route(x, gate, bias, router), {"x": x}),
        Stage(
            "experts",
            experts,
            {"x": x, "ids": ids, "out": vec(T, 2, D)},
            written=("out",),
        ),
        Stage(
            "expert_group",
            lambda **given: bench.group(bench.records, bench.mlp, **given),
            {"x": x, "ids": ids, "weights": vec(T, 2)},
        ),
    ]


def each_array(stages: Sequence[Stage]) -> Iterator[tuple[Stage, str, dict[str, Any]]]:
    """Every array of every stage, with fresh arguments."""
    for stage in stages:
        for name in stage.given:
            yield stage, name, stage.arrays()


def off_by_a_byte(array: Any) -> Any:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    shifted = memory[1:].view(array.dtype).reshape(array.shape)
    shifted[...] = array
    return shifted


WRONG: dict[str, Callable[[Any], Any]] = {
    "another kind": lambda a: a.astype(np.float64 if a.dtype.kind == "f" else np.float32),
    "another size": lambda a: a.astype(np.float16 if a.dtype.kind == "f" else np.int16),
    "another byte order": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "without a sign": lambda a: a.view(np.uint32 if a.itemsize == 4 else np.uint64),
    "an axis more": lambda a: a[None],
    "an axis less": lambda a: a[0],
    "strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "not aligned": off_by_a_byte,
    "a list": lambda a: a.tolist(),
    "a buffer": memoryview,
}
ANY_AXES = {("rms_norm", "x"), ("add", "x"), ("add_norm", "x")}  # the others have to follow


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_such_array_is_refused_by_name(stages: list[Stage], wrong: str) -> None:
    for stage, name, arrays in each_array(stages):
        if (stage.name, name) in ANY_AXES and "axis" in wrong:
            continue
        arrays[name] = WRONG[wrong](arrays[name])
        with pytest.raises(ValueError, match=rf"^{name}: expected contiguous (writable )?(float32|int32|int64) \("):
            stage.call(**arrays)
        for other, array in stage.given.items():  # before anything was written to
            assert other == name or np.array_equal(arrays[other], array), f"{stage.name} {name}"


def test_every_axis_counts(stages: list[Stage]) -> None:
    """One more of any axis fails, where nothing else says how many there are."""
    free = {(s, "x", 0) for s in ("linear", "rms_norm", "kda", "mla_project", "mlp", "route", "hc_expand")}
    free |= {("hc_expand", "x", 1), ("hc_pre", "streams", 0), ("mla_attend", "cache", 0), ("index", "keys", 0)}
    free |= {("hc_mean", "streams", axis) for axis in range(3)}
    for stage, name, _ in each_array(stages):
        for axis in range(stage.given[name].ndim):
            arrays = stage.arrays()
            more = np.concatenate([arrays[name], arrays[name].take([0], axis)], axis)
            arrays[name] = np.ascontiguousarray(more)
            if (stage.name, name, axis) in free:
                stage.call(**arrays)
            else:
                with pytest.raises(ValueError, match="expected contiguous"):
                    stage.call(**arrays)


def test_none_is_refused_where_an_array_may_not_lack(stages: list[Stage]) -> None:
    for stage, name, arrays in each_array(stages):
        arrays[name] = None
        if name in stage.optional:
            stage.call(**arrays)
        else:
            with pytest.raises(TypeError, match="incompatible function arguments"):
                stage.call(**arrays)


def test_read_only_will_do_for_what_is_only_read(stages: list[Stage]) -> None:
    for stage, name, arrays in each_array(stages):
        arrays[name].flags.writeable = False
        if name in stage.written:
            with pytest.raises(ValueError, match=rf"^{name}: expected contiguous writable float32 .*read-only$"):
                stage.call(**arrays)
        else:
            stage.call(**arrays)


def arrays_in(result: Any) -> list[Any]:
    if isinstance(result, np.ndarray):
        return [result]
    return [array for part in result or () for array in arrays_in(part)]


def test_results_are_arrays_of_their_own(stages: list[Stage]) -> None:
    """The next call leaves them alone; only what a call works on in place is shared with its arguments."""
    for stage in stages:
        arrays = stage.arrays()
        found = arrays_in(stage.call(**arrays))
        kept = [array.copy() for array in found]
        others = {name: array if name in CHOICES else 3 * array for name, array in stage.arrays().items()}
        again = arrays_in(stage.call(**others))
        assert [a.tobytes() for a in found] == [a.tobytes() for a in kept]
        for array in found:
            if any(array is arrays[name] for name in stage.written):
                continue
            assert array.flags.c_contiguous and array.flags.writeable and array.flags.owndata
            assert not any(np.shares_memory(array, other) for other in [*arrays.values(), *again])
            assert sum(np.shares_memory(array, other) for other in found) == 1


def test_records_are_tuples_of_enough_bytes(bench: Bench) -> None:
    first, second = bench.records
    expected = bench.group([first, second])
    assert np.array_equal(bench.group((first, second)), expected)
    needed = max(section.offset + section.nbytes for section in LAYOUT.sections)
    assert np.array_equal(bench.group([first, second._replace(nbytes=needed)]), expected)
    with pytest.raises(ValueError, match=f"^record: expected {needed} bytes, found {needed - 1}$"):
        bench.group([first, second._replace(nbytes=needed - 1)])
    for wrong in ((0, first.address), 3, list(first)):
        with pytest.raises(ValueError, match=r"^records: expected tuples"):
            bench.group([wrong])
    with pytest.raises(TypeError):
        bench.group(None)


@pytest.mark.parametrize(("into", "out_of"), [(D + 1, D), (D, D + 1)])
def test_a_shared_expert_of_another_width_is_refused(bench: Bench, into: int, out_of: int) -> None:
    other = MlpWeights(bench.mat(5, into), bench.mat(5, into), bench.mat(out_of, 5))
    with pytest.raises(ValueError, match=f"^shared: expected D={D}, found {into} to {out_of}$"):
        bench.group(bench.records, other)


def test_an_index_selection_is_as_long_as_its_tokens_may_see(bench: Bench) -> None:
    """min(whole pools, keep) * pool and the open pool's, for every token."""
    state = IndexState(np.zeros((9, 4), np.float32), np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32))
    for t in (1, 4, 3, 1, 9, 2):
        start = state.tokens
        chosen = bench.ops.index(bench.vec(t, D), bench.vec(t, 5), bench.index, INDEX, state)
        seen = np.arange(start + 1, start + t + 1)
        if (start + t) // 3 <= 2:
            assert chosen is None
        else:
            assert np.diff(chosen.offsets).tolist() == (np.minimum(seen // 3, 2) * 3 + seen % 3).tolist()
            assert chosen.offsets[0] == 0 and chosen.offsets[-1] == len(chosen.positions)
            assert (chosen.positions >= 0).all() and (chosen.positions < start + t).all()
    with pytest.raises(ValueError, match=r"^index keys: 10 pools do not fit the capacity of 9$"):
        bench.ops.index(bench.vec(10, D), bench.vec(10, 5), bench.index, INDEX, state)
    assert state.tokens == 20
