"""Rows for people: what a token takes, lane by lane and tier by tier, as tables of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from waste.bench.compare import Comparison
from waste.bench.row import NOTHING_READ, Row
from waste.units import format_bytes, format_rate


@dataclass(frozen=True)
class Table:
    """Cells with a line of names on top. `right`: columns of numbers."""

    title: str
    cells: list[list[str]]
    right: tuple[int, ...]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Speed, lanes and tiers of every row, and what they have in common."""
    if not rows:
        return []
    shown = [_SPEED, _LANES] + ([_TIERS] if any(row.all_experts for row in rows) else [])
    return [*(_table(title, columns, rows) for title, columns in shown), _facts(rows)]


def comparison_table(found: Sequence[Comparison]) -> Table:
    """Then and now."""
    columns: list[tuple[str, Callable[[Comparison], str]]] = [
        ("arm", lambda c: c.new.arm),
        ("test", lambda c: c.new.title),
        ("then tok/s", lambda c: _number(c.old.tokens_per_s)),
        ("now tok/s", lambda c: _number(c.new.tokens_per_s)),
        ("ratio", lambda c: f"{c.ratio:.3f}"),
        ("verdict", lambda c: c.verdict),
    ]
    if not any(c.new.arm for c in found):
        del columns[0]
    cells = [[name for name, _ in columns], *([show(c) for _, show in columns] for c in found)]
    return Table("Compared", cells, tuple(i for i, (name, _) in enumerate(columns) if name not in _TEXTS))


def markdown(shown: Sequence[Table]) -> str:
    """The tables as Markdown."""
    parts = []
    for table in shown:
        head, *body = [[cell.replace("|", "\\|") for cell in line] for line in table.cells]
        rule = ["---:" if i in table.right else "---" for i in range(len(head))]
        lines = [f"| {' | '.join(line)} |" for line in (head, rule, *body)]
        parts.append("\n".join([f"**{table.title}**", "", *lines]) + "\n")
    return "\n".join(parts)


_Columns = list[tuple[str, Callable[[Row], str]]]
_TEXTS = ("arm", "test", "verdict")


def _number(value: float | None) -> str:
    """Three digits or more: 0.012, 1.23, 12.3, 1234."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}" if size >= 0.0005 else f"{value:.1g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.{0 if share > 0.0995 else 1}f} %"


def _bytes(value: float) -> str:
    return format_bytes(value) if value else "0"


_SPEED: tuple[str, _Columns] = (
    "Speed",
    [
        ("test", lambda row: row.title),
        ("tok/s", lambda row: _number(row.tokens_per_s)),
        ("p10-p90", lambda row: f"{_number(row.tokens_per_s_p10)}-{_number(row.tokens_per_s_p90)}"),
        ("ms/token", lambda row: _number(row.token_ms)),
        ("hits", lambda row: _percent(row.hit_share)),
        ("read/token", lambda row: _bytes(row.read_bytes)),
        ("of memory", lambda row: _percent(row.memory_share)),
        ("of drive", lambda row: _percent(row.drive_share)),
        ("peak RSS", lambda row: format_bytes(row.peak_rss_bytes)),
    ],
)
_LANES: tuple[str, _Columns] = (
    "Milliseconds a token",
    [
        ("test", lambda row: row.title),
        ("all", lambda row: _number(row.token_ms)),
        ("trunk", lambda row: _number(row.trunk_ms)),
        ("attention", lambda row: _number(row.attention_ms)),
        ("experts", lambda row: _number(row.experts_ms)),
        ("router", lambda row: _number(row.router_ms)),
        ("sampling", lambda row: _number(row.sampling_ms)),
        ("drive wait", lambda row: _number(row.wait_ms)),
        ("Python", lambda row: _number(row.python_ms)),
    ],
)
_TIERS: tuple[str, _Columns] = (
    "Experts a token",
    [
        ("test", lambda row: row.title),
        ("VRAM", lambda row: _number(row.vram_hits)),
        ("RAM", lambda row: _number(row.ram_hits)),
        ("late", lambda row: _number(row.late)),
        ("missed", lambda row: _number(row.misses)),
        ("read", lambda row: _number(row.reads)),
        ("ahead", lambda row: _number(row.prefetch_reads)),
        ("useful", lambda row: _number(row.prefetch_useful)),
        ("wasted", lambda row: _number(row.prefetch_wasted)),
        ("resident", lambda row: f"{row.resident_experts} of {row.all_experts}"),
    ],
)


def _table(title: str, columns: _Columns, rows: Sequence[Row]) -> Table:
    if any(row.arm for row in rows):
        columns = [("arm", lambda row: row.arm), *columns]
    cells = [[name for name, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    return Table(title, cells, tuple(i for i, (name, _) in enumerate(columns) if name not in _TEXTS))


def _facts(rows: Sequence[Row]) -> Table:
    first = rows[0]
    budgets = dict.fromkeys(f"{row.slots} slots in {format_bytes(row.ram_bytes)} of RAM" for row in rows)
    cells = [
        ["model", f"{first.model} ({first.formats})"],
        ["experts", "; ".join(budgets)],
        ["run", _run(rows)],
        ["memory limit", _rates([row.memory_limit_bytes_per_s for row in rows])],
        ["drive limit", _drives(rows)],
        ["machine", f"{first.cpu}, {first.cores} cores, {format_bytes(first.ram_total_bytes)}, {first.system}"],
        ["versions", f"waste {first.waste_version}, Python {first.python_version}, NumPy {first.numpy_version}"],
    ]
    return Table("Measured with", [["what", "value"], *cells], ())


def _run(rows: Sequence[Row]) -> str:
    first = rows[0]
    several = {name: dict.fromkeys(str(getattr(row, name)) for row in rows) for name in ("isa", "threads", "repeats")}
    isa, threads, repeats = (" and ".join(values) for values in several.values())
    state = "cold" if first.cold else "warm"
    turns, crew = _counted(repeats, "repeat"), _counted(threads, "thread")
    cached = all(row.direct_asked and not row.direct for row in rows)
    reads = ", no direct reads here" if cached else ""
    return f"{state} cache, {turns}, {crew}, {first.backend} {isa}{reads}, load average {first.load_average:g}"


def _drives(rows: Sequence[Row]) -> str:
    """The limits of real drives, those of simulated ones, and why there may be none."""
    parts = []
    for note in dict.fromkeys(row.drive_note for row in rows):
        rates = [row.drive_limit_bytes_per_s for row in rows if row.drive_note == note]
        known = any(rate is not None for rate in rates)
        if known or note not in ("", NOTHING_READ):
            parts.append(f"{_rates(rates)} ({note})" if known and note else _rates(rates) if known else note)
    return "; ".join(parts) or "-"


def _counted(count: str, what: str) -> str:
    return f"{count} {what}" if count == "1" else f"{count} {what}s"


def _rates(rates: Sequence[float | None]) -> str:
    known = sorted(rate for rate in rates if rate is not None)
    if not known:
        return "-"
    low, high = format_rate(known[0]), format_rate(known[-1])
    return low if low == high else f"{low} to {high}"
