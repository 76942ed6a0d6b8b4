"""Safetensors files and checkpoints made of them: headers checked to the last byte, tensors read one at a time.

The format: 8 bytes little-endian header length, a JSON object (name -> dtype, shape,
data_offsets from the end of the header; optionally `__metadata__`), then the data, without
gaps. Files come from strangers and interrupted downloads, so nothing in a header is believed
before it is compared with the file's real size.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from waste.errors import InputError
from waste.io.files import directory_problem, open_for_reading, pread_into, read_file, regular_size, shown

# Bits per element. F4 and F6 are packed, so a tensor of them must fill whole bytes.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The limit of the reference implementation; the headers of the largest releases stay below 10 MB.
_MAX_HEADER = 100_000_000
_MAX_INDEX = 100_000_000
_MAX_NDIM = 16
_MAX_DIM = 1 << 48
_AGAIN = "download the file again"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `nbytes` bytes at the absolute `offset` of the file `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, in order of their data.

    Everything is validated: header length, JSON, dtypes, shapes, that the tensors tile the data
    without gap or overlap, and that the file ends exactly where the last one does. Only the
    header is read. Raises InputError naming the file and, where one is at fault, the tensor.
    """
    size = _weight_file_size(path)
    fd = open_for_reading(path)
    try:
        head = np.empty(min(size, 512), np.uint8)
        pread_into(fd, head, 0, where=shown(path))
        _refuse_impostors(head.tobytes(), path, size)
        length = int.from_bytes(head[:8].tobytes(), "little")
        if length > _MAX_HEADER:
            raise InputError(
                f"{shown(path)} claims a header of {length} bytes, at most {_MAX_HEADER} are allowed: "
                "not a safetensors file, or damaged",
                hint=_AGAIN,
            )
        if 8 + length > size:
            raise InputError(
                f"{shown(path)} is cut short: its header ends at byte {8 + length}, the file has {size} bytes",
                hint=_AGAIN,
            )
        text = np.empty(length, np.uint8)
        pread_into(fd, text, 8, where=shown(path))
    finally:
        os.close(fd)
    tensors = _parse_header(text.tobytes(), path, 8 + length)
    end = max((info.offset + info.nbytes for info in tensors.values()), default=8 + length)
    if end != size:
        fault = "is cut short" if size < end else "has bytes that belong to no tensor"
        raise InputError(f"{shown(path)} {fault}: expected {end} bytes, found {size}", hint=_AGAIN)
    return tensors


def _weight_file_size(path: Path) -> int:
    """Size of a downloaded file. A hub cache holds links to blobs; one to nothing is a download that stopped."""
    if os.path.islink(path) and not os.path.exists(path):
        raise InputError(
            f"download incomplete: {shown(path)} is a link to a file that is not there", hint="download the model again"
        )
    return regular_size(path)


def _refuse_impostors(head: bytes, path: Path, size: int) -> None:
    """Name what is often found in place of a shard: nothing, a web page, a Git LFS pointer."""
    if size == 0:
        raise InputError(f"{shown(path)} is empty: expected a safetensors file", hint=_AGAIN)
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise InputError(
            f"{shown(path)} is a Git LFS pointer of {size} bytes, not the safetensors file it points to",
            hint="run `git lfs pull` in the folder",
        )
    start = head.lstrip()[:200].lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")):
        raise InputError(
            f"{shown(path)} is an HTML or XML page (an error page?), not a safetensors file",
            hint="check access to the model, then download the file again",
        )
    if size < 8:
        raise InputError(f"{shown(path)} is cut short: expected at least 8 bytes, found {size}", hint=_AGAIN)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError when a key occurs twice, where `json` would keep the last silently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the name {key!r} occurs twice")
            seen.add(key)
    return found


