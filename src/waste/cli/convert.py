"""`waste convert`: from a Hugging Face checkpoint to a container, or what that would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from waste.cli import options
from waste.cli.config import Config
from waste.cli.failures import Terminated
from waste.cli.native import choose_isa
from waste.cli.output import Output
from waste.errors import ExitCode
from waste.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from waste.convert import Preflight

SCHEMA = "waste.convert/1"
SHORT = "Make a container of a Hugging Face checkpoint."
HELP = """\
\b
waste convert zai-org/GLM-5.3-Flash glm.waste
waste convert ./checkpoint model.waste --size 90GB --dry-run
waste convert ./checkpoint model.waste --experts wt2+wt3 --trunk q6

Reads SRC, a directory or a model of the Hugging Face Hub, and writes the container DST, a directory. Everything is
checked before the first byte is written. It can be killed at any point: the same command goes on where it
stopped, and the result is the same to the byte. stdout gets the path and size of what was written.

Default: --experts wt3 --trunk q8,kda=q6,mla=wt4,indexer=wt4,shared=wt4, most bits where they count most.

Formats: f32 and bf16 are exact for BF16 releases; q8, q6 and q4 take 8, 6 and 4 bits a weight, wt4, wt3 and wt2 4, 3
and 2 with less loss than plain rounding has. --experts wt2+wt3: wt2 for gate and up, wt3 for down. --trunk q6: for all
the rest, but embedding and head never get less than 8 bits. --trunk q6,kda=q8: some classes of tensors in another one,
without the first word on top of the default: first (attention of layer 0), kda, kda_gate, mla, indexer, dense, shared,
table (embedding and head), small. --size: formats that are not given are chosen so that the container fits and least
is lost, as measured on the bundled example. HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE and HF_ENDPOINT mean what they mean
to other Hub programs.
"""


def convert(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint directory, or OWNER/NAME on the Hub.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Container to write, a directory: NAME.waste.")],
    experts: Annotated[
        str | None, typer.Option("--experts", metavar="FORMAT", help="One of those below, or wt2+wt3. Default: wt3.")
    ] = None,
    trunk: Annotated[str | None, typer.Option("--trunk", metavar="FORMATS", help="Everything else, see below.")] = None,
    size: Annotated[
        str | None, typer.Option("--size", metavar="SIZE", help="Of the whole container at most, as 90GB.")
    ] = None,
    revision: options.Revision = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and report, write nothing.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Drop an unfinished conversion in DST.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished container in DST.")] = False,
    threads: options.Threads = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> ExitCode:
    """Its help is `HELP`; the exit code is NO for a dry run that finds too little space."""
    out: Output = ctx.obj
    out.configure(quiet=quiet, verbose=verbose, no_color=no_color)
    config = Config.load(out.env.environ)

    from waste.convert import ConvertOptions, plan_conversion
    from waste.convert import convert as run_conversion

    chosen = ConvertOptions(
        experts=config.parse("experts", experts),
        trunk=config.parse("trunk", trunk),
        size=config.parse("size", size),
        revision=revision,
        force=force,
        restart=restart,
        threads=config.get("threads", threads),
    )
    choose_isa(config)
    if dry_run:
        report = plan_conversion(source, target, chosen, out.on_event)
        if as_json:
            out.json({"schema": SCHEMA, "dry_run": True, **_document(report)})
        else:
            out.table(list(_rows(report)), title="Nothing was written.")
        return ExitCode.DONE if report.fits else ExitCode.NO
    try:
        result = run_conversion(source, target, chosen, out.on_event, lambda report: _announce(report, target, out))
    except (KeyboardInterrupt, Terminated):
        out.notice("interrupted: the same command goes on from here")
        raise
    out.detail(f"took {format_seconds(result.seconds)}, {format_bytes(result.resumed_bytes)} of the source done before")
    if as_json:
        out.json(
            {
                "schema": SCHEMA,
                "dry_run": False,
                "path": str(result.path),
                "container_bytes": result.nbytes,
                "seconds": result.seconds,
                "unchanged": result.unchanged,
                "resumed_bytes": result.resumed_bytes,
                "notices": list(result.notices),
            }
        )
    else:
        out.table([(str(result.path), format_bytes(result.nbytes))])
    return ExitCode.DONE


def _announce(report: Preflight, target: Path, out: Output) -> None:
    """What is about to happen, in one line."""
    if report.finished:
        return
    done = f", {format_bytes(report.done_bytes)} of it done before" if report.done_bytes else ""
    fetched = f"{format_bytes(report.download_bytes)} to download, " if report.download_bytes else ""
    out.notice(
        f"{report.source} -> {target!s}: {format_count(report.weights)} weights, {fetched}"
        f"{format_bytes(report.read_bytes)} to read, {format_bytes(report.write_bytes)} to write{done}, "
        f"about {format_seconds(report.seconds)}"
    )


def _rows(report: Preflight) -> Iterator[tuple[str, str]]:
    from waste.convert.mixes import by_class, class_bytes

    yield "source", report.source if report.revision is None else f"{report.source} at {report.revision}"
    yield "model", f"{report.config.family}, {format_count(report.weights)} weights in {report.tensors} tensors"
    yield "formats", f"experts {report.formats.experts_text}, trunk {report.formats.trunk_text}"
    chosen = by_class(report.formats)
    for name, nbytes in class_bytes(report.config, report.formats).items():
        yield name, f"{chosen.get(name, 'f32')}, {format_bytes(nbytes)}"
    cost, usual = _costs(report)
    if cost is not None and cost != usual:
        yield "loss", f"{cost / usual:.2g} times that of the default formats, by the example model"
    if report.download_bytes:
        yield "to download", format_bytes(report.download_bytes)
    yield "to read", format_bytes(report.read_bytes)
    yield "to write", format_bytes(report.write_bytes)
    if report.done_bytes:
        yield "done before", format_bytes(report.done_bytes)
    needed = "" if report.fits else f", {format_bytes(report.needed_bytes)} are needed"
    yield "free there", f"{format_bytes(report.free_bytes)}{needed}"
    yield "time", f"about {format_seconds(report.seconds)}"
    for what, names in (("vision, skipped", report.vision), ("copies, skipped", report.copies)):
        if names:
            yield what, f"{_tensors(names)}, as {names[0]}"
    if report.unused:
        yield "unused", f"{_tensors(report.unused)}: {', '.join(report.unused)}"
    if report.finished:
        yield "target", "holds exactly this already"


def _tensors(names: Sequence[str]) -> str:
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'}"


def _costs(report: Preflight) -> tuple[float | None, float]:
    """What the formats of `report` and the default ones cost the example model, in the classes that this model has.

    None where not all of it was measured.
    """
    from waste.convert.mixes import Costs, class_bytes
    from waste.models.formats import read_formats

    costs, classes = Costs.measured(), class_bytes(report.config, report.formats)
    usual = costs.of(read_formats(), classes)
    assert usual is not None  # the default consists of measured formats; a test holds it to that
    return costs.of(report.formats, classes), usual


def _document(report: Preflight) -> dict[str, Any]:
    from waste.convert.mixes import class_bytes

    cost, usual = _costs(report)
    return {
        "source": report.source,
        "revision": report.revision,
        "family": report.config.family,
        "weights": report.weights,
        "tensors": report.tensors,
        "formats": asdict(report.formats),
        "class_bytes": class_bytes(report.config, report.formats),
        "example_kl": cost,
        "example_kl_of_default": usual,
        "download_bytes": report.download_bytes,
        "read_bytes": report.read_bytes,
        "write_bytes": report.write_bytes,
        "done_bytes": report.done_bytes,
        "needed_bytes": report.needed_bytes,
        "free_bytes": report.free_bytes,
        "fits": report.fits,
        "expected_s": report.seconds,
        "finished": report.finished,
        "vision_tensors": list(report.vision),
        "copied_tensors": list(report.copies),
        "unused_tensors": list(report.unused),
        "notices": list(report.notices),
    }
