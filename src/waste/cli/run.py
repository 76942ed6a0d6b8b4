"""`waste run`: a prompt in, the model's text on stdout and nothing else there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from waste.cli import options
from waste.cli.config import REASONING, Config
from waste.cli.native import choose_isa
from waste.cli.output import Output
from waste.cli.prompt import PromptSources, read_prompt
from waste.cli.target import bundled_container, split_words
from waste.errors import InputError, UsageError
from waste.units import format_bytes

if TYPE_CHECKING:
    from waste.engine.engine import Engine
    from waste.engine.sampling import SamplingParams
    from waste.generate import Channel, Generation

# For models whose makers publish no values of their own.
FALLBACK = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.0}

SCHEMA = "waste.run/1"
EFFORTS = ("low", "high", "max")

SHORT = "Answer a prompt."
HELP = """\
\b
waste run glm.waste "Why is the sky blue?"
waste run "In the beginning"                     the bundled example, no MODEL
cat notes.txt | waste run glm.waste "summarise"  piped text comes first
waste run glm.waste -n 64 --temp 0 --json < question.txt

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
    threads: options.Threads = None,
    backend: options.Backend = None,
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
    flags = {
        "temp": temp,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "seed": seed,
    }
    _sampling(flags, config, {})  # a bad value is said before a prompt is waited for
    if effort is not None and effort not in EFFORTS:
        raise UsageError(f"--effort is {effort!r}, expected one of {', '.join(EFFORTS)}")
    for option, value in (("--system", system), ("--effort", effort)):
        if raw and value is not None:
            raise UsageError(f"{option} has no place in a --raw prompt")
    show_reasoning = config.parse("reasoning", reasoning) == "show"
    ram_bytes = config.parse("ram", ram)
    backend_name = config.parse("backend", backend)
    sources, container = _question(model, prompt, prompt_option, file or [], not no_stdin, out)
    text = read_prompt(sources, out.env, out.notice)
    if text is None:
        raise UsageError("no prompt", hint="waste run MODEL 'your question', or pipe a text into it")
    choose_isa(config)
    place = _bundled(config, out) if container is None else _existing(container)

    from waste.engine.engine import Engine
    from waste.generate import chat_prompt, generate, published_sampling, raw_prompt

    with Engine.open(
        place,
        ram=ram_bytes,
        backend=backend_name,
        threads=config.get("threads", threads),
        ctx=config.get("ctx", context),
        on_event=out.on_event,
    ) as engine:
        if raw:
            question = raw_prompt(engine, text)
        else:
            if effort is not None and not _knows_effort(engine):
                out.notice("--effort changes nothing: this model's chat template does not ask for it")
            question = chat_prompt(engine, text, system=system, effort=effort)
        printer = _Printer(out, as_json=as_json, show_reasoning=show_reasoning)
        done = generate(
            engine,
            question,
            sampling=_sampling(flags, config, published_sampling(engine)),
            max_tokens=config.get("max_tokens", max_tokens),
            stops=stop or (),
            on_piece=printer.piece,
            on_event=out.on_event,
        )
        printer.end(done, engine)


def _question(
    model: str | None, prompt: str | None, option: str | None, files: list[str], read_stdin: bool, out: Output
) -> tuple[PromptSources, str | None]:
    """What the two words and the options mean: the prompt's sources, and the MODEL as it was written."""
    container, text = split_words(model, prompt, option, bool(files))
    if container is not None:
        _existing(container)  # a missing model is said before a prompt is waited for
    return PromptSources(text, files, read_stdin), container


def _existing(name: str) -> Path:
    """The container called `name`. InputError where there is nothing, or a checkpoint."""
    place = Path(name)
    if not place.exists():
        raise InputError(
            f"no such container: {name!r}",
            hint=f"if it is a prompt: waste run -p ...; if it is a model of the Hub: waste convert {name} NAME.waste"
            if _hub_like(name)
            else "waste convert SRC DST makes one; a prompt goes to -p",
        )
    if (place / "config.json").exists() and not (place / "manifest.json").exists():
        raise InputError(
            f"{name!r} is a checkpoint, not a container",
            hint=f"waste convert {name} {place.name or 'model'}.waste",
        )
    return place


