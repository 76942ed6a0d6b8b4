"""`waste run`: its options, and the way from a prompt to the model's text on stdout and nothing else there."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from waste.cli import options
from waste.cli.answer import Printer, knows_effort
from waste.cli.config import REASONING, Config
from waste.cli.jsonl import answer_lines, request_lines
from waste.cli.kept import KeptSession
from waste.cli.native import choose_isa
from waste.cli.output import Output
from waste.cli.prompt import STDIN, PromptSources, read_prompt
from waste.cli.request import EFFORTS, Request
from waste.cli.target import bundled_example, existing_container, split_words
from waste.cli.tiers import TierFlags
from waste.errors import UsageError

if TYPE_CHECKING:
    from waste.engine.engine import Engine

SHORT = "Answer a prompt."
HELP = """\
\b
waste run glm.waste "Why is the sky blue?"
waste run "In the beginning"                     the bundled example, no MODEL
cat notes.txt | waste run glm.waste "summarise"  piped text comes first
waste run glm.waste -n 64 --temp 0 --json < question.txt
waste run glm.waste --session s.kv < long.txt    keeps what was read for the next run
waste run glm.waste --jsonl < requests.jsonl     many prompts, one answer a line

Answers one prompt. The answer goes to stdout, everything else (reasoning, timings, notices) to stderr.

PROMPT is taken from the argument, -p, --file, a pipe, or stdin for '-'; piped text comes first, then files,
then the argument, a blank line between. All of a pipe is the prompt; one final newline is dropped. The text
must be UTF-8. Control tokens written in it are plain text.

A single word is the MODEL if it exists, ends with .waste, or has a slash and no spaces, or if the prompt comes
from -p or --file; otherwise it is the PROMPT, and the bundled example answers. With no word at all the bundled
example answers what comes through the pipe.

Sampling: repeat penalty, then top-k, top-p, min-p, then temperature, so the filters see the model's own
probabilities. --temp 0, --top-k 1, --top-p 0 and --min-p 1 each take the best token every time.
Values not given are those of the release's generation_config.json, else --temp 0.7 --top-p 0.95.

--session FILE keeps the model's state after the prompt and after the answer. A later run whose prompt begins with
one of the two, token for token, goes on from there. FILE belongs to one model in one set of formats; it changes
only when a run has ended well.

