"""The border of the `cpu` backend: refusals, threads and processes, the extension and its stub."""

from __future__ import annotations

import ast
import gc
import importlib
import os
import signal
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from waste.backends.base import KdaState, KdaWeights, MlaWeights, MlpWeights
from waste.backends.cpu import KERNEL_FORMATS, CpuOps
from waste.backends.shapes import KdaShape, MlaShape, Rotary, RouterShape
from waste.bundled import bundled_checkpoint
from waste.errors import ResourceError, UnsupportedError, UsageError
from waste.kernels import _cpu
from waste.quant import get, names


def test_wrong_shapes_are_refused_by_axis(lab: Any) -> None:
    w = lab.weight(lab.cpu, np.ones((5, 8), np.float32))
    with pytest.raises(ValueError, match=r"^x: expected contiguous float32 \(T=2, in=8\), found float32 \(2, 7\)$"):
        lab.cpu.linear(np.ones((2, 7), np.float32), w)
    with pytest.raises(ValueError, match=r"found float64 \(2, 8\)"):
        lab.cpu.linear(np.ones((2, 8)), w)
    with pytest.raises(ValueError, match="not contiguous"):
        lab.cpu.linear(np.ones((2, 16), np.float32)[:, ::2], w)
    with pytest.raises(ValueError, match=r"^up: expected a matrix \(F=5, D=8\), found \(5, 7\)$"):
        lab.cpu.mlp(
            np.ones((1, 8), np.float32), MlpWeights(w, lab.weight(lab.cpu, np.ones((5, 7), np.float32)), w), None
        )


def test_no_tokens_are_no_work(lab: Any) -> None:
    none, w = np.zeros((0, 8), np.float32), lab.weight(lab.cpu, np.ones((8, 8), np.float32))
    assert lab.cpu.linear(none, w).shape == (0, 8)
    assert lab.cpu.embed(w, np.zeros(0, np.int64)).shape == (0, 8)
    assert lab.cpu.mlp(none, MlpWeights(w, w, w), None).shape == (0, 8)
    assert lab.cpu.route(none, w, np.zeros(8, np.float32), RouterShape(8, 2, 1, 1, 1.0, True)).ids.shape == (0, 2)
    assert lab.cpu.rms_norm(none, np.ones(8, np.float32), 1e-5).shape == (0, 8)
    assert [a.shape for a in lab.cpu.add_norm(none, none, np.ones(8, np.float32), 1e-5)] == [(0, 8), (0, 8)]


def test_rotations_of_other_channels_are_refused(lab: Any) -> None:
    def ones(*shape: int) -> Any:
        return lab.weight(lab.cpu, np.ones(shape, np.float32))

    shape = MlaShape(1, None, 4, 3, 6, 2, 1.0, 1e-6, Rotary.plain(4, 10000.0))
    w = MlaWeights(None, None, ones(9, 8), ones(10, 8), np.ones(4, np.float32), ones(4, 3), ones(2, 4), ones(8, 2))
    with pytest.raises(ValueError, match="rotary: expected 6 to 6 channels, found 4"):
        lab.cpu.mla_project(np.ones((1, 8), np.float32), w, shape, 0)


def test_read_only_states_are_refused(lab: Any) -> None:
    shape = KdaShape(1, 4, 2, None, 1e-5)
    square, narrow = (lab.weight(lab.cpu, np.ones(s, np.float32)) for s in ((4, 4), (1, 4)))
    conv, ones = np.ones((4, 2), np.float32), np.ones(4, np.float32)
    w = KdaWeights(*[square] * 3, *[conv] * 3, square, square, narrow, square, square, ones[:1], ones, ones, square)
    state = KdaState(np.zeros((3, 1, 4), np.float32), np.zeros((1, 4, 4), np.float32))
    lab.cpu.kda(np.ones((1, 4), np.float32), w, shape, state)
    state.s.flags.writeable = False
    with pytest.raises(ValueError, match=r"^s: expected contiguous writable float32 .*read-only"):
        lab.cpu.kda(np.ones((1, 4), np.float32), w, shape, state)


def test_blobs_of_another_size_are_refused(lab: Any) -> None:
    for fmt in KERNEL_FORMATS:
        nbytes = get(fmt).nbytes(20, 130)
        for size in (nbytes - 1, nbytes + 1, 0):
            with pytest.raises(ValueError, match=rf"bytes={nbytes}\), found uint8 \({size},\)"):
                lab.cpu.weight(np.zeros(size, np.uint8), fmt, 20, 130)


