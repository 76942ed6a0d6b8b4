"""How an answer is shown: pieces as they come on stdout and stderr, or as JSON Lines; then remarks and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from waste.cli.output import Output
from waste.units import format_bytes

if TYPE_CHECKING:
    from waste.engine.engine import Engine
    from waste.engine.first_token import FirstToken
    from waste.generate import Channel, Generation

SCHEMA = "waste.run/1"


def knows_effort(engine: Engine) -> bool:
    """Whether the model's chat template asks how much to reason."""
    return "reasoning_effort" in (engine.chat.source or "")


class Printer:
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
        start = first_token(done, engine) if done.ids or done.decode_steps else None
        if self._json:
            facts = figures(done, engine) | (start.figures() if start else {})
            self._out.json({"schema": SCHEMA, "event": "done", **facts}, lines=True)
        self._end_line("reasoning")
        self._end_line("text")
        for remark in _remarks(done, engine):
            self._out.notice(remark)
        if start:
            self._out.notice(timing_line(done))
            self._out.detail(start.line())
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


def first_token(done: Generation, engine: Engine) -> FirstToken:
    """How a cold start went: for the first answer of a freshly opened engine."""
    from waste.engine.first_token import FirstToken

    return FirstToken(
        open_s=engine.load_s,
        trunk=engine.load,
        prompt_tokens=done.prompt_tokens - done.reused_tokens,
        prompt_s=done.prompt_s,
        stall_s=done.prompt_stall_s,
        draw_s=max(0.0, done.ttft_s - done.prompt_s),
    )


def _remarks(done: Generation, engine: Engine) -> list[str]:
    remarks = []
    if done.ended_by == "context":
        remarks.append(f"stopped: the context of {engine.context} tokens is full (finish reason: length)")
    if not done.answered and done.ids:
        tokens = "1 token" if done.completion_tokens == 1 else f"{done.completion_tokens} tokens"
        lower = ", or try --effort low" if knows_effort(engine) else ""
        limit = f"the limit of {tokens} came first; {_more_room(done, engine)}{lower}"
        remarks.append(f"no answer: {'the model ended while it was reasoning' if done.ended_by == 'end' else limit}")
    return remarks


def _more_room(done: Generation, engine: Engine) -> str:
    if done.ended_by != "context":
        return "raise it with -n"
    return "raise it with --ctx" if engine.context < engine.config.max_position_embeddings else "ask for less"


def timing_line(done: Generation) -> str:
    """prompt 34 tok (20 reused) 0.12 s 283 tok/s | answer 32 tok 1.10 s 29 tok/s | TTFT 0.15 s | experts ... | ..."""
    return " | ".join(
        (
            f"prompt {done.prompt_tokens} tok{_reused(done)} {done.prompt_s:.2f} s {_rate(done.prompt_tokens_per_s)}",
            f"answer {done.completion_tokens} tok {done.decode_s:.2f} s {_rate(done.decode_tokens_per_s)}",
            f"TTFT {done.ttft_s:.2f} s",
            f"experts {done.expert_hits} hit {done.expert_misses} miss",
            f"read {format_bytes(done.bytes_read)}" + _waited(done),
        )
    )


def _waited(done: Generation) -> str:
    """Where waiting for the drive took a twentieth of the time or more."""
    worth = done.stall_s >= max(0.05 * (done.prompt_s + done.decode_s), 0.01)
    return f", {done.stall_s:.2f} s waited for the drive" if worth else ""


def _reused(done: Generation) -> str:
    return f" ({done.reused_tokens} reused)" if done.reused_tokens else ""


def _rate(tokens_per_s: float) -> str:
    if tokens_per_s == 0:  # a single token has no rate
        return "- tok/s"
    return f"{tokens_per_s:.{0 if tokens_per_s >= 100 else 1}f} tok/s"


def _budget_line(engine: Engine) -> str:
    budget = engine.budget
    return (
        f"{budget.slots} expert slots of {format_bytes(budget.slot_bytes)} in {format_bytes(budget.ram_bytes)} of RAM"
    )


def figures(done: Generation, engine: Engine) -> dict[str, Any]:
    """What JSON says of an answer: plain numbers, units in the keys."""
    return {
        "finish_reason": done.finish_reason,
        "ended_by": done.ended_by,
        "answered": done.answered,
        "prompt_tokens": done.prompt_tokens,
        "reused_tokens": done.reused_tokens,
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
        "stall_s": done.stall_s,
        "context_tokens": engine.context,
        "seed": done.seed,
    }
