"""Which instruction set native code uses: the best this processor has, or one that was forced for the whole process.

For now that is the encoder's choice alone; its bytes are the same with every one. Kernels that compute pick theirs
when the library is loaded.
"""

from __future__ import annotations

from waste.errors import UnsupportedError
from waste.kernels import _cpu

ISAS = ("portable", "avx2", "avx512")  # slowest first; avx512 includes VNNI and VBMI

_forced: str | None = None


def usable() -> tuple[str, ...]:
    """Those this processor has, slowest first."""
    return tuple(name for code, name in enumerate(ISAS) if _cpu.usable(code))


def force(isa: str | None) -> None:
    """Use `isa` from now on; None: the best again. UnsupportedError for one that this processor lacks."""
    global _forced
    if isa is not None:
        code_of(isa)
    _forced = isa


def code_of(isa: str | None = None) -> int:
    """The number by which native code knows `isa`; None: the one to use. UnsupportedError as `force`."""
    wanted = isa or _forced or usable()[-1]
    if wanted not in usable():
        raise UnsupportedError(
            f"this processor has no code for instruction set {wanted!r}", hint=f"one of {', '.join(usable())}"
        )
    return ISAS.index(wanted)