def test_every_registered_format_has_a_kernel_or_says_so(lab: Any) -> None:
    for fmt in names():
        blob = get(fmt).encode(np.ones((4, 130), np.float32))
        if fmt in KERNEL_FORMATS:
            assert lab.cpu.weight(blob, fmt, 4, 130).fmt == get(fmt).code
        else:
            with pytest.raises(UnsupportedError, match=fmt):
                lab.cpu.weight(blob, fmt, 4, 130)
    with pytest.raises(UnsupportedError, match="'w\\\\nx' has no cpu kernel"):
        lab.cpu.weight(np.zeros(4, np.uint8), "w\nx", 1, 1)


def test_a_weight_keeps_its_memory_alive(lab: Any) -> None:
    blob = get("f32").encode(np.ones((3, 4), np.float32))
    alive = weakref.ref(blob)
    w = lab.cpu.weight(blob, "f32", 3, 4)
    del blob
    gc.collect()
    assert alive() is not None
    del w
    gc.collect()
    assert alive() is None


def test_vectors_and_zeros_are_plain_numpy(lab: Any) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(lab.cpu.numpy(lab.cpu.vector(values.T)), values.T)
    assert lab.cpu.vector(values.T).flags.c_contiguous
    assert lab.cpu.zeros(2, 3).dtype == np.float32


@pytest.mark.parametrize("threads", [0, -1, 5000])
def test_impossible_numbers_of_threads_are_a_usage_error(threads: int) -> None:
    with pytest.raises(UsageError, match=f"not {threads}"):
        CpuOps(threads=threads)


def product(ops: CpuOps, rng: np.random.Generator) -> bytes:
    """A product large enough to be shared among threads."""
    values, x = rng.standard_normal((400, 256), np.float32), rng.standard_normal((8, 256), np.float32)
    return ops.linear(x, ops.weight(get("f32").encode(values), "f32", 400, 256)).tobytes()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_threads_start_with_the_first_work_and_end_with_the_pool() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = count()
    ops = CpuOps(threads=4)
    assert ops.threads == 4
    assert count() == before
    product(ops, np.random.default_rng(1))
    assert count() == before + 3
    del ops
    gc.collect()
    assert count() == before


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads resident memory in /proc")
def test_scratch_memory_is_reused(rng: np.random.Generator) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    ops, x = CpuOps(threads=1), rng.standard_normal((64, 4), np.float32)
    shapes = (4096, 4), (4096, 4), (4, 4096)
    w = MlpWeights(*(ops.weight(get("f32").encode(rng.standard_normal(s, np.float32)), "f32", *s) for s in shapes))
    ops.mlp(x, w, None)
    before = resident_bytes()
    for _ in range(100):  # 2 MiB of scratch each
        ops.mlp(x, w, None)
    assert resident_bytes() - before < 50 * 2**20


def test_one_backend_serves_several_python_threads(lab: Any) -> None:
    expected = [product(lab.crews[1], np.random.default_rng(i)) for i in range(4)]
    found: list[list[bytes]] = [[] for _ in range(4)]

    def work(i: int) -> None:
        for _ in range(20):
            found[i].append(product(lab.crews[3], np.random.default_rng(i)))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(set(results) == {expected[i]} for i, results in enumerate(found))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own(lab: Any) -> None:
    ops = lab.crews[3]
    expected = product(ops, np.random.default_rng(5))
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # waiting for threads of the parent would last for ever
        right = (
            product(ops, np.random.default_rng(5)) == expected
            and product(CpuOps(threads=2), np.random.default_rng(5)) == expected
        )
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert product(ops, np.random.default_rng(5)) == expected


def test_a_missing_extension_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import waste.kernels

    monkeypatch.setitem(sys.modules, "waste.kernels._cpu", None)
    monkeypatch.delattr(waste.kernels, "_cpu")
    monkeypatch.delitem(sys.modules, "waste.kernels")
    with pytest.raises(ImportError) as caught:
        importlib.import_module("waste.kernels")
    error = caught.value
    assert isinstance(error, ResourceError)
    assert "native code" in error.message
    assert "\n" not in error.message
    assert error.hint is not None
    assert "pip install" in error.hint


def test_the_committed_stub_is_the_generated_one() -> None:
    assert _cpu.__file__ is not None
    generated = Path(_cpu.__file__).with_name("_cpu.pyi")
    committed = Path(__file__).resolve().parents[2] / "src/waste/kernels/_cpu.pyi"
    if not generated.is_file() or not committed.is_file():
        pytest.skip("needs an installed stub and a source tree")
    assert ast.dump(ast.parse(committed.read_text())) == ast.dump(ast.parse(generated.read_text()))


def test_the_example_checkpoint_is_found() -> None:
    found = {path.name for path in bundled_checkpoint().iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"} <= found
    assert any(name.endswith(".safetensors") for name in found)
