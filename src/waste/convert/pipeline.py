"""Carrying out the work: tensors into trunk and draft file, experts into banks, every item journalled.

Memory stays bounded at any model size: matrices pass in blocks of rows, and at most a fixed number of bytes of
experts is in work. Experts are encoded in parallel and written in order, so threads change no byte.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from waste.container.layout import Bytes, bank_digest
from waste.container.manifest import BankEntry, TensorEntry
from waste.container.writer import BankWriter, TensorFileWriter
from waste.convert.check import source_bytes
from waste.convert.encode import TensorSource
from waste.convert.journal import Journal
from waste.convert.work import BankFile, TensorFile, Work
from waste.io.safetensors import Checkpoint
from waste.models.config import ModelConfig

# Experts in work hold a float32 matrix, temporaries of the encoder and three blobs each. Sixteen of GLM-5.3-Flash
# (8.4 M weights a matrix) take 1 GiB; more threads than that share the bound.
_IN_WORK_BYTES = 1 << 30


@dataclass
class Written:
    """What the files with weights hold, for the manifest."""

    tensors: list[TensorEntry]
    banks: list[BankEntry]
    digests: dict[str, int]  # of every source tensor read, by the checkpoint's name


class Pipeline:
    """One conversion on its way: reads `checkpoint`, writes into `directory`, remembers in `journal`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Path,
        journal: Journal,
        config: ModelConfig,
        block: tuple[int, int],
        threads: int,
        advance: Callable[[int, bool], None],
    ) -> None:
        """advance(bytes, taken_over) is called with the source bytes of every item that is done."""
        self._checkpoint = checkpoint
        self._directory = directory
        self._journal = journal
        self._config = config
        self._block = block
        self._threads = threads
        self._advance = advance
        self._written = Written([], [], {})

    def run(self, work: Work, before_seal: Callable[[], None]) -> Written:
        """Write all files of `work`, continuing where the journal ends. `before_seal` may veto each by raising.

        Raises InputError for a source that cannot be read or used, ResourceError when the target cannot be written.
        """
        for file in work.tensors:
            self._tensor_file(file, before_seal)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="encode") as pool:
            for bank in work.banks:
                self._bank(bank, pool, before_seal)
        return self._written

    # -- trunk and draft

    def _tensor_file(self, file: TensorFile, before_seal: Callable[[], None]) -> None:
        promised = self._promised(file)
        entries = [entry for entry, _ in promised]
        if self._is_sealed(file.name, file.nbytes) and len(promised) == len(file.items):
            for item, (_, digests) in zip(file.items, promised, strict=True):
                self._done(item.source, digests, taken_over=True)
            self._written.tensors += entries
            return
        with TensorFileWriter(self._directory / file.name, resume=True) as writer:
            kept = writer.verify_prefix(entries)
            for item, (_, digests) in zip(file.items[:kept], promised, strict=False):
                self._done(item.source, digests, taken_over=True)
            reader = TensorSource(self._checkpoint, self._block, self._config)
            for index, item in enumerate(file.items[kept:], kept):
                parts = reader.parts(item.spec, item.fmt, item.source)
                entry = writer.append_parts(item.spec.name, item.fmt, item.spec.shape, parts)
                digests = {item.source: reader.digest}
                self._journal.add_tensor(index, entry, digests)
                self._done(item.source, digests, taken_over=False)
            before_seal()
            self._written.tensors += writer.seal()
        self._journal.add_sealed(file.name)

    def _promised(self, file: TensorFile) -> list[tuple[TensorEntry, dict[str, int]]]:
        """The journal's entries of `file`, up to the first that is not what would be written there."""
        found = []
        for item, (entry, digests) in zip(file.items, self._journal.tensors(file.name), strict=False):
            if (entry.name, entry.fmt, entry.shape) != (item.spec.name, item.fmt, item.spec.shape):
                break
            found.append((entry, digests))
        return found

    # -- banks

    def _bank(self, bank: BankFile, pool: ThreadPoolExecutor, before_seal: Callable[[], None]) -> None:
        promised = self._journal.records(bank.name)
        checksums = [value for value, _ in promised]
        if self._is_sealed(bank.name, bank.nbytes) and len(promised) == bank.experts:
            for _, digests in promised:
                for name, digest in digests.items():
                    self._done(name, {name: digest}, taken_over=True)
            entry = BankEntry(bank.layer, bank.name, bank.experts, bank.layout, bank_digest(checksums))
            self._written.banks.append(entry)
            return
        with BankWriter(self._directory / bank.name, bank.layer, bank.layout, resume=True) as writer:
            kept = writer.verify_prefix(checksums)
            for _, digests in promised[:kept]:
                for name, digest in digests.items():
                    self._done(name, {name: digest}, taken_over=True)
            for expert, (blobs, digests) in self._encoded(bank, kept, pool):
                record = writer.append(*blobs)
                self._journal.add_record(bank.name, expert, record, digests)
                for name, digest in digests.items():
                    self._done(name, {name: digest}, taken_over=False)
            before_seal()
            self._written.banks.append(writer.seal())
        self._journal.add_sealed(bank.name)

    def _encoded(
        self, bank: BankFile, begin: int, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, tuple[tuple[Bytes, Bytes, Bytes], dict[str, int]]]]:
        """(expert, (blobs, source digests)) from `begin` on, in order, a bounded number ahead."""
        matrix_bytes = 4 * bank.layout.gate.rows * bank.layout.gate.cols
        ahead = max(1, min(self._threads, _IN_WORK_BYTES // (2 * matrix_bytes + bank.layout.stride)))
        running: deque[tuple[int, Future[tuple[tuple[Bytes, Bytes, Bytes], dict[str, int]]]]] = deque()
        waiting = iter(range(begin, bank.experts))
        try:
            while True:
                for expert in waiting:
                    running.append((expert, pool.submit(self._expert, bank, expert)))
                    if len(running) >= ahead:
                        break
                if not running:
                    return
                expert, future = running.popleft()
                yield expert, future.result()
        finally:
            for _, future in running:
                future.cancel()

    def _expert(self, bank: BankFile, expert: int) -> tuple[tuple[Bytes, Bytes, Bytes], dict[str, int]]:
        reader = TensorSource(self._checkpoint, self._block, self._config)
        digests: dict[str, int] = {}
        blobs = []
        for section, (_, source) in zip(bank.layout.sections, bank.sources(expert), strict=True):
            blob, digests[source] = reader.whole(source, section.fmt)
            blobs.append(blob)
        gate, up, down = blobs
        return (gate, up, down), digests

    # -- both

    def _is_sealed(self, name: str, nbytes: int) -> bool:
        if not self._journal.sealed(name):
            return False
        with contextlib.suppress(OSError):
            return (self._directory / name).stat().st_size == nbytes
        return False

    def _done(self, source: str, digests: dict[str, int], *, taken_over: bool) -> None:
        """Count the source bytes of `source`, once even where two stored tensors come from it."""
        if source not in self._written.digests:
            self._advance(source_bytes(source, self._checkpoint.tensors), taken_over)
        self._written.digests.update(digests)
