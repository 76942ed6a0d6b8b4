"""Which formats lose least within a size: a search over measured costs and a model's own bytes.

The costs, format_costs.json (made by tools/format_costs.py), are KL divergences from exact mode on held-out text, of
one class of tensors in one format, everything else exact. Those of several classes do not add up, the sum is up to
twice what a whole mix measures; but their powers do,

    cost(mix) ^ p = sum over classes of cost(class) ^ p,

with p = 1.89, which predicts 25 whole mixes to 10 % on average (LEARNED: format-mixes): nearly as if errors added up in
squares and KL were linear in their size, as it is where they change the choice of experts. Limits: one small model,
nano-glm. Order and ratios of classes and formats may carry over to a large one, absolute values do not: small models
lose more per bit. The draft layer, which no answer depends on, has bytes and no cost.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from waste.container.layout import TRUNK_ALIGN, align_up
from waste.models.config import ModelConfig
from waste.models.formats import TRUNK, Formats, read_formats
from waste.models.spec import TensorSpec, bank_layers, draft_specs, trunk_specs
from waste.quant import get

TABLE = Path(__file__).with_name("format_costs.json")
EXPERTS = "experts"  # beside the trunk's classes; its formats are texts such as "wt2+wt3"
_EXACT = "exact"  # what is f32 always
_FREE = {"small": {"bf16": 0.0, "f32": 0.0}}  # not measured: releases have these tensors in BF16


@dataclass(frozen=True)
class Costs:
    """KL divergence in nats by class and format, and the power in which classes add up."""

    kl: Mapping[str, Mapping[str, float]]
    power: float

    @classmethod
    @functools.cache
    def measured(cls) -> Costs:
        """The table that comes with this package."""
        table = json.loads(TABLE.read_text(encoding="utf-8"))
        kl = {name: {fmt: float(cost["kl"]) for fmt, cost in costs.items()} for name, costs in table["costs"].items()}
        return cls({**kl, **_FREE}, float(table["power"]))

    def of(self, formats: Formats, classes: Container[str] = (EXPERTS, *TRUNK)) -> float | None:
        """What a mix costs in `classes`, those that a model has; None where one of them is in a format that was not
        measured. f32 costs nothing."""
        total = 0.0
        for name, fmt in by_class(formats).items():
            if name not in classes:
                continue
            cost = 0.0 if fmt == "f32" else self.kl[name].get(fmt)
            if cost is None:
                return None
            total += cost**self.power
        return float(total ** (1 / self.power))


def by_class(formats: Formats) -> dict[str, str]:
    """Class: the text of its format."""
    return {EXPERTS: formats.experts_text, **{name: getattr(formats, name) for name in TRUNK}}


def class_bytes(config: ModelConfig, formats: Formats) -> dict[str, int]:
    """Bytes in a container by class, padding included, the draft layer's with the others; empty classes left out."""
    found = {name: _nbytes(config, name, fmt) for name, fmt in {**by_class(formats), _EXACT: "f32"}.items()}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


@dataclass(frozen=True)
class Mix:
    """Formats for everything, and the bytes of all weights in them."""

    formats: Formats
    nbytes: int


def best_mixes(config: ModelConfig, fixed: Mapping[str, str], costs: Costs) -> list[Mix]:
    """Every mix that no other beats in both bytes and cost, largest (and so best) first; never empty.

    `fixed` says the formats of classes (and of `EXPERTS`) that are not to choose; the others get what was measured.
    Exact: classes are added one at a time, and what is beaten among some of them is part of no mix that is not.
    """
    front: list[tuple[int, float, tuple[str, ...]]] = [(_nbytes(config, _EXACT, "f32"), 0.0, ())]
    names = (EXPERTS, *TRUNK)
    for name in names:
        options = list(_options(config, name, fixed.get(name), costs))
        sums = ((a + b, x + y, (*chosen, fmt)) for (a, x, chosen), (b, y, fmt) in itertools.product(front, options))
        front = []
        for candidate in sorted(sums):
            if not front or candidate[1] < front[-1][1]:
                front.append(candidate)
    return [Mix(_formats(dict(zip(names, chosen, strict=True))), nbytes) for nbytes, _, chosen in reversed(front)]


def _options(config: ModelConfig, name: str, fixed: str | None, costs: Costs) -> Iterator[tuple[int, float, str]]:
    """(bytes, power of the cost, format) of every choice for one class."""
    for fmt in costs.kl[name] if fixed is None else [fixed]:
        # What is fixed costs every mix the same.
        cost = 0.0 if fixed is not None else costs.kl[name][fmt]
        yield _nbytes(config, name, fmt), cost**costs.power, fmt


def _formats(chosen: dict[str, str]) -> Formats:
    experts = chosen.pop(EXPERTS)
    return read_formats(experts, ",".join(f"{name}={fmt}" for name, fmt in chosen.items()))


def _nbytes(config: ModelConfig, name: str, fmt: str) -> int:
    """Bytes of one class in a container."""
    if name == EXPERTS:
        return len(bank_layers(config)) * config.router.experts * read_formats(experts=fmt).record(config).stride
    return sum(align_up(get(fmt).nbytes(spec.rows, spec.cols), TRUNK_ALIGN) for spec in _of_role(config, name))


def _of_role(config: ModelConfig, name: str) -> list[TensorSpec]:
    return [spec for spec in (*trunk_specs(config), *draft_specs(config)) if spec.role.value == name]
