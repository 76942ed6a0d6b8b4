"""What --vary makes: every combination, and one line for everything that makes no sense."""

from __future__ import annotations

import pytest

from waste.bench.arms import MOST_ARMS, VARIABLE, Settings, arms, parse_drive, parse_lookahead
from waste.errors import UsageError
from waste.tiers.options import TierOptions


def test_nothing_varied_is_one_arm_as_it_is() -> None:
    base = Settings(ram=5, tiers=TierOptions(policy="lru"))
    (arm,) = arms(base, [])
    assert (arm.name, arm.settings) == ("", base)


def test_arms_are_all_combinations_in_the_order_given() -> None:
    found = arms(Settings(threads=3), ["ram=2GiB,4GiB", "policy=lru,lfu"])
    assert [arm.name for arm in found] == [
        "ram=2GiB policy=lru",
        "ram=2GiB policy=lfu",
        "ram=4GiB policy=lru",
        "ram=4GiB policy=lfu",
    ]
    assert [(arm.settings.ram, arm.settings.tiers.policy) for arm in found] == [
        (2 << 30, "lru"),
        (2 << 30, "lfu"),
        (4 << 30, "lru"),
        (4 << 30, "lfu"),
    ]
    assert {arm.settings.threads for arm in found} == {3}


@pytest.mark.parametrize(
    ("text", "meanings"),
    [
        ("vram=0,1GiB,2g", [0, (1 << 30), (2 << 30)]),
        ("threads=1, 2", [1, 2]),
        ("isa=portable", ["portable"]),
        ("lookahead=auto,off,8", [None, 0, 8]),
        ("fill=on,off", [True, False]),
        ("direct=off", [False]),
        ("drive=off,500MB/s,2GB/s", [None, 5e8, 2e9]),
    ],
)
def test_every_setting_reaches_its_place(text: str, meanings: list[object]) -> None:
    key = text.partition("=")[0]
    name = {"drive": "drive_bytes_per_s"}.get(key, key)
    found = arms(Settings(), [text])
    assert [getattr(a.settings if hasattr(a.settings, name) else a.settings.tiers, name) for a in found] == meanings


def test_all_of_them_are_known() -> None:
    assert set(VARIABLE) == {"ram", "vram", "threads", "isa", "policy", "lookahead", "fill", "direct", "drive"}


@pytest.mark.parametrize(
    ("varied", "said"),
    [
        (["ram"], "no values"),
        (["ram="], "no values"),
        (["ram=2GiB,"], "no values"),
        (["ram=,2GiB"], "no values"),
        ([""], "no setting"),
        (["="], "no setting"),
        (["Ram=2GiB"], "no setting 'Ram'"),
        (["rma=1,2"], "no setting 'rma'"),
        (["ram=2GiB,-1"], "--vary ram '-1'"),
        (["ram=nan"], "--vary ram 'nan'"),
        (["threads=0"], "--vary threads"),
        (["threads=1,x"], "--vary threads"),
        (["threads=9999999999"], "--vary threads"),
        (["threads=²"], "--vary threads"),
        (["threads=1,1"], "names 1 twice"),
        (["ram=1GiB,1024MiB"], "names 1024MiB twice"),
        (["policy=lru,fifo"], "expected one of"),
        (["isa=sse9"], "expected one of"),
        (["lookahead=-1"], "auto, off"),
        (["lookahead=²"], "whole number"),
        (["fill=yes"], "on, off"),
        (["drive=0"], "not a rate"),
        (["drive=fast"], "not a rate"),
        (["ram=1GiB", "ram=2GiB"], "given twice"),
        (["lookahead=" + ",".join(str(i) for i in range(1, MOST_ARMS + 2))], f"more than {MOST_ARMS}"),
    ],
)
def test_nonsense_is_one_line(varied: list[str], said: str) -> None:
    with pytest.raises(UsageError) as failure:
        arms(Settings(), varied)
    assert said in failure.value.message
    assert "\n" not in failure.value.message


def test_near_misses_have_a_hint() -> None:
    with pytest.raises(UsageError) as failure:
        arms(Settings(), ["polcy=lru"])
    assert failure.value.hint == "did you mean policy?"


def test_single_values() -> None:
    assert parse_lookahead("auto", "x") is None and parse_lookahead("off", "x") == 0
    assert parse_drive("2GB/s", "x") == 2e9 and parse_drive("off", "x") is None
