"""What a forward pass can report about its discrete choices, for tests, traces and learning."""

from __future__ import annotations

from typing import Protocol

from waste.backends.base import Routing, Selection


class Trace(Protocol):
    """Receives every choice as it is made. `start` is the position of the chunk's first token."""

    def routing(self, layer: int, start: int, routing: Routing) -> None: ...

    def selection(self, layer: int, start: int, tokens: int, selection: Selection | None) -> None: ...


class NoTrace:
    """Nobody listens."""

    def routing(self, layer: int, start: int, routing: Routing) -> None:
        pass

    def selection(self, layer: int, start: int, tokens: int, selection: Selection | None) -> None:
        pass
