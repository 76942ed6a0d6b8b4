"""Feed-forwards of the `cpu` backend: dense MLP, router, routed experts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from waste.backends.base import MlpWeights, Record, Routing
from waste.backends.shapes import ExpertShape, RouterShape
from waste.container.layout import RecordLayout, pack_record
from waste.errors import InputError
from waste.quant import get

F32 = npt.NDArray[np.float32]


@dataclass
class Here:
    """A wave of records: all there, or told of one by one."""

    given: Sequence[tuple[int, Any]]
    arrived: npt.NDArray[np.int32] | None = None
    failure: Exception | None = None
    stalled_s: float = 0.0

    @property
    def records(self) -> list[Record]:
        if self.arrived is None:
            return [Record.of(*pair) for pair in self.given]
        flags = self.arrived.ctypes.data
        return [Record.of(*pair, flags + 4 * i) for i, pair in enumerate(self.given)]

    def stalled(self, seconds: float) -> None:
        self.stalled_s += seconds

    def wait(self) -> None:
        if self.failure is not None:
            raise self.failure


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, np.float32)


def swiglu(x: F32, gate: F32, up: F32, down: F32, limit: float | None) -> Any:
    g, u = x.astype(np.float64) @ gate.T.astype(np.float64), x.astype(np.float64) @ up.T.astype(np.float64)
    if limit is not None:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return g / (1 + np.exp(-g)) * u @ down.T.astype(np.float64)


# ---- dense


@pytest.mark.parametrize("limit", [None, 4.0])
@pytest.mark.parametrize(("dim", "inner"), [(40, 17), (130, 200), (1, 1)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_mlp(
    lab: Any, rng: np.random.Generator, fmt: str, dim: int, inner: int, tokens: int, limit: float | None
) -> None:
    arrays = normal(rng, inner, dim), normal(rng, inner, dim), normal(rng, dim, inner)
    x = normal(rng, tokens, dim)
    stored = (get(fmt).decode(get(fmt).encode(a), *a.shape) for a in arrays)
    found = lab.cpu.mlp(x, MlpWeights(*(lab.weight(lab.cpu, a, fmt) for a in arrays)), limit)
    lab.close(found, swiglu(x, *stored, limit), max(3e-6, lab.tolerance(fmt, 3)))


def test_the_gate_has_no_lower_clamp(lab: Any) -> None:
    one = np.ones((1, 1), np.float32)
    w = MlpWeights(*(lab.weight(lab.cpu, a) for a in (one, -one, one)))
    for value in (-6.0, 6.0):
        g, u = min(value, 4.0), max(-value, -4.0) if value > 0 else 4.0
        found = lab.cpu.mlp(np.float32([[value]]), w, 4.0)
        assert found[0, 0] == pytest.approx(g / (1 + np.exp(-g)) * u, rel=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e20])
def test_mlp_of_extreme_inputs(lab: Any, rng: np.random.Generator, size: float) -> None:
    arrays = normal(rng, 30, 20), normal(rng, 30, 20), normal(rng, 20, 30)
    x = (normal(rng, 3, 20).astype(np.float64) * size).astype(np.float32)
    w = MlpWeights(*(lab.weight(lab.cpu, a) for a in arrays))
    with np.errstate(over="ignore"):
        expected = swiglu(x, *arrays, 10.0) if size > 1e-30 else np.zeros((3, 20))
    lab.close(lab.cpu.mlp(x, w, 10.0), expected, 3e-6)


def test_activation_over_its_whole_range(lab: Any) -> None:
    """silu through an MLP of one channel a token: within 1e-6 relative, down to where it underflows."""
    x = np.concatenate([np.linspace(-100, 100, 4001), [-1e4, 1e4, 0]]).astype(np.float32)[:, None]
    one, zero = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
    up = lab.weight(lab.cpu, np.float32([[0.0, 1.0]]))
    gate, down = lab.weight(lab.cpu, np.concatenate([one, zero], 1)), lab.weight(lab.cpu, np.float32([[1.0], [0.0]]))
    found = lab.cpu.mlp(np.concatenate([x, np.ones_like(x)], 1), MlpWeights(gate, up, down), None)[:, 0]
    wide = x[:, 0].astype(np.float64)
    expected = wide / (1 + np.exp(np.minimum(-wide, 700)))
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-36)


# ---- router


def router(experts: int, top_k: int, groups: int = 1, topk_groups: int = 1, normalize: bool = True) -> RouterShape:
    return RouterShape(experts, top_k, groups, topk_groups, 2.5, normalize)


@pytest.mark.parametrize(
    "shape",
    [
        router(32, 4),
        router(288, 8),
        router(7, 7),
        router(24, 6, 4, 2),
        router(256, 8, 8, 4),
        router(16, 3, 1, 1, False),
    ],
    ids=str,
)
def test_route_agrees_with_the_oracle(lab: Any, rng: np.random.Generator, shape: RouterShape) -> None:
    gate, bias, x = normal(rng, shape.experts, 50) / 5, normal(rng, shape.experts) / 5, normal(rng, 9, 50)
    found, expected = (
        ops.route(ops.vector(x), lab.weight(ops, gate), ops.vector(bias), shape) for ops in (lab.cpu, lab.oracle)
    )
    assert np.array_equal(found.ids, expected.ids)
    lab.close(found.weights, expected.weights, 3e-7)


def test_route_with_every_gate_format(lab: Any, rng: np.random.Generator, fmt: str) -> None:
    shape, gate, bias, x = router(40, 5), normal(rng, 40, 140), normal(rng, 40), normal(rng, 5, 140) / 8
    found, expected = (
        ops.route(ops.vector(x), lab.weight(ops, gate, fmt), ops.vector(bias), shape) for ops in (lab.cpu, lab.oracle)
    )
    assert np.array_equal(found.ids, expected.ids)
    lab.close(found.weights, expected.weights, 3e-7)


def test_bias_moves_the_choice_and_not_the_weight(lab: Any, rng: np.random.Generator) -> None:
    gate, x = normal(rng, 12, 20), normal(rng, 1, 20)
    bias = np.zeros(12, np.float32)
    bias[7] = 10.0
    found = lab.cpu.route(x, lab.weight(lab.cpu, gate), bias, router(12, 3, normalize=False))
    assert found.ids[0, 0] == 7
    assert found.weights[0, 0] == pytest.approx(2.5 / (1 + np.exp(-(gate[7].astype(float) @ x[0]))), rel=1e-6)


def test_ties_go_to_the_lower_expert(lab: Any) -> None:
    x, bias = np.ones((2, 10), np.float32), np.zeros(20, np.float32)
    for gate in (np.zeros((20, 10), np.float32), np.full((20, 10), 9.0, np.float32)):  # all 1/2; all 1, saturated
        w = lab.weight(lab.cpu, gate)
        assert lab.cpu.route(x, w, bias, router(20, 4)).ids.tolist() == [[0, 1, 2, 3]] * 2
        assert lab.cpu.route(x, w, bias, router(20, 4, 5, 2)).ids.tolist() == [[0, 1, 2, 3]] * 2


def test_zero_scores_do_not_divide_by_zero(lab: Any) -> None:
    gate = lab.weight(lab.cpu, np.full((8, 4), -1e4, np.float32))
    routing = lab.cpu.route(np.ones((1, 4), np.float32), gate, np.zeros(8, np.float32), router(8, 2))
    assert routing.ids.tolist() == [[0, 1]]
    assert routing.weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_route_of_broken_inputs_names_existing_experts(lab: Any, rng: np.random.Generator, value: float) -> None:
    x = normal(rng, 2, 20)
    x[0, 3] = value
    shape = router(24, 6, 4, 2)
    ids = lab.cpu.route(x, lab.weight(lab.cpu, normal(rng, 24, 20)), normal(rng, 24), shape).ids
    for row in ids:
        assert sorted(set(row.tolist())) == sorted(row.tolist())
        assert all(0 <= e < 24 for e in row)


def test_route_threads_and_grouping_change_no_bit(lab: Any, rng: np.random.Generator) -> None:
    gate, bias, x = normal(rng, 96, 200), normal(rng, 96), normal(rng, 70, 200)

    def run(ops: Any, part: slice) -> list[Any]:
        routing = ops.route(x[part], lab.weight(ops, gate), bias, router(96, 8, 6, 3))
        return [routing.ids, routing.weights]

    lab.laws(lambda: run, 70)


def test_impossible_routers_are_refused(lab: Any, rng: np.random.Generator) -> None:
    for shape in (router(10, 3, 4, 2), router(8, 5, 4, 2)):
        gate = lab.weight(lab.cpu, normal(rng, shape.experts, 4))
        with pytest.raises(ValueError, match="router"):
            lab.cpu.route(np.ones((1, 4), np.float32), gate, np.zeros(shape.experts, np.float32), shape)


# ---- routed experts


def bank(rng: np.random.Generator, layout: RecordLayout, experts: int) -> list[tuple[int, Any]]:
    return [
        (e, pack_record(0, e, layout, *(get(s.fmt).encode(normal(rng, s.rows, s.cols)) for s in layout.sections)))
        for e in range(experts)
    ]


def random_routing(rng: np.random.Generator, tokens: int, top_k: int, experts: int) -> Routing:
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    return Routing(ids, rng.random((tokens, top_k), np.float32))


@pytest.mark.parametrize(
    "formats",
    [("q4", "q8", "bf16"), ("q4", "q4", "q4"), ("f32", "f32", "f32"), ("wt2", "wt2", "wt3"), ("wt4", "q6", "wt3")],
    ids="-".join,
)
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_agree_with_the_oracle(
    lab: Any, rng: np.random.Generator, formats: tuple[str, str, str], tokens: int
) -> None:
    shape = ExpertShape(140, 33, 4.0)
    layout = RecordLayout.of(*formats, shape.hidden, shape.inner)
    records, x = bank(rng, layout, 6), normal(rng, tokens, 140)
    routing = random_routing(rng, tokens, 3, 6)
    outs = []
    for ops in (lab.cpu, lab.oracle):
        out = ops.zeros(tokens, 3, 140)
        own = Routing(routing.ids, ops.vector(routing.weights))
        ops.experts(ops.vector(x), own, layout, Here(records), shape, out)
        outs.append(out)
    lab.close(*outs, max(3e-6, lab.tolerance(formats[0], 3)))


def test_waves_fill_their_own_rows_only(lab: Any, rng: np.random.Generator) -> None:
    shape = ExpertShape(40, 20, None)
    layout = RecordLayout.of("q8", "q8", "q8", 40, 20)
    records, x, routing = bank(rng, layout, 5), normal(rng, 7, 40), random_routing(rng, 7, 2, 5)
    whole = np.zeros((7, 2, 40), np.float32)
    lab.cpu.experts(x, routing, layout, Here(records), shape, whole)
    waves = np.full((7, 2, 40), 3.0, np.float32)
    lab.cpu.experts(x, routing, layout, Here([]), shape, waves)
    for wave in ([records[4]], [], records[1:4]):
        lab.cpu.experts(x, routing, layout, Here(wave), shape, waves)
    done = routing.ids != 0
    assert np.array_equal(waves[done], whole[done])
    assert (waves[~done] == 3.0).all()


@pytest.mark.parametrize("formats", [("q4", "q4", "q8"), ("wt3", "wt3", "q6"), ("wt2", "q4", "wt4")], ids="-".join)
def test_expert_threads_and_grouping_change_no_bit(
    lab: Any, rng: np.random.Generator, formats: tuple[str, str, str]
) -> None:
    """70 tokens of top 8 are more vectors than run together, so this also crosses that border."""
    shape = ExpertShape(70, 40, 10.0)
    layout = RecordLayout.of(*formats, 70, 40)
    records, x, routing = bank(rng, layout, 12), normal(rng, 70, 70), random_routing(rng, 70, 8, 12)

    def run(ops: Any, part: slice) -> list[F32]:
        own = Routing(np.ascontiguousarray(routing.ids[part]), np.ascontiguousarray(routing.weights[part]))
        out = ops.zeros(len(own.ids), 8, 70)
        ops.experts(x[part], own, layout, Here(records), shape, out)
        return [out, ops.combine(out, own, None), ops.expert_group(x[part], own, layout, Here(records), shape, None)]

    lab.laws(lambda: run, 70)
    w = [lab.weight(lab.cpu, a) for a in (normal(rng, 90, 70), normal(rng, 90, 70), normal(rng, 70, 90))]
    lab.laws(lambda: lambda ops, part: [ops.mlp(x[part], MlpWeights(*w), 10.0)], 70)


# ---- the whole group in one call


@pytest.mark.parametrize("shared", [None, "f32", "q6"])
@pytest.mark.parametrize("tokens", [1, 9, 150])
def test_a_group_is_its_three_parts(lab: Any, rng: np.random.Generator, tokens: int, shared: str | None) -> None:
    """experts, mlp, combine: the same bits, and what the oracle says. 150 tokens: the shared one in runs."""
    shape = ExpertShape(140, 33, 4.0)
    layout = RecordLayout.of("f32", "f32", "f32", 140, 33)
    records, x, routing = bank(rng, layout, 6), normal(rng, tokens, 140), random_routing(rng, tokens, 3, 6)
    arrays = normal(rng, 50, 140), normal(rng, 50, 140), normal(rng, 140, 50)
    outs = []
    for ops in (lab.cpu, lab.oracle):
        own = Routing(routing.ids, ops.vector(routing.weights))
        w = None if shared is None else MlpWeights(*(lab.weight(ops, a, shared) for a in arrays))
        outs.append(ops.expert_group(ops.vector(x), own, layout, Here(records), shape, w))
        parts = ops.zeros(tokens, 3, 140)
        ops.experts(ops.vector(x), own, layout, Here(records), shape, parts)
        whole = ops.combine(parts, own, None if w is None else ops.mlp(ops.vector(x), w, 4.0))
        assert np.array_equal(outs[-1], whole)
    lab.close(*outs, 3e-6 if shared != "q6" else 0.03)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 30])
def test_the_order_of_arrival_changes_no_bit(lab: Any, rng: np.random.Generator, tokens: int, threads: int) -> None:
    """Records arrive one by one while the call waits for them; garbage until then, so none is read too early."""
    shape = ExpertShape(70, 40, 10.0)
    layout = RecordLayout.of("wt3", "wt3", "q6", 70, 40)
    records, x, routing = bank(rng, layout, 9), normal(rng, tokens, 70), random_routing(rng, tokens, 4, 9)
    ops = lab.crews[threads]
    expected = ops.expert_group(x, routing, layout, Here(records), shape, None)
    for _ in range(5):
        flags = np.zeros(9, np.int32)
        late = [(expert, np.full_like(record, 255)) for expert, record in records]
        order = rng.permutation(9)

        def deliver(late: Any = late, flags: Any = flags, order: Any = order) -> None:
            for i in order:
                threading.Event().wait(0.002)
                late[i][1][:] = records[i][1]
                flags[i] = 1

        reader = threading.Thread(target=deliver)
        reader.start()
        found = ops.expert_group(x, routing, layout, Here(late, flags), shape, None)
        reader.join()
        assert np.array_equal(found, expected)


def test_a_record_that_will_not_come_ends_the_call(lab: Any, rng: np.random.Generator) -> None:
    shape = ExpertShape(40, 20, None)
    layout = RecordLayout.of("q8", "q8", "q8", 40, 20)
    records, x, routing = bank(rng, layout, 5), normal(rng, 7, 40), random_routing(rng, 7, 2, 5)
    wave = Here(records, np.int32([1, 1, -1, 0, 0]), InputError("record 2 is damaged"))
    with pytest.raises(InputError, match="record 2"):
        lab.cpu.expert_group(x, routing, layout, wave, shape, None)
    with pytest.raises(InputError, match="record 2"):
        lab.cpu.experts(x, routing, layout, wave, shape, np.zeros((7, 2, 40), np.float32))


def test_flags_that_are_not_flags_are_refused(lab: Any, rng: np.random.Generator) -> None:
    shape = ExpertShape(40, 20, None)
    layout = RecordLayout.of("q8", "q8", "q8", 40, 20)
    records, x, routing = bank(rng, layout, 5), normal(rng, 7, 40), random_routing(rng, 7, 2, 5)
    for address in (1, 6, -4, 1 << 64, "4", None):
        given = [Record.of(*pair)._replace(arrived=address) for pair in records]
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            lab.cpu.expert_group(x, routing, layout, Given(given), shape, None)


@dataclass
class Given:
    """A wave of records as they are."""

    records: list[Record]


def test_what_was_waited_for_is_told(lab: Any, rng: np.random.Generator) -> None:
    """Nothing when all is there; when the last record comes late, most of the time until then."""
    shape = ExpertShape(40, 20, None)
    layout = RecordLayout.of("q8", "q8", "q8", 40, 20)
    records, x, routing = (
        bank(rng, layout, 5),
        normal(rng, 2, 40),
        Routing(np.int32([[0, 1], [1, 4]]), np.ones((2, 2), np.float32)),
    )
    out = np.zeros((2, 2, 40), np.float32)
    for late in (False, True):
        for call in (
            lambda wave: lab.cpu.expert_group(x, routing, layout, wave, shape, None),
            lambda wave: lab.cpu.experts(x, routing, layout, wave, shape, out),
        ):
            flags = np.ones(5, np.int32)
            wave = Here(records, flags)
            began = time.perf_counter()
            if late:
                flags[4] = 0
                timer = threading.Timer(0.2, lambda flags=flags: flags.__setitem__(4, 1))
                timer.start()
            call(wave)
            passed = time.perf_counter() - began
            assert wave.stalled_s <= passed
            assert (wave.stalled_s > 0.15) if late else (wave.stalled_s == 0)


def test_a_record_that_never_comes_does_not_take_ctrl_c_with_it(lab: Any, rng: np.random.Generator) -> None:
    """The signal's handler runs while native code waits, and what it raises ends the call."""
    shape = ExpertShape(40, 20, None)
    layout = RecordLayout.of("q8", "q8", "q8", 40, 20)
    records, x, routing = bank(rng, layout, 5), normal(rng, 7, 40), random_routing(rng, 7, 2, 5)
    for call in (
        lambda wave: lab.cpu.expert_group(x, routing, layout, wave, shape, None),
        lambda wave: lab.cpu.experts(x, routing, layout, wave, shape, np.zeros((7, 2, 40), np.float32)),
    ):
        wave = Here(records, np.zeros(5, np.int32))
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call(wave)
        timer.join()


