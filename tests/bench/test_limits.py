"""The limits: memory is read by as many threads as asked for, drives through their own records."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from waste.bench.limits import drive_rate, memory_rate, read_rate
from waste.bench.machine import PeakMemory, cache_bytes, look_around
from waste.bench.spread import Spread
from waste.container.reader import Container
from waste.errors import InputError
from waste.io.buffers import aligned


def test_spread_is_that_of_sorted_samples() -> None:
    samples = np.random.default_rng(3).permutation(101).astype(float)
    assert Spread.of(samples.tolist()) == Spread(50, 10, 90)
    assert Spread.of([2.0]) == Spread(2, 2, 2)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_caches_grow_outwards() -> None:
    sizes = cache_bytes()
    assert 0 < sizes["L1"] < sizes["L2"] < sizes["L3"]


def test_every_thread_reads_its_own_memory_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is the sum over threads of bytes by CPU time."""
    together = threading.Barrier(3, timeout=20)
    asked = []

    def read_stream(address: int, nbytes: int, passes: int, ahead: int) -> tuple[int, float]:
        together.wait()  # breaks unless all three are there at once
        asked.append((address, nbytes, passes, ahead))
        return 0, address / 10

    monkeypatch.setattr("waste.bench.limits._cpu", SimpleNamespace(read_stream=read_stream))
    assert read_rate([10, 20, 40], 600, 2048) == pytest.approx(600 / 1 + 600 / 2 + 600 / 4)
    assert sorted(asked) == [(10, 600, 1, 2048), (20, 600, 1, 2048), (40, 600, 1, 2048)]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_memory_that_is_streamed_is_distinct_and_inside(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr("waste.bench.limits._LEAST_BYTES", 3 << 20)
    monkeypatch.setattr("waste.bench.limits._READ_BYTES", 1 << 20)
    monkeypatch.setattr("waste.bench.limits.cache_bytes", lambda: {"L3": 1 << 20})
    memories: list[Any] = []
    monkeypatch.setattr("waste.bench.limits.aligned", lambda nbytes: memories.append(aligned(nbytes)) or memories[-1])
    turns = []

    def rate(addresses: list[int], nbytes: int, ahead: int) -> float:
        turns.append((addresses, nbytes, ahead))
        return float(ahead % 5000)

    monkeypatch.setattr("waste.bench.limits.read_rate", rate)
    assert memory_rate(threads) == 4096
    (memory,) = memories
    assert memory.min() == 1
    for addresses, nbytes, _ in turns:
        assert len(addresses) == threads and nbytes >= 4096 and nbytes % 64 == 0
        assert all(b - a >= nbytes for a, b in pairwise(addresses))
        assert addresses[0] >= memory.ctypes.data
        assert addresses[-1] + nbytes <= memory.ctypes.data + len(memory)


def test_memory_has_a_rate() -> None:
    assert 1e8 < memory_rate(1) < 1e13


def test_records_of_all_banks_are_read_past_the_cache_and_verified(default_nano: Path) -> None:
    container = Container.open(default_nano)
    banks = [container.bank(layer) for layer in (1, 2)]
    seen = set()
    for bank in banks:
        read = bank.read

        def watched(expert: int, buffer: Any, bank: Any = bank, read: Any = read) -> None:
            read(expert, buffer)
            seen.add((bank.layer, expert))

        bank.read = watched  # type: ignore[method-assign]
    try:
        assert drive_rate(banks, None, 0.05) > 0
    finally:
        for bank in banks:
            bank.close()
    assert {layer for layer, _ in seen} == {1, 2} and len(seen) > 20


def test_a_simulated_drive_gives_no_more_than_it_has(default_nano: Path) -> None:
    with Container.open(default_nano).bank(1) as bank:
        assert 0 < drive_rate([bank], 3e6, 0.1) <= 3e6


def test_a_read_error_ends_it(default_nano: Path) -> None:
    with Container.open(default_nano).bank(1) as bank:

        def broken(expert: int, buffer: Any) -> None:
            raise InputError("gone")

        bank.read = broken  # type: ignore[method-assign]
        with pytest.raises(InputError, match="gone"):
            drive_rate([bank], None, 5.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "waste-reader"]


def test_the_machine_is_described_in_plain_values() -> None:
    machine = look_around()
    assert machine.cores >= 1 and machine.ram_total_bytes > 1 << 28
    assert all(isinstance(value, str | int | float | None) for value in vars(machine).values())


def test_peak_memory_is_that_since_the_reset() -> None:
    peak = PeakMemory()
    peak.reset()
    before = peak.bytes()
    memory = aligned(64 << 20)
    memory.fill(1)
    assert peak.bytes() >= before + (60 << 20)
    del memory
    peak.reset()
    assert peak.bytes() < before + (40 << 20)
