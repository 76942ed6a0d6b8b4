"""Where a checkpoint comes from: a folder here, or (see `hub`) a model of the Hugging Face Hub.

A source hands out its small files at once and its weights when they are wanted, so that a model which cannot be
converted is refused before a single weight is read or downloaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from waste.container.manifest import MANIFEST_NAME
from waste.errors import InputError, WasteError
from waste.events import OnEvent
from waste.io.checksum import Hasher
from waste.io.files import open_for_reading, pread_into, read_file, shown
from waste.io.safetensors import INDEX_NAME, SINGLE_NAME, Checkpoint, TensorInfo, read_header
from waste.models.hf_config import CONFIG_FILE, GENERATION_FILE

# Everything besides weights that a conversion may read. What a release has of them is enough.
SMALL_FILES = (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_NAME,
    "chat_template.jinja",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
)
_SMALL_LIMIT = 256 << 20

# .../models--OWNER--NAME/snapshots/COMMIT, where the Hub's cache keeps a download
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")

_SAMPLES = 64
_SAMPLE_BYTES = 1024


@dataclass(frozen=True)
class Headers:
    """What is known of the weights without reading any: tensors by name, sizes of the files they lie in."""

    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, int]
    unindexed: tuple[str, ...] = ()


class Source(Protocol):
    """A checkpoint to convert."""

    label: str  # for messages: quoted path or Hub id
    kind: str  # "local" or "hub"
    name: str  # base name of the folder, or the Hub id: never a path
    revision: str | None  # commit, where there is one
    directory: Path  # holds the small files now, the weights after `fetch`

    def headers(self) -> Headers:
        """Names, shapes, dtypes and sizes of the weights; downloads headers only."""
        ...

    def download_bytes(self) -> int:
        """Bytes that `fetch` would still have to download."""
        ...

    def fetch(self, on_event: OnEvent) -> Checkpoint:
        """The weights, here and opened; downloads what is missing."""
        ...

    def close(self) -> None: ...


class LocalSource:
    """A folder in the Hugging Face layout."""

    kind = "local"

    def __init__(self, directory: Path) -> None:
        """Raises InputError when `directory` is no folder with a config.json."""
        self.directory = directory
        self.label = shown(directory)
        resolved = directory.resolve()
        self.name, self.revision = resolved.name, None
        snapshot = _SNAPSHOT.search(resolved.as_posix())
        if snapshot is not None:
            self.name, self.revision = f"{snapshot['owner']}/{snapshot['name']}", snapshot["commit"]
        self._checkpoint: Checkpoint | None = None
        _refuse_other_folders(directory)

    def headers(self) -> Headers:
        if self._checkpoint is None:
            self._checkpoint = Checkpoint.open(self.directory)
        return Headers(self._checkpoint.tensors, self._checkpoint.files, self._checkpoint.unindexed)

    def download_bytes(self) -> int:
        return 0

    def fetch(self, on_event: OnEvent) -> Checkpoint:
        self.headers()
        assert self._checkpoint is not None
        return self._checkpoint

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()


def _refuse_other_folders(directory: Path) -> None:
    if not directory.is_dir():
        hint = None
        if directory.suffix == ".gguf":
            hint = "GGUF files cannot be converted yet: give the folder with the original safetensors"
        elif directory.suffix in (".safetensors", ".json"):
            hint = f"give its folder: {shown(directory.parent)}"
        fault = "is not a folder" if directory.exists() else "is a link to nothing"
        raise InputError(f"{shown(directory)} {fault}: expected a folder with a checkpoint", hint=hint)
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise InputError(f"{shown(directory)} cannot be read: {error.strerror}") from error
    if CONFIG_FILE in names:
        return
    if MANIFEST_NAME in names:
        raise InputError(
            f"{shown(directory)} is a container already, not a checkpoint", hint=f"waste info {shown(directory)}"
        )
    raise InputError(
        f"{shown(directory / CONFIG_FILE)} is missing; incomplete download?", hint="download the whole model"
    )


def small_files(directory: Path) -> dict[str, bytes]:
    """The bytes of those of `SMALL_FILES` that the folder has. InputError for one that cannot be read."""
    return {
        name: read_file(directory / name, limit=_SMALL_LIMIT)
        for name in SMALL_FILES
        if os.path.lexists(directory / name)
    }


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """`data` as a JSON object; InputError naming `where`."""
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where} is not valid JSON: {' '.join(str(error).split())}", hint="download the file again"
        ) from None
    if not isinstance(found, dict):
        raise InputError(f"{where} holds a JSON {type(found).__name__}; expected an object")
    return found


def tensor_names(directory: Path) -> frozenset[str] | None:
    """Names of the checkpoint's tensors from its index (or its lone file), None where that is not possible.

    Only a hint for reading the config; the index is checked for real when the weights are opened.
    """
    try:
        if (directory / INDEX_NAME).exists():
            index = json_object(read_file(directory / INDEX_NAME, limit=_SMALL_LIMIT), shown(directory / INDEX_NAME))
            found = index.get("weight_map")
            return frozenset(found) if isinstance(found, dict) else None
        if (directory / SINGLE_NAME).exists():
            return frozenset(read_header(directory / SINGLE_NAME))
    except WasteError:
        return None
    return None


def fingerprint(path: Path) -> int:
    """A checksum of a weight file's size, its header and 64 KiB spread evenly over its data.

    Tells another model of the same shape from this one without reading it; it does not prove that nothing changed.
    """
    fd = open_for_reading(path)
    try:
        size = os.fstat(fd).st_size
        hasher = Hasher()
        hasher.update(size.to_bytes(8, "little"))
        length = np.empty(min(8, size), np.uint8)
        pread_into(fd, length, 0, where=shown(path))
        begin = min(8 + int.from_bytes(length.tobytes(), "little"), size)
        head = np.empty(begin, np.uint8)
        pread_into(fd, head, 0, where=shown(path))
        hasher.update(head)
        room = max(size - begin - _SAMPLE_BYTES, 0)
        for i in range(_SAMPLES):
            at = begin + room * i // (_SAMPLES - 1)
            piece = np.empty(min(_SAMPLE_BYTES, size - at), np.uint8)
            pread_into(fd, piece, at, where=shown(path))
            hasher.update(piece)
    finally:
        os.close(fd)
    return hasher.value
