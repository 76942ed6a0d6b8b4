"""The choice of an instruction set: which ones there are, and that native code follows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from waste.errors import UnsupportedError
from waste.kernels import _cpu, isa

NEEDS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512vbmi"},
    "amx": {"amx_tile", "amx_int8"},
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    isa.force(None)


def flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return set(found)


def test_usable_sets_are_what_the_kernel_says_of_the_processor() -> None:
    if not flags():
        pytest.skip("no flags in /proc/cpuinfo")
    expected, have = ["portable"], flags()
    for name, needs in NEEDS.items():
        if not needs <= have:
            break
        expected.append(name)
    found = list(isa.usable())
    # Linux before 5.16, or a sandbox, may refuse tiles to a processor that has them.
    assert found == expected or [*found, "amx"] == expected


def test_the_best_one_is_used_unless_told_otherwise() -> None:
    assert isa.active() == isa.usable()[-1]
    assert isa.code_of() == isa.ISAS.index(isa.active()) == _cpu.active()


@pytest.mark.parametrize("name", isa.ISAS)
def test_native_code_follows(name: str) -> None:
    """Every usable set, and the float loops of it; amx has those of avx512."""
    if name not in isa.usable():
        with pytest.raises(UnsupportedError, match=f"'{name}'"):
            isa.force(name)
        assert isa.active() == isa.usable()[-1]
        return
    isa.force(name)
    assert isa.active() == name
    assert isa.ISAS[_cpu.lanes()] == ("avx512" if name == "amx" else name)
    isa.force(None)
    assert isa.active() == isa.usable()[-1]


def test_what_does_not_exist_is_refused_and_changes_nothing() -> None:
    isa.force("portable")
    with pytest.raises(UnsupportedError, match="'mmx'"):
        isa.force("mmx")
    for code in (-1, len(isa.ISAS), 2**31 - 1):
        assert not _cpu.usable(code)
        with pytest.raises(ValueError, match="instruction set"):
            _cpu.force(code)
    assert isa.active() == "portable"


def test_the_choice_holds_for_the_whole_process_and_no_other() -> None:
    isa.force("portable")
    script = "from waste.kernels import isa; print(isa.active())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == isa.usable()[-1]
