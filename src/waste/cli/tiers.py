"""The settings of the expert cache on their way to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from waste.cli.config import Config, lookahead_experts

if TYPE_CHECKING:
    from waste.tiers.options import TierOptions


@dataclass(frozen=True)
class TierFlags:
    """What the command line said, as it was written; None where it said nothing."""

    vram: str | None = None
    experts_dir: Sequence[str] | None = None
    policy: str | None = None
    lookahead: str | None = None
    learn: bool | None = None
    mlock: bool | None = None

    def resolve(self, config: Config) -> dict[str, Any]:
        """The arguments of `Engine.open`. UsageError, naming option or setting, for what makes no sense."""
        return {
            "vram": config.parse("vram", self.vram),
            "experts_dirs": config.parse("experts_dir", self.experts_dir),
            "tiers": self.options(config),
        }

    def options(self, config: Config) -> TierOptions:
        from waste.tiers.options import TierOptions  # with NumPy behind it: only where an engine follows

        return TierOptions(
            policy=config.parse("policy", self.policy),
            lookahead=lookahead_experts(config.parse("lookahead", self.lookahead)),
            learn=config.get("learn", self.learn),
            lock=config.get("mlock", self.mlock),
        )
