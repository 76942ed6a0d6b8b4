"""How a run keeps experts: everything about the tiers that a user, or a measurement, may set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierOptions:
    """None of these changes what is computed, only how long it takes."""

    policy: str = "adaptive"  # one of waste.tiers.policy.POLICIES
    lookahead: int | None = None  # experts predicted for the next layer; None adapts to what pays, 0 is never
    fill: bool = True  # read experts in the background while there is room, the most used first
    learn: bool = False  # use and update the container's usage.json: what `waste run` and `waste bench` do
    lock: bool = False  # keep slots from being paged out (mlock)
    direct: bool = True  # read past the page cache where the file system can
    drive_bytes_per_s: float | None = None  # as if no drive gave more than this, on the same path
