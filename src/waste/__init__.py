"""waste: convert mixture-of-experts checkpoints into streaming containers, and run them where they do not fit.

    from waste import Engine
    engine = Engine.open("x.waste", ram="4GiB")
    print(engine.generate("Who are you?", max_tokens=32).text)

`Engine` and `Session` are imported on first use: the command line must answer `--help` at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from waste.errors import WasteError

if TYPE_CHECKING:
    from waste.engine.engine import Engine
    from waste.engine.session import Session

__all__ = ["Engine", "Session", "WasteError"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from waste.engine.engine import Engine

        return Engine
    if name == "Session":
        from waste.engine.session import Session

        return Session
    raise AttributeError(f"module 'waste' has no attribute {name!r}")
