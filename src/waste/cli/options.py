"""Options that mean the same on every command, written down once."""

from __future__ import annotations

from typing import Annotated

import typer

from waste.cli.config import BACKENDS, POLICIES

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more on stderr.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colour, whatever the terminal.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, units in the keys.")]
Ram = Annotated[
    str | None, typer.Option("--ram", metavar="SIZE", help="RAM to stay inside, as 8GiB. Default: 72% of what is free.")
]
Vram = Annotated[
    str | None, typer.Option("--vram", metavar="SIZE", help="Expert cache above RAM, as 8GiB. Default: 0, none.")
]
ExpertsDir = Annotated[
    list[str] | None,
    typer.Option("--experts-dir", metavar="DIR", help="More places of experts-*.bin files; may be repeated."),
]
Policy = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME", help=f"What leaves the expert cache: {', '.join(POLICIES)}."),
]
Lookahead = Annotated[
    str | None,
    typer.Option("--lookahead", metavar="auto|off|N", help="Experts of the next layer to read ahead. Default: auto."),
]
Learn = Annotated[
    bool | None,
    typer.Option(
        "--learn/--no-learn", help="Write usage.json beside the model, for a warm next start.", show_default=False
    ),
]
Mlock = Annotated[
    bool | None,
    typer.Option("--mlock/--no-mlock", help="Keep the expert cache from being swapped out.", show_default=False),
]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", min=1, help="Default: one per core.")]
Context = Annotated[
    int | None, typer.Option("--ctx", metavar="TOKENS", min=1, help="Of prompt and answer. Default: 8192.")
]
Backend = Annotated[str | None, typer.Option("--backend", metavar="NAME", help=f"{' or '.join(BACKENDS)}.")]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a Hub model.")
]
