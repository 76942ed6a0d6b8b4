"""The setting `isa` (WASTE_ISA) on its way to native code."""

from __future__ import annotations

from waste.cli.config import Config


def choose_isa(config: Config) -> None:
    """Make this process use the configured instruction set, or the best there is.

    Raises UnsupportedError for one that the processor lacks, NativeCodeError without native code.
    """
    from waste.kernels import isa

    isa.force(config.get("isa"))
