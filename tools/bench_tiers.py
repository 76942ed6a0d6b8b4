"""What the expert cache costs when everything is there, and how near it comes to the drive when half is.

    python tools/make_synthetic.py big.waste          GLM's shape, 704 experts of 2.35 MiB
    python tools/bench_tiers.py big.waste             every part
    python tools/bench_tiers.py big.waste --part drives --drives 0.5,2,7,real --tokens 24 --json

Parts:
  array    everything resident: decode through the cache against decode from a plain array of records
  drives   half resident: decode against max(drive time at the measured rate, compute time), for simulated drives (the
           same path with a rate limiter) and for the real one; lookahead adapting, off, or half of top-k
  checksum decode with half resident, records verified on arrival or not

Arms take turns token by token in one process; medians, and 10th to 90th percentile. Tokens are random ids, so routing
spreads over all experts: the hardest case for a cache. Compute time is that of the same tokens with everything
resident, right between them. Drive time is the bytes that were read over the rate at which random records come
through the same readers, measured right before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import waste.container.reader
from waste.backends.base import Record
from waste.bench.limits import drive_rate
from waste.bench.spread import Spread
from waste.container.layout import RecordLayout
from waste.engine.engine import Engine
from waste.engine.session import Session
from waste.tiers.options import TierOptions

WARM = 8  # tokens before any is counted


class PlainWave:
    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def __enter__(self) -> PlainWave:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        pass

    def stalled(self, seconds: float) -> None:
        raise AssertionError(f"{seconds} s waited for an array")


class PlainArray:
    """Every record in a list: what a cache can at best be as fast as. Stands in for `ExpertCache` in a session."""

    def __init__(self, engine: Engine) -> None:
        self._layouts = {layer: bank.layout for layer, bank in engine.banks.items()}
        self._records: dict[int, list[Record]] = {}
        for layer, bank in engine.banks.items():
            self._records[layer] = []
            for expert in range(bank.experts):
                with engine.cache.waves(layer, [expert])[0] as wave:
                    wave.wait()
                    self._records[layer].append(wave.records[0]._replace(arrived=0))
        self.stats = engine.cache.stats

    def layout(self, layer: int) -> RecordLayout:
        return self._layouts[layer]

    def waves(self, layer: int, experts: Sequence[int]) -> list[PlainWave]:
        records = self._records[layer]
        return [PlainWave([records[expert] for expert in experts])]

    def wanted_ahead(self, layer: int) -> int:
        return 0

    def prefetch(self, layer: int, experts: Sequence[int], likely: int) -> None:
        raise AssertionError("nothing is read ahead")

    def token(self, seconds: float) -> None:
        pass

    def refuse_closed(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


@dataclass
class Row:
    """One arm. Times in ms per token."""

    part: str
    arm: str
    tokens: int
    ms: Spread
    bytes_read: float = 0.0  # per token
    ms_drive: float = 0.0
    ms_compute: float = 0.0
    ratio: float = 0.0  # to what it is compared with
    ms_stalled: float = 0.0
    hit_share: float = 0.0
    useful: float = 0.0  # of what was read ahead
    width: float = 0.0  # of the lookahead, on average
    depth: int = 0


def token_times(
    sessions: dict[str, Session], ids: Sequence[int], count: Callable[[str, float], None], skip: int = WARM
) -> None:
    """Every session evaluates the same ids; each token is done by all in turn, the first one changing.

    The first `skip` tokens are not counted.
    """
    names = list(sessions)
    for step, token in enumerate(ids):
        for name in names[step % len(names) :] + names[: step % len(names)]:
            began = time.perf_counter()
            sessions[name].eval([token])
            if step >= skip:
                count(name, time.perf_counter() - began)


def array(engine: Engine, ids: Sequence[int], rounds: int) -> list[Row]:
    """Ratios token by token: both arms saw the same moment of the machine."""
    plain = PlainArray(engine)
    times: dict[str, list[float]] = {"array": [], "cache": []}
    for _ in range(rounds):
        sessions = {
            "array": Session(engine.model, plain, engine.context),  # type: ignore[arg-type]
            "cache": Session(engine.model, engine.cache, engine.context),
        }
        token_times(sessions, ids, lambda name, seconds: times[name].append(seconds))
    ratio = float(np.median(np.array(times["cache"]) / np.array(times["array"])))
    return [
        Row("array", name, len(taken), Spread.of([1e3 * s for s in taken]), ratio=ratio if name == "cache" else 1.0)
        for name, taken in times.items()
    ]


def drives(whole: Engine, needed: int, rates: Sequence[str], ids: Sequence[int], share: float) -> list[Row]:
    """needed: bytes of all experts. A rate above the real drive's is simulated over the page cache."""
    rows = []
    real = drive_rate(list(whole.banks.values()), None, 2.0)
    for rate in rates:
        simulated = None if rate == "real" else float(rate) * 1e9
        arms = {}
        for name, lookahead in (("auto", None), ("off", 0), ("half", whole.config.router.top_k // 2)):
            options = TierOptions(
                lookahead=lookahead,
                fill=False,
                direct=simulated is None or simulated < 0.9 * real,
                drive_bytes_per_s=simulated,
            )
            arms[name] = whole.sibling(ram=whole.budget.fixed_bytes + int(share * needed), tiers=options)
        plain = drive_rate(list(arms["off"].banks.values()), simulated, 2.0)
        rows += half_resident(whole, arms, rate, plain, ids)
        for arm in arms.values():
            arm.close()
    return rows


def half_resident(
    whole: Engine, arms: dict[str, Engine], rate: str, bytes_per_s: float, ids: Sequence[int]
) -> list[Row]:
    """Warm every arm's cache with other tokens, then let all take turns on the same ones."""
    rng = np.random.default_rng(5)
    engines = {"whole": whole, **arms}
    for engine in engines.values():
        warm = engine.session()
        for token in rng.integers(0, 256, 24).tolist():
            warm.eval([token])
    taken: dict[str, list[float]] = {name: [] for name in engines}
    widths: dict[str, list[int]] = {name: [] for name in engines}
    before = {}
    sessions = {name: Session(e.model, e.cache, e.context) for name, e in engines.items()}

    def count(name: str, seconds: float) -> None:
        taken[name].append(seconds)
        lookahead = engines[name].cache.lookahead
        widths[name].append(0 if lookahead is None else lookahead.width)

    for name, engine in engines.items():
        for token in ids[:WARM]:
            sessions[name].eval([token])
        before[name] = engine.cache.stats.copy()
    token_times(sessions, ids[WARM:], count, skip=0)
    rows = []
    compute = 1e3 * float(np.median(taken["whole"]))
    for name in arms:
        did = engines[name].cache.stats - before[name]
        tokens = len(ids) - WARM
        nbytes = did.bytes_read / tokens
        drive = 1e3 * nbytes / bytes_per_s
        times = Spread.of([1e3 * s for s in taken[name]])
        mean = 1e3 * float(np.mean(taken[name]))
        rows.append(
            Row(
                "drives",
                f"{rate} GB/s, lookahead {name}" if rate != "real" else f"real, lookahead {name}",
                len(taken[name]),
                times,
                nbytes,
                drive,
                compute,
                mean / max(drive, compute),
                1e3 * did.stall_s / tokens,
                did.hits / max(did.uses, 1),
                did.prefetch_useful / max(did.prefetch_useful + did.prefetch_wasted, 1),
                float(np.mean(widths[name])),
                engines[name].cache.depth,
            )
        )
    return rows


@contextmanager
def unverified() -> Iterator[None]:
    """For measuring only: records are taken as they come."""
    check = waste.container.reader.check_record
    waste.container.reader.check_record = lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        waste.container.reader.check_record = check


def checksum(whole: Engine, needed: int, ids: Sequence[int], rounds: int) -> list[Row]:
    """Decode with half of the experts resident, tokens verified and not in turn, on a cache each."""
    budget = whole.budget.fixed_bytes + needed // 2
    options = TierOptions(lookahead=0, fill=False)
    arms = {name: whole.sibling(ram=budget, tiers=options) for name in ("verified", "unverified")}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        sessions = {name: arm.session() for name, arm in arms.items()}
        for step, token in enumerate(ids):
            for name in (list(arms), list(arms)[::-1])[step % 2]:
                began = time.perf_counter()
                if name == "verified":
                    sessions[name].eval([token])
                else:
                    with unverified():
                        sessions[name].eval([token])
                if step >= WARM:
                    times[name].append(time.perf_counter() - began)
    ratio = float(np.median(np.array(times["verified"]) / np.array(times["unverified"])))
    for arm in arms.values():
        arm.close()
    return [
        Row("checksum", name, len(taken), Spread.of([1e3 * s for s in taken]), ratio=ratio if name == "verified" else 1)
        for name, taken in times.items()
    ]


def show(rows: Sequence[Row]) -> None:
    print(
        "| part | arm | ms/token (p10-p90) | ratio | MB read | drive ms | compute ms | stalled ms | hits % | "
        "ahead useful % | width | depth |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        more = (
            f"{r.bytes_read / 1e6:.0f} | {r.ms_drive:.1f} | {r.ms_compute:.1f} | {r.ms_stalled:.1f} | "
            f"{100 * r.hit_share:.0f} | {100 * r.useful:.0f} | {r.width:.1f} | {r.depth} |"
            if r.part == "drives"
            else " | | | | | | | |"
        )
        print(f"| {r.part} | {r.arm} | {r.ms.text()} | {r.ratio:.3f} | {more}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--part", choices=("all", "array", "drives", "checksum"), default="all")
    parser.add_argument("--drives", default="0.5,2,7,real", help="GB/s, or real")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts that is resident")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, WARM + chosen.tokens).tolist()
    rows: list[Row] = []
    with Engine.open(chosen.model, threads=chosen.threads, ctx=1024, tiers=TierOptions(lookahead=0)) as engine:
        needed = sum(bank.experts * bank.layout.stride for bank in engine.banks.values())
        for layer in engine.banks:
            for expert in range(engine.config.router.experts):
                with engine.cache.waves(layer, [expert])[0] as wave:
                    wave.wait()
        if chosen.part in ("all", "array"):
            rows += array(engine, ids, chosen.rounds)
        if chosen.part in ("all", "checksum"):
            rows += checksum(engine, needed, ids, chosen.rounds)
        if chosen.part in ("all", "drives"):
            rows += drives(engine, needed, chosen.drives.split(","), ids, chosen.share)
    if chosen.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
