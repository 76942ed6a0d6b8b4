"""An engine on a container whose embedding stays on disk, and on one that was converted before that was possible."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from waste.container.manifest import MANIFEST_NAME, Manifest
from waste.container.strips import Strips
from waste.engine.engine import Engine
from waste.errors import InputError, WasteError
from waste.models.embedding import ResidentEmbedding, StreamedEmbedding
from waste.models.spec import EMBEDDING, TRUNK_FILE
from waste.planner.footprint import PREFILL_CHUNK

SUMS = "embed_tokens.sums"


@pytest.fixture
def copy(default_nano: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(default_nano, tmp_path / "copy.waste"))


def without_sums(path: Path) -> Path:
    """The container as it was converted earlier."""
    manifest = Manifest.from_bytes((path / MANIFEST_NAME).read_bytes(), "manifest")
    older = replace(manifest, files=tuple(file for file in manifest.files if file.name != SUMS))
    (path / MANIFEST_NAME).write_bytes(older.to_bytes())
    (path / SUMS).unlink()
    return path


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_where_the_embedding_lies_changes_no_bit(default_nano: Path, copy: Path, backend: str) -> None:
    with (
        Engine.open(default_nano, ram="4GiB", backend=backend, threads=1) as here,
        Engine.open(without_sums(copy), ram="4GiB", backend=backend, threads=1) as older,
    ):
        assert isinstance(here.model.embedding, StreamedEmbedding)
        assert isinstance(older.model.embedding, ResidentEmbedding)
        ids = [i * 7919 % 4096 for i in range(20)] + [4095, 0, 0, 4095]
        for chunk in (1, 5, 1000):
            one, other = here.session(chunk=chunk), older.session(chunk=chunk)
            assert one.eval(ids, all_logits=True).tobytes() == other.eval(ids, all_logits=True).tobytes()
            assert one.eval([5]).tobytes() == other.eval([5]).tobytes()


def test_the_budget_counts_what_is_in_memory(default_nano: Path, copy: Path) -> None:
    with Engine.open(default_nano, ram="4GiB") as here, Engine.open(without_sums(copy), ram="4GiB") as older:
        entries = here.manifest.tensors_of(TRUNK_FILE)
        table = next(entry for entry in entries if entry.name == EMBEDDING)
        everything = sum(entry.nbytes for entry in entries)
        assert older.budget.trunk_bytes == everything
        strips = Strips.of(table.fmt, table.shape)
        assert strips.count <= PREFILL_CHUNK  # of a table so small one chunk may need everything
        assert here.budget.trunk_bytes == everything + strips.sums_bytes


def test_a_damaged_row_ends_the_session_that_needs_it(copy: Path) -> None:
    manifest = Manifest.from_bytes((copy / MANIFEST_NAME).read_bytes(), "manifest")
    table = next(entry for entry in manifest.tensors if entry.name == EMBEDDING)
    strips = Strips.of(table.fmt, table.shape)
    with (copy / TRUNK_FILE).open("r+b") as file:
        file.seek(table.offset + 3 * strips.nbytes)
        file.write(b"\0" * 64)
    with Engine.open(copy, ram="4GiB") as engine:
        session = engine.session()
        session.eval([1, 2, 3])
        with pytest.raises(InputError, match=r"trunk\.bin', tensor 'embed_tokens.weight' is damaged in rows 48 to 63"):
            session.eval([1, 50])
        with pytest.raises(WasteError, match="stopped in the middle"):
            session.eval([1])
        engine.session().eval([1, 2, 3])


def test_sums_of_another_size_are_refused(copy: Path) -> None:
    from waste.container.manifest import FileEntry
    from waste.io.checksum import checksum

    manifest = Manifest.from_bytes((copy / MANIFEST_NAME).read_bytes(), "manifest")
    data = bytes(8)
    (copy / SUMS).write_bytes(data)
    others = (file for file in manifest.files if file.name != SUMS)
    changed = replace(manifest, files=(*others, FileEntry(SUMS, 8, checksum(data))))
    (copy / MANIFEST_NAME).write_bytes(changed.to_bytes())
    with pytest.raises(InputError, match=r"embed_tokens\.sums' has 8 bytes, expected 2048"):
        Engine.open(copy, ram="4GiB")
