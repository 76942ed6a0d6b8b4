"""What a conversion is asked for, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from waste.errors import UsageError
from waste.models.formats import DEFAULT_EXPERTS, DEFAULT_TRUNK, Formats, read_formats


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `waste convert`. `experts`, `trunk` and `size` decide the bytes of the result; the others do not.

    `experts` and `trunk` are texts as `waste.models.formats` reads them; None is the default or, where there is a
    `size`, whatever loses least within it. Raises UsageError for formats that are none and a number of threads
    below one.
    """

    experts: str | None = None
    trunk: str | None = None
    size: int | None = None  # bytes that the whole container may have
    revision: str | None = None  # of a Hub model: branch, tag or commit
    force: bool = False  # replace a finished container
    restart: bool = False  # discard an unfinished conversion
    threads: int | None = None  # None: one for each core this process may use

    def __post_init__(self) -> None:
        self.formats()
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is {self.threads}; at least 1 is needed")

    def formats(self) -> Formats:
        """The format of every class of tensors, defaults for what is not said, whatever the size."""
        return read_formats(
            DEFAULT_EXPERTS if self.experts is None else self.experts,
            DEFAULT_TRUNK if self.trunk is None else self.trunk,
        )


@dataclass(frozen=True)
class ConvertResult:
    """A finished container."""

    path: Path
    nbytes: int  # of all its files
    seconds: float
    unchanged: bool  # it was there already, from the same source with the same options
    resumed_bytes: int  # taken over from an interrupted conversion
    notices: tuple[str, ...]
