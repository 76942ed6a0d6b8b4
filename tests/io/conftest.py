"""Builders of safetensors files and checkpoints, by hand, so that wrong ones can be made too."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

# name -> (dtype, array): the bytes of the array are written as they are.
Tensors = Mapping[str, tuple[str, np.ndarray]]


def _file_bytes(tensors: Tensors, edit: Callable[[dict], None] | None = None) -> bytes:
    """A safetensors file; `edit` may change the header object before it is written."""
    header: dict = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    if edit is not None:
        edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def file_bytes() -> Callable[..., bytes]:
    return _file_bytes


@pytest.fixture
def checkpoint_dir(tmp_path: Path) -> Callable[..., Path]:
    """make({shard name: tensors}, index=True) -> the folder."""

    def make(shards: Mapping[str, Tensors], *, index: bool = True, name: str = "ckpt") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        weight_map = {}
        for shard, tensors in shards.items():
            (folder / shard).write_bytes(_file_bytes(tensors))
            weight_map.update(dict.fromkeys(tensors, shard))
        if index:
            text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
            (folder / "model.safetensors.index.json").write_text(text)
        return folder

    return make


@pytest.fixture
def lone(checkpoint_dir: Callable[..., Path]) -> Callable[..., Path]:
    """make(tensors) -> a folder with one model.safetensors and no index."""
    return lambda tensors, **more: checkpoint_dir({"model.safetensors": tensors}, index=False, **more)
