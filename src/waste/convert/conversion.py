"""From a checkpoint to a finished container: plan, resume, convert, finish. What `waste convert` calls."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from waste.container.manifest import MANIFEST_NAME, Manifest
from waste.container.reader import Container
from waste.convert import target
from waste.convert.assemble import assemble, container_bytes, room_bytes, tool_version
from waste.convert.check import source_bytes
from waste.convert.fit import fitted, smallest
from waste.convert.journal import Journal, begun_identity
from waste.convert.locate import open_source
from waste.convert.options import ConvertOptions, ConvertResult
from waste.convert.pipeline import Pipeline
from waste.convert.preflight import Preflight, Prepared, forecast, prepare, with_local_headers
from waste.convert.provenance import (
    RESTART_HINT,
    Identity,
    describe,
    identify,
    made_from,
    refuse_changes,
    refuse_moving_source,
    refuse_other_options,
    sketch,
)
from waste.convert.source import Source
from waste.convert.sums import strip_sums
from waste.errors import UsageError, WasteError
from waste.events import Notice, OnEvent, Progress, ignore
from waste.io.dense import RowStream
from waste.io.files import atomic_write, shown
from waste.io.safetensors import Checkpoint
from waste.models.stored import stored_config


def plan_conversion(source: str, dst: Path, options: ConvertOptions, on_event: OnEvent = ignore) -> Preflight:
    """Everything about converting `source` to `dst` that can be known without reading weights; writes nothing.

    Raises UnsupportedError, InputError and UsageError as `convert` does for a source that cannot be converted and a
    `dst` that holds something else, an unfinished conversion with other options included. Lack of space is in the
    result, and so are the notices.
    """
    dst = Path(dst)
    with _opened(source, options, on_event) as found:
        state = target.state_of(dst)
        prepared = fitted(found, prepare(found, options), options)
        _refuse_other_options(found, prepared, dst, options, state)
        finished = False
        if state is target.State.FINISHED and not options.force and found.download_bytes() == 0:
            identity = identify(found, prepared.headers, prepared.small, prepared.formats, tool_version())
            finished = made_from(_finished_manifest(dst), identity)
            if not finished:
                raise _other_container(dst)
        return _preflight(found, prepared, dst, options, state, finished)


def convert(
    source: str,
    dst: Path,
    options: ConvertOptions,
    on_event: OnEvent = ignore,
    on_plan: Callable[[Preflight], None] | None = None,
) -> ConvertResult:
    """Convert the checkpoint `source` (a folder, or a Hub id) to a container at `dst`, or finish what was begun there.

    Killed at any point, the same call continues, and the result is byte-identical. Reports `Progress("convert", ...)`
    in bytes of the source ("download" before it for a Hub model, "verify" where a finished container has to be
    compared with its source), and a `Notice` for everything the user should know. `on_plan` is called once, after
    all checks and before anything is written or downloaded.

    Raises UnsupportedError (model or format that is not served), InputError (source missing, damaged or changed),
    UsageError (`dst` holds something else, or a conversion with other options), ResourceError (space, permissions,
    another conversion at work there).
    """
    began = time.perf_counter()
    with _opened(source, options, on_event) as found:
        run = _Run(found, Path(dst), options, on_event)
        nbytes, unchanged = run.run(on_plan)
        return ConvertResult(
            path=Path(dst),
            nbytes=nbytes,
            seconds=time.perf_counter() - began,
            unchanged=unchanged,
            resumed_bytes=run.resumed_bytes,
            notices=tuple(run.notices),
        )


@contextlib.contextmanager
def _opened(source: str, options: ConvertOptions, on_event: OnEvent) -> Iterator[Source]:
    found = open_source(source, options.revision, on_event)
    try:
        yield found
    finally:
        found.close()


def default_threads() -> int:
    """One for each core this process may use."""
    return len(os.sched_getaffinity(0))


class _Run:
    """One call of `convert`."""

    def __init__(self, source: Source, dst: Path, options: ConvertOptions, on_event: OnEvent) -> None:
        self._source = source
        self._dst = dst
        self._options = options
        self._on_event = on_event
        self.notices: list[str] = []
        self.resumed_bytes = 0

    def run(self, on_plan: Callable[[Preflight], None] | None) -> tuple[int, bool]:
        """(bytes of the container, whether it was there already)."""
        state = target.state_of(self._dst)
        prepared = fitted(self._source, prepare(self._source, self._options), self._options)
        for notice in prepared.notices:
            self._note(notice)
        keep_finished = state is target.State.FINISHED and not self._options.force
        if not keep_finished:
            _refuse_other_options(self._source, prepared, self._dst, self._options, state)
            plan = _preflight(self._source, prepared, self._dst, self._options, state, finished=False)
            if on_plan is not None:
                on_plan(plan)
            if not plan.fits:
                smaller = self._smaller(prepared, state, plan.write_bytes - (plan.needed_bytes - plan.free_bytes))
                raise target.too_small(self._dst, plan.needed_bytes, plan.free_bytes, smaller)
        checkpoint = self._source.fetch(self._on_event)
        prepared = with_local_headers(self._source, prepared)
        identity = identify(self._source, prepared.headers, prepared.small, prepared.formats, tool_version())
        if keep_finished:
            return self._already(identity, prepared), True
        target.make_directory(self._dst)
        journal = Journal(self._dst)
        try:
            if self._claim(journal, identity):
                journal.remove()
                return self._already(identity, prepared), True
            return self._write(checkpoint, prepared, identity, journal), False
        finally:
            journal.close()

    def _smaller(self, prepared: Prepared, state: target.State, size: int) -> int | None:
        """`size` when --size could make the container so small: formats are left to choose, and nothing to resume."""
        options = self._options
        resumes = state is target.State.UNFINISHED and not options.restart and not options.force
        if resumes or None not in (options.experts, options.trunk):
            return None
        size -= size % (1 << 20)  # as the hint writes it
        return size if smallest(self._source, prepared, options) <= size else None

    def _claim(self, journal: Journal, identity: Identity) -> bool:
        """Make the folder ours: continue what the journal says, or begin anew. True if all is finished already."""
        again = self._options.restart or self._options.force
        finished = (self._dst / MANIFEST_NAME).exists()
        if journal.identity is None and finished and not self._options.force:
            # The journal is new: another conversion has finished here, or --force was killed before it began.
            return True
        if journal.identity is not None and not again:
            refuse_changes(journal.identity, identity)
            if finished and _is_result(self._dst, identity):
                return True  # killed between the manifest and the end of the journal
            target.remove_manifest(self._dst)
            self._note(f"continuing the unfinished conversion in {shown(self._dst)}")
            return False
        if journal.identity is None and not again and target.has_data(self._dst):
            raise UsageError(
                f"{shown(journal.path)} is damaged: it does not say what was being converted", hint=RESTART_HINT
            )
        journal.begin(identity.to_json())
        target.clear(self._dst)
        return False

    def _write(self, checkpoint: Checkpoint, prepared: Prepared, identity: Identity, journal: Journal) -> int:
        """Write every file, the manifest last; returns the bytes of all."""
        total, done = prepared.inventory.read_bytes, 0

        def advance(nbytes: int, taken_over: bool) -> None:
            nonlocal done
            done += nbytes
            if taken_over:
                self.resumed_bytes += nbytes
            self._on_event(Progress("convert", done, total))

        def unmoved() -> None:
            refuse_moving_source(self._source, identity)

        threads = self._options.threads or default_threads()
        pipeline = Pipeline(checkpoint, self._dst, journal, prepared.config, prepared.block, threads, advance)
        written = pipeline.run(prepared.work, unmoved)
        files = {**prepared.texts, **strip_sums(self._dst, prepared.config, written.tensors)}
        for name, data in sorted(files.items()):
            if not _holds(self._dst / name, data):
                atomic_write(self._dst / name, data)
        unmoved()
        provenance = describe(identity, prepared.headers, written.digests)
        manifest = assemble(prepared, provenance, written.tensors, written.banks, files)
        text = manifest.to_bytes()
        atomic_write(self._dst / MANIFEST_NAME, text)
        journal.remove()
        return sum(manifest.file_sizes().values()) + len(text)

    def _already(self, identity: Identity, prepared: Prepared) -> int:
        """The size of the finished container that lies at the target; UsageError unless it is what was asked for."""
        manifest = _finished_manifest(self._dst)
        same = made_from(manifest, identity)
        if same and _newer(identity, self._dst / MANIFEST_NAME):
            same = describe(identity, prepared.headers, self._read_digests(prepared)) == manifest.provenance
        if not same:
            raise _other_container(self._dst)
        self._note(f"{shown(self._dst)} is converted already: nothing to do")
        return sum(manifest.file_sizes().values()) + len(manifest.to_bytes())

    def _read_digests(self, prepared: Prepared) -> dict[str, int]:
        """Digests of all source tensors, by reading them."""
        checkpoint = self._source.fetch(self._on_event)
        total, done = prepared.inventory.read_bytes, 0
        digests = {}
        for _, name in prepared.work.sources():
            stream = RowStream(checkpoint, name, prepared.block)
            for _ in stream:
                pass
            digests[name] = stream.digest
            done += source_bytes(name, checkpoint.tensors)
            self._on_event(Progress("verify", done, total))
        return digests

    def _note(self, message: str) -> None:
        self.notices.append(message)
        self._on_event(Notice(message))


def _refuse_other_options(
    source: Source, prepared: Prepared, dst: Path, options: ConvertOptions, state: target.State
) -> None:
    """UsageError when an unfinished conversion at `dst` would not be resumed, before anybody hears what is done."""
    if state is not target.State.UNFINISHED or options.restart or options.force:
        return
    begun = begun_identity(dst)
    if begun is not None:
        refuse_other_options(begun, sketch(source, prepared.headers, prepared.small, prepared.formats, tool_version()))


def _preflight(
    source: Source, prepared: Prepared, dst: Path, options: ConvertOptions, state: target.State, finished: bool
) -> Preflight:
    resumable = state is target.State.UNFINISHED and not options.restart and not options.force
    write = container_bytes(source, prepared)
    download = source.download_bytes()
    there = target.reusable_bytes(dst)
    # Whatever lies there is continued or replaced: it need not fit in a second time.
    needed = max(room_bytes(source, prepared, write) - there, 0)
    if download and target.same_drive(source.directory, dst):
        needed += download
    inventory = prepared.inventory
    cores = default_threads()
    return Preflight(
        source=source.name,
        revision=source.revision,
        config=prepared.config,
        formats=prepared.formats,
        tensors=inventory.used,
        weights=inventory.weights,
        vision=inventory.vision,
        copies=inventory.copies,
        unused=inventory.unused,
        notices=prepared.notices,
        download_bytes=download,
        read_bytes=inventory.read_bytes,
        write_bytes=write,
        done_bytes=min(there, write) if resumable else 0,
        needed_bytes=needed,
        free_bytes=target.free_bytes(dst),
        seconds=forecast(prepared, min(options.threads or cores, cores), download, write),
        finished=finished,
    )


def _other_container(dst: Path) -> UsageError:
    return UsageError(
        f"{shown(dst)} holds a finished container, made from another source or with other options",
        hint="--force replaces it, or choose another DST",
    )


def _finished_manifest(dst: Path) -> Manifest:
    """The manifest of the finished container at `dst`; UsageError for one that `waste run` would refuse."""
    try:
        manifest = Container.open(dst).manifest
        stored_config(manifest)
    except WasteError as error:
        raise UsageError(
            f"{shown(dst)} holds a container that cannot be used: {error.message}", hint="--force replaces it"
        ) from error
    return manifest


def _is_result(dst: Path, identity: Identity) -> bool:
    """Whether a whole container made from `identity` lies at `dst`."""
    try:
        return made_from(_finished_manifest(dst), identity)
    except UsageError:
        return False


def _holds(path: Path, data: bytes) -> bool:
    """Whether `data` was written to `path` before an interruption."""
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _newer(identity: Identity, path: Path) -> bool:
    """Whether a source file was written after `path`: then sizes and samples are no proof that it is the same."""
    return max((file.mtime_ns for file in identity.files), default=0) >= path.stat().st_mtime_ns
