"""One request, from the command line or from a line of JSON: what is asked and how; and how it is put to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from waste.cli.config import Config
from waste.errors import UsageError

if TYPE_CHECKING:
    from waste.chat import Message
    from waste.engine.engine import Engine
    from waste.engine.sampling import SamplingParams
    from waste.engine.session import Session
    from waste.events import OnEvent
    from waste.generate import Generation, OnPiece, Prompt

EFFORTS = ("low", "high", "max")

# For models whose makers publish no values of their own.
FALLBACK = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True)
class Request:
    """`text` or `messages`, and what else was said; None, or a missing name in `sampling`, where nothing was."""

    text: str = ""
    messages: tuple[Message, ...] | None = None  # instead of `text` and, where they have their own, of `system`
    system: str | None = None
    raw: bool = False
    effort: str | None = None
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # by flag: temp, top_p, top_k, ..., seed

    def check(self, dashes: str = "") -> None:
        """UsageError for what contradicts itself. `dashes`: what stands before a name where it was written."""
        if self.effort is not None and self.effort not in EFFORTS:
            raise UsageError(f"{dashes}effort is {self.effort!r}, expected one of {', '.join(EFFORTS)}")
        for name, value in (("system", self.system), ("effort", self.effort), ("messages", self.messages)):
            if self.raw and value is not None:
                raise UsageError(f"{dashes}{name} has no place in a {dashes}raw prompt")

    def prompt(self, engine: Engine) -> Prompt:
        """The prompt's ids. UsageError where the model's chat template refuses, or is missing."""
        from waste.chat import Message
        from waste.generate import chat_prompt, messages_prompt, raw_prompt

        if self.raw:
            return raw_prompt(engine, self.text)
        if self.messages is None:
            return chat_prompt(engine, self.text, system=self.system, effort=self.effort)
        own = any(message.role == "system" for message in self.messages)
        first = [] if own or self.system is None else [Message("system", self.system)]
        return messages_prompt(engine, [*first, *self.messages], effort=self.effort)

    def params(self, config: Config, published: Mapping[str, float]) -> SamplingParams:
        """Said, else set, else what the model's makers publish, else the fallback. UsageError for a senseless value."""
        from waste.engine.sampling import SamplingParams

        flags = ("temp", "top_p", "top_k", "min_p", "repeat_penalty", "seed")
        chosen = {key: config.get(key, self.sampling.get(key)) for key in flags}
        chosen["temperature"] = chosen.pop("temp")
        for key, fallback in FALLBACK.items():
            if chosen[key] is None:
                chosen[key] = published.get(key, fallback)
        return SamplingParams(**chosen)

    def answer(
        self,
        engine: Engine,
        prompt: Prompt,
        config: Config,
        *,
        session: Session | None = None,
        on_piece: OnPiece | None = None,
        on_prompt: Callable[[], None] | None = None,
        on_event: OnEvent,
    ) -> Generation:
        """Generate after `prompt`; errors as `waste.generate.generate`."""
        from waste.generate import generate, no_piece, no_prompt, published_sampling

        return generate(
            engine,
            prompt,
            session=session,
            sampling=self.params(config, published_sampling(engine)),
            max_tokens=config.get("max_tokens", self.max_tokens),
            stops=self.stops,
            on_piece=on_piece or no_piece,
            on_prompt=on_prompt or no_prompt,
            on_event=on_event,
        )
