"""What a conversion is asked for, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from waste import quant
from waste.errors import UsageError
from waste.models.spec import Formats

# The trunk is the sensitive part and a small share of the bytes; experts are nearly all of them.
DEFAULT_EXPERTS = "q4"
DEFAULT_TRUNK = "q8"


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `waste convert`. `experts` and `trunk` decide the bytes of the result; the others do not.

    `experts` is one format, or two joined by a plus: that of gate and up, then that of down. Raises UsageError for
    an unknown format or a number of threads below one.
    """

    experts: str = DEFAULT_EXPERTS
    trunk: str = DEFAULT_TRUNK
    revision: str | None = None  # of a Hub model: branch, tag or commit
    force: bool = False  # replace a finished container
    restart: bool = False  # discard an unfinished conversion
    threads: int | None = None  # None: one for each core this process may use

    def __post_init__(self) -> None:
        for name in vars(self.formats).values():
            quant.get(name)
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is {self.threads}; at least 1 is needed")

    @property
    def formats(self) -> Formats:
        """The format of every kind of tensor."""
        inner, _, down = self.experts.partition("+")
        return Formats(gate=inner, up=inner, down=down if "+" in self.experts else inner, trunk=self.trunk)

    def recorded(self) -> dict[str, str]:
        """The options that a container's manifest keeps: those that decide its bytes."""
        return {"experts": self.experts, "trunk": self.trunk}


@dataclass(frozen=True)
class ConvertResult:
    """A finished container."""

    path: Path
    nbytes: int  # of all its files
    seconds: float
    unchanged: bool  # it was there already, from the same source with the same options
    resumed_bytes: int  # taken over from an interrupted conversion
    notices: tuple[str, ...]
