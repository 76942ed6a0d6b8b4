"""Speed of the CPU kernels beside what this machine can do: a Markdown table, or JSON with --json.

    python tools/bench_kernels.py                       products, experts and prefill
    python tools/bench_kernels.py --isa avx2 --formats wt3,q8
    python tools/bench_kernels.py --model model.waste   a whole model: tok/s, stages, share of the memory limit
    python tools/bench_kernels.py --model tiny.waste --overhead      what Python costs a token

Everything runs in one process and takes turns, round by round, so that a busy machine slows all rows down alike;
the read bandwidth just before each sample is the yardstick. Rates are per second of a thread's CPU time, medians with
the 10th and 90th percentile. How many times faster two threads are is told by wall time (the best round of each), with
the answer of CPU time beside it: they agree on a quiet machine, and on a busy one only the latter means something.
Only public entry points are called: `_cpu.linear`, `_cpu.mlp`, `Engine`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_model import Model, Overhead, bench_model, overhead
from limits import Arena, best_ahead, cache_levels, description, huge_bytes, read_rate, shared_read_rate
from stopwatch import Spread, seconds

from waste import quant
from waste.kernels import _cpu, isa

FORMATS = ("f32", "bf16", "q8", "q6", "q4", "wt4", "wt3", "wt2")
EXPERTS = ("q8", "q6", "q4", "wt4", "wt3", "wt2+wt3", "wt2")  # one format, or gate and up + down
HIDDEN, INNER = 4096, 2048  # GLM-5.3-Flash's expert
L2_BYTES, L2_COLS = 1 << 20, 2048
BATCH_BYTES = 16 << 20  # streamed for one sample
PREFILL = (16, 64, 128)
FITTED = (16, 32, 64, 128, 256)  # tokens whose times are split into decoding and the rest
TORCH_EXPERTS = 3


@dataclass
class Row:
    """A line of a table: what was measured, and every figure with its spread."""

    isa: str
    fmt: str
    tokens: int
    figures: dict[str, Spread] = field(default_factory=dict)


@dataclass
class Product:
    """One format and instruction set: a matrix that stays in L2, fresh ones from memory, and a short one."""

    isa: str
    fmt: str
    resident: _cpu.Weight
    short: tuple[_cpu.Weight, _cpu.Weight]  # of one strip of rows and of two
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)


class Bench:
    """The arena, pools and vectors that all measurements share."""

    def __init__(self, arena: Arena, rounds: int) -> None:
        self.arena = arena
        self.rounds = rounds
        self.ahead = best_ahead(arena)
        self.one, self.two = _cpu.Pool(1), _cpu.Pool(2)
        rng = np.random.default_rng(1)
        self.x = rng.standard_normal(max(FITTED) * HIDDEN, np.float32)
        self.inputs: dict[tuple[int, int], npt.NDArray[np.float32]] = {}

    def linear(self, pool: _cpu.Pool, weight: _cpu.Weight, tokens: int = 1) -> None:
        _cpu.linear(pool, self._input(tokens, weight.cols), weight)

    def mlp(self, pool: _cpu.Pool, weights: Sequence[_cpu.Weight], tokens: int) -> None:
        gate, up, down = weights
        _cpu.mlp(pool, self._input(tokens, gate.cols), _cpu.Mlp(gate, up, down), 10.0)

    def _input(self, *shape: int) -> npt.NDArray[np.float32]:
        """(tokens, columns) of the shared numbers; a view, made once."""
        known = self.inputs.get(shape)
        if known is None:
            known = self.inputs[shape] = self.x[: math.prod(shape)].reshape(shape)
        return known

    def expert(self, fmt: str) -> list[_cpu.Weight]:
        """The next expert of the arena."""
        inner, _, down = fmt.partition("+")
        gate = quant.get(inner)
        return [
            self.arena.weight(gate, INNER, HIDDEN),
            self.arena.weight(gate, INNER, HIDDEN),
            self.arena.weight(quant.get(down or inner), HIDDEN, INNER),
        ]

    # -- products of one token

    def products(self, sets: Sequence[str], formats: Sequence[str]) -> list[Row]:
        """Matrix times vector from L2 and from memory, on one thread and on two; the cost of the input."""
        cases = [self._product(which, fmt) for which in sets for fmt in formats]
        for _ in range(self.rounds):
            for case in cases:
                isa.force(case.isa)
                self._sample(case)
        isa.force(None)
        return [_product_row(case) for case in cases]

    def _product(self, which: str, fmt: str) -> Product:
        known = quant.get(fmt)
        rows = max(1, L2_BYTES // known.nbytes(16, L2_COLS)) * 16
        short = self.arena.weight(known, 16, HIDDEN), self.arena.weight(known, 32, HIDDEN)
        return Product(which, fmt, self.arena.weight(known, rows, L2_COLS), short)

    def _sample(self, case: Product) -> None:
        # What memory gives changes from second to second on a shared machine: asked anew for each sample.
        read = read_rate(self.arena, BATCH_BYTES, self.ahead)
        read_two = shared_read_rate(self.arena, BATCH_BYTES, self.ahead, 2)
        known = quant.get(case.fmt)
        resident = case.resident
        self.linear(self.one, resident)
        spent = _repeated(lambda: self.linear(self.one, resident), 2e-3)
        case.add("l2_gweights_per_s", resident.rows * resident.cols / spent / 1e9)
        # Twice the time of one strip less that of two: what is left when there are no rows.
        strips = [_repeated(lambda short=short: self.linear(self.one, short), 3e-4) for short in case.short]
        case.add("input_us", 1e6 * (2 * strips[0] - strips[1]))
        nbytes = known.nbytes(INNER, HIDDEN)
        count = max(2, BATCH_BYTES // nbytes)
        fresh = [self.arena.weight(known, INNER, HIDDEN) for _ in range(2 * count)]
        wall = time.perf_counter()
        spent = seconds(lambda: self._each(self.one, fresh[:count])) / count
        case.add("wall", (time.perf_counter() - wall) / count)
        case.add("cpu", spent)
        case.add("gweights_per_s", INNER * HIDDEN / spent / 1e9)
        case.add("gb_per_s", nbytes / spent / 1e9)
        case.add("of_read_percent", 100 * nbytes / spent / 1e9 / read)
        wall, cpu = time.perf_counter(), time.process_time()
        self._each(self.two, fresh[count:])
        cpu = (time.process_time() - cpu) / count
        case.add("cpu_two", cpu)
        case.add("wall_two", (time.perf_counter() - wall) / count)
        case.add("of_read_two_percent", 100 * 2 * nbytes / cpu / 1e9 / read_two)

    def _each(self, pool: _cpu.Pool, weights: Sequence[_cpu.Weight]) -> None:
        for weight in weights:
            self.linear(pool, weight)

    # -- experts

    def experts(self, sets: Sequence[str], formats: Sequence[str]) -> list[Row]:
        """A routed expert from memory for one token."""
        samples: dict[tuple[str, str], list[tuple[float, float]]] = {(w, f): [] for w in sets for f in formats}
        for _ in range(self.rounds):
            for (which, fmt), found in samples.items():
                isa.force(which)
                read = read_rate(self.arena, BATCH_BYTES, self.ahead)
                fresh = [self.expert(fmt) for _ in range(2)]
                spent = seconds(lambda fresh=fresh: [self.mlp(self.one, weights, 1) for weights in fresh]) / 2
                found.append((spent, 100 * _expert_bytes(fmt) / spent / 1e9 / read))
        isa.force(None)
        rows = []
        for (which, fmt), found in samples.items():
            figures = {
                "ms": Spread.of([1e3 * spent for spent, _ in found]),
                "gb_per_s": Spread.of([_expert_bytes(fmt) / spent / 1e9 for spent, _ in found]),
                "of_read_percent": Spread.of([share for _, share in found]),
            }
            rows.append(Row(which, fmt, 1, figures))
        return rows

    def prefill(self, sets: Sequence[str], formats: Sequence[str], with_torch: bool) -> list[Row]:
        """A routed expert for many tokens, beside torch's bf16 products with weights that need no decoding."""
        torch_expert = _torch_expert(self.arena) if with_torch else None
        ours: dict[tuple[str, str, int], list[float]] = {}
        ratios: dict[tuple[str, str, int], list[float]] = {}
        for _ in range(max(3, self.rounds // 3)):
            torch_s = {} if torch_expert is None else {t: seconds(lambda t=t: torch_expert(t)) for t in PREFILL}
            for which in sets:
                isa.force(which)
                for fmt in formats:
                    for tokens in FITTED:
                        expert = self.expert(fmt)
                        spent = seconds(lambda expert=expert, tokens=tokens: self.mlp(self.one, expert, tokens))
                        ours.setdefault((which, fmt, tokens), []).append(spent)
                        if tokens in torch_s:
                            ratios.setdefault((which, fmt, tokens), []).append(torch_s[tokens] / spent)
        isa.force(None)
        rows = []
        for (which, fmt, tokens), found in ours.items():
            if tokens in PREFILL:
                row = Row(which, fmt, tokens, {"tokens_per_s": Spread.of([tokens / spent for spent in found])})
                if (which, fmt, tokens) in ratios:
                    row.figures["times_torch"] = Spread.of(ratios[which, fmt, tokens])
                if tokens == max(PREFILL):
                    row.figures["decode_percent"] = _decode_share(
                        [ours[which, fmt, fitted] for fitted in FITTED], FITTED.index(tokens)
                    )
                rows.append(row)
        return rows


def _repeated(work: Callable[[], object], least_s: float) -> float:
    """CPU seconds of one call, from as many as take `least_s`."""
    once = max(seconds(work), 1e-7)
    count = max(1, int(least_s / once))
    return seconds(lambda: [work() for _ in range(count)]) / count


def _expert_bytes(fmt: str) -> int:
    inner, _, down = fmt.partition("+")
    return 2 * quant.get(inner).nbytes(INNER, HIDDEN) + quant.get(down or inner).nbytes(HIDDEN, INNER)


def _product_row(case: Product) -> Row:
    kept = ("l2_gweights_per_s", "gweights_per_s", "gb_per_s", "of_read_percent", "of_read_two_percent", "input_us")
    figures = {name: Spread.of(case.samples[name]) for name in kept}
    best = min(case.samples["wall"]) / min(case.samples["wall_two"])
    figures["two_threads_wall_times"] = Spread(best, best, best)
    # Had both threads worked all the time: waiting for the other, asleep, costs no CPU time.
    cpu = [2 * one / two for one, two in zip(case.samples["cpu"], case.samples["cpu_two"], strict=True)]
    figures["two_threads_cpu_times"] = Spread.of(cpu)
    return Row(case.isa, case.fmt, 1, figures)


def _decode_share(samples: Sequence[Sequence[float]], which: int) -> Spread:
    """Percent of the time for FITTED[which] tokens that no token adds: a line through the times of each round.

    Reading and decoding weights is in it, and so is whatever else a call does once; decoding that is repeated for
    every block of tokens is not, and shows as a smaller slope of tokens/s.
    """
    shares = []
    for times in zip(*samples, strict=True):
        slope, once = np.polyfit(FITTED, times, 1, w=1 / np.asarray(times))
        shares.append(100 * max(0.0, once) / (once + slope * FITTED[which]))
    return Spread.of(shares)


def _torch_expert(arena: Arena) -> Callable[[int], object]:
    """The same feed-forward in torch: bf16 weights and activations, one thread, a few experts in turn."""
    import torch
    from torch.nn.functional import linear, silu

    torch.set_num_threads(1)
    experts = []
    for _ in range(TORCH_EXPERTS):
        begin = arena.take(6 * INNER * HIDDEN)
        flat = torch.from_numpy(arena.bytes[begin : begin + 6 * INNER * HIDDEN]).view(torch.bfloat16)
        gate, up, down = flat.split(INNER * HIDDEN)
        experts.append((gate.view(INNER, HIDDEN), up.view(INNER, HIDDEN), down.view(HIDDEN, INNER)))
    x = torch.randn(max(PREFILL), HIDDEN, dtype=torch.bfloat16)
    turn = 0

    def run(tokens: int) -> object:
        nonlocal turn
        turn += 1
        gate, up, down = experts[turn % TORCH_EXPERTS]
        with torch.inference_mode():
            given = x[:tokens]
            return linear(silu(linear(given, gate)) * linear(given, up), down)

    for tokens in PREFILL:  # the first call of a shape plans it
        run(tokens)
    return run


# -- output


def _head(found: dict[str, Any]) -> None:
    machine = found["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores; {', '.join(machine['instruction_sets'])}")
    print(
        f"load average {machine['load_average']} before, {found['load_average_after']} after; huge pages: "
        f"{machine['huge_pages']}, {found['huge_bytes'] >> 20} MiB in use; "
        f"streaming from {found['arena_bytes'] >> 20} MiB\n"
    )
    if machine["load_average"] > 0.5 * machine["usable_threads"]:
        print("**The machine is busy: figures by wall time mean little, the others are on the low side.**\n")


def _print_limits(limits: Sequence[dict[str, Any]]) -> None:
    print("| read bandwidth | bytes | GB/s (p10-p90) | prefetch ahead, bytes |\n|---|---|---|---|")
    for level in limits:
        print(f"| {level['name']} | {level['nbytes'] >> 10} KiB | {level['rate'].text()} | {level['ahead']} |")
    print()


def _print_products(rows: Sequence[Row]) -> None:
    print("Matrix times vector, one token; memory: 2048 x 4096 matrices, each a fresh one\n")
    print(
        "| isa | format | L2, G weights/s | memory, G weights/s | memory, GB/s | % of read | 2 threads, % of read "
        "| 2 threads, x (CPU) | rotate + quantise 4096 inputs, us |\n|---|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        f = row.figures
        two = f"{f['two_threads_wall_times'].median:.2f} ({f['two_threads_cpu_times'].median:.2f})"
        print(
            f"| {row.isa} | {row.fmt} | {f['l2_gweights_per_s'].text()} | {f['gweights_per_s'].text()} "
            f"| {f['gb_per_s'].text()} | {f['of_read_percent'].text(0)} | {f['of_read_two_percent'].text(0)} | {two} "
            f"| {f['input_us'].text()} |"
        )
    print()


def _print_experts(rows: Sequence[Row]) -> None:
    print("One expert (gate, up, SwiGLU, down; 2048 x 4096) for one token, from memory\n")
    print("| isa | format | ms | GB/s | % of read |\n|---|---|---|---|---|")
    for row in rows:
        f = row.figures
        print(
            f"| {row.isa} | {row.fmt} | {f['ms'].text(2)} | {f['gb_per_s'].text()} | {f['of_read_percent'].text(0)} |"
        )
    print()


def _print_prefill(rows: Sequence[Row]) -> None:
    print(
        "The same expert for many tokens, tokens/s on one thread; x: times torch's bf16 products in the same rounds\n"
    )
    print(f"| isa | format | {' | '.join(f'{t} tokens | x' for t in PREFILL)} | decoding at {max(PREFILL)}, % |")
    print("|---|---|" + "---|---|" * len(PREFILL) + "---|")
    for which, fmt in dict.fromkeys((row.isa, row.fmt) for row in rows):
        cells, share = [], ""
        for row in rows:
            if (row.isa, row.fmt) == (which, fmt):
                times = row.figures.get("times_torch")
                cells += [row.figures["tokens_per_s"].text(0), "" if times is None else f"{times.median:.2f}"]
                if "decode_percent" in row.figures:
                    share = row.figures["decode_percent"].text(0)
        print(f"| {which} | {fmt} | {' | '.join(cells)} | {share} |")
    print()


def _print_model(model: Model) -> None:
    print(f"{model.path}: {model.layers} layers, {model.token_bytes >> 20} MiB of weights a token", end="")
    print(f" (trunk {model.trunk_bytes >> 20}, experts {model.expert_bytes >> 20}), {model.formats}\n")
    print(f"KDA states beside them, read and written: {model.state_bytes >> 20} MiB; not in the limit\n")
    if model.misses:
        print(f"**{model.misses} experts were read from disk while measuring: a larger --ram is needed**\n")
    print(
        "| threads | decode, tok/s | prefill, tok/s | read, GB/s | limit, ms a token | CPU, ms a token | % of limit |"
    )
    print("|---|---|---|---|---|---|---|")
    for run in model.runs:
        prefill = ", ".join(f"{rate.text(0)} at {tokens}" for tokens, rate in run.prefill.items())
        print(
            f"| {run.threads} | {run.decode.text()} | {prefill} | {run.read_gb_per_s.text()} "
            f"| {run.limit_ms.median:.2f} | {run.cpu_ms.text(2)} | {run.reached_percent.text(0)} |"
        )
    print("\nms a token (decode) by stage, CPU time of the main thread, and the share of all\n")
    print(f"| stage | {' | '.join(f'threads: {run.threads} | %' for run in model.runs)} |")
    print("|---|" + "---|---|" * len(model.runs))
    for stage in model.runs[0].stages:
        cells = [f"{run.stages[stage]:.3f} | {100 * run.stages[stage] / run.token_ms:.0f}" for run in model.runs]
        print(f"| {stage} | {' | '.join(cells)} |")
    print()


def _print_overhead(found: Overhead) -> None:
    print(
        f"Python: {found.python_ms.text(2)} ms a token over {found.layers} layers "
        f"({found.calls:.0f} native calls; {found.token_ms.text(2)} ms of CPU time in all)\n"
    )


def _plain(value: Any) -> Any:
    """Dataclasses as JSON objects."""
    return asdict(value) if hasattr(value, "__dataclass_fields__") else str(value)


def _chosen(text: str, known: Sequence[str], what: str, parser: argparse.ArgumentParser) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"unknown {what} {name!r}; one of {', '.join(known)}")
    return names


def _arguments() -> tuple[argparse.Namespace, list[str], list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usable = isa.usable()
    usual = [usable[-1]] + (["avx2"] if "avx2" in usable[:-1] else [])
    parser.add_argument("--isa", default=",".join(usual), help=f"instruction sets, of {', '.join(usable)}")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, help="default 15; 5 with --model")
    parser.add_argument("--arena-mib", type=int, help="memory to stream from (default: 4 x L3)")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out of the prefill table")
    parser.add_argument("--model", type=Path, help="a container: measure it instead")
    parser.add_argument("--ram", help="budget for --model, as for waste run")
    parser.add_argument("--tokens", type=int, default=32, help="decoded per round with --model")
    parser.add_argument("--overhead", action="store_true", help="with --model: only what Python costs a token")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if chosen.rounds is None:
        chosen.rounds = 15 if chosen.model is None else 5
    if chosen.rounds < 1 or chosen.tokens < 1:
        parser.error("--rounds and --tokens are at least 1")
    if chosen.overhead and chosen.model is None:
        parser.error("--overhead wants a --model")
    sets = _chosen(chosen.isa, usable, "instruction set", parser)
    return chosen, sets, _chosen(chosen.formats, FORMATS, "format", parser)


def main() -> None:
    chosen, sets, formats = _arguments()
    found: dict[str, Any] = {"machine": description()}
    if chosen.model is not None and chosen.overhead:
        found["overhead"] = overhead(chosen.model, chosen.ram, chosen.tokens, chosen.rounds)
    else:
        arena = Arena(None if chosen.arena_mib is None else chosen.arena_mib << 20)
        found["arena_bytes"] = len(arena.bytes)
        if chosen.model is not None:
            found["model"] = bench_model(chosen.model, chosen.ram, chosen.tokens, chosen.rounds, arena)
        else:
            bench = Bench(arena, chosen.rounds)
            found["limits"] = [asdict(level) | {"rate": level.rate} for level in cache_levels(arena)]
            for threads in (1, 2):
                rates = [shared_read_rate(arena, BATCH_BYTES, bench.ahead, threads) for _ in range(chosen.rounds)]
                name = f"memory, {threads} thread{'s'[: threads - 1]}"
                found["limits"].append(
                    {"name": name, "nbytes": len(arena.bytes), "rate": Spread.of(rates), "ahead": bench.ahead}
                )
            wanted = [fmt for fmt in EXPERTS if set(fmt.split("+")) <= set(formats)]
            found["products"] = bench.products(sets, formats)
            found["experts"] = bench.experts(sets, wanted)
            found["prefill"] = bench.prefill(sets, wanted, not chosen.no_torch)
        found["huge_bytes"] = huge_bytes()
    found["load_average_after"] = round(os.getloadavg()[0], 2)
    if chosen.json:
        print(json.dumps(found, indent=2, default=_plain))
        return
    if "overhead" in found:
        print(f"{found['machine']['cpu']}; load average {found['machine']['load_average']}")
        _print_overhead(found["overhead"])
        return
    _head(found)
    if "model" in found:
        _print_model(found["model"])
        return
    _print_limits(found["limits"])
    _print_products(found["products"])
    _print_experts(found["experts"])
    _print_prefill(found["prefill"])


if __name__ == "__main__":
    main()
