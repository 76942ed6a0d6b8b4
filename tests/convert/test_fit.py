"""`--size`: the container is never larger, nothing better would have fitted, and what is given stays as given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waste.container.reader import Container
from waste.convert import ConvertOptions, convert, plan_conversion
from waste.convert.mixes import EXPERTS, Costs, best_mixes, by_class
from waste.errors import UsageError
from waste.models.config import ModelConfig
from waste.models.formats import read_classes, read_formats

Files = Callable[[Path], dict[str, bytes]]


def planned(tiny: Any, dst: Path, **options: Any) -> Any:
    return plan_conversion(str(tiny.path), dst, ConvertOptions(**options))


def smallest(tiny: Any, dst: Path) -> int:
    """Bytes of the smallest container, but for some of the manifest: it says the format of absent classes too."""
    return int(planned(tiny, dst, experts="wt2", trunk="wt3").write_bytes) + 100


def test_the_container_is_never_larger_and_no_better_mix_fits(original: Any, dst: Path, tmp_path: Path) -> None:
    low, high = smallest(original, dst), int(planned(original, dst, experts="q8", trunk="q8").write_bytes)
    before = 0.0
    config = planned(original, dst).config
    mixes = best_mixes(config, {}, Costs.measured())
    for i, size in enumerate(range(low, high + 1, (high - low) // 12)):
        report = planned(original, dst, size=size)
        assert report.write_bytes <= size
        cost = -(Costs.measured().of(report.formats) or 0.0)
        assert cost >= before or before == 0.0  # more room, no more loss
        before = cost
        place = [mix.formats for mix in mixes].index(report.formats)
        if place:  # the next better mix is larger by weights alone, or its container is
            texts = mixes[place - 1].formats.texts()
            assert planned(original, dst, **texts).write_bytes > size
        if i % 4 == 0:
            target = tmp_path / f"{i}.waste"
            convert(str(original.path), target, ConvertOptions(size=size))
            assert sum(file.stat().st_size for file in target.iterdir()) == report.write_bytes


def test_a_size_chooses_formats_and_nothing_else(original: Any, dst: Path, tmp_path: Path, files_of: Files) -> None:
    """The same container as with those formats given: it resumes, and is found finished, whichever way it was asked."""
    size = int(planned(original, dst).write_bytes)
    result = convert(str(original.path), dst, ConvertOptions(size=size))
    options = Container.open(dst).manifest.options
    assert options.keys() == {"experts", "trunk"}
    convert(str(original.path), tmp_path / "other.waste", ConvertOptions(**options))
    assert files_of(tmp_path / "other.waste") == files_of(dst)
    assert result.nbytes == sum(map(len, files_of(dst).values())) <= size
    assert convert(str(original.path), dst, ConvertOptions(size=size)).unchanged
    assert convert(str(original.path), dst, ConvertOptions(**options)).unchanged


def test_too_small_a_size_is_an_error_that_names_one_that_will_do(original: Any, dst: Path) -> None:
    with pytest.raises(UsageError, match="too small") as caught:
        planned(original, dst, size=smallest(original, dst) - 3000)
    assert "729 KiB at least" in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint == "--size 1MiB"
    planned(original, dst, size=1 << 20)
    assert not dst.exists()


@pytest.mark.parametrize(
    "given",
    [{"experts": "q8"}, {"trunk": "q6"}, {"trunk": "mla=bf16,shared=q4"}, {"experts": "wt2+wt3", "trunk": "mla=q8"}],
    ids=str,
)
def test_what_is_given_stays(original: Any, dst: Path, given: dict[str, str]) -> None:
    """With room for all, the rest gets the best there is; with a byte less something of the rest gives way."""
    report = planned(original, dst, size=10 << 20, **given)
    rest = by_class(read_formats("q8", "q8,table=bf16"))
    expected = rest | {EXPERTS: given.get("experts", "q8")} | dict(read_classes(given.get("trunk", "mla=q8")))
    assert by_class(report.formats) == expected
    tight = planned(original, dst, size=report.write_bytes - 1, **given)
    assert tight.write_bytes < report.write_bytes
    fixed = dict(read_classes(given["trunk"])) if "trunk" in given else {}
    if "experts" in given:
        fixed[EXPERTS] = given["experts"]
    assert by_class(tight.formats).items() >= fixed.items()


def test_all_given_and_too_large_is_an_error_that_says_so(original: Any, dst: Path) -> None:
    size = int(planned(original, dst, experts="q8", trunk="q8").write_bytes)
    assert planned(original, dst, experts="q8", trunk="q8", size=size).write_bytes == size
    with pytest.raises(UsageError, match="too small") as caught:
        planned(original, dst, experts="q8", trunk="q8", size=size - 1)
    assert "--experts q8 --trunk q8" in caught.value.message
    assert f"{size - 1} B is too small" in caught.value.message
    assert f"takes {size} B at least" in caught.value.message
    assert not dst.exists()


def test_models_without_some_classes_have_mixes_too(config_without_kda: ModelConfig) -> None:
    mixes = best_mixes(config_without_kda, {}, Costs.measured())
    assert len(mixes) > 10
    assert mixes[0].formats.kda == min(Costs.measured().kl["kda"], key=Costs.measured().kl["kda"].__getitem__)


@pytest.fixture
def config_without_kda(original: Any, dst: Path) -> ModelConfig:
    from dataclasses import replace

    config = planned(original, dst).config
    return replace(config, attention=("mla",) * config.num_layers, kda=None)