def _load_object(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """`text` as a JSON object, or InputError."""
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{what} of {shown(path)} is not valid JSON: {' '.join(str(error).split())}", hint=_AGAIN
        ) from None
    if not isinstance(found, dict):
        raise InputError(f"{what} of {shown(path)} is a JSON {type(found).__name__}, expected an object", hint=_AGAIN)
    return found


def _parse_header(text: bytes, path: Path, data_begin: int) -> dict[str, TensorInfo]:
    entries = _load_object(text, path, "the header")
    entries.pop("__metadata__", None)
    tensors = [_parse_entry(name, entry, path, data_begin) for name, entry in entries.items()]
    # Empty tensors share their offset with a neighbour, so the end decides second.
    tensors.sort(key=lambda info: (info.offset, info.offset + info.nbytes))
    expected = data_begin
    for info in tensors:
        if info.offset != expected:
            fault = "overlaps another tensor" if info.offset < expected else "leaves a gap before it"
            raise InputError(
                f"tensor {info.name!r} of {shown(path)} {fault}: "
                f"expected to begin at byte {expected}, found {info.offset}",
                hint=_AGAIN,
            )
        expected += info.nbytes
    return {info.name: info for info in tensors}


def _parse_entry(name: str, entry: object, path: Path, data_begin: int) -> TensorInfo:
    def wrong(what: str) -> InputError:
        return InputError(f"tensor {name!r} of {shown(path)}: {what}", hint=_AGAIN)

    if not isinstance(entry, dict):
        raise wrong("its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise wrong(f"unknown dtype {_short(dtype)}")
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM or not all(_is_size(dim) for dim in shape):
        raise wrong(f"shape {_short(shape)} is not a list of at most {_MAX_NDIM} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise wrong(f"data_offsets {_short(offsets)} are not two byte offsets")
    begin, end = offsets
    if begin > end:
        raise wrong(f"its data ends at byte {end} before it begins at {begin}")
    bits = DTYPE_BITS[dtype]
    for dim in shape:
        bits *= dim
    if bits != 8 * (end - begin):
        raise wrong(f"shape {shape} of {dtype} takes {bits / 8:.16g} bytes, its data has {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), path, data_begin + begin, end - begin)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_DIM


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Checkpoint:
    """A folder of safetensors in the Hugging Face layout, opened for reading tensor by tensor.

    `tensors` are those the index names (or all of a lone model.safetensors), by name; `files` are
    the sizes in bytes of the files they lie in, in order of name; `unindexed` are tensors that lie
    in those files without being in the index: never read. Other files of the folder are not looked
    at. Reads are thread-safe. Close it, or use it in a `with`.
    """

    def __init__(
        self, directory: Path, tensors: dict[str, TensorInfo], files: dict[str, int], unindexed: tuple[str, ...]
    ) -> None:
        self.directory = directory
        self.tensors = tensors
        self.files = files
        self.unindexed = unindexed
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read the index and every header; all files are checked before anything else can happen.

        Raises InputError naming the file at fault: missing, cut short, not a safetensors file, a
        link to nothing; or the tensor that the index promises and its file lacks.
        """
        problem = directory_problem(directory)
        if problem is not None:
            raise InputError(f"{shown(directory)} {problem}: expected a folder with a safetensors checkpoint")
        weight_map = _weight_map(directory)
        names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
        files = _file_sizes(directory, names)
        headers = {name: read_header(directory / name) for name in names}
        if weight_map is None:
            return cls(directory, headers[SINGLE_NAME], files, ())
        tensors = {}
        for tensor, name in weight_map.items():
            if tensor not in headers[name]:
                raise InputError(
                    f"tensor {tensor!r} is not in {shown(directory / name)}, where {INDEX_NAME!r} places it",
                    hint="the files are of different versions: download them again",
                )
            tensors[tensor] = headers[name][tensor]
        unindexed = tuple(tensor for name in names for tensor in headers[name] if weight_map.get(tensor) != name)
        return cls(directory, tensors, files, unindexed)

    def info(self, name: str) -> TensorInfo:
        """The tensor called `name`; InputError when there is none."""
        if name not in self.tensors:
            raise InputError(f"tensor {name!r} is missing from the checkpoint {shown(self.directory)}")
        return self.tensors[name]

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """All bytes of one tensor: (nbytes,) uint8. InputError when the file cannot be read or shrank."""
        info = self.info(name)
        return self._read(info, info.offset, info.nbytes)

    def read_rows(self, name: str, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """The bytes of rows `begin` to `end` (along the first axis) of one tensor, as (n,) uint8.

        Lets a matrix that is too large for memory pass through it. ValueError for rows outside the
        tensor, for a scalar, and for packed dtypes whose rows are not whole bytes.
        """
        info = self.info(name)
        if not info.shape or not 0 <= begin <= end <= info.shape[0]:
            raise ValueError(f"rows {begin} to {end} of {name!r} with shape {info.shape}")
        row_bytes, rest = divmod(info.nbytes, max(info.shape[0], 1))
        if rest:
            raise ValueError(f"rows of {name!r} ({info.dtype}) are not whole bytes")
        return self._read(info, info.offset + begin * row_bytes, (end - begin) * row_bytes)

    def _read(self, info: TensorInfo, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        data = np.empty(nbytes, np.uint8)
        pread_into(self._descriptor(info.path), data, offset, where=f"{shown(info.path)}, tensor {info.name!r}")
        return data

    def _descriptor(self, path: Path) -> int:
        # Opened once and kept: a file that is replaced meanwhile cannot mix old and new bytes.
        with self._lock:
            if self._closed:
                raise ValueError("the checkpoint is closed")
            if path not in self._fds:
                self._fds[path] = open_for_reading(path)
            return self._fds[path]

    def close(self) -> None:
        """Close the files; reads after that are a ValueError."""
        with self._lock:
            self._closed = True
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _weight_map(directory: Path) -> dict[str, str] | None:
    """tensor -> file name from the index; None where a lone model.safetensors takes its place."""
    path = directory / INDEX_NAME
    if not os.path.lexists(path):
        _require_single(directory)
        return None
    _weight_file_size(path)
    index = _load_object(read_file(path, limit=_MAX_INDEX), path, "the text")
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InputError(f"{shown(path)} has no weight_map, or an empty one", hint=_AGAIN)
    for tensor, name in found.items():
        if not isinstance(name, str) or "/" in name or "\0" in name or name in ("", ".", ".."):
            raise InputError(
                f"{shown(path)} places tensor {tensor!r} in {_short(name)}, "
                "expected the plain name of a file in the folder"
            )
    return found


def _require_single(directory: Path) -> None:
    """Without an index there must be one model.safetensors; say what is there instead."""
    if os.path.lexists(directory / SINGLE_NAME):
        return
    others = sorted(os.listdir(directory))
    if any(name.endswith(".safetensors") for name in others):
        raise InputError(
            f"{shown(directory / INDEX_NAME)} is missing beside its shards; incomplete download?",
            hint="download the index",
        )
    for name in others:
        if name.startswith("pytorch_model") or name.endswith((".gguf", ".pth", ".pt")):
            raise InputError(
                f"{shown(directory)} holds {name!r} but no safetensors, the only weights that are read",
                hint="download the safetensors files of the model",
            )
    raise InputError(
        f"{shown(directory)} holds neither {INDEX_NAME!r} nor {SINGLE_NAME!r}; incomplete download?",
        hint="download the whole model",
    )


def _file_sizes(directory: Path, names: list[str]) -> dict[str, int]:
    """Sizes of all files, or one error that tells how many are missing."""
    missing = [name for name in names if not os.path.lexists(directory / name)]
    if missing:
        raise InputError(
            f"{shown(directory / missing[0])} is missing ({len(missing)} of {len(names)} weight files are); "
            "incomplete download?",
            hint="download the missing files",
        )
    return {name: _weight_file_size(directory / name) for name in names}
