"""`waste bench --replay FILE`: what caches of some sizes would have hit on a trace, with each policy. No model runs."""

from __future__ import annotations

from pathlib import Path

from waste.cli.output import Output


def replayed(trace: Path, sizes: str | None, plot: Path | None, form: str, out: Output) -> None:
    """Replay, print, and draw where that is asked for. Raises what reading, sizes and drawing raise."""
    from waste.bench import hits
    from waste.bench.flat import csv_text, jsonl
    from waste.bench.replay import SHARES, replay
    from waste.bench.report import markdown

    if plot is not None:
        from waste.bench.plot import check
        from waste.bench.plot import plot as draw

        check(plot)  # replaying may take a minute
    slots, shares = (None, None) if sizes is None else hits.parse_sizes(sizes)
    rows = replay(trace, slots, shares=shares or SHARES, on_event=out.on_event)
    if form == "table":
        table = hits.table(rows)
        out.table(table.cells, title=table.title, right=table.right)
    elif form == "md":
        out.text(markdown([hits.table(rows)]))
    elif form == "json":
        out.json({"schema": hits.SCHEMA, "rows": hits.as_dicts(rows)})
    else:
        documents = hits.as_dicts(rows)
        out.text(csv_text(list(documents[0]), documents) if form == "csv" else jsonl(documents))
    if plot is not None:
        draw(rows, plot, title=str(trace))
        out.notice(f"the curve is in {str(plot)!r}")
