"""The search for the mix that loses least within a size: against trying everything, and the table it goes by."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from waste import quant
from waste.container.reader import Container
from waste.convert import mixes as mixes_module
from waste.convert.mixes import EXPERTS, TABLE, Costs, best_mixes, by_class, class_bytes
from waste.models.config import ModelConfig
from waste.models.formats import TRUNK, Formats, read_formats


@pytest.fixture(scope="module")
def config(default_nano: Path) -> ModelConfig:
    return ModelConfig.from_json(Container.open(default_nano).manifest.config)


def random_costs(seed: int) -> Costs:
    """Two or three formats a class, costs without any order."""
    rng = np.random.default_rng(seed)
    kl = {EXPERTS: ["wt2", "wt2+wt3", "q8"], "table": ["q8", "bf16"], "small": ["bf16"]}
    kl |= {name: list(rng.choice(["wt3", "wt4", "q6", "q8"], 2, replace=False)) for name in TRUNK if name not in kl}
    return Costs({name: {str(f): float(rng.random()) for f in formats} for name, formats in kl.items()}, 1.5)


def everything(config: ModelConfig, costs: Costs, fixed: dict[str, str]) -> list[tuple[int, float, Formats]]:
    """Every mix there is: bytes, cost, formats."""
    found = []
    for chosen in itertools.product(*(costs.kl[name] for name in costs.kl)):
        mix = dict(zip(costs.kl, chosen, strict=True)) | fixed
        trunk = ",".join(f"{name}={mix[name]}" for name in TRUNK)
        formats = read_formats(mix[EXPERTS], trunk)
        cost = sum(costs.kl[name].get(fmt, 0.0) ** costs.power for name, fmt in mix.items() if name not in fixed)
        found.append((sum(class_bytes(config, formats).values()), cost, formats))
    return found


@pytest.mark.parametrize("fixed", [{}, {EXPERTS: "q4"}, {"kda": "f32", "mla": "q8", "small": "f32"}], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_other_mix_of_the_size_loses_less(
    config: ModelConfig, seed: int, fixed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = random_costs(seed)
    sizes = {}

    def remembered(config: ModelConfig, name: str, fmt: str) -> int:
        if (name, fmt) not in sizes:
            sizes[name, fmt] = real(config, name, fmt)
        return sizes[name, fmt]

    real = mixes_module._nbytes
    monkeypatch.setattr(mixes_module, "_nbytes", remembered)
    all_mixes = everything(config, costs, fixed)
    cost_of = {formats: cost for _, cost, formats in all_mixes}
    mixes = best_mixes(config, fixed, costs)
    assert [m.nbytes for m in mixes] == sorted((m.nbytes for m in mixes), reverse=True)
    assert mixes[-1].nbytes == min(nbytes for nbytes, _, _ in all_mixes)
    for size in np.linspace(mixes[-1].nbytes, 1.1 * mixes[0].nbytes, 60, dtype=int):
        chosen = next(mix for mix in mixes if mix.nbytes <= size)
        assert chosen.nbytes == sum(class_bytes(config, chosen.formats).values())
        best = min(cost for nbytes, cost, _ in all_mixes if nbytes <= size)
        assert cost_of[chosen.formats] == pytest.approx(best, rel=1e-12)
        assert all(by_class(chosen.formats)[name] == fmt for name, fmt in fixed.items())


def test_bytes_by_class_are_those_of_the_files(config: ModelConfig, default_nano: Path) -> None:
    sizes = class_bytes(config, read_formats())
    assert sum(sizes.values()) == sum(path.stat().st_size for path in default_nano.glob("*.bin"))
    assert sizes[EXPERTS] == sum(path.stat().st_size for path in default_nano.glob("experts-*.bin"))
    assert sizes["table"] == 2 * 4096 * (256 + 2 * 2)
    assert sizes.keys() == {EXPERTS, *TRUNK, "exact"}


def test_the_table_is_whole_and_plausible() -> None:
    """Every class, more bits cost less, and the measurement says what it is of."""
    table, costs = json.loads(TABLE.read_text(encoding="utf-8")), Costs.measured()
    assert (table["model"], table["positions"] > 10_000) == ("nano-glm", True)
    assert costs.kl.keys() == {EXPERTS, *TRUNK}
    assert 1 <= costs.power <= 2
    for name, formats in costs.kl.items():
        bits = {fmt: float(np.mean([quant.get(part).bits for part in fmt.split("+")])) for fmt in formats}
        ordered = [formats[fmt] for fmt in sorted(formats, key=bits.__getitem__)]
        assert name == "small" or ordered == sorted(ordered, reverse=True)
        for fmt, found in table["costs"].get(name, {}).items():
            assert found["kl"] == 0 or 0 < 3 * found["error"] < found["kl"], (name, fmt)


def test_costs_of_whole_mixes() -> None:
    costs = Costs({EXPERTS: {"wt3": 3.0}, **{name: {"q8": 4.0 if name == "kda" else 0.0} for name in TRUNK}}, 2.0)
    trunk = ",".join(f"{name}=q8" for name in TRUNK if name != "small")
    assert costs.of(read_formats("wt3", f"{trunk},small=f32")) == pytest.approx(5.0)
    assert costs.of(read_formats("f32", f"{trunk},small=f32")) == pytest.approx(4.0)
    assert costs.of(read_formats("f32", "f32")) == 0
    assert costs.of(read_formats("wt3", "q8"), {EXPERTS, "mla"}) == pytest.approx(3.0)  # a model without KDA
    assert costs.of(read_formats("wt3", "q8,kda=q4"), {EXPERTS, "mla"}) == pytest.approx(3.0)
    assert costs.of(read_formats("wt3", "q8,mla=q4"), {EXPERTS, "mla"}) is None
    assert costs.of(read_formats("q4", f"{trunk},small=f32")) is None
    assert Costs.measured().of(read_formats()) is not None  # the command compares with it