def _hub_like(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def _bundled(config: Config, out: Output) -> Path:
    from importlib.metadata import version

    from waste.bundled import bundled_checkpoint

    source = bundled_checkpoint()
    place = bundled_container(source, config.cache_dir, version("waste"), out.on_event)
    out.notice(f"no MODEL given: the bundled example {source.name} answers")
    return place


def _sampling(flags: dict[str, Any], config: Config, published: dict[str, float]) -> SamplingParams:
    """Flag, else setting, else what the model's makers publish, else the fallback. UsageError for a senseless value."""
    from waste.engine.sampling import SamplingParams

    chosen = {key: config.get(key, flag) for key, flag in flags.items()}
    chosen["temperature"] = chosen.pop("temp")
    for key, fallback in FALLBACK.items():
        if chosen[key] is None:
            chosen[key] = published.get(key, fallback)
    return SamplingParams(**chosen)


def _knows_effort(engine: Engine) -> bool:
    return "reasoning_effort" in (engine.chat.source or "")


class _Printer:
    """Pieces to stdout and stderr, or both to JSON Lines."""

    def __init__(self, out: Output, *, as_json: bool, show_reasoning: bool) -> None:
        self._out = out
        self._json = as_json
        self._show_reasoning = show_reasoning
        self._last = {"text": "", "reasoning": ""}

    def piece(self, channel: Channel, text: str) -> None:
        if channel == "reasoning" and not self._show_reasoning:
            return
        if self._json:
            self._out.json({"schema": SCHEMA, "event": channel, "text": text}, lines=True)
        elif channel == "reasoning":
            self._out.aside(text)
        else:
            self._end_line("reasoning")
            self._out.text(text)
        self._last[channel] = text

    def end(self, done: Generation, engine: Engine) -> None:
        """The last newline, what cut the answer short, and the figures."""
        if self._json:
            self._out.json({"schema": SCHEMA, "event": "done", **_figures(done, engine)}, lines=True)
        self._end_line("reasoning")
        self._end_line("text")
        for remark in _remarks(done, engine):
            self._out.notice(remark)
        if done.ids or done.decode_steps:
            self._out.notice(timing_line(done))
        self._out.detail(f"seed {done.seed} | load {engine.load_s:.2f} s | {_budget_line(engine)}")

    def _end_line(self, channel: Channel) -> None:
        """A newline after the channel's text, unless it has one or there is none; once."""
        last, self._last[channel] = self._last[channel], ""
        if self._json or not last or last.endswith("\n"):
            return
        if channel == "text":
            self._out.text("\n")
        else:
            self._out.aside("\n")


def _remarks(done: Generation, engine: Engine) -> list[str]:
    remarks = []
    if done.ended_by == "context":
        remarks.append(f"stopped: the context of {engine.context} tokens is full (finish reason: length)")
    if not done.answered and done.ids:
        tokens = "1 token" if done.completion_tokens == 1 else f"{done.completion_tokens} tokens"
        lower = ", or try --effort low" if _knows_effort(engine) else ""
        limit = f"the limit of {tokens} came first; {_more_room(done, engine)}{lower}"
        remarks.append(f"no answer: {'the model ended while it was reasoning' if done.ended_by == 'end' else limit}")
    return remarks


def _more_room(done: Generation, engine: Engine) -> str:
    if done.ended_by != "context":
        return "raise it with -n"
    return "raise it with --ctx" if engine.context < engine.config.max_position_embeddings else "ask for less"


def timing_line(done: Generation) -> str:
    """prompt 34 tok 0.12 s 283 tok/s | answer 32 tok 1.10 s 29.1 tok/s | TTFT 0.15 s | experts ... | read ..."""
    return " | ".join(
        (
            f"prompt {done.prompt_tokens} tok {done.prompt_s:.2f} s {_rate(done.prompt_tokens_per_s)}",
            f"answer {done.completion_tokens} tok {done.decode_s:.2f} s {_rate(done.decode_tokens_per_s)}",
            f"TTFT {done.ttft_s:.2f} s",
            f"experts {done.expert_hits} hit {done.expert_misses} miss",
            f"read {format_bytes(done.bytes_read)}",
        )
    )


def _rate(tokens_per_s: float) -> str:
    if tokens_per_s == 0:  # a single token has no rate
        return "- tok/s"
    return f"{tokens_per_s:.{0 if tokens_per_s >= 100 else 1}f} tok/s"


def _budget_line(engine: Engine) -> str:
    budget = engine.budget
    return (
        f"{budget.slots} expert slots of {format_bytes(budget.slot_bytes)} in {format_bytes(budget.ram_bytes)} of RAM"
    )


def _figures(done: Generation, engine: Engine) -> dict[str, Any]:
    return {
        "finish_reason": done.finish_reason,
        "ended_by": done.ended_by,
        "answered": done.answered,
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "load_s": engine.load_s,
        "prompt_s": done.prompt_s,
        "prompt_tokens_per_s": done.prompt_tokens_per_s,
        "ttft_s": done.ttft_s,
        "decode_s": done.decode_s,
        "decode_tokens_per_s": done.decode_tokens_per_s,
        "expert_hits": done.expert_hits,
        "expert_misses": done.expert_misses,
        "read_bytes": done.bytes_read,
        "context_tokens": engine.context,
        "seed": done.seed,
    }
