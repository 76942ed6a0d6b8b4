"""`waste bench`: what a token costs, lane by lane and tier by tier, and how near that is to what the machine can do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from waste.cli import options
from waste.cli.config import Config
from waste.cli.measured import Wanted, measured
from waste.cli.native import choose_isa
from waste.cli.output import Output
from waste.cli.replayed import replayed
from waste.cli.target import bundled_example, existing_container
from waste.cli.tiers import TierFlags
from waste.errors import UsageError

FORMATS = ("table", "md", "csv", "json", "jsonl")

# A big model on a slow drive takes minutes for three rounds; without -r no round begins after this time.
PATIENCE_S = 60.0
REPEATS = 3

SHORT = "Measure tokens per second, and what they are made of."
HELP = """\
\b
waste bench glm.waste
waste bench glm.waste -p 64,512 -n 64 -r 5 --depth 0,4096
waste bench glm.waste --vary ram=16GiB,32GiB --vary policy=lru,lfu
waste bench glm.waste -o jsonl >> results.jsonl
waste bench glm.waste --compare results.jsonl --fail-under 0.95
waste bench glm.waste --trace routing.trace
waste bench --replay routing.trace --slots 2%,10%,50% --plot hits.svg
waste bench                                     the bundled example

Prompts (prefill) and the tokens after them (decode) are measured apart, on a built-in text that is new in every
repeat. Decoding is forced along that text, so that all arms see the same tokens; what is drawn is thrown away.

Rates are medians over the repeats, with the 10th and 90th percentile; lanes and tiers are means per token, and the
lanes add up to the wall time. "of memory": weights that a token reads, at the rate at which as many threads can read
memory; "of drive": what was read, against random reads of the same records by the same readers; both limits are
measured in the same rounds. What comes through the page cache is never called a drive speed.

