"""The memory of one tier: a single reservation, carved into blocks of equal slots.

A slot holds one record. Blocks differ in stride, so that layers whose records are smaller take less room; nothing is
lost between them but the distance to the next 4 KiB. Slots are made when they are asked for: 40,000 cost nothing
until then, as their pages do until they are written to.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from waste.backends.base import Bytes
from waste.events import Notice, OnEvent, ignore
from waste.io.buffers import PAGE, aligned
from waste.units import format_bytes

# Of <linux/mman.h>. On fault: a page is locked when it is first written to. Without it 20 GiB would be written with
# zeros before the first token, and be resident whether a record comes or not.
_MLOCK_ONFAULT = 1
_COLD = 20
_DONTNEED_LOCKED = 24  # Linux 5.18; plain DONTNEED refuses locked pages


class ArenaSlot(NamedTuple):
    """Room for one record. Native code gets the two addresses; both are good as long as the arena lives."""

    index: int  # type: ignore[assignment]  # in `Arena.arrived`; hides tuple.index, which says nothing here
    data: Bytes  # (stride,) uint8, on 4 KiB
    address: int  # of data[0]
    flag_address: int  # of its int32 in `Arena.arrived`


class Slots(Sequence[ArenaSlot]):
    """The slots of one block, each made when it is asked for."""

    def __init__(self, memory: Bytes, arrived: npt.NDArray[np.int32], first: int, stride: int) -> None:
        """memory: of the block. arrived: of the arena. first: index of the block's first slot there."""
        self.first = first
        self.stride = stride
        self._count = len(memory) // stride
        self._memory = memory
        self._address = int(memory.ctypes.data)
        self._arrived = arrived
        self._flags_address = int(arrived.ctypes.data)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, position: int) -> ArenaSlot: ...
    @overload
    def __getitem__(self, position: slice) -> list[ArenaSlot]: ...
    def __getitem__(self, position: int | slice) -> ArenaSlot | list[ArenaSlot]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(self._count))]
        place = position + self._count if position < 0 else position
        if not 0 <= place < self._count:
            raise IndexError(f"slot {position} of {self._count}")
        begin = place * self.stride
        return ArenaSlot(
            self.first + place,
            self._memory[begin : begin + self.stride],
            self._address + begin,
            self._flags_address + 4 * (self.first + place),
        )


class Arena:
    """The slots of a tier. The memory goes back to the system with the arena and the last view of it."""

    def __init__(self, blocks: Sequence[tuple[int, int]], *, lock: bool = False, on_event: OnEvent = ignore) -> None:
        """blocks: (stride in bytes, slots) of each; a stride is a multiple of 4 KiB, as records are.

        lock: keep what is written to from being swapped out, as far as the system allows; one Notice when it does not.
        Raises ResourceError when the address space is refused, ValueError for senseless blocks.
        """
        for stride, count in blocks:
            if stride <= 0 or stride % PAGE or count < 0:
                raise ValueError(f"a block of {count} slots of {stride} bytes")
        sizes = [stride * count for stride, count in blocks]
        self.nbytes = sum(sizes)
        self.memory: Bytes = aligned(self.nbytes)
        self.address = int(self.memory.ctypes.data)
        # One flag for each slot: 0 while its record is read, 1 once it is there, below 0 when it will not come.
        self.arrived: npt.NDArray[np.int32] = np.zeros(sum(count for _, count in blocks), np.int32)
        firsts = accumulate((count for _, count in blocks), initial=0)
        begins = accumulate(sizes, initial=0)
        self.slots: tuple[Slots, ...] = tuple(
            Slots(self.memory[begin : begin + size], self.arrived, first, stride)
            for (stride, _), size, first, begin in zip(blocks, sizes, firsts, begins, strict=False)
        )
        self._split = False  # whether huge pages are no longer asked for
        self.locked = lock and self.nbytes > 0 and self._lock(on_event)

    def give_back(self, slot: ArenaSlot) -> None:
        """Return the pages of a slot to the system, at once. The slot can be used again: it then holds zeros at first.

        The first time, the arena stops asking for huge pages: the system would make new ones of what is left.
        """
        if not self._split:
            self._split = _call("madvise", self.address, self.nbytes, mmap.MADV_NOHUGEPAGE) == 0
        nbytes = slot.data.nbytes
        if self.locked:
            if _call("madvise", slot.address, nbytes, _DONTNEED_LOCKED) == 0:
                return
            _call("munlock", slot.address, nbytes)  # an older system: what comes here is no longer locked
        # A huge page that is only partly given up stays with the process whole, until memory is short: of 1 GiB in
        # every second slot of 1 MiB, nothing came free. Marking pages as cold takes huge pages apart (Linux 5.4).
        _call("madvise", slot.address, nbytes, _COLD)
        _call("madvise", slot.address, nbytes, mmap.MADV_DONTNEED)

    def _lock(self, on_event: OnEvent) -> bool:
        problem = _mlock(self.address, self.nbytes)
        if not problem:
            return True
        limit, words = _memlock_limit()
        reason = "" if limit is not None and limit < self.nbytes else f" ({os.strerror(problem)})"
        on_event(
            Notice(
                f"expert slots are not locked in memory{reason}: {format_bytes(self.nbytes)} are wanted, "
                f"RLIMIT_MEMLOCK allows {words}; `ulimit -l {-(-self.nbytes >> 10)}` (root may) raises it"
            )
        )
        return False


def _memlock_limit() -> tuple[int | None, str]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return (None, "any") if limit == resource.RLIM_INFINITY else (limit, format_bytes(limit))


def _mlock(address: int, nbytes: int) -> int:
    """Lock pages as they are written to; the error number, 0 when it worked."""
    for name, more in (("mlock2", (_MLOCK_ONFAULT,)), ("mlock", ())):
        error = _call(name, address, nbytes, *more)
        if error not in (errno.ENOSYS, errno.EINVAL):  # neither an old system nor an old C library
            return error
    return errno.ENOSYS


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, address: int, nbytes: int, *more: int) -> int:
    """A function of the C library on a range of pages: the error number, 0 when it worked."""
    try:
        function = _library()[name]
    except AttributeError:
        return errno.ENOSYS
    failed = function(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), *map(ctypes.c_int, more))
    return ctypes.get_errno() if failed else 0
