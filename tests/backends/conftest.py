"""Shared by the backend tests: crews of several sizes, the float64 oracle, and the two laws of every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from waste.backends.cpu import CpuOps
from waste.backends.reference import ReferenceOps
from waste.kernels import isa
from waste.quant import get

F32 = npt.NDArray[np.float32]
Run = Callable[[Any, slice], Sequence[Any]]


@dataclass(frozen=True)
class Lab:
    """What a test of one operation needs. `run(ops, tokens)` evaluates a slice of the tokens, in order, and
    returns its outputs, token axis first, as the backend's own arrays."""

    crews: dict[int, CpuOps]
    oracle: ReferenceOps

    @property
    def cpu(self) -> CpuOps:
        return self.crews[2]

    @staticmethod
    def weight(ops: Any, values: F32, fmt: str = "f32") -> Any:
        """`values` as a weight of any backend."""
        return ops.weight(get(fmt).encode(values), fmt, *values.shape)

    @staticmethod
    def tolerance(fmt: str, layers: int = 1) -> float:
        """Relative L2 that `layers` products in a row may lose: strip formats round inputs to 8 bits, .65 %."""
        return 2e-6 if fmt in ("f32", "bf16") else 0.012 * layers

    @staticmethod
    def close(found: Any, expected: Any, tolerance: float = 2e-6) -> None:
        """Relative L2 over the whole array, in float64."""
        a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        assert a.shape == b.shape
        assert np.isfinite(a).all()
        error, size = np.linalg.norm(a - b), np.linalg.norm(b)
        assert error <= tolerance * size + 1e-30, f"relative error {error / max(size, 1e-300):.2e}"

    def laws(self, make: Callable[[], Run], tokens: int) -> None:
        """Neither the number of threads nor the way tokens are grouped changes a bit. `make` starts afresh,
        with empty states; a run's states may be among its outputs only if they have a token axis."""
        whole = [np.array(a) for a in make()(self.crews[1], slice(0, tokens))]
        for threads, ops in self.crews.items():
            for a, b in zip(whole, make()(ops, slice(0, tokens)), strict=True):
                assert same_bits(a, np.asarray(b)), f"{threads} threads"
        third = -(-tokens // 3)
        for size in (1, third):
            run = make()
            parts = [run(self.cpu, slice(t, min(t + size, tokens))) for t in range(0, tokens, size)]
            for a, b in zip(whole, zip(*parts, strict=True), strict=True):
                assert same_bits(a, np.concatenate(b)), f"{size} tokens at a time"


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Equal shape, kind and bytes: unlike ==, this tells -0.0 from 0.0 and calls a NaN equal to itself."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.fixture(scope="session")
def lab() -> Lab:
    # More threads than cores is on purpose: that is where an ordering mistake shows.
    return Lab({n: CpuOps(threads=n) for n in (1, 2, 3, 5)}, ReferenceOps(torch.float64))


@pytest.fixture(params=isa.ISAS)
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set this processor has, forced."""
    if request.param not in isa.usable():
        pytest.skip(f"this processor has no {request.param}")
    isa.force(request.param)
    yield request.param
    isa.force(None)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261203)


@pytest.fixture(params=["f32", "bf16", "q8", "q4", "wt2", "wt3", "wt4", "q6"])
def fmt(request: pytest.FixtureRequest) -> str:
    """Every number format with a kernel."""
    return str(request.param)
