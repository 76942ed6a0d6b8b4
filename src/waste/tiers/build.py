"""A cache for a budget: arenas, pools with their policies, readers, and what to read before anybody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from waste.container.reader import Bank
from waste.errors import UsageError
from waste.events import OnEvent
from waste.io.readers import Readers
from waste.io.throttle import Throttle
from waste.tiers.arena import Arena
from waste.tiers.cache import ExpertCache
from waste.tiers.lookahead import Lookahead
from waste.tiers.options import TierOptions
from waste.tiers.partition import Partition, divide
from waste.tiers.policy import POLICIES, Fifo, Key, Policy
from waste.tiers.slot import Pool
from waste.tiers.usage import Usage


@dataclass(frozen=True)
class TierBudget:
    """Bytes for records. vram may be 0; ram holds the experts that a token needs in any one layer."""

    ram_bytes: int
    vram_bytes: int = 0


def build(
    banks: Mapping[int, Bank],
    budget: TierBudget,
    options: TierOptions,
    *,
    experts: int,
    top_k: int,
    usage: Usage | None,
    between_tokens: Callable[[ExpertCache], None] | None,
    on_event: OnEvent,
) -> ExpertCache:
    """A cache over `banks` (by layer), and its background reads begun.

    experts: of a layer, top_k: of them a token takes, usage: what earlier runs used, None where nobody knows.
    Raises UsageError for a policy there is not.
    """
    throttle = None if options.drive_bytes_per_s is None else Throttle(options.drive_bytes_per_s)
    adapts = options.lookahead is None or options.lookahead > 0
    pools = {
        tier: _pools(tier, nbytes, banks, options, experts, top_k, on_event)
        for tier, nbytes in (("ram", budget.ram_bytes), ("vram", budget.vram_bytes))
        if nbytes > 0 and banks
    }
    cache = ExpertCache(
        banks,
        pools.get("ram", ()),
        Readers(limit=throttle),
        vram=pools.get("vram", ()),
        lookahead=Lookahead(top_k, experts, options.lookahead) if adapts else None,
        experts=experts,
        between_tokens=between_tokens,
    )
    if options.fill:
        room = sum(pool.capacity for pool in pools.get("ram", ()))
        cache.fill(_worth_filling(banks, experts, usage, everything=room >= len(banks) * experts))
    return cache


def _pools(
    tier: str,
    nbytes: int,
    banks: Mapping[int, Bank],
    options: TierOptions,
    experts: int,
    top_k: int,
    on_event: OnEvent,
) -> list[Pool]:
    if options.policy not in POLICIES:
        raise UsageError(f"unknown policy {options.policy!r}", hint=f"one of {', '.join(POLICIES)}")
    strides = {layer: bank.layout.stride for layer, bank in banks.items()}
    partitions = divide(nbytes, strides, experts, top_k)  # counts of uses do not help (LEARNED: expert-policies)
    arena = Arena([(part.stride, part.slots) for part in partitions], lock=options.lock, on_event=on_event)
    return [
        Pool(tier, part.layers, arena, memory, _policy(options.policy, part, experts), top_k)
        for part, memory in zip(partitions, arena.slots, strict=True)
    ]


def _policy(name: str, part: Partition, experts: int) -> Callable[[int], Policy]:
    """A maker of the policy for so many slots: which order matters only where there are fewer than experts."""
    everything = experts * len(part.layers)
    return lambda capacity: (Fifo if capacity >= everything else POLICIES[name])(capacity)


def _worth_filling(banks: Mapping[int, Bank], experts: int, usage: Usage | None, *, everything: bool) -> Iterator[Key]:
    """The most used first; those nobody is known to have used only where there is room for all."""
    if usage is not None:
        yield from usage.hottest()
    if everything:
        for layer in banks:
            for expert in range(experts):
                yield layer, expert
