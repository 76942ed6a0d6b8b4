"""Addresses of arrays for native calls, with their kind and shape checked on the way.

A stage trusts its addresses, so every array that crosses goes through one of these functions: they cost about
0.5 us (array.ctypes.data alone: 3 us) and raise ValueError naming the axes when an array is not what the stage expects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from waste.kernels import _cpu


def fresh(*shape: int) -> tuple[npt.NDArray[np.float32], int]:
    """An uninitialised float32 array and its address."""
    array = np.empty(shape, np.float32)
    return array, _cpu.address_f32(array, shape)


def f32(array: Any, name: str, axes: str, *shape: int) -> int:
    """Address of a C-contiguous float32 array of `shape`; `axes` names them, one word each."""
    return _cpu.address_f32(array, shape) or _refuse(array, "float32", name, axes, shape)


def f32_out(array: Any, name: str, axes: str, *shape: int) -> int:
    """The same for an array the stage writes to."""
    return _cpu.address_f32(array, shape, True) or _refuse(array, "writable float32", name, axes, shape)


def i32(array: Any, name: str, axes: str, *shape: int) -> int:
    """The same for int32."""
    return _cpu.address_i32(array, shape) or _refuse(array, "int32", name, axes, shape)


def i64(array: Any, name: str, axes: str, *shape: int) -> int:
    """The same for int64."""
    return _cpu.address_i64(array, shape) or _refuse(array, "int64", name, axes, shape)


def u8(array: Any, name: str, axes: str, *shape: int) -> int:
    """The same for uint8."""
    return _cpu.address_u8(array, shape) or _refuse(array, "uint8", name, axes, shape)


def matrix(weight: _cpu.Weight, name: str, axes: str, rows: int, cols: int) -> _cpu.Weight:
    """`weight` itself, if it is a (rows, cols) matrix."""
    if weight.rows != rows or weight.cols != cols:
        expected, found = _sizes(axes, (rows, cols)), f"({weight.rows}, {weight.cols})"
        raise ValueError(f"{name}: expected a matrix {expected}, found {found}")
    return weight


def _sizes(axes: str, shape: tuple[int, ...]) -> str:
    return f"({', '.join(f'{axis}={size}' for axis, size in zip(axes.split(), shape, strict=True))})"


def _refuse(array: Any, kind: str, name: str, axes: str, shape: tuple[int, ...]) -> int:
    found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}".rstrip()
    flags = getattr(array, "flags", None)
    if flags is not None:
        found += "" if flags.c_contiguous else ", not contiguous"
        found += "" if flags.writeable else ", read-only"
    raise ValueError(f"{name}: expected contiguous {kind} {_sizes(axes, shape)}, found {found}")
