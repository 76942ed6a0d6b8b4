"""Carrying out the work: tensors into trunk and draft file, experts into banks, every item journalled.

Memory stays bounded at any model size: trunk matrices pass in blocks of rows, and at most a fixed number of bytes is
in work. Blocks and experts are encoded in parallel and written in order, so threads change no byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from waste.container.layout import Bytes, bank_digest
from waste.container.manifest import BankEntry, TensorEntry
from waste.container.writer import BankWriter, TensorFileWriter
from waste.convert.check import source_bytes
from waste.convert.encode import TensorSource
from waste.convert.journal import Journal
from waste.convert.parallel import Job, in_order
from waste.convert.work import BankFile, TensorFile, TensorItem, Work
from waste.io.safetensors import Checkpoint
from waste.models.config import ModelConfig

# An expert in work holds a float32 matrix, temporaries of the encoder and three blobs. Twelve of GLM-5.3-Flash
# (8.4 M weights a matrix) take 1 GiB; more threads than that share the bound.
_IN_WORK_BYTES = 1 << 30

Expert = tuple[tuple[Bytes, Bytes, Bytes], dict[str, int]]  # blobs, digests of their sources


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
        with ThreadPoolExecutor(self._threads, thread_name_prefix="encode") as pool:
            for file in work.tensors:
                self._tensor_file(file, pool, before_seal)
            for bank in work.banks:
                self._bank(bank, pool, before_seal)
        return self._written

    # -- trunk and draft

    def _tensor_file(self, file: TensorFile, pool: ThreadPoolExecutor, before_seal: Callable[[], None]) -> None:
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
            results = in_order(self._pieces(file.items[kept:]), pool, self._threads, _IN_WORK_BYTES)
            for index, item in enumerate(file.items[kept:], kept):
                digests = {item.source: 0}
                blob = _until_digest(results, item.source, digests)
                entry = writer.append_parts(item.spec.name, item.fmt, item.spec.shape, blob)
                self._journal.add_tensor(index, entry, digests)
                self._done(item.source, digests, taken_over=False)
            before_seal()
            self._written.tensors += writer.seal()
        self._journal.add_sealed(file.name)

    def _pieces(self, items: Sequence[TensorItem]) -> Iterator[Job[Bytes | int]]:
        """The pieces of each item's blob, followed by the digest of its source, item after item."""
        reader = TensorSource(self._checkpoint, self._block, self._config)
        for item in items:
            yield from reader.jobs(item.spec, item.fmt, item.source)
            yield Job(0, partial(int, reader.digest))

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
            nbytes = 8 * bank.layout.gate.rows * bank.layout.gate.cols + bank.layout.stride
            jobs = (Job(nbytes, partial(self._expert, bank, expert)) for expert in range(kept, bank.experts))
            encoded = in_order(jobs, pool, self._threads, _IN_WORK_BYTES)
            for expert, (blobs, digests) in enumerate(encoded, kept):
                record = writer.append(*blobs)
                self._journal.add_record(bank.name, expert, record, digests)
                for name, digest in digests.items():
                    self._done(name, {name: digest}, taken_over=False)
            before_seal()
            self._written.banks.append(writer.seal())
        self._journal.add_sealed(bank.name)

    def _expert(self, bank: BankFile, expert: int) -> Expert:
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


def _until_digest(results: Iterator[Bytes | int], source: str, digests: dict[str, int]) -> Iterator[Bytes]:
    """The pieces of one blob from `results`; the digest behind them goes into `digests` under `source`."""
    for result in results:
        if isinstance(result, int):
            digests[source] = result
            return
        yield result
