"""What the time to the first token of a freshly opened engine consisted of."""

from __future__ import annotations

from dataclasses import dataclass

from waste.container.load import LoadReport
from waste.units import format_bytes, format_rate, format_seconds

# Parts below this share of the whole explain nothing.
_MENTIONED = 0.005


@dataclass(frozen=True)
class FirstToken:
    """A cold start, part by part. `open_s`, `prompt_s` and `draw_s` follow each other and are all there is."""

    open_s: float  # from the call of `Engine.open` until a prompt could be evaluated, the trunk's loading included
    trunk: LoadReport
    prompt_tokens: int  # that were evaluated
    prompt_s: float
    stall_s: float  # of `prompt_s`, in which compute had nothing to do but wait for the drive
    draw_s: float  # from the logits to the token

    @property
    def total_s(self) -> float:
        """Seconds from the call of `Engine.open` to the first token, without what lay between opening and prompt."""
        return self.open_s + self.prompt_s + self.draw_s

    def line(self) -> str:
        """`first token after 12.3 s: trunk 7.00 GiB in 2.40 s (3.13 GB/s), prompt 34 tok 9.70 s, 8.90 s of it waiting
        for the drive, rest 0.20 s`. Parts that are nearly nothing are left out; the rest is opening (manifest,
        tokenizer, buffers) and drawing."""
        trunk = self.trunk
        rate = format_rate(trunk.bytes_per_s) + ("" if trunk.direct else " through the page cache")
        parts = [
            f"trunk {format_bytes(trunk.nbytes)} in {format_seconds(trunk.seconds)} ({rate})",
            f"prompt {self.prompt_tokens} tok {format_seconds(self.prompt_s)}",
        ]
        least = _MENTIONED * self.total_s
        if self.stall_s > least:
            parts.append(f"{format_seconds(self.stall_s)} of it waiting for the drive")
        rest = self.total_s - trunk.seconds - self.prompt_s
        if rest > least:
            parts.append(f"rest {format_seconds(rest)}")
        return f"first token after {format_seconds(self.total_s)}: {', '.join(parts)}"

    def figures(self) -> dict[str, float | int | bool]:
        """What JSON says of it beside the times of opening and of the prompt: plain numbers, unit in the key."""
        return {
            "first_token_s": self.total_s,
            "trunk_read_bytes": self.trunk.nbytes,
            "trunk_s": self.trunk.seconds,
            "trunk_drive_s": self.trunk.drive_s,
            "trunk_direct": self.trunk.direct,
            "prompt_stall_s": self.stall_s,
        }
