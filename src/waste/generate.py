"""Text in, text out: the prompt is rendered and encoded, tokens are drawn until something ends the answer,
and their text comes out piece by piece. The one glue between chat, tokenizer, engine and sampling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from waste.chat import Message, Piece, ReasoningSplitter
from waste.engine.sampling import Sampler, SamplingParams, published
from waste.errors import UsageError
from waste.events import OnEvent, ignore

if TYPE_CHECKING:
    from waste.engine.engine import Engine
    from waste.engine.session import Session
    from waste.tokenizer import Tokenizer

Channel = Literal["text", "reasoning"]
OnPiece = Callable[[Channel, str], None]
EndedBy = Literal["end", "stop_string", "max_tokens", "context"]

DEFAULT_MAX_TOKENS = 256
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class Prompt:
    """What the model is asked, as ids. `think`: ids that open and close reasoning, None where nothing does."""

    ids: Sequence[int]
    think: tuple[int | None, int | None] = (None, None)
    inside_reasoning: bool = False  # the prompt itself opened it, as GLM's template does


@dataclass(frozen=True)
class Generation:
    """An answer and how it came about. Times in seconds; `ids` without the end id."""

    text: str
    reasoning: str
    ended_by: EndedBy
    answered: bool  # False: a limit came before the answer began, or the model ended inside its reasoning
    ids: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int  # of the prompt: those that the session held already
    prompt_s: float  # evaluating the prompt
    prompt_stall_s: float  # of it, in which compute had nothing to do but wait for the drive
    ttft_s: float  # from the call to the first token
    decode_s: float  # from the first token to the last
    decode_steps: int  # tokens drawn after the first, the end id included
    expert_hits: int
    expert_misses: int
    bytes_read: int
    stall_s: float  # in all, in which compute had nothing to do but wait for the drive
    seed: int

    @property
    def completion_tokens(self) -> int:
        return len(self.ids)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """As servers call it: "length" when a limit, of tokens or of the context, ended the answer."""
        return "stop" if self.ended_by in ("end", "stop_string") else "length"

    @property
    def prompt_tokens_per_s(self) -> float:
        return (self.prompt_tokens - self.reused_tokens) / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_steps / self.decode_s if self.decode_s > 0 else 0.0


def no_piece(channel: Channel, text: str) -> None:
    """The `on_piece` of a caller who waits for the whole answer."""


def no_prompt() -> None:
    """The `on_prompt` of a caller who wants nothing of the moment after the prompt."""


def chat_prompt(engine: Engine, text: str, *, system: str | None = None, effort: str | None = None) -> Prompt:
    """One user turn in the model's chat format, as `messages_prompt`."""
    messages = [Message("user", text)] if system is None else [Message("system", system), Message("user", text)]
    return messages_prompt(engine, messages, effort=effort)


def messages_prompt(engine: Engine, messages: Sequence[Message], *, effort: str | None = None) -> Prompt:
    """A conversation in the model's chat format; `effort` is handed to the template as `reasoning_effort`.

    Raises UsageError where the model has no template or the template refuses.
    """
    if effort is None:  # undefined for the template, which is not the same as None
        ids = engine.chat.render_ids(messages, engine.tokenizer)
    else:
        ids = engine.chat.render_ids(messages, engine.tokenizer, reasoning_effort=effort)
    return Prompt(ids, engine.chat.think_ids(engine.tokenizer), engine.chat.starts_inside(ids, engine.tokenizer))


def raw_prompt(engine: Engine, text: str) -> Prompt:
    """The text itself, to be gone on with. Control tokens in it are plain text, and nothing is told apart after it."""
    return Prompt(engine.tokenizer.encode(text))


def published_sampling(engine: Engine) -> dict[str, float]:
    """Sampling values that the model's makers publish, by the names of `SamplingParams`; empty where they do not."""
    if all(entry.name != GENERATION_FILE for entry in engine.manifest.files):
        return {}
    return published(engine.container.read_file(GENERATION_FILE))


