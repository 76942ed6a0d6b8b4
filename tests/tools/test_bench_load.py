"""The loading benchmark: every arm brings in all bytes of the trunk, and its document has every row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_load import ARMS, Trunk

from waste.container import load
from waste.container.reader import Container
from waste.io.direct import DirectFile
from waste.models.spec import EMBEDDING, TRUNK_FILE

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_load.py"


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_reads_the_same_bytes_once(default_nano: Path, monkeypatch: pytest.MonkeyPatch, arm: str) -> None:
    spans: list[tuple[int, int]] = []
    real = DirectFile.read_into

    def read_into(file: DirectFile, buffer: object, offset: int, *, where: str) -> None:
        spans.append((offset, offset + len(buffer)))  # type: ignore[arg-type]
        real(file, buffer, offset, where=where)  # type: ignore[arg-type]

    monkeypatch.setattr(DirectFile, "read_into", read_into)
    for name in ("READERS", "BLOCK"):  # which an arm sets, for the tool alone
        monkeypatch.setattr(load, name, getattr(load, name))
    trunk = Trunk(default_nano)
    trunk.arm(arm, 3, 1 << 18)
    spans.sort()
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    assert begins[1:] == ends[:-1]
    table = next(t for t in Container.open(default_nano).manifest.tensors if t.name == EMBEDDING)
    assert begins[0] == table.nbytes // 4096 * 4096  # it lies first, and is left out
    assert ends[-1] == (default_nano / TRUNK_FILE).stat().st_size == begins[0] + trunk.nbytes


def test_the_document_has_a_row_for_each_setting(default_nano: Path) -> None:
    command = [sys.executable, str(TOOL), str(default_nano), "--rounds", "1", "--readers", "1,2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["readers"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        assert all(row[f"{arm}_gb_per_s"]["median"] > 0 for arm in ARMS)
        assert row["share"]["p10"] == row["share"]["p90"]  # of one round
