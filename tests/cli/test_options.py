"""Options that several commands share, as Typer reads them."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from waste.cli import options


def parsed(*argv: str) -> dict[str, Any]:
    app, found = typer.Typer(rich_markup_mode=None), {}

    @app.command()
    def command(
        vram: options.Vram = None,
        experts_dir: options.ExpertsDir = None,
        policy: options.Policy = None,
        lookahead: options.Lookahead = None,
        learn: options.Learn = None,
        mlock: options.Mlock = None,
    ) -> None:
        found.update(locals())

    command.__annotations__ = {
        "vram": options.Vram,
        "experts_dir": options.ExpertsDir,
        "policy": options.Policy,
        "lookahead": options.Lookahead,
        "learn": options.Learn,
        "mlock": options.Mlock,
    }
    app(args=list(argv), standalone_mode=False)
    return {key: value for key, value in found.items() if key != "found"}


def test_options_that_are_not_given_are_none_or_empty() -> None:
    """So that a setting can take their place."""
    assert {value or None for value in parsed().values()} == {None}


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--vram", "1GiB"], "vram", "1GiB"),
        (["--vram", ""], "vram", ""),
        (["--experts-dir", "/a:b", "--experts-dir", "c"], "experts_dir", ["/a:b", "c"]),
        (["--policy", "lru"], "policy", "lru"),
        (["--lookahead", "off"], "lookahead", "off"),
        (["--lookahead", "-3"], "lookahead", "-3"),
        (["--no-learn"], "learn", False),
        (["--learn"], "learn", True),
        (["--mlock"], "mlock", True),
        (["--no-mlock"], "mlock", False),
    ],
)
def test_an_option_arrives_as_it_was_written(argv: list[str], key: str, value: object) -> None:
    """Values are checked by the setting of the same name, which names the option."""
    assert parsed(*argv)[key] == value
