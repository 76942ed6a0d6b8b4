"""The curve of a replay: hit share by share resident, a line for each policy, as SVG or PNG."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from waste.bench.replay import OPTIMUM, ReplayRow
from waste.errors import UsageError
from waste.io.files import atomic_write, shown

KINDS = (".svg", ".png")


def check(path: str | os.PathLike[str]) -> str:
    """The ending of `path`, in lower case. Raises UsageError for one that cannot be drawn, and without matplotlib."""
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in KINDS:
        raise UsageError(f"{shown(path)} is neither .svg nor .png", hint=f"--plot {target.stem or 'hits'}.svg")
    if find_spec("matplotlib") is None:
        raise UsageError("matplotlib is not installed: it draws the plot", hint="pip install 'waste[plot]'")
    return kind


def plot(rows: Sequence[ReplayRow], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw `rows` into the file at `path`, whose ending says how.

    The same rows give the same bytes with the same matplotlib. Raises what `check` raises, ResourceError when the
    file cannot be written.
    """
    kind = check(path)
    import matplotlib
    from matplotlib.figure import Figure

    # Ids in an SVG are random and glyphs depend on the fonts there, unless told otherwise.
    with matplotlib.rc_context({"svg.hashsalt": "waste", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot(
            xlabel="share of the experts that is resident, %", ylabel="share of uses that hit, %", title=title
        )
        for policy in dict.fromkeys(row.policy for row in rows):
            points = sorted((100 * row.share_resident, 100 * row.hit_share) for row in rows if row.policy == policy)
            style = "--" if policy == OPTIMUM else "-"
            axes.plot([x for x, _ in points], [y for _, y in points], style, marker="o", markersize=3, label=policy)
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        axes.grid(alpha=0.3)
        if rows:
            axes.legend(loc="lower right")
        data = io.BytesIO()
        figure.savefig(data, format=kind[1:], metadata={"Date" if kind == ".svg" else "Software": None})
    atomic_write(Path(path), data.getvalue())
