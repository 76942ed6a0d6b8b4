"""What lower packages report while they work; nothing below `cli` prints.

A caller passes an `OnEvent` callback down and decides what to show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of one named phase ("convert", "load", "prefill", ...)."""

    phase: str
    done: int
    total: int
    unit: str = "bytes"  # "bytes" or "tokens"


@dataclass(frozen=True)
class Notice:
    """One line the user should see once, although the work goes on."""

    message: str


Event = Progress | Notice
OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The callback of a caller that does not care."""
