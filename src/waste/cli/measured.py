"""`waste bench MODEL` at work: measure, show the rows, compare them with those of another time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waste.cli.failures import Terminated
from waste.cli.output import Output
from waste.errors import WasteError

if TYPE_CHECKING:
    from waste.bench.arms import Arm
    from waste.bench.compare import Comparison
    from waste.bench.measure import Plan, RoutingLog
    from waste.bench.row import Row
    from waste.bench.workload import Case
    from waste.engine.engine import Engine


@dataclass(frozen=True)
class Wanted:
    """What the command line asked for."""

    arms: Sequence[Arm]
    tests: Sequence[Case]
    plan: Plan
    backend: str
    context: int | None
    experts_dirs: Sequence[str]
    trace: Path | None
    compare: Path | None
    fail_under: float | None


def measured(model: Callable[[], Path], wanted: Wanted, form: str, out: Output) -> None:
    """Measure and print. Whoever interrupts it gets the rows of what was finished."""
    from waste.bench import stored
    from waste.bench.measure import opened

    old = None if wanted.compare is None else stored.load(wanted.compare)  # before minutes of measuring
    place = model()
    with (
        opened(
            place,
            wanted.arms,
            backend=wanted.backend,
            ctx=wanted.context,
            experts_dirs=wanted.experts_dirs,
            on_event=out.on_event,
        ) as engines,
        _traced(wanted.trace, engines[wanted.arms[0].name]) as listener,
    ):
        rows, end = _rows(engines, wanted, listener, str(place), out)
    for reason in dict.fromkeys(engine.not_learned for engine in engines.values() if engine.not_learned is not None):
        out.detail(f"usage is not learned: {reason}")
    found = None if old is None else _compared(old, rows, wanted.compare, out)
    _show(rows, found, form, out)
    if end is not None:
        raise end
    if found is not None and wanted.fail_under is not None:
        _judge(found, wanted.fail_under, str(wanted.compare))


def _rows(
    engines: dict[str, Engine], wanted: Wanted, listener: RoutingLog | None, model: str, out: Output
) -> tuple[list[Row], BaseException | None]:
    """The rows, and what ended the measurement before its time."""
    from waste.bench.lanes import clock_s
    from waste.bench.machine import look_around
    from waste.bench.measure import Measurement
    from waste.bench.rows import row_of

    plan, end = wanted.plan, None
    machine, clocks = look_around(), clock_s()
    measurement = Measurement(engines, wanted.arms, wanted.tests, plan, trace=listener, on_event=out.on_event)
    try:
        measurement.run()
    except (KeyboardInterrupt, Terminated) as signalled:
        end = signalled
    out.clear_progress()
    results = measurement.results
    done = len(results[0].samples) if results else 0
    if end is None and done < plan.repeats:
        out.notice(f"{done} of {plan.repeats} repeats began within a minute; -r {plan.repeats} takes them all")
    for result in results:
        for stage, ms in result.stages_ms():
            out.detail(f"{result.arm.name} {result.test}: {stage} {ms:.3f} ms a token".strip())
    return [row_of(result, engines[result.arm.name], plan, machine, model, clocks) for result in results], end


@contextmanager
def _traced(path: Path | None, engine: Engine) -> Iterator[RoutingLog | None]:
    """What writes the routing to `path`, if there is one."""
    if path is None:
        yield None
        return
    from waste.bench.trace import TraceHeader, write_trace

    with write_trace(path, TraceHeader.of(engine.config, engine.manifest)) as writer:
        yield writer


def _compared(old: Sequence[Row], rows: Sequence[Row], path: Path | None, out: Output) -> list[Comparison]:
    from waste.bench.compare import compare, unlike

    found = compare(old, rows)
    if rows and not found:
        nearest = ", ".join(unlike(old, rows[-1]))
        out.notice(
            f"nothing in {str(path)!r} was measured with these settings, on this model"
            + (f": {nearest}" if nearest else "")
        )
    for remark in dict.fromkeys(remark for each in found for remark in each.remarks):
        out.notice(f"not all else is equal: {remark}")
    return found


def _show(rows: Sequence[Row], found: Sequence[Comparison] | None, form: str, out: Output) -> None:
    """The rows on stdout. A comparison is part of all but the pure rows: beside those it goes to stderr."""
    from waste.bench import report, stored
    from waste.bench.row import SCHEMA

    shown = report.tables(rows)
    if found:
        shown.append(report.comparison_table(found))
    if form == "table":
        for table in shown:
            out.table(table.cells, title=table.title, right=table.right)
    elif form == "md":
        out.text(report.markdown(shown))
    elif form == "json":
        document: dict[str, Any] = {"schema": SCHEMA, "rows": [row.as_dict() for row in rows]}
        if found is not None:
            document["compared"] = [each.as_dict() for each in found]
        out.json(document)
    elif rows:
        out.text(stored.to_csv(rows) if form == "csv" else stored.to_jsonl(rows))
    if form in ("csv", "jsonl"):
        for each in found or ():
            out.notice(f"{each.new.arm} {each.new.title}: {each.ratio:.3f} of before, {each.verdict}".strip())


def _judge(found: Sequence[Comparison], least: float, before: str) -> None:
    """Exit 1, naming the worst, when tests have become slower, and where that cannot be known."""
    if not found:
        raise WasteError(
            f"nothing to judge: no test is also in {before!r}", hint="measure with the settings of that file, or anew"
        )
    bad = [each for each in found if each.falls_below(least)]
    if bad:
        worst = min(bad, key=lambda each: each.ratio)
        raise WasteError(
            f"{_tests(bad)} slower than {least:g} of before: {_name(worst)} is at {worst.ratio:.3f}",
            hint="measure both again, on a quiet machine, with more repeats (-r)",
        )
    unknown = [each for each in found if each.verdict == "spread unknown"]
    if unknown:
        few = unknown[0]
        raise WasteError(
            f"{_tests(unknown)} beyond judgement: {_name(few)} has {few.old.repeats} repeats of before, "
            f"{few.new.repeats} of now, 2 are needed",
            hint="measure with -r 3 or more",
        )


def _tests(found: Sequence[Comparison]) -> str:
    return "1 test is" if len(found) == 1 else f"{len(found)} tests are"


def _name(found: Comparison) -> str:
    return f"{found.new.arm} {found.new.title}".strip()
