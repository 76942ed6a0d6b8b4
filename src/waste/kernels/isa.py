"""Which instruction set native code uses: the best this processor has, or one that was forced for the whole process.

Neither the bytes of encoded matrices nor results depend on it, but for attention over the cache, which rounds once
less where products and sums are fused (all sets but portable): it is a matter of speed, and of tests.
"""

from __future__ import annotations

from waste.errors import UnsupportedError
from waste.kernels import _cpu

# Slowest first. avx2 includes FMA and F16C; avx512 includes BW, DQ, VL, VNNI, VBMI and GFNI; amx is avx512 with int8
# tiles.
ISAS = ("portable", "avx2", "avx512", "amx")


def usable() -> tuple[str, ...]:
    """Those this processor has, slowest first."""
    return tuple(name for code, name in enumerate(ISAS) if _cpu.usable(code))


def active() -> str:
    """The one in use."""
    return ISAS[_cpu.active()]


def force(isa: str | None) -> None:
    """Use `isa` from now on; None: the best again. UnsupportedError for one that this processor lacks."""
    _cpu.force(None if isa is None else code_of(isa))


def code_of(isa: str | None = None) -> int:
    """The number by which native code knows `isa`; None: the one in use. UnsupportedError as `force`."""
    if isa is None:
        return _cpu.active()
    if isa not in usable():
        raise UnsupportedError(
            f"this processor has no code for instruction set {isa!r}", hint=f"one of {', '.join(usable())}"
        )
    return ISAS.index(isa)