def generate(
    engine: Engine,
    prompt: Prompt,
    *,
    session: Session | None = None,
    sampling: SamplingParams | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    stops: Sequence[str] = (),
    on_piece: OnPiece = no_piece,
    on_prompt: Callable[[], None] = no_prompt,
    on_event: OnEvent = ignore,
) -> Generation:
    """Answer `prompt`, on a new session or on the one given (which then holds prompt and answer).

    A session that holds the first tokens of the prompt already goes on from there; what else it may hold is a
    UsageError. `on_prompt` is called when the prompt is evaluated and nothing is drawn yet: the session can be saved.

    Ends at any end id of the model (never part of the text), at a string of `stops` in the answer (left out,
    even when it crosses tokens), after `max_tokens`, or where the context is full. The pieces that `on_piece`
    gets, joined by channel, are `text` and `reasoning`. Rows of the vocabulary without a token are never drawn.
    Raises UsageError, before anything is evaluated, when the prompt does not fit or a setting makes no sense.
    """
    if max_tokens < 0:
        raise UsageError(f"max_tokens is {max_tokens}, expected 0 or more")
    stopper = _StopStrings(stops)
    sampler = Sampler(sampling or SamplingParams(), engine.tokenizer.unused_ids(engine.config.vocab_size))
    session = session or engine.session()
    room = room_for(engine, len(prompt.ids))
    run = _Run(reader=_Reader(engine.tokenizer, prompt, stopper, on_piece))
    before = session.stats
    began = run.first = run.last = time.perf_counter()
    reused, prompt_s, prompt_stall_s = session.position, 0.0, 0.0
    if max_tokens > 0:
        logits = session.sync(prompt.ids, on_event=on_event)
        prompt_s = time.perf_counter() - began
        prompt_stall_s = session.stats.stall_s - before.stall_s
        on_prompt()
        history = list(prompt.ids)
        run.ended_by = "max_tokens" if max_tokens <= room else "context"
        for _ in range(min(max_tokens, room)):
            drawn = sampler.sample(logits, history)
            run.count(time.perf_counter())
            if drawn in engine.stop_ids:
                run.ended_by = "end"
                break
            history.append(drawn)
            if run.reader.feed(drawn):
                run.ended_by = "stop_string"
                break
            if len(history) - len(prompt.ids) < min(max_tokens, room):
                logits = session.eval([drawn])
        run.ids = history[len(prompt.ids) :]
        run.reader.finish()
    after = session.stats
    return Generation(
        text="".join(run.reader.said["text"]),
        reasoning="".join(run.reader.said["reasoning"]),
        ended_by=run.ended_by,
        answered=run.answered,
        ids=tuple(run.ids),
        prompt_tokens=len(prompt.ids),
        reused_tokens=reused,
        prompt_s=prompt_s,
        prompt_stall_s=prompt_stall_s,
        ttft_s=run.first - began,
        decode_s=run.last - run.first,
        decode_steps=max(0, run.drawn - 1),
        expert_hits=after.expert_hits - before.expert_hits,
        expert_misses=after.expert_misses - before.expert_misses,
        bytes_read=after.bytes_read - before.bytes_read,
        stall_s=after.stall_s - before.stall_s,
        seed=sampler.seed,
    )


def room_for(engine: Engine, prompt_tokens: int) -> int:
    """Tokens an answer may have. Said before any work: a long prompt would take minutes to fail.

    UsageError for an empty prompt, and for one that leaves no room for an answer.
    """
    if prompt_tokens == 0:
        raise UsageError("the prompt has no tokens")
    context, limit = engine.context, engine.config.max_position_embeddings
    needed = prompt_tokens + 1
    if needed > context:
        raise UsageError(
            f"the prompt has {prompt_tokens} tokens, the context holds {context}, and the answer needs one",
            hint=f"--ctx {min(needed + DEFAULT_MAX_TOKENS, limit)}"
            if needed <= limit
            else f"shorten it: the model goes to {limit} tokens",
        )
    return context - prompt_tokens


@dataclass
class _Run:
    """What changes while tokens are drawn."""

    reader: _Reader
    ids: list[int] = field(default_factory=list)
    ended_by: EndedBy = "max_tokens"
    drawn: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def answered(self) -> bool:
        if any(text.strip() for text in self.reader.said["text"]):
            return True
        return self.ended_by in ("end", "stop_string") and not self.reader.inside_reasoning

    def count(self, now: float) -> None:
        self.first, self.last = (now if self.drawn == 0 else self.first), now
        self.drawn += 1


class _Reader:
    """Ids to pieces of text: reasoning told from answer by the marker ids, control tokens left out."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, stops: _StopStrings, on_piece: OnPiece) -> None:
        self.said: dict[Channel, list[str]] = {"text": [], "reasoning": []}
        self._splitter = ReasoningSplitter(
            tokenizer, *prompt.think, starts_inside=prompt.inside_reasoning, skip_special=True
        )
        self._stops = stops
        self._on_piece = on_piece

    def feed(self, token_id: int) -> bool:
        """Take one id; True when it completed a stop string."""
        self._take(self._splitter.feed(token_id))
        return self._stops.found

    def finish(self) -> None:
        """Give out what was held back: half a character, the beginning of a stop string that did not come."""
        self._take(self._splitter.flush())
        self._say("text", self._stops.rest())

    @property
    def inside_reasoning(self) -> bool:
        return self._splitter.inside_reasoning

    def _take(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "reasoning":
                self._say("reasoning", piece.text)
            else:
                self._say("text", self._stops.feed(piece.text))

    def _say(self, channel: Channel, text: str) -> None:
        if text:
            self.said[channel].append(text)
            self._on_piece(channel, text)


class _StopStrings:
    """Finds the first stop string in text that arrives in pieces; holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that is certainly before any stop string; nothing once `found`."""
        if self.found:
            return ""
        text, self._held = self._held + text, ""
        # The match that is complete first, so that it does not matter how the text was cut into pieces.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.found = True
            return text[: min(found)[1]]
        hold = max(self._overlaps(text), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def rest(self) -> str:
        """What is still held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _overlaps(self, text: str) -> Iterator[int]:
        """Lengths of the ends of `text` that begin a stop string."""
        for stop in self._stops:
            longest = min(len(stop) - 1, len(text))
            yield next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
