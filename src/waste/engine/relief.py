"""What a run does when memory becomes short: it gives back slots rather than let the system page."""

from __future__ import annotations

from waste.events import Notice, OnEvent
from waste.hardware.pressure import PressureWatch
from waste.tiers.cache import ExpertCache
from waste.units import format_bytes

# Of the slots, each time there is pressure: three times bring 81 % of RAM (collapse) below 72 % (healthy), and the
# watch lets ten seconds pass in between.
SHARE = 0.05


class Relief:
    """Asked between tokens."""

    def __init__(self, watch: PressureWatch, on_event: OnEvent) -> None:
        self._watch = watch
        self._on_event = on_event
        self._said = False

    def check(self, cache: ExpertCache) -> None:
        """Shrink the cache while there is pressure; say so once."""
        pressure = self._watch.check()
        if pressure is None:
            return
        share = max(SHARE, pressure.short_bytes / max(cache.ram_bytes, 1))
        given = cache.shrink(min(share, 0.5))
        if given and not self._said:
            self._said = True
            self._on_event(
                Notice(f"memory is short ({pressure.reason}): {format_bytes(given)} of cached experts given back")
            )
