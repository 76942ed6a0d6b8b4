"""A slot: room for one expert in one tier, and what is in it. A pool: the slots that some layers share.

A slot goes empty -> reading -> ready -> empty; ready and held by a wave it is pinned. It belongs to the thread that
computes, but for `failure` and the flag, which the reader's thread sets when a read has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any

from waste.backends.base import Bytes, Record
from waste.tiers.arena import Arena, ArenaSlot, Slots
from waste.tiers.policy import Policy


class State(Enum):
    EMPTY = "empty"
    READING = "reading"
    READY = "ready"  # and pinned while a wave holds it


class Origin(Enum):
    """Why a record was read."""

    DEMAND = "demand"
    AHEAD = "ahead"  # predicted for the next layer
    FILL = "fill"  # room was left


class Slot:
    """One slot of an arena."""

    __slots__ = ("expert", "failure", "layer", "memory", "origin", "pool", "record", "state", "ticket")

    def __init__(self, pool: Pool, memory: ArenaSlot) -> None:
        self.pool = pool
        self.memory = memory
        self.state = State.EMPTY
        self.layer = -1
        self.expert = -1
        self.record: Record | None = None
        self.origin = Origin.DEMAND
        self.ticket: Any = None  # of the read, to hasten or cancel it
        self.failure: BaseException | None = None

    def begin(self, layer: int, expert: int, nbytes: int, origin: Origin) -> Record:
        """Empty -> reading: the record that will be there."""
        self.state, self.layer, self.expert, self.origin = State.READING, layer, expert, origin
        self.ticket = self.failure = None
        self.pool.arrived[self.memory.index] = 0
        data: Bytes = self.memory.data[:nbytes]
        self.record = Record(expert, data, self.memory.address, nbytes, self.memory.flag_address)
        return self.record

    def ended(self, failure: BaseException | None) -> None:
        """The read has ended; called on the reader's thread."""
        self.failure = failure
        self.pool.arrived[self.memory.index] = 1 if failure is None else -1

    @property
    def landed(self) -> bool:
        """Whether the read has ended, well or not."""
        return bool(self.pool.arrived[self.memory.index] != 0)

    def clear(self) -> None:
        """-> empty."""
        self.state, self.record, self.ticket = State.EMPTY, None, None


class Pool:
    """Slots of one tier that some layers share, with the policy that says who leaves."""

    def __init__(
        self,
        tier: str,
        layers: tuple[int, ...],
        arena: Arena,
        memory: Slots,
        make_policy: Callable[[int], Policy],
        floor: int,
    ) -> None:
        """tier: "vram" or "ram". memory: of `arena`. make_policy: for so many slots.
        floor: slots it keeps: the experts of one token in a layer.
        """
        self.tier = tier
        self.layers = layers
        self.policy = make_policy(len(memory))
        self.floor = floor
        self.capacity = len(memory)  # falls when memory is given back
        self.slot_bytes = memory.stride
        self.arrived = arena.arrived
        self.ready = 0  # slots that hold a record, all known to the policy
        self.reading = 0
        self.background: OrderedDict[Slot, None] = OrderedDict()  # being read, and nobody waits for them: oldest first
        self._arena = arena
        self._memory = memory
        self._make_policy = make_policy
        self._made, self._most = 0, len(memory)  # slots are made when they are first wanted
        self._free: list[Slot] = []

    def take(self) -> Slot | None:
        """A slot that nothing is in, from now on the caller's; None where there is none."""
        if self._free:
            return self._free.pop()
        if self._made < self._most:
            self._made += 1
            return Slot(self, self._memory[self._made - 1])
        return None

    def put(self, slot: Slot) -> None:
        """It is empty again."""
        self._free.append(slot)

    def start_over(self) -> None:
        """Nothing is in any slot, as if the pool had just been made with as many as it has now."""
        for at in range(self.capacity, self._most):  # others than before may have been given back
            self._arena.give_back(self._memory[at])
        self.policy = self._make_policy(self.capacity)
        self.ready = self.reading = 0
        self.background.clear()
        self._made, self._most = 0, self.capacity
        self._free = []

    def give_up_unused(self) -> None:
        """Slots that nothing was ever in, but for `floor`, are not to be used any more."""
        for _ in range(min(self._most - self._made, self.capacity - self.floor)):
            self._most -= 1
            self.capacity -= 1
            self._arena.give_back(self._memory[self._most])  # it may have been used before the pool started over

    def resized(self) -> bool:
        """`capacity` has changed. True when another kind of policy is right for it, which knows of no resident yet."""
        policy = self._make_policy(self.capacity)
        if type(policy) is type(self.policy):
            self.policy.resized(self.capacity)
            return False
        self.policy = policy
        return True

    def retire(self, slot: Slot) -> int:
        """Give an empty slot's memory back for good. Returns its bytes."""
        self.capacity -= 1
        self._arena.give_back(slot.memory)
        return self.slot_bytes