def test_a_group_wants_every_expert_that_was_chosen(lab: Any, rng: np.random.Generator) -> None:
    """Rows without an expert would be summed as they lie in memory; an empty wave has no record to look at."""
    shape = ExpertShape(40, 20, None)
    layout = RecordLayout.of("q8", "q8", "q8", 40, 20)
    records, x = bank(rng, layout, 5), normal(rng, 2, 40)
    routing = Routing(np.int32([[0, 1], [1, 4]]), np.ones((2, 2), np.float32))
    for wave in (records[:4], []):
        with pytest.raises(ValueError, match="not among the records"):
            lab.cpu.expert_group(x, routing, layout, Here(wave), shape, None)
    none = Routing(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32))
    assert lab.cpu.expert_group(x[:0], none, layout, Here([]), shape, None).shape == (0, 40)
    with pytest.raises(ValueError, match="from 0 up"):
        lab.cpu.expert_group(x, routing, layout, Here([*records, (-1, records[0][1])]), shape, None)


def test_a_shared_expert_of_another_width_is_refused(lab: Any, rng: np.random.Generator) -> None:
    shape = ExpertShape(40, 20, None)
    layout = RecordLayout.of("q8", "q8", "q8", 40, 20)
    records, x, routing = bank(rng, layout, 5), normal(rng, 7, 40), random_routing(rng, 7, 2, 5)
    w = MlpWeights(*(lab.weight(lab.cpu, normal(rng, *s)) for s in ((20, 40), (20, 40), (48, 20))))
    assert lab.cpu.mlp(x, w, None).shape == (7, 48)
    with pytest.raises(ValueError, match=r"^shared: expected D=40, found 40 to 48$"):
        lab.cpu.expert_group(x, routing, layout, Here(records), shape, w)
