"""`--ram` of `waste run`: what is a size, what is too small or too large, and that following a hint works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from waste.hardware import memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def box(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 256 GiB, 250 of them free."""
    monkeypatch.setattr(memory, "detect", lambda *_: memory.Memory(256 * GIB, 250 * GIB, None))


@pytest.fixture
def run(waste: Any, default_nano: Path) -> Any:
    command = ("run", str(default_nano), "Hi", "-n", "1", "--temp", "0", "--no-stdin", "--ctx", "64")
    return lambda *options, **more: waste(*command, *options, **more)


@pytest.mark.parametrize("ram", ["8GB", "8GiB", "8g", "8000M", " 8 GiB ", "9000000000"])
def test_sizes_are_understood(run: Any, ram: str) -> None:
    done = run("--ram", ram, "-v")
    assert done.code == 0, done.err
    assert f"in {'7.' if ram in ('8GB', '8000M') else '8.'}" in done.err


@pytest.mark.parametrize(
    "ram", ["0", "0.001", "-3", "abc", "", "8_000M", "8 GiB of RAM", "1e9", "0x10", "nan", "8GiB8"]
)
def test_what_is_no_size_is_a_usage_error(run: Any, failed: Any, ram: str) -> None:
    done = run("--ram", ram)
    failed(done, 2)
    assert f"--ram {ram!r}" in done.err


@pytest.mark.parametrize(("ram", "shown"), [("1", "1 B"), ("220", "220 B"), ("99999", "97.7 KiB")])
def test_a_number_without_a_unit_is_bytes_and_said_to_be(run: Any, failed: Any, ram: str, shown: str) -> None:
    done = run("--ram", ram)
    failed(done, 4)
    assert f"a RAM budget of {shown} is too small: " in done.err
    assert "a number without a unit is bytes" in done.err


def test_more_than_the_machine_has_is_refused_and_more_than_is_free_is_said(
    run: Any, failed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("--ram", "300GiB")
    failed(done, 4)
    assert "more than this machine's 256 GiB" in done.err
    source = "memory.max of control group '/a'"
    monkeypatch.setattr(memory, "detect", lambda *_: memory.Memory(256 * GIB, GIB, 6 * GIB, source))
    done = run("--ram", "6.5GiB")
    failed(done, 4)
    assert "more than the control group's 6.00 GiB" in done.err
    done = run("--ram", "5GiB")
    assert done.code == 0
    assert f"above the 1.00 GiB now free ({source})" in done.err


def test_the_same_by_variable_and_file(run: Any, failed: Any, tmp_path: Path) -> None:
    failed(run(WASTE_RAM="abc"), 2)
    failed(run(WASTE_RAM="220"), 4)
    assert run("--ram", "8GiB", WASTE_RAM="220").code == 0
    (tmp_path / "waste.toml").write_text("ram = 220\n")
    failed(run(), 4)
    assert run("--ram", "8GiB").code == 0


def test_a_hint_that_is_followed_works(run: Any, failed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with a process that stays as large as it is."""
    monkeypatch.setattr(memory, "resident_bytes", lambda: 150 << 20)

    def least(context: str) -> int:
        done = run("--ram", "1MiB", "--ctx", context)
        failed(done, 4)
        return int(re.findall(r"--ram (\d+)MiB", done.err)[0])

    between = f"{(least('16') + least('4096')) // 2 - 1}MiB"
    done = run("--ram", between, "--ctx", "4096")
    failed(done, 4)
    found = re.fullmatch(r"hint: --ram (\d+)MiB, or --ctx (\d+)", done.err.splitlines()[-1])
    assert found and int(found[1]) == least("4096") and 16 < int(found[2]) < 4096
    assert run("--ctx", "4096", "--ram", f"{found[1]}MiB").code == 0
    assert run("--ctx", found[2], "--ram", between).code == 0
    failed(run("--ctx", str(int(found[2]) + 1), "--ram", between), 4)


def test_a_hint_that_is_followed_works_in_a_process_of_its_own(default_nano: Path) -> None:
    """Whose size differs a little every time."""

    def start(ram: str) -> subprocess.CompletedProcess[str]:
        command = ("run", str(default_nano), "Hi", "-n", "1", "--ctx", "64", "--no-stdin", "--ram", ram)
        return subprocess.run([sys.executable, "-m", "waste", *command], capture_output=True, text=True, check=False)

    refused = start("2MiB")
    assert refused.returncode == 4, refused.stderr
    found = re.search(r"hint: --ram (\S+)", refused.stderr)
    assert found
    done = start(found[1])
    assert done.returncode == 0, done.stderr
