"""The report of a cold start: its parts add up, and it says what they were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste.container.load import LoadReport
from waste.engine.engine import Engine
from waste.engine.first_token import FirstToken
from waste.models.spec import EMBEDDING, TRUNK_FILE
from waste.units import format_seconds

COLD = FirstToken(
    open_s=2.6,
    trunk=LoadReport(7516192768, 2.4, 2.39, True),
    prompt_tokens=34,
    prompt_s=9.7,
    stall_s=8.9,
    draw_s=0.004,
)


def test_one_line_says_it_all() -> None:
    assert COLD.line() == (
        "first token after 12.3 s: trunk 7.00 GiB in 2.40 s (3.13 GB/s), prompt 34 tok 9.70 s, "
        "8.90 s of it waiting for the drive, rest 0.20 s"
    )


def test_a_warm_start_does_not_speak_of_the_drive() -> None:
    warm = FirstToken(0.5, LoadReport(1 << 30, 0.499, 0.49, False), 3, 0.25, 0.0, 0.0)
    assert warm.line() == (
        "first token after 0.75 s: trunk 1.00 GiB in 0.50 s (2.15 GB/s through the page cache), prompt 3 tok 0.25 s"
    )


seconds = st.just(0.0) | st.floats(1e-6, 5)


@given(open_rest=seconds, load=seconds, prompt=seconds, share=st.floats(0, 1), draw=seconds)
def test_the_parts_add_up(open_rest: float, load: float, prompt: float, share: float, draw: float) -> None:
    trunk = LoadReport(1 << 20, load, load, True)
    report = FirstToken(open_rest + load, trunk, 5, prompt, share * prompt, draw)
    assert report.total_s == pytest.approx(open_rest + load + prompt + draw)
    line = report.line()
    assert line.startswith(f"first token after {format_seconds(report.total_s)}: trunk 1.00 MiB in ")
    told = [float(part) for part in re.findall(r"(?:in|tok|rest) ([\d.]+) s", line)]
    assert sum(told) == pytest.approx(report.total_s, abs=0.02 + 0.006 * report.total_s)
    figures = report.figures()
    assert figures["first_token_s"] == report.total_s
    assert (figures["trunk_s"], figures["prompt_stall_s"]) == (load, report.stall_s)
    assert all(key.endswith(("_s", "_bytes", "_direct")) for key in figures)


def test_an_engine_tells_how_its_trunk_was_loaded(default_nano: Path) -> None:
    with Engine.open(default_nano, ram="4GiB") as engine:
        entries = engine.manifest.tensors_of(TRUNK_FILE)
        table = next(entry for entry in entries if entry.name == EMBEDDING)
        size = (default_nano / TRUNK_FILE).stat().st_size
        assert size - table.nbytes - 4096 <= engine.load.nbytes <= size - table.nbytes + 4096
        assert 0 < engine.load.drive_s <= engine.load.seconds <= engine.load_s
