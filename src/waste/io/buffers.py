"""Page-aligned anonymous memory, for data that kernels and direct reads want aligned."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from waste.errors import ResourceError
from waste.units import format_bytes

# Whatever lies contiguously in memory and can be hashed or written.
Data = bytes | bytearray | memoryview | npt.NDArray[Any]

PAGE = 4096
HUGE_PAGE = 2 << 20


def aligned(nbytes: int, alignment: int = PAGE) -> npt.NDArray[np.uint8]:
    """(nbytes,) uint8, zero, writable, its address a multiple of `alignment` (a power of two).

    The memory is private, belongs to no file and goes back to the system with the last array
    that views it. Pages are taken on first touch. From 2 MiB on, huge pages are asked for.
    Raises ValueError for a negative size or an alignment that is no power of two, and
    ResourceError when the system refuses the memory.
    """
    if nbytes < 0:
        raise ValueError(f"a buffer of {nbytes} bytes")
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment} is not a power of two")
    huge = nbytes >= HUGE_PAGE
    if huge:
        # A huge page needs an aligned address; the slack is address space that is never touched.
        alignment = max(alignment, HUGE_PAGE)
    try:
        region = mmap.mmap(-1, max(nbytes, 1) + alignment - 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError) as error:
        raise ResourceError(
            f"no memory for a buffer of {format_bytes(nbytes)}: {error}",
            hint="free memory, or choose a smaller budget",
        ) from error
    if huge:
        _advise_huge(region)
    whole = np.frombuffer(region, dtype=np.uint8)
    start = -whole.ctypes.data % alignment
    return whole[start : start + nbytes]


def as_bytes(data: Data) -> memoryview:
    """The bytes of a C-contiguous buffer as a flat view; TypeError when it is not contiguous."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    # A view with a zero in its shape cannot be cast, and has no bytes anyway.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _advise_huge(region: mmap.mmap) -> None:
    """Ask for huge pages where the system knows them; it is a wish, so a refusal is no error."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    try:
        region.madvise(advice)
    except OSError:
        return
