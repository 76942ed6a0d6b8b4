"""The plot of a replay: a line for each policy, the same bytes each time, and a hint where it cannot be drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from waste.bench.plot import plot
from waste.bench.replay import ReplayRow
from waste.errors import ResourceError, UsageError


def rows() -> list[ReplayRow]:
    return [
        ReplayRow(policy, "pooled", 1, n, n / 100, 10, hits, 100, hits, 100)
        for n, hits in ((50, 80), (10, 20), (25, 40))
        for policy in ("lru", "adaptive", "optimum")
    ]


@pytest.fixture(autouse=True)
def _needs_matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def test_a_line_and_a_name_for_each_policy(tmp_path: Path) -> None:
    path = tmp_path / "hits.svg"
    plot(rows(), path, title="nano-glm")
    texts = [node.text for node in ElementTree.parse(path).iter() if node.tag.endswith("text")]
    for name in ("lru", "adaptive", "optimum", "nano-glm"):
        assert texts.count(name) == 1


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_the_same_rows_give_the_same_bytes(tmp_path: Path, ending: str) -> None:
    first, second = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
    plot(rows(), first)
    plot(rows()[::-1][:3] + rows()[:6], tmp_path / "other.svg")  # what was drawn before leaves nothing behind
    plot(rows(), second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG" if ending == ".png" else b"<?xml")


def test_no_rows_are_an_empty_plot(tmp_path: Path) -> None:
    plot([], tmp_path / "none.svg")
    assert (tmp_path / "none.svg").exists()


def test_pyplot_stays_out(tmp_path: Path) -> None:
    plot(rows(), tmp_path / "a.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_what_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"neither \.svg nor \.png"):
        plot(rows(), tmp_path / "a.jpg")
    with pytest.raises(ResourceError):
        plot(rows(), tmp_path / "nowhere" / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        plot(rows(), tmp_path / "a.svg")
    assert caught.value.hint == "pip install 'waste[plot]'"
