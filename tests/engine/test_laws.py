"""Laws 1, 2 and 6 of the engine, and what it does when it is asked for the impossible."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from waste.engine.engine import Engine
from waste.engine.session import Session
from waste.errors import InputError, ResourceError, UsageError, WasteError
from waste.events import Progress
from waste.hardware import memory
from waste.tiers.cache import ExpertCache
from waste.tiers.options import TierOptions
from waste.tiers.policy import POLICIES
from waste.units import parse_bytes

CacheOf = Callable[..., ExpertCache]

GOLDEN = np.load(Path(__file__).resolve().parents[2] / "examples" / "nano-glm" / "golden.npz")
TEXT = GOLDEN["python.input_ids"][:150]  # past the dense limit of 67 tokens: selection is at work


def answer(session: Session, steps: int = 12) -> np.ndarray:
    """Logits of a prompt and of a few greedy steps after it."""
    rows = [session.eval(TEXT, all_logits=True)]
    for _ in range(steps):
        rows.append(session.eval([int(rows[-1][-1].argmax())], all_logits=True))
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def expected(cpu_engine: Engine) -> np.ndarray:
    return answer(cpu_engine.session())


@pytest.mark.parametrize("slots", [4, 5, 33, 100])
def test_cache_size_changes_no_bit(cpu_engine: Engine, expected: np.ndarray, cache_of: CacheOf, slots: int) -> None:
    cache = cache_of(cpu_engine, slots)
    np.testing.assert_array_equal(answer(Session(cpu_engine.model, cache, cpu_engine.context)), expected)
    assert cache.stats.evictions > slots  # it did have to evict


@pytest.mark.parametrize("vram", [0, 40])
@pytest.mark.parametrize("lookahead", [0, 3, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_tiers_policies_and_reading_ahead_change_no_bit(
    cpu_engine: Engine, expected: np.ndarray, cache_of: CacheOf, policy: str, lookahead: int, vram: int
) -> None:
    options = replace(TierOptions(learn=False), policy=policy, lookahead=lookahead, direct=vram == 0)
    cache = cache_of(cpu_engine, 60, vram, options)
    np.testing.assert_array_equal(answer(Session(cpu_engine.model, cache, cpu_engine.context)), expected)
    stats = cache.stats
    assert stats.evictions > 0 and (stats.promotions > 0) == (vram > 0) and (stats.vram_hits > 0) == (vram > 0)
    assert (stats.prefetch_useful > 0) == (lookahead > 0)


def test_filling_shrinking_and_a_slow_drive_change_no_bit(
    cpu_engine: Engine, expected: np.ndarray, cache_of: CacheOf
) -> None:
    """With room for everything, filled behind the session's back; then less and less room, token by token."""
    everything = len(cpu_engine.banks) * cpu_engine.config.router.experts
    for options in (TierOptions(learn=False), TierOptions(learn=False, drive_bytes_per_s=50e6)):
        cache = cache_of(cpu_engine, everything, 0, options)
        np.testing.assert_array_equal(answer(Session(cpu_engine.model, cache, cpu_engine.context)), expected)
        assert cache.stats.fill_reads > 0 and cache.stats.evictions == 0
    cache = cache_of(cpu_engine, everything, 0, TierOptions(learn=False))
    cache._between_tokens = lambda cache: cache.shrink(0.2)
    np.testing.assert_array_equal(answer(Session(cpu_engine.model, cache, cpu_engine.context)), expected)
    assert cache.stats.evictions > 0


