"""Rows of another time beside those of now: how many times as fast, and whether that is more than the spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from waste.bench.row import Row

Verdict = Literal["faster", "slower", "within the spread", "spread unknown"]

# What has to be equal for two rows to be about the same thing. Budgets as they were asked for: what is free differs
# from minute to minute. The machine is not among them: comparing machines is a use.
SAME = (
    *("test", "model_digest", "backend", "isa", "threads", "ram_asked_bytes", "vram_asked_bytes", "policy"),
    *("lookahead", "fill", "direct_asked", "simulated_drive_bytes_per_s", "cold", "workload", "depth_tokens"),
    *("prompt_tokens", "tokens"),
)


@dataclass(frozen=True)
class Comparison:
    """One row beside the last older one with the same settings."""

    old: Row
    new: Row

    @property
    def ratio(self) -> float:
        """Median against median: 2 is twice as fast."""
        return self.new.tokens_per_s / self.old.tokens_per_s

    @property
    def verdict(self) -> Verdict:
        """Faster or slower where even the outer samples of both do not meet."""
        if min(self.old.repeats, self.new.repeats) < 2:
            return "spread unknown"
        if self.new.tokens_per_s_p10 > self.old.tokens_per_s_p90:
            return "faster"
        if self.new.tokens_per_s_p90 < self.old.tokens_per_s_p10:
            return "slower"
        return "within the spread"

    def falls_below(self, ratio: float) -> bool:
        """Slower than `ratio` of before, and not by chance."""
        return self.verdict == "slower" and self.ratio < ratio

    def as_dict(self) -> dict[str, Any]:
        """Flat and plain."""
        return {
            **{name: getattr(self.new, name) for name in ("arm", "test", "depth_tokens", "prompt_tokens", "tokens")},
            "old_tokens_per_s": self.old.tokens_per_s,
            "tokens_per_s": self.new.tokens_per_s,
            "ratio": self.ratio,
            "verdict": self.verdict,
        }

    @property
    def remarks(self) -> list[str]:
        """What else is different: another machine, another version."""
        differences = []
        for name in ("cpu", "usable_threads", "system", "waste_version", "direct", "file_systems", "mlock"):
            before, now = getattr(self.old, name), getattr(self.new, name)
            if before != now:
                differences.append(f"{name} was {before}, is {now}")
        return differences


def compare(old: Sequence[Row], new: Sequence[Row]) -> list[Comparison]:
    """The rows of `new` that have a counterpart in `old`, in their order. Of several old ones the last counts."""
    known = {_key(row): row for row in old}
    return [Comparison(known[_key(row)], row) for row in new if _key(row) in known]


def unlike(old: Sequence[Row], new: Row) -> list[str]:
    """Where the row of `old` that is most like `new` is different, as "policy was lru, is lfu"; none without rows."""
    found = [[name for name in SAME if getattr(row, name) != getattr(new, name)] for row in old if row.test == new.test]
    if not found:
        return []
    names = min(found, key=len)
    row = next(row for row in reversed(old) if all(getattr(row, n) == getattr(new, n) for n in SAME if n not in names))
    return [f"{name} was {getattr(row, name)}, is {getattr(new, name)}" for name in names]


def _key(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in SAME)
