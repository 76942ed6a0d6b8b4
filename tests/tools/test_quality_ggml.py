"""tools/quality_ggml.py changes the weights it is asked to change, by what their formats lose, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from waste import quant
from waste.container.layout import matrix_shape
from waste.container.reader import Container
from waste.models.formats import MATRICES
from waste.models.spec import DRAFT_FILE, TRUNK_FILE, Role, trunk_specs
from waste.models.stored import stored_config

TOOL = Path(__file__).resolve().parents[2] / "tools" / "quality_ggml.py"


@pytest.fixture(scope="module")
def pair(exact_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Container, Container]:
    """nano-glm before and after: gate and up wt2, down wt3, trunk in ggml's Q8_0, embedding and head q6."""
    target = tmp_path_factory.mktemp("lossy") / "nano.waste"
    options = ["--experts", "wt2+wt3", "--trunk", "Q8_0", "--table", "q6"]
    subprocess.run([sys.executable, str(TOOL), str(exact_nano), str(target), *options], capture_output=True, check=True)
    return Container.open(exact_nano), Container.open(target)


def experts(container: Container, layer: int) -> list[np.ndarray]:
    """gate, up and down of all experts of a layer, each (E, rows, cols)."""
    found: list[list[np.ndarray]] = [[], [], []]
    with container.bank(layer) as bank:
        record = np.empty(bank.layout.stride, np.uint8)
        for expert in range(bank.experts):
            bank.read(expert, record)
            for part, section in zip(found, bank.layout.sections, strict=True):
                blob = record[section.offset : section.offset + section.nbytes].copy()
                part.append(quant.get(section.fmt).decode(blob, section.rows, section.cols))
    return [np.array(part) for part in found]


def through(fmt: str, weight: np.ndarray) -> np.ndarray:
    return quant.get(fmt).decode(quant.get(fmt).encode(weight), *weight.shape)


def test_experts_are_those_of_a_conversion_and_narrow_ones_share_rows(pair: tuple[Container, Container]) -> None:
    """gate and up are 256 wide and go through alone; down is 96 wide: eight experts make a row of 768."""
    before, after = (experts(container, 3) for container in pair)
    for part in (0, 1):
        np.testing.assert_array_equal(after[part][17], through("wt2", before[part][17]))
    joined = through("wt3", np.concatenate(list(before[2][8:16]), axis=1))
    np.testing.assert_array_equal(np.concatenate(list(after[2][8:16]), axis=1), joined)


def test_trunk_and_tables(pair: tuple[Container, Container]) -> None:
    """Q8_0 is off by half a step of its block of 32 at most, with a step of the largest magnitude / 127 in float16."""
    before, after = (container.load_tensors(TRUNK_FILE) for container in pair)
    for spec in trunk_specs(stored_config(pair[0].manifest)):
        old, new = (
            blobs[spec.name].view("<f4").reshape(matrix_shape(spec.shape)).astype(np.float64)
            for blobs in (before, after)
        )
        match spec.role:
            case role if role in MATRICES:
                step = np.abs(old.reshape(-1, 32)).max(1, keepdims=True) / 127
                assert (np.abs((new - old).reshape(-1, 32)) <= step * (0.5 + 127 * 2**-11)).all()
                assert (new != old).any()
            case Role.TABLE:
                np.testing.assert_array_equal(new, through("q6", old.astype(np.float32)))
            case _:
                np.testing.assert_array_equal(new, old)


def test_the_draft_layer_stays_exact(pair: tuple[Container, Container]) -> None:
    before, after = (container.path for container in pair)
    last = pair[0].manifest.banks[-1].file
    for name in (DRAFT_FILE, last):
        assert (before / name).read_bytes() == (after / name).read_bytes()
    assert (before / pair[0].manifest.banks[0].file).read_bytes() != (
        after / pair[0].manifest.banks[0].file
    ).read_bytes()