@pytest.mark.parametrize("chunk", [1, 7, 64, 149])
def test_chunk_size_changes_no_bit(cpu_engine: Engine, expected: np.ndarray, cache_of: CacheOf, chunk: int) -> None:
    """Prefill equals token-by-token decode; on this backend not only within 1e-4 but in every bit."""
    session = Session(cpu_engine.model, cache_of(cpu_engine, 300), cpu_engine.context, chunk=chunk)
    np.testing.assert_array_equal(answer(session), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_thread_count_changes_no_bit(default_nano: Path, expected: np.ndarray, threads: int) -> None:
    with Engine.open(default_nano, ram="4GiB", threads=threads) as engine:
        np.testing.assert_array_equal(answer(engine.session()), expected)


def test_prefill_equals_decode_on_the_reference(exact_nano: Path) -> None:
    with Engine.open(exact_nano, ram="4GiB", backend="reference", threads=1) as engine:
        whole = engine.session().eval(TEXT, all_logits=True)
        single = engine.session(chunk=1).eval(TEXT, all_logits=True)
    assert np.linalg.norm(whole - single) < 1e-4 * np.linalg.norm(whole)


def test_sessions_do_not_disturb_each_other(cpu_engine: Engine, expected: np.ndarray) -> None:
    one, other = cpu_engine.session(), cpu_engine.session()
    first = one.eval(TEXT[:80], all_logits=True)
    other.eval(TEXT[::-1].copy())
    rest = one.eval(TEXT[80:], all_logits=True)
    np.testing.assert_array_equal(np.concatenate([first, rest]), expected[: len(TEXT)])


def test_hits_and_misses_add_up(cpu_engine: Engine, cache_of: CacheOf) -> None:
    session = Session(cpu_engine.model, cache_of(cpu_engine, 300), cpu_engine.context)
    session.eval(TEXT[:1])
    first = session.stats
    layers, k = len(cpu_engine.config.moe_layers), cpu_engine.config.router.top_k
    assert (first.expert_hits, first.expert_misses) == (0, layers * k)
    assert first.bytes_read == layers * k * cpu_engine.budget.slot_bytes


def test_a_damaged_record_is_an_error_that_names_it(default_nano: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged.waste"
    shutil.copytree(default_nano, copy)
    bank = copy / "experts-003.bin"
    with Engine.open(copy, ram="4GiB") as engine:
        stride = engine.budget.slot_bytes
        raw = bytearray(bank.read_bytes())
        for expert in range(engine.config.router.experts):
            raw[expert * stride + stride // 2] ^= 1
        bank.write_bytes(raw)
        session = engine.session()
        with pytest.raises(InputError, match=r"experts-003\.bin"):
            session.eval(TEXT)
        with pytest.raises(WasteError, match="stopped"):
            session.eval(TEXT)  # nothing is ever computed from a half-advanced state


def test_a_vanished_bank_is_an_error(default_nano: Path, tmp_path: Path) -> None:
    copy = tmp_path / "short.waste"
    shutil.copytree(default_nano, copy)
    with Engine.open(copy, ram="4GiB") as engine:
        with (copy / "experts-002.bin").open("r+b") as bank:
            bank.truncate(8192)
        with pytest.raises(InputError, match=r"experts-002\.bin"):
            engine.session().eval(TEXT)


@pytest.mark.parametrize("ids", [[], [-1], [4096], [[1, 2]], [1.5], np.array([1.0]), ["a"], [True], [2**70], None])
def test_impossible_ids_are_refused(cpu_engine: Engine, ids: list) -> None:
    session = cpu_engine.session()
    with pytest.raises(UsageError):
        session.eval(ids)
    assert session.eval(np.array([5], dtype=np.uint16)).shape == (cpu_engine.config.vocab_size,)


@pytest.mark.parametrize("chunk", [0, -1])
def test_an_impossible_chunk_is_refused(cpu_engine: Engine, chunk: int) -> None:
    with pytest.raises(UsageError, match="chunk"):
        cpu_engine.session(chunk=chunk)


def test_prefill_reports_from_nothing_to_everything(cpu_engine: Engine) -> None:
    events: list[Progress] = []
    session = cpu_engine.session(chunk=64)
    session.eval(TEXT, on_event=events.append)
    session.eval(TEXT[:1], on_event=events.append)  # a decode step is no progress
    assert [(e.phase, e.done, e.total) for e in events] == [("prefill", n, 150) for n in (0, 64, 128, 150)]


def test_context_is_a_limit_and_refusing_costs_nothing(default_nano: Path) -> None:
    with Engine.open(default_nano, ram="4GiB", ctx=20) as engine:
        session = engine.session()
        session.eval(TEXT[:15])
        with pytest.raises(UsageError, match="context of 20"):
            session.eval(TEXT[15:21])
        assert session.position == 15
        session.eval(TEXT[15:20])
    with Engine.open(default_nano, ram="4GiB", ctx=10**9) as engine:
        assert engine.context == engine.config.max_position_embeddings


def test_a_small_budget_is_refused_with_the_least_that_runs(default_nano: Path) -> None:
    with pytest.raises(ResourceError) as refusal:
        Engine.open(default_nano, ram="20MiB", ctx=512)
    found = re.match(r"--ram ([^\s,]+)", refusal.value.hint or "")
    assert found
    # The baseline is this process's own size, which may have grown by a page or two since.
    with Engine.open(default_nano, ram=parse_bytes(found[1]) + (64 << 20), ctx=512) as engine:
        assert engine.budget.slots >= engine.config.router.top_k
        assert engine.budget.fixed_bytes + engine.budget.cache_bytes <= engine.budget.ram_bytes
        engine.session().eval(TEXT[:10])


def test_a_control_group_is_the_most_there_is(default_nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "detect", lambda: memory.Memory(64 << 30, 3 << 30, 4 << 30))
    with pytest.raises(ResourceError, match="more than the control group's 4"):
        Engine.open(default_nano, ram="16GiB")
    monkeypatch.setattr(memory, "detect", lambda: memory.Memory(8 << 30, 3 << 30, None))
    with pytest.raises(ResourceError, match="more than this machine's 8"):
        Engine.open(default_nano, ram="16GiB")


def test_a_closed_engine_says_so(default_nano: Path) -> None:
    with Engine.open(default_nano, ram="4GiB") as engine:
        session = engine.session()
        session.eval(TEXT[:3])
    with pytest.raises(WasteError, match="closed"):
        session.eval(TEXT[:3])
    with pytest.raises(WasteError, match="closed"):
        engine.session().eval(TEXT[:3])
    engine.close()  # twice is no harm


def test_unknown_backend_is_refused(default_nano: Path) -> None:
    with pytest.raises(UsageError, match="backend"):
        Engine.open(default_nano, backend="tpu")
