"""How one thread waits for what others finish, whatever Ctrl-C interrupts."""

from __future__ import annotations

import contextlib
import threading


class Bell:
    """Rung by readers when something has landed; one thread waits for it, and then looks what.

    No `threading.Condition`: Ctrl-C may come when its lock has just been taken, which it would then hold for ever.
    """

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been rung already
            self._silent.release()

    def wait(self) -> None:
        """Until it has been rung since the last wait."""
        self._silent.acquire()
