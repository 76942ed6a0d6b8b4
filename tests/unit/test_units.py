"""Sizes are read in both unit systems, and refused when they are no sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste import units
from waste.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GB", 8 * 10**9), ("8GiB", 8 << 30), ("8g", 8 << 30), ("8000M", 8000 << 20), ("8000MB", 8 * 10**9),
     ("1.5 GiB", 3 << 29), ("4096", 4096), ("640 B", 640), (".5k", 512), ("2tib", 2 << 40),
     ("2.GB", 2 * 10**9), ("9007199254740993", 2**53 + 1), ("9" * 20 + "TiB", (10**20 - 1) << 40)],
)  # fmt: skip
def test_sizes_people_write(text: str, nbytes: int) -> None:
    assert units.parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "0.001",
        "-3",
        "abc",
        "",
        " ",
        "8_000M",
        "GiB",
        "1e9",
        "nan",
        "8 GiB/s",
        "٣GB",
        "9" * 400,
        "9" * 21,
        "1." + "0" * 9000,
    ],
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="ram"):
        units.parse_bytes(text, name="ram")


@given(st.integers(1, 1 << 50))
def test_printed_sizes_read_back_within_their_digits(nbytes: int) -> None:
    assert units.parse_bytes(units.format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.421, "0.42 s"), (42.04, "42.0 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (59.99, "60.0 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(960, "960"), (25_360_000, "25.4 M"), (321e9, "321 B"), (1500, "1.50 K")])
def test_counts(count: float, text: str) -> None:
    assert units.format_count(count) == text


def test_rates_are_decimal() -> None:
    assert units.format_rate(1.2e9) == "1.20 GB/s"
    assert units.format_rate(512) == "512 B/s"