--jsonl reads one JSON object a line from stdin or --file and writes one a line, each before the next is read.
"prompt" (or "messages", a list of {"role", "content"}) is needed; "id" comes back; system, raw, effort, max_tokens,
temp, top_p, top_k, min_p, repeat_penalty, seed and stop mean what the options of these names do, which count where
a line says nothing. A line that cannot be answered gets {"event": "error", "line": N, ...}, the others go on, and
the exit code is 1. Blank lines are passed by; no request at all is a usage error.
"""


def run(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A container made by `waste convert`.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The question; '-' is stdin.", show_default=False)
    ] = None,
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt, whatever it looks like.")
    ] = None,
    file: Annotated[
        list[str] | None, typer.Option("--file", "-f", metavar="PATH", help="A prompt file; may be repeated.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the model goes on with the text.")] = False,
    effort: Annotated[
        str | None, typer.Option("--effort", metavar="|".join(EFFORTS), help="How much to reason, where it is known.")
    ] = None,
    reasoning: Annotated[
        str | None, typer.Option("--reasoning", metavar="|".join(REASONING), help="On stderr, or not at all.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", metavar="N", min=0, help="Reasoning included. Default: 256.")
    ] = None,
    temp: Annotated[
        float | None,
        typer.Option("--temp", "--temperature", metavar="T", help="0 is greedy. Default: published, or 0.7."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", metavar="P", help="1 is off. Default: published, or 0.95.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", help="0 is off. Default: published, or off.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", metavar="P", help="0 is off. Default: published, or off.")
    ] = None,
    repeat_penalty: Annotated[
        float | None, typer.Option("--repeat-penalty", metavar="X", help="On the last 64 tokens. Default: 1, off.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="The same seed, the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before TEXT; may be repeated.")
    ] = None,
    context: options.Context = None,
    ram: options.Ram = None,
    vram: options.Vram = None,
    experts_dir: options.ExpertsDir = None,
    policy: options.Policy = None,
    lookahead: options.Lookahead = None,
    learn: options.Learn = None,
    mlock: options.Mlock = None,
    threads: options.Threads = None,
    backend: options.Backend = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="FILE", help="Go on from what FILE holds, and save it there.")
    ] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Requests and answers as JSON Lines, in order.")] = False,
    no_stdin: Annotated[bool, typer.Option("--no-stdin", help="Do not read a prompt from a pipe.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON Lines: pieces as they come, then the figures.")] = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> None:
    """Its help is `HELP`."""
    out: Output = ctx.obj
    out.configure(quiet=quiet, verbose=verbose, no_color=no_color)
    config = Config.load(out.env.environ)
    asked = Request(
        system=system,
        raw=raw,
        effort=effort,
        max_tokens=max_tokens,
        stops=tuple(stop or ()),
        sampling={
            "temp": temp,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repeat_penalty": repeat_penalty,
            "seed": seed,
        },
    )
    asked.check(dashes="--")  # what makes no sense is said before a prompt is waited for
    asked.params(config, {})
    show_reasoning = config.parse("reasoning", reasoning) == "show"
    ram_bytes = config.parse("ram", ram)
    backend_name = config.parse("backend", backend)
    tiers = TierFlags(vram, experts_dir, policy, lookahead, learn, mlock).resolve(config)
    container, text = split_words(model, prompt, prompt_option, bool(file) or (jsonl and model != STDIN))
    place = None if container is None else existing_container(container, _hint(container))  # a missing model, too
    with contextlib.ExitStack() as stack:
        lines = None
        if jsonl:
            _only_lines(text, as_json=as_json, session=session)
            lines = stack.enter_context(request_lines(file or [], out.env, read_stdin=not no_stdin, named=text == "-"))
        else:
            asked = replace(asked, text=_prompt(PromptSources(text, file or [], not no_stdin), out))
        choose_isa(config)

        from waste.engine.engine import Engine

        engine = stack.enter_context(
            Engine.open(
                bundled_example(config, out, "answers") if place is None else place,
                ram=ram_bytes,
                backend=backend_name,
                threads=config.get("threads", threads),
                ctx=config.get("ctx", context),
                on_event=out.on_event,
                **tiers,
            )
        )
        stack.callback(_say_not_learned, engine, out)
        if effort is not None and not knows_effort(engine):
            out.notice("--effort changes nothing: this model's chat template does not ask for it")
        if lines is not None:
            answer_lines(engine, lines, asked, config, out, show_reasoning=show_reasoning)
            return
        question = asked.prompt(engine)
        kept = stack.enter_context(KeptSession(engine, session, question, out)) if session is not None else None
        printer = Printer(out, as_json=as_json, show_reasoning=show_reasoning)
        done = asked.answer(
            engine,
            question,
            config,
            session=kept.session if kept else None,
            on_piece=printer.piece,
            on_prompt=kept.keep if kept else None,
            on_event=out.on_event,
        )
        printer.end(done, engine)
        if kept:
            kept.finish()


def _say_not_learned(engine: Engine, out: Output) -> None:
    """A model that nothing can be written beside is no fault: said with -v only."""
    engine.close()
    if engine.not_learned is not None:
        out.detail(f"usage is not learned: {engine.not_learned}")


def _only_lines(text: str | None, *, as_json: bool, session: str | None) -> None:
    """Refuse what has no meaning beside --jsonl."""
    if text not in (None, "-"):
        raise UsageError("with --jsonl the prompts come from stdin or --file, not from the command line")
    for option, given in (("--json", as_json), ("--session", session is not None)):
        if given:
            raise UsageError(f"{option} has no place beside --jsonl")


def _prompt(sources: PromptSources, out: Output) -> str:
    text = read_prompt(sources, out.env, out.notice)
    if text is None:
        raise UsageError("no prompt", hint="waste run MODEL 'your question', or pipe a text into it")
    return text


def _hint(name: str) -> str:
    """For whoever names a model that is not there."""
    if _hub_like(name):
        return f"if it is a prompt: waste run -p ...; if it is a model of the Hub: waste convert {name} NAME.waste"
    return "waste convert SRC DST makes one; a prompt goes to -p"


def _hub_like(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")
