"""Measures what each number format costs in each class of tensors, for `waste convert --size` to choose by.

    python tools/format_costs.py            # some 60 conversions and evaluations, about 20 seconds each
    python tools/format_costs.py --windows 1 --only kda=q8,experts=wt3   # a look; writes nothing

One class of nano-glm at a time is in the format, everything else in float32; the KL divergence from exact mode is taken
on the windows of tools/quality.py. Whole mixes then tell in which power the classes add up (src/waste/convert/mixes.py
says what for). The table becomes src/waste/convert/format_costs.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

from quality import HEADER, WINDOW, WINDOWS, Exact, Quality, row

from waste.convert import ConvertOptions, convert
from waste.convert.mixes import TABLE, Costs
from waste.models.formats import read_formats

MODEL = Path(__file__).resolve().parent.parent / "examples" / "nano-glm"

_MATRIX = ("wt3", "wt4", "q6", "q8")
FORMATS = {
    "experts": ("wt2", "wt2+wt3", "wt3", "wt3+wt4", "wt4", "q6", "q8"),
    **dict.fromkeys(("first", "kda", "kda_gate", "mla", "indexer", "dense", "shared"), _MATRIX),
    "table": ("q8", "bf16"),
}
# Experts and trunk of whole mixes, to which the power is fitted.
_HIGH = "first=q8,kda_gate=q8,dense=q8"
_LOW = "mla=wt4,indexer=wt4,shared=wt4"
MIXES = (
    *(("wt3", trunk) for trunk in ("q8", "q6", "wt4", f"wt4,{_HIGH}", f"q6,{_HIGH}", f"q6,{_HIGH},{_LOW}")),
    *(("wt3", trunk) for trunk in (f"q8,{_LOW}", f"q6,{_LOW}", "wt4,first=q8,kda_gate=q6,dense=q6")),
    *(("wt4", trunk) for trunk in ("q8", "q6", f"wt4,{_HIGH}")),
    *(("wt2+wt3", trunk) for trunk in ("q8", "q6", f"wt4,{_HIGH}")),
    *(("wt2", trunk) for trunk in ("q8", "wt4", f"wt4,{_HIGH}")),
    *(("q8", trunk) for trunk in ("q8", "q6")),
    *(("f32", trunk) for trunk in ("q8", "q6", "wt4", f"wt4,{_HIGH}", f"q6,{_HIGH},{_LOW}")),
)


def alone(name: str, fmt: str) -> tuple[str, str]:
    """Experts and trunk with `name` in `fmt`, all the rest exact."""
    return (fmt, "f32") if name == "experts" else ("f32", f"f32,{name}={fmt}")


def fitted_power(costs: Mapping[str, Mapping[str, float]], mixes: Mapping[tuple[str, str], float]) -> float:
    """The power that predicts what whole `mixes` cost best, by the mean square of the logarithm; printed beside it."""
    best, power = math.inf, 1.0
    for candidate in (round(1 + i / 100, 2) for i in range(101)):
        model = Costs({**costs, "small": {"bf16": 0.0}}, candidate)
        ratios = {mix: (model.of(read_formats(*mix)) or 0.0) / found for mix, found in mixes.items()}
        error = math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios.values()) / len(ratios))
        if error < best:
            best, power, predicted = error, candidate, ratios
    print(f"\npower {power}: off by a factor of {math.exp(best):.3f} on average\n")
    print("| experts | trunk | predicted / measured |\n|---|---|---|")
    for (experts, trunk), ratio in predicted.items():
        print(f"| {experts} | {trunk} | {ratio:.2f} |")
    return power


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"per topic (default {WINDOWS})")
    parser.add_argument("--only", help="CLASS=FORMAT,... and write no table")
    chosen = parser.parse_args()
    pairs = [(name, fmt) for name, formats in FORMATS.items() for fmt in formats]
    if chosen.only:
        pairs = [(name, fmt) for name, _, fmt in (item.partition("=") for item in chosen.only.split(","))]
    costs: dict[str, dict[str, dict[str, float]]] = {}
    mixes: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        convert(str(MODEL), target, ConvertOptions(experts="f32", trunk="f32"))
        exact = Exact(target, chosen.windows)

        def measure(experts: str, trunk: str) -> Quality:
            convert(str(MODEL), target, ConvertOptions(experts=experts, trunk=trunk, force=True))
            return exact.compare(target)

        print(f"| class | format | {HEADER}\n|---|---|---|---|---|---|---|", flush=True)
        for name, fmt in pairs:
            found = measure(*alone(name, fmt))
            costs.setdefault(name, {})[fmt] = {"kl": round(found.kl, 6), "error": round(found.kl_error, 6)}
            print(f"| {name} | {fmt} | {row(found)}", flush=True)
        if chosen.only:
            return
        print(f"\n| experts | trunk | {HEADER}\n|---|---|---|---|---|---|---|", flush=True)
        for experts, trunk in MIXES:
            found = measure(experts, trunk)
            mixes[experts, trunk] = found.kl
            print(f"| {experts} | {trunk} | {row(found)}", flush=True)
    kl = {name: {fmt: cost["kl"] for fmt, cost in formats.items()} for name, formats in costs.items()}
    table = {
        "model": MODEL.name,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "positions": found.positions,
        "window": WINDOW,
        "power": fitted_power(kl, mixes),
        "costs": costs,
        "mixes": [{"experts": experts, "trunk": trunk, "kl": round(kl, 6)} for (experts, trunk), kl in mixes.items()],
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
