"""Memory is bounded at any model size: a matrix larger than what the process may take passes through in pieces."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

ROWS = 1_600_000

# VmHWM, not getrusage: ru_maxrss survives exec, so it would report the test run's own peak.
PROGRAM = """
import sys
from pathlib import Path
from waste.convert import ConvertOptions, convert
convert(sys.argv[1], Path(sys.argv[2]), ConvertOptions(threads=8))
status = Path("/proc/self/status").read_text().split()
print(int(status[status.index("VmHWM:") + 1]) * 1024)
"""


def test_peak_rss_does_not_follow_the_size_of_a_matrix(tiny: Any, dst: Path) -> None:
    """Embedding and head of 256 M weights each: 977 MiB in float32, more than the whole process may take."""
    hidden = tiny.text["hidden_size"]
    tiny.text["vocab_size"] = ROWS
    tables = ["model.language_model.embed_tokens.weight", "lm_head.weight"]
    for name in tables:
        del tiny.tensors[name]
    tiny.write()
    add_hollow_shard(tiny.path, {name: [ROWS, hidden] for name in tables})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny.path), str(dst)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (dst / "trunk.bin").stat().st_size > 2 * ROWS * hidden
    assert int(done.stdout) < 600 << 20


def add_hollow_shard(checkpoint: Path, shapes: dict[str, list[int]]) -> None:
    """A shard of BF16 zeros that takes no disk space, entered in the index."""
    header, offset = {}, 0
    for name, (rows, cols) in shapes.items():
        header[name] = {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [offset, offset + 2 * rows * cols]}
        offset += 2 * rows * cols
    text = json.dumps(header).encode()
    with (checkpoint / "hollow.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    place = checkpoint / "model.safetensors.index.json"
    index = json.loads(place.read_text(encoding="utf-8"))
    index["weight_map"] |= dict.fromkeys(shapes, "hollow.safetensors")
    place.write_text(json.dumps(index), encoding="utf-8")
