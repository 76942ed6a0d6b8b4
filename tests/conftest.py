"""Containers and engines that several test folders share, each built once a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from waste.convert import ConvertOptions, convert
from waste.engine.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
NANO_GLM = ROOT / "examples" / "nano-glm"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--interruptions", type=int, default=300, help="cases of tests/engine/test_interruptions.py")


@pytest.fixture(scope="session")
def nano_checkpoint() -> Path:
    """The bundled checkpoint: a trained model in GLM-5.3-Flash's architecture and release layout."""
    return NANO_GLM


@pytest.fixture(scope="session")
def exact_nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nano-glm with every weight in float32."""
    target = tmp_path_factory.mktemp("exact") / "nano.waste"
    convert(str(NANO_GLM), target, ConvertOptions(experts="f32", trunk="f32"))
    return target


@pytest.fixture(scope="session")
def default_nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nano-glm as `waste convert` writes it without options."""
    target = tmp_path_factory.mktemp("default") / "nano.waste"
    convert(str(NANO_GLM), target, ConvertOptions())
    return target


@pytest.fixture(scope="session")
def cpu_engine(default_nano: Path) -> Iterator[Engine]:
    with Engine.open(default_nano, ram="4GiB") as engine:
        yield engine
