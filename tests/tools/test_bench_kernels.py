"""The kernel benchmark: its memory is finite in every format, its sums add up, its document has every row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bench_model import token_bytes
from limits import Arena

from waste import quant
from waste.engine.engine import Engine
from waste.models.formats import Formats
from waste.planner.footprint import sizes
from waste.quant.format import QuantFormat

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_kernels.py"


def run(*options: str) -> dict[str, object]:
    command = [sys.executable, str(TOOL), "--json", "--arena-mib", "64", "--rounds", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(64 << 20)


@pytest.mark.parametrize("fmt", [quant.get(name) for name in quant.names()], ids=quant.names())
def test_the_arena_holds_finite_numbers_in_every_format(arena: Arena, fmt: QuantFormat) -> None:
    begin = arena.take(fmt.nbytes(48, 384))
    values = fmt.decode(arena.bytes[begin : begin + fmt.nbytes(48, 384)], 48, 384)
    assert np.isfinite(values).all()
    assert 0 < np.abs(values).max() < 1e4


def test_the_arena_comes_round_and_stays_inside(arena: Arena) -> None:
    """What was read longest ago is next: takes follow each other without overlap until the end."""
    size, end = 5_000_001, 0
    arena.take(len(arena.bytes))
    begin = arena.take(size)
    assert begin == 0
    for _ in range(len(arena.bytes) // size - 1):
        end, begin = begin + size, arena.take(size)
        assert end <= begin < end + 4096
        assert begin + size <= len(arena.bytes)
    assert arena.take(size) in (0, (begin + size + 4095) // 4096 * 4096)
    with pytest.raises(ValueError, match="67108865"):
        arena.take(len(arena.bytes) + 1)


def test_the_bytes_of_a_token_are_those_the_planner_knows(cpu_engine: Engine) -> None:
    trunk, experts = token_bytes(cpu_engine)
    known = sizes(cpu_engine.config, Formats(**cpu_engine.manifest.formats))
    assert abs(trunk - known.read_trunk_bytes) <= 1
    padding = known.token_bytes - known.read_trunk_bytes - experts
    assert 0 <= padding < 8192 * known.top_k * known.expert_layers


def test_every_product_expert_and_prompt_has_its_row() -> None:
    found = run("--isa", "portable", "--formats", "q4,f32", "--no-torch")
    limits, products, experts, prefill = (found[name] for name in ("limits", "products", "experts", "prefill"))
    assert [level["name"] for level in limits] == ["L1", "L2", "L3", "memory, 1 thread", "memory, 2 threads"]
    assert [(row["isa"], row["fmt"]) for row in products] == [("portable", "q4"), ("portable", "f32")]
    assert [row["fmt"] for row in experts] == ["q4"]
    assert [row["tokens"] for row in prefill] == [16, 64, 128]
    figures = [figure for row in (*products, *experts, *prefill) for figure in row["figures"].values()]
    assert all(np.isfinite([f["p10"], f["median"], f["p90"]]).all() and f["p10"] <= f["median"] for f in figures)
    assert all(level["rate"]["median"] > 0 for level in limits)


def test_a_model_is_split_into_stages(default_nano: Path) -> None:
    """Stages and the time between them make up the token."""
    model = run("--model", str(default_nano), "--tokens", "4", "--ram", "1GiB")["model"]
    assert model["misses"] == 0
    assert [each["threads"] for each in model["runs"]] == [1, 2]
    for each in model["runs"]:
        assert sum(each["stages"].values()) == pytest.approx(each["token_ms"], rel=0.02)
        assert all(ms >= 0 for ms in each["stages"].values())
        assert set(each["prefill"]) == {"128", "512"}
    spent = run("--model", str(default_nano), "--tokens", "4", "--ram", "1GiB", "--overhead")["overhead"]
    assert spent["token_ms"]["median"] > 0
    assert 8 * 5 < spent["calls"] < 8 * 8  # every native stage of eight layers was seen


@pytest.mark.parametrize("options", [["--isa", "sse9"], ["--formats", "q5"], ["--overhead"], ["--rounds", "0"]])
def test_nonsense_is_refused_before_anything_runs(options: list[str]) -> None:
    done = subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert not done.stdout
