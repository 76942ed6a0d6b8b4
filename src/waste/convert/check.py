"""Every tensor the engine will ask for, against the checkpoint's headers: before a byte is read or written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from waste.convert.names import is_copy, is_vision
from waste.convert.work import Work
from waste.errors import InputError, UnsupportedError, WasteError
from waste.io.dense import FP8, SCALE_SUFFIX
from waste.io.safetensors import TensorInfo
from waste.models.spec import TensorSpec

READABLE = ("F32", "F16", "BF16", "F64", FP8)
_SCALES = ("F32", "F16", "BF16")
_NAMED = 3  # tensors that a message names; it counts the rest


@dataclass(frozen=True)
class Inventory:
    """The checkpoint's tensors by what becomes of them. Names in the checkpoint's spelling and order."""

    used: int  # tensors that are read, scales included
    weights: int  # numbers in them, scales not included
    read_bytes: int
    vision: tuple[str, ...]  # left out for now
    copies: tuple[str, ...]  # repeat the embedding or the head
    unused: tuple[str, ...]  # nothing asks for them


def check_tensors(work: Work, tensors: Mapping[str, TensorInfo], block: tuple[int, int], where: str) -> Inventory:
    """Compare what `work` needs with what the checkpoint has; `where` names the checkpoint.

    Raises InputError for tensors that are missing or of the wrong shape, and for FP8 without a fitting grid of
    scales; UnsupportedError for dtypes that are not read. Messages name up to three tensors and count the others.
    """
    missing: list[str] = []
    faults: dict[str, WasteError] = {}
    used: set[str] = set()
    weights = read_bytes = 0
    for spec, name in work.sources():
        info = tensors.get(name)
        if info is None:
            missing.append(name)
            continue
        fault = _fault(spec, info, tensors, block, where)
        if fault is not None:
            faults[name] = fault
            continue
        used.add(name)
        weights += math.prod(info.shape)
        read_bytes += info.nbytes
        if info.dtype == FP8:
            used.add(name + SCALE_SUFFIX)
            read_bytes += tensors[name + SCALE_SUFFIX].nbytes
    if missing:
        what = (
            "1 tensor that the model needs is" if len(missing) == 1 else f"{len(missing)} tensors the model needs are"
        )
        raise InputError(
            f"{what} missing from {where}: {_several(missing)}",
            hint="the download is incomplete, or config.json belongs to another model",
        )
    if faults:
        raise _joined(faults)
    rest = [name for name in tensors if name not in used]
    return Inventory(
        used=len(used),
        weights=weights,
        read_bytes=read_bytes,
        vision=tuple(name for name in rest if is_vision(name)),
        copies=tuple(name for name in rest if is_copy(name)),
        unused=tuple(name for name in rest if not is_vision(name) and not is_copy(name)),
    )


def source_bytes(name: str, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of one source tensor, its scales included."""
    scale = tensors.get(name + SCALE_SUFFIX)
    return tensors[name].nbytes + (scale.nbytes if scale is not None else 0)


def _fault(
    spec: TensorSpec, info: TensorInfo, tensors: Mapping[str, TensorInfo], block: tuple[int, int], where: str
) -> WasteError | None:
    tensor = f"tensor {info.name!r} of {where}"
    if not fits(spec, info.shape):
        return InputError(f"{tensor} has shape {list(info.shape)}; expected {list(spec.source_shape)}")
    if info.dtype not in READABLE:
        return UnsupportedError(f"{tensor} is {info.dtype}; only {', '.join(READABLE)} are supported")
    scale = tensors.get(info.name + SCALE_SUFFIX)
    if info.dtype != FP8:
        if scale is not None:
            return InputError(f"{tensor} is {info.dtype} but has scales, {scale.name!r}; expected {FP8}")
        return None
    if len(info.shape) != 2:
        return InputError(f"{tensor} is {FP8} with shape {list(info.shape)}; expected a matrix")
    if scale is None:
        return InputError(f"{tensor} is {FP8} but its scales, {info.name + SCALE_SUFFIX!r}, are missing")
    if scale.dtype not in _SCALES:
        return UnsupportedError(f"scales {scale.name!r} of {where} are {scale.dtype}; expected {', '.join(_SCALES)}")
    grid = tuple(math.ceil(size / step) for size, step in zip(info.shape, block, strict=True))
    if scale.shape == grid:
        return None
    found = f"scales {scale.name!r} of {where} have shape {list(scale.shape)}"
    if math.prod(scale.shape) == 1:
        return UnsupportedError(f"{found}, one for the whole tensor; only one per block is supported, {list(grid)}")
    return InputError(f"{found}; expected {list(grid)} for {list(info.shape)} in blocks of {block[0]} x {block[1]}")


def fits(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` can be the source of `spec`: equal, or for vectors and convolutions, equal
    but for axes of size 1 (Kimi stores A_log as [1, 1, heads, 1])."""
    if shape == spec.source_shape:
        return True
    return len(spec.source_shape) != 2 and _squeezed(shape) == _squeezed(spec.source_shape)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _several(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(repr(name) for name in listed[:_NAMED])
    return text if len(listed) <= _NAMED else f"{text} and {len(listed) - _NAMED} more"


def _joined(faults: dict[str, WasteError]) -> WasteError:
    """The first fault in full, the other tensors by name, up to three in all."""
    first, *others = faults
    error = faults[first]
    text = error.message
    if others:
        named = ", ".join(repr(name) for name in others[: _NAMED - 1])
        rest = len(others) - (_NAMED - 1)
        text += f"; likewise {named}" + (f" and {rest} more" if rest > 0 else "")
    damaged = isinstance(error, InputError)
    return type(error)(text, hint="download the files again, or check config.json" if damaged else None)