--vary compares settings in one process, in turns, on one trunk: ram, vram, threads, isa, policy, lookahead, fill,
direct, drive.
"""


def bench(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A container made by `waste convert`.", show_default=False)
    ] = None,
    prompt: Annotated[
        str, typer.Option("--prompt-tokens", "-p", metavar="N,N", help="Prompt lengths; 0: no prompt.")
    ] = "64",
    generate: Annotated[int, typer.Option("--tokens", "-n", metavar="N", min=0, help="Tokens decoded after it.")] = 32,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", "-r", metavar="N", min=1, help="Default: 3, or as many as begin in a minute."),
    ] = None,
    depth: Annotated[str, typer.Option("--depth", metavar="N,N", help="Tokens already in the session.")] = "0",
    warm_up: Annotated[
        int, typer.Option("--warm-up", "-w", metavar="N", min=0, help="Tokens evaluated before anything counts.")
    ] = 32,
    cold: Annotated[
        bool, typer.Option("--cold/--warm", help="Whether every repeat begins with an empty expert cache.")
    ] = False,
    vary: Annotated[
        list[str] | None, typer.Option("--vary", metavar="KEY=A,B", help="Compare settings; may be repeated.")
    ] = None,
    drive: Annotated[str | None, typer.Option("--drive", metavar="RATE", help="Simulate a drive, as 2GB/s.")] = None,
    no_fill: Annotated[bool, typer.Option("--no-fill", help="No reads in the background while there is room.")] = False,
    context: options.Context = None,
    ram: options.Ram = None,
    vram: options.Vram = None,
    experts_dir: options.ExpertsDir = None,
    policy: options.Policy = None,
    lookahead: options.Lookahead = None,
    learn: options.Learn = None,
    mlock: options.Mlock = None,
    threads: options.Threads = None,
    isa: Annotated[str | None, typer.Option("--isa", metavar="NAME", help="Instruction set of native code.")] = None,
    backend: options.Backend = None,
    form: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="|".join(FORMATS), help="How rows are written. Default: table."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="Rows of another time, as -o jsonl writes them.")
    ] = None,
    fail_under: Annotated[
        float | None,
        typer.Option("--fail-under", metavar="X", help="With --compare: exit 1 when a test is slower than X times."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write down which experts every token chose.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option("--replay", metavar="FILE", help="No MODEL: what caches would have hit on a trace.")
    ] = None,
    slots: Annotated[
        str | None, typer.Option("--slots", metavar="N,N", help="With --replay: cache sizes, as 2%,10% or 500,2000.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="With --replay: the curve, as .svg or .png.")
    ] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> None:
    """Its help is `HELP`."""
    out: Output = ctx.obj
    out.configure(quiet=quiet, verbose=verbose, no_color=no_color)
    form = _form(form, as_json=as_json)
    if replay is not None:
        _only_replay(ctx)
        replayed(replay, slots, plot, form, out)
        return
    for option, given in (("--slots", slots), ("--plot", plot)):
        if given is not None:
            raise UsageError(f"{option} needs --replay FILE")
    if fail_under is not None and compare is None:
        raise UsageError("--fail-under needs --compare FILE")
    if fail_under is not None and not 0 < fail_under < 100:
        raise UsageError(f"--fail-under is {fail_under:g}, expected a ratio as 0.95")
    if fail_under is not None and repeats == 1:
        raise UsageError("--fail-under needs two repeats or more: one has no spread", hint="-r 3")
    config = Config.load(out.env.environ)
    tiers = TierFlags(vram, experts_dir, policy, lookahead, learn, mlock).resolve(config)
    native = choose_isa(config, isa)

    from waste.bench import workload
    from waste.bench.arms import Settings, arms, parse_drive
    from waste.bench.measure import Plan, context_for

    tests = workload.cases(_counts(depth, "--depth"), _counts(prompt, "--prompt-tokens"), generate)
    base = Settings(
        ram=config.parse("ram", ram),
        vram=tiers["vram"],
        threads=config.get("threads", threads),
        isa=native,
        tiers=dataclasses.replace(
            tiers["tiers"],
            fill=not no_fill,
            drive_bytes_per_s=None if drive is None else parse_drive(drive, "--drive"),
        ),
    )
    plan = Plan(
        repeats=REPEATS if repeats is None else repeats,
        patience_s=PATIENCE_S if repeats is None else None,
        cold=cold,
        warm_up_tokens=warm_up,
    )
    measured(
        lambda: bundled_example(config, out, "is measured") if model is None else existing_container(model),
        Wanted(
            arms=arms(base, vary or ()),
            tests=tests,
            plan=plan,
            backend=config.parse("backend", backend),
            context=context_for(tests, warm_up, config.get("ctx", context)),
            experts_dirs=tiers["experts_dirs"],
            trace=trace,
            compare=compare,
            fail_under=fail_under,
        ),
        form,
        out,
    )


def _form(form: str | None, *, as_json: bool) -> str:
    if form is not None and form not in FORMATS:
        raise UsageError(f"--output is {form!r}, expected one of {', '.join(FORMATS)}")
    if as_json and form not in (None, "json"):
        raise UsageError(f"--json and --output {form} are two formats, expected one")
    return "json" if as_json else form or "table"


# What means something where no model runs.
_OF_A_REPLAY = ("replay", "slots", "plot", "form", "as_json", "quiet", "verbose", "no_color")


def _only_replay(ctx: typer.Context) -> None:
    """Refuse whatever the command line says of a measurement."""
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        if name in _OF_A_REPLAY or source is None or source.name != "COMMANDLINE":
            continue
        shown = parameter.opts[0] if parameter.param_type_name == "option" else name.upper()
        raise UsageError(f"{shown} has no place beside --replay, which runs no model")


def _counts(text: str, option: str) -> list[int]:
    """ "64,512" as numbers."""
    found = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit() and len(word) <= 9):
            raise UsageError(f"{option} is {text!r}, expected token counts as 64,512")
        found.append(int(word))
    return found
