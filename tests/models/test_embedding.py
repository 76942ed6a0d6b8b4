"""The embedding on disk gives the bits of the embedding in memory, and never those of a damaged strip."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste import quant
from waste.backends.base import Ops
from waste.backends.cpu import CpuOps
from waste.backends.reference import ReferenceOps
from waste.container.manifest import TensorEntry
from waste.container.reader import Container
from waste.container.strips import StripFile, Strips, computed_sums
from waste.container.writer import TensorFileWriter
from waste.errors import InputError
from waste.models.embedding import (
    ResidentEmbedding,
    StreamedEmbedding,
    open_streamed,
    streamed_bytes,
    streams_embedding,
)
from waste.models.spec import EMBEDDING
from waste.models.stored import stored_config

ROWS, COLS = 203, 200  # twelve strips and a part of one; one group of columns and a part

OPS: dict[str, Callable[[], Ops]] = {"cpu": lambda: CpuOps(threads=1), "reference": ReferenceOps}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


class Table:
    """One random table in one format: in memory, and on disk."""

    def __init__(self, directory: Path, fmt: str) -> None:
        self.path = directory / f"{fmt}.bin"
        rng = np.random.default_rng(5)
        self.blob = quant.get(fmt).encode(rng.standard_normal((ROWS, COLS)).astype(np.float32))
        with TensorFileWriter(self.path) as writer:
            writer.append("before", "f32", (7,), np.zeros(28, np.uint8))
            self.entry: TensorEntry = writer.append(EMBEDDING, fmt, (ROWS, COLS), self.blob)
            writer.seal()

    def streamed(self) -> StreamedEmbedding:
        return StreamedEmbedding(
            StripFile(self.path, self.entry, np.frombuffer(computed_sums(self.path, self.entry), "<u8"))
        )

    def resident(self, ops: Ops) -> ResidentEmbedding:
        return ResidentEmbedding(ops.weight(self.blob, self.entry.fmt, ROWS, COLS))


@pytest.fixture(scope="module")
def tables(directory: Path) -> dict[str, Table]:
    return {fmt: Table(directory, fmt) for fmt in quant.names()}


@pytest.mark.parametrize("backend", OPS)
@pytest.mark.parametrize("fmt", quant.names())
def test_every_row_alone_and_all_together(tables: dict[str, Table], backend: str, fmt: str) -> None:
    ops, table = OPS[backend](), tables[fmt]
    streamed, resident = table.streamed(), table.resident(ops)
    everything = np.arange(ROWS)
    expected = ops.numpy(resident.rows(ops, everything))
    assert ops.numpy(streamed.rows(ops, everything)).tobytes() == expected.tobytes()
    for token in (0, 15, 16, 100, ROWS - 1):
        assert ops.numpy(streamed.rows(ops, np.array([token]))).tobytes() == expected[token].tobytes()
    streamed.close()


@given(chunks=st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=40), min_size=1, max_size=4))
def test_any_chunks_in_any_order_with_repetitions(tables: dict[str, Table], chunks: list[list[int]]) -> None:
    ops = CpuOps(threads=1)
    for fmt in ("q8", "bf16"):
        streamed, resident = tables[fmt].streamed(), tables[fmt].resident(ops)
        for chunk in chunks:
            ids = np.array(chunk, np.int64)
            assert streamed.rows(ops, ids).tobytes() == resident.rows(ops, ids).tobytes()
        streamed.close()


@pytest.mark.parametrize("ids", [[-1], [ROWS], [ROWS + 4], [3, ROWS], [5, -16, 7]])
def test_ids_outside_the_table(tables: dict[str, Table], ids: list[int]) -> None:
    ops = CpuOps(threads=1)
    streamed, resident = tables["q8"].streamed(), tables["q8"].resident(ops)
    for embedding in (streamed, resident):
        with pytest.raises(IndexError):
            embedding.rows(ops, np.array(ids))
    streamed.close()


def test_threads_share_it(tables: dict[str, Table]) -> None:
    streamed, ops = tables["q8"].streamed(), CpuOps(threads=1)
    expected = tables["q8"].resident(ops).rows(ops, np.arange(ROWS))
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng, mine = np.random.default_rng(seed), CpuOps(threads=1)
        for _ in range(150):
            ids = rng.integers(0, ROWS, rng.integers(1, 30))
            if streamed.rows(mine, ids).tobytes() != expected[ids].tobytes():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    streamed.close()
    assert not wrong


def test_a_damaged_strip_is_an_error_for_its_rows_alone(tmp_path: Path) -> None:
    table, ops = Table(tmp_path, "q8"), CpuOps(threads=1)
    streamed = table.streamed()
    strips = Strips.of("q8", (ROWS, COLS))
    expected = streamed.rows(ops, np.arange(48, 64))
    at = table.entry.offset + 2 * strips.nbytes + 77
    with table.path.open("r+b") as file:
        byte = file.seek(at) and file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    for token in (32, 47):
        with pytest.raises(InputError, match=r"q8\.bin', tensor 'embed_tokens.weight' is damaged in rows 32 to 47"):
            streamed.rows(ops, np.array([token]))
        with pytest.raises(InputError, match="damaged in rows 32 to 47"):
            streamed.rows(ops, np.array([1, token, 200]))
    assert streamed.rows(ops, np.arange(48, 64)).tobytes() == expected.tobytes()
    os.truncate(table.path, at)
    with pytest.raises(InputError, match="the file ends at byte"):
        streamed.rows(ops, np.array([60]))
    streamed.close()


@pytest.mark.parametrize("fmt", ["q8", "f32"])
def test_its_memory_is_what_the_budget_counts(tables: dict[str, Table], fmt: str) -> None:
    ops, strips = CpuOps(threads=1), Strips.of(fmt, (ROWS, COLS))
    for tokens in (1, 2, 12, 13, 256):
        streamed = tables[fmt].streamed()
        step = 16 if tokens <= 13 else 1  # a strip for each, the last one too
        ids = np.minimum(np.arange(tokens)[::-1] * step, ROWS - 1)
        streamed.rows(ops, ids)
        streamed.rows(ops, np.array([ROWS - 1]))
        held = streamed._buffer.nbytes + strips.sums_bytes
        assert held <= streamed_bytes(strips, tokens)
        if tokens in (12, 13):
            assert held == streamed_bytes(strips, tokens)
        streamed.close()


def test_which_containers_leave_it_on_disk(default_nano: Path) -> None:
    container = Container.open(default_nano)
    config, manifest = stored_config(container.manifest), container.manifest
    assert streams_embedding(config, manifest)
    assert not streams_embedding(replace(config, tie_word_embeddings=True), manifest)
    assert open_streamed(container, replace(config, tie_word_embeddings=True)) is None
    older = replace(manifest, files=tuple(file for file in manifest.files if file.name != "embed_tokens.sums"))
    assert not streams_embedding(config, older)
    assert open_streamed(Container(default_nano, older), config) is None
    opened = open_streamed(container, config)
    assert opened is not None
    opened.close()
