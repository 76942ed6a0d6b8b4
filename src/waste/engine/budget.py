"""What a run may take: from the user's words and the machine's figures to bytes and tokens."""

from __future__ import annotations

from waste.errors import ResourceError, UsageError
from waste.events import Notice, OnEvent
from waste.hardware import memory
from waste.models.config import ModelConfig
from waste.planner.footprint import HEALTHY_SHARE, MARGIN_BYTES, Budget
from waste.tiers.build import TierBudget
from waste.units import format_bytes, parse_bytes

# A session's token limit unless asked otherwise: long enough for a report, short enough that its caches
# do not crowd out experts. The model's own limit may be a million.
DEFAULT_CONTEXT = 8192


def context_tokens(ctx: int | None, config: ModelConfig, on_event: OnEvent) -> int:
    """Tokens a session can hold: `ctx`, within the model's own limit, or the default."""
    limit = config.max_position_embeddings
    if ctx is None:
        return min(DEFAULT_CONTEXT, limit)
    if ctx < 1:
        raise UsageError(f"ctx is {ctx}, at least 1 token is needed")
    if ctx > limit:
        on_event(Notice(f"context reduced to {limit} tokens, the model's own limit (asked for {ctx})"))
    return min(ctx, limit)


def ram_bytes(ram: str | int | None, on_event: OnEvent) -> int:
    """The RAM this process may take: `ram`, or the healthy share of what is free.

    Raises ResourceError for more than the machine, or its control group, has.
    """
    machine = memory.detect()
    healthy = int(HEALTHY_SHARE * machine.available_bytes) + memory.resident_bytes()
    if ram is None:
        return healthy
    wanted = parse_bytes(ram, name="ram") if isinstance(ram, str) else ram
    if wanted > machine.most_bytes:
        owner = "this machine's" if machine.limit_bytes is None else "the control group's"
        raise ResourceError(
            f"a RAM budget of {format_bytes(wanted)} is more than {owner} {format_bytes(machine.most_bytes)}",
            hint=f"--ram {healthy >> 20}MiB is healthy here",
        )
    if wanted > machine.available_bytes + memory.resident_bytes():
        free = format_bytes(machine.available_bytes)
        source = "" if machine.limit_source == "MemAvailable" else f" ({machine.limit_source})"
        on_event(Notice(f"a RAM budget of {format_bytes(wanted)} is above the {free} now free{source}"))
    return wanted


def tier_budget(budget: Budget, vram: str | int | None, top_k: int, on_event: OnEvent) -> TierBudget:
    """How the bytes for records are shared between the tiers.

    There is no GPU backend yet. A VRAM tier is kept in host memory instead, inside the RAM budget.
    Raises ResourceError when a tier would not hold what a token uses in one layer.
    """
    wanted = parse_bytes(vram, name="vram") if isinstance(vram, str) else vram or 0
    if wanted <= 0:
        return TierBudget(budget.room_bytes)
    least = top_k * budget.slot_bytes
    if wanted < least:
        raise ResourceError(
            f"a VRAM tier of {format_bytes(wanted)} is too small: the {top_k} experts of a token take "
            f"{format_bytes(least)}",
            hint=f"--vram {-(-least >> 10)}KiB, or no --vram",
        )
    most = budget.room_bytes - least
    if wanted > most:
        mib = (most - MARGIN_BYTES) >> 20
        smaller = f"--vram {mib}MiB" if mib << 20 >= least else "no --vram"
        larger = budget.ram_bytes + wanted - most + MARGIN_BYTES
        raise ResourceError(
            f"a VRAM tier of {format_bytes(wanted)} leaves no room in RAM for the {top_k} experts of a token: "
            f"{format_bytes(budget.room_bytes)} are left for both",
            hint=smaller if larger > memory.detect().most_bytes else f"{smaller}, or --ram {-(-larger >> 20)}MiB",
        )
    on_event(Notice("no GPU backend in this version: the VRAM tier is kept in host memory, inside the RAM budget"))
    return TierBudget(budget.room_bytes - wanted, wanted)
