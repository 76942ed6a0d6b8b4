"""The setting `isa` (WASTE_ISA) on its way to native code."""

from __future__ import annotations

from waste.cli.config import Config


def choose_isa(config: Config, flag: str | None = None) -> str | None:
    """Make this process use the instruction set of `--isa`, else the configured one, else the best there is.

    Returns the one that was chosen, None where nobody has. UsageError for one that nobody knows.

    Raises UnsupportedError for one that the processor lacks, NativeCodeError without native code.
    """
    from waste.kernels import isa

    chosen: str | None = config.parse("isa", flag)
    isa.force(chosen)
    return chosen
