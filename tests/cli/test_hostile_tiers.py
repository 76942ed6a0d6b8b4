"""`waste run` beside usage counts, strip checksums and banks that are not what they should be: one line, its exit code.

What is merely advice (usage.json) never ends a run; what is part of the model always does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from waste.container.layout import record_checksum
from waste.container.manifest import MANIFEST_NAME, Manifest
from waste.convert import ConvertOptions, convert

COMMON = ("--raw", "-n", "3", "--temp", "0", "--ram", "1GiB", "--ctx", "64", "--threads", "1")
BANK = "experts-003.bin"


@pytest.fixture
def model(default_nano: Path, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(default_nano, tmp_path / "m.waste", ignore=shutil.ignore_patterns("usage.json*", "*.part"))
    )


@pytest.fixture(scope="module")
def other_model(nano_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint in another format."""
    target = tmp_path_factory.mktemp("other") / "o.waste"
    convert(str(nano_checkpoint), target, ConvertOptions(experts="q4"))
    return target


@pytest.fixture
def ask(waste: Any, model: Path) -> Callable[..., Any]:
    return lambda *more: waste("run", str(model), "-p", "Hello", *COMMON, *more)


# -- usage.json


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def of_another_model(path: Path) -> None:
    path.write_text(json.dumps({"schema": "waste.usage/1", "experts": 4, "counts": {"1": [1, 2, 3, 4]}}))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, loop, huge, device, of_another_model])
@pytest.mark.parametrize("suffix", ["", ".lock", ".part"])
def test_nothing_in_the_place_of_usage_changes_an_answer(ask: Any, model: Path, make: Any, suffix: str) -> None:
    expected = ask("--no-learn")
    make(model / f"usage.json{suffix}")
    found = ask("-v", "--learn")
    assert (found.code, found.out) == (0, expected.out), found.err
    told = [line for line in found.err.splitlines() if "usage" in line]
    assert len(told) <= 1 and "Traceback" not in found.err, found.err
    assert model.joinpath("usage.json").is_file() or told  # learned, or the reason


# -- checksums of the embedding's strips


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # In every record of a bank; of the trunk outside of the embedding, of which a run reads only the rows it needs.
    for at in range(200, len(data), 4096) if path.name == BANK else [len(data) - 100]:
        data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def other_kind(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink, other_kind])
@pytest.mark.parametrize("name", ["embed_tokens.sums", "trunk.bin", BANK])
def test_a_file_of_the_model_that_is_not_whole_is_named(
    ask: Any, model: Path, failed: Any, damage: Any, name: str
) -> None:
    damage(model / name)
    result = ask()
    failed(result, 3)
    assert name in result.err


# -- banks


def test_the_banks_of_two_layers_exchanged_are_found(ask: Any, model: Path, failed: Any) -> None:
    one, other = model / BANK, model / "experts-005.bin"
    one.rename(model / "x")
    other.rename(one)
    (model / "x").rename(other)
    result = ask()
    failed(result, 3)
    assert "record" in result.err and "layer" in result.err


def test_a_bank_of_another_container_is_found(ask: Any, model: Path, other_model: Path, failed: Any) -> None:
    shutil.copyfile(other_model / BANK, model / BANK)
    result = ask()
    failed(result, 3)
    assert BANK in result.err


def test_a_bank_of_other_formats_and_the_same_size_is_found(
    ask: Any, model: Path, other_model: Path, failed: Any
) -> None:
    """As if another container's records had the same length: they say themselves that they are others."""
    manifest = Manifest.from_bytes((model / MANIFEST_NAME).read_bytes(), "manifest")
    (entry,) = (bank for bank in manifest.banks if bank.file == BANK)
    stride = entry.layout.stride
    bank = np.frombuffer((model / BANK).read_bytes(), np.uint8).reshape(-1, stride).copy()
    for record in bank:
        record[32] ^= 3  # the format code of gate
        record[24:32] = np.frombuffer(record_checksum(record).to_bytes(8, "little"), np.uint8)
    (model / BANK).write_bytes(bank.tobytes())
    result = ask()
    failed(result, 3)
    assert BANK in result.err and "formats" in result.err


@pytest.fixture
def moved(model: Path, tmp_path: Path) -> Path:
    """One bank in a directory of its own."""
    place = tmp_path / "fast"
    place.mkdir()
    (model / BANK).rename(place / BANK)
    return place


def test_banks_elsewhere_give_the_same_answer_however_often_they_are_named(
    ask: Any, moved: Path, model: Path, waste: Any, default_nano: Path
) -> None:
    expected = waste("run", str(default_nano), "-p", "Hello", *COMMON, "--no-learn")
    link = moved.parent / "link"
    link.symlink_to(moved)
    for places in ([moved], [moved, moved], [moved, link], [model, moved], [moved, moved.parent]):
        found = ask(*(word for place in places for word in ("--experts-dir", str(place))))
        assert (found.code, found.out) == (0, expected.out), found.err


def test_no_directory_of_experts_is_one_line(ask: Any, moved: Path, tmp_path: Path, failed: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("x")
    for name in ("file", "pipe", "loop", "nothing", str(moved / BANK), "x" * 5000, "a\nb"):
        result = ask("--experts-dir", str(moved), "--experts-dir", str(tmp_path / name))
        failed(result, 3)
        assert "experts directory" in result.err
    failed(ask("--experts-dir", ""), 2)


def test_a_bank_elsewhere_that_is_none_is_named(ask: Any, moved: Path, failed: Any) -> None:
    whole = (moved / BANK).read_bytes()
    result = ask()
    failed(result, 3)
    assert BANK in result.err
    for data in (b"", whole[:-1], whole + b"\0", whole[: len(whole) // 2]):
        (moved / BANK).write_bytes(data)
        result = ask("--experts-dir", str(moved))
        failed(result, 3)
        assert str(moved / BANK) in result.err
    (moved / BANK).unlink()
    os.mkfifo(moved / BANK)
    failed(ask("--experts-dir", str(moved)), 3)


@pytest.mark.parametrize("vram", ["1", "64KiB", "1TiB", "0x10", "-1", ""])
def test_a_vram_tier_that_makes_no_sense_is_one_line(ask: Any, failed: Any, vram: str) -> None:
    result = ask("--vram", vram)
    failed(result, 4 if vram in ("1", "64KiB", "1TiB") else 2)
    assert "vram" in result.err.lower()
