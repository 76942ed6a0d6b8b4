"""From samples to rows: medians over repeats, means per token, shares of what the machine could do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from waste.bench.lanes import LANES
from waste.bench.machine import Machine
from waste.bench.measure import Plan, Result, threads_of
from waste.bench.row import BUFFERED, NOTHING_READ, REFUSED, SCHEMA, SIMULATED, Row
from waste.bench.spread import Spread
from waste.bench.text import WORKLOAD
from waste.engine.engine import Engine
from waste.io.checksum import checksum, to_hex
from waste.io.direct import file_system
from waste.kernels import isa
from waste.models.formats import Formats
from waste.planner.footprint import sizes
from waste.tiers.stats import CacheStats


def row_of(result: Result, engine: Engine, plan: Plan, machine: Machine, model: str, clock_s: float) -> Row:
    """The row of one test that has at least one sample. `clock_s`: what the clocks around one stage take."""
    samples, tokens, chosen = result.samples, result.tokens, result.arm.settings
    total = tokens * len(samples)
    speed = Spread.of([tokens / sample.seconds for sample in samples])
    token_s = sum(sample.seconds for sample in samples) / total
    lanes: dict[str, Any] = {
        f"{lane}_ms": 1e3 * sum(sample.lanes[lane] for sample in samples) / total for lane in LANES
    }
    tiers = _sum([sample.tiers for sample in samples])
    counts: dict[str, Any] = {
        name: getattr(tiers, name) / total
        for name in (
            *("vram_hits", "ram_hits", "late", "misses", "reads", "prefetch_reads", "prefetch_useful"),
            *("prefetch_wasted", "fill_reads", "evictions", "promotions"),
        )
    }
    known = sizes(engine.config, Formats(**engine.manifest.formats))
    decode = result.test == "decode"
    # A prompt's experts are read once for many tokens: its limit is arithmetic, not memory.
    weights = known.token_bytes if decode else None
    memory_limit = float(np.median(result.memory_rates)) if result.memory_rates else None
    used = None if weights is None else weights / token_s
    drive, drive_limit, note = _drive(result, engine, tiers.bytes_read / (token_s * total))
    drives = {bank.drive for bank in engine.banks.values()}
    every = [each for sample in samples for each in sample.tokens_s]
    return Row(
        schema=SCHEMA,
        test=result.test,
        arm=result.arm.name,
        model=model,
        model_digest=to_hex(checksum(engine.manifest.to_bytes())),
        family=engine.config.family,
        formats=" ".join(f"{kind}={fmt}" for kind, fmt in engine.manifest.formats.items()),
        backend=engine.model.ops.name,
        isa=chosen.isa or isa.active(),
        threads=threads_of(engine),
        context_tokens=engine.context,
        ram_asked_bytes=chosen.ram,
        ram_bytes=engine.budget.ram_bytes,
        vram_asked_bytes=chosen.vram,
        vram_bytes=engine.tier_budget.vram_bytes,
        policy=chosen.tiers.policy,
        lookahead=chosen.tiers.lookahead,
        fill=chosen.tiers.fill,
        learn=chosen.tiers.learn,
        mlock=chosen.tiers.lock,
        direct_asked=chosen.tiers.direct,
        direct=_direct(engine),
        drives=len(drives),
        file_systems=", ".join(sorted({file_system(drive) or "unknown" for drive in drives})),
        simulated_drive_bytes_per_s=chosen.tiers.drive_bytes_per_s,
        cold=plan.cold,
        workload=WORKLOAD,
        depth_tokens=result.case.depth,
        prompt_tokens=result.case.prompt,
        tokens=tokens,
        warm_up_tokens=plan.warm_up_tokens,
        repeats=len(samples),
        tokens_per_s=speed.median,
        tokens_per_s_p10=speed.p10,
        tokens_per_s_p90=speed.p90,
        predicted_tokens_per_s=None,  # until there are plans
        samples_s=[sample.seconds for sample in samples],
        token_ms=1e3 * token_s,
        token_p90_ms=1e3 * float(np.percentile(every, 90)) if decode else None,
        **lanes,
        clock_ms=1e3 * clock_s * sum(sample.calls for sample in samples) / total,
        **counts,
        hit_share=tiers.hits / tiers.uses if tiers.uses else None,
        read_bytes=tiers.bytes_read / total,
        slots=engine.budget.slots,
        slot_bytes=engine.budget.slot_bytes,
        resident_experts=samples[-1].resident,
        all_experts=known.experts * known.expert_layers,
        weights_bytes=weights,
        memory_bytes_per_s=used,
        memory_limit_bytes_per_s=memory_limit,
        memory_share=used / memory_limit if used is not None and memory_limit else None,
        drive_bytes_per_s=drive,
        drive_limit_bytes_per_s=drive_limit,
        drive_share=drive / drive_limit if drive is not None and drive_limit else None,
        drive_note=note,
        peak_rss_bytes=max(sample.peak_rss_bytes for sample in samples),
        **asdict(machine),
    )


def _drive(result: Result, engine: Engine, rate: float) -> tuple[float | None, float | None, str]:
    """What was read per second, what could have been, and why there are no such figures."""
    simulated = result.arm.settings.tiers.drive_bytes_per_s is not None
    if rate == 0:
        return 0.0, None, NOTHING_READ
    if not simulated and not _direct(engine):
        return None, None, REFUSED if result.arm.settings.tiers.direct else BUFFERED
    limit = float(np.median(result.drive_rates)) if result.drive_rates else None
    return rate, limit, SIMULATED if simulated else ""


def _direct(engine: Engine) -> bool:
    return all(bank.direct for bank in engine.banks.values())


def _sum(parts: Sequence[CacheStats]) -> CacheStats:
    total = CacheStats()
    for part in parts:
        for name, value in vars(part).items():
            setattr(total, name, getattr(total, name) + value)
    return total
