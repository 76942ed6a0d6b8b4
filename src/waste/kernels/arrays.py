"""Arrays and matrices that are checked once: those of a layer, and what the encoder works on.

Arrays that change from call to call are checked by the stages themselves (csrc/cpu/border.hpp).
"""

from __future__ import annotations

from typing import Any

from waste.kernels import _cpu


def f32(array: Any, name: str, axes: str, *shape: int) -> int:
    """Address of a C-contiguous float32 array of `shape`; `axes` names them, one word each.

    Raises ValueError naming the axes for anything else.
    """
    return _cpu.address_f32(array, name, axes, shape)


def f32_out(array: Any, name: str, axes: str, *shape: int) -> int:
    """The same for an array that is written to."""
    return _cpu.address_f32(array, name, axes, shape, True)


def u8(array: Any, name: str, axes: str, *shape: int) -> int:
    """The same for uint8."""
    return _cpu.address_u8(array, name, axes, shape)


def matrix(weight: _cpu.Weight, name: str, axes: str, rows: int, cols: int) -> _cpu.Weight:
    """`weight` itself, if it is a (rows, cols) matrix."""
    if weight.rows != rows or weight.cols != cols:
        expected = ", ".join(f"{axis}={size}" for axis, size in zip(axes.split(), (rows, cols), strict=True))
        raise ValueError(f"{name}: expected a matrix ({expected}), found ({weight.rows}, {weight.cols})")
    return weight
