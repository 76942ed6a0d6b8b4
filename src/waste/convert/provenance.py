"""What a container says about its source, and how a source is recognised again.

The manifest's `provenance`: `source` ("local" or "hub"), `name` (base name of the folder, or the Hub id), `revision`
(commit or null) and `files`, each with name, size in bytes, `fingerprint` and `digest`. The digest of a weight file is
XXH3-64 over the lines "TENSOR:DIGEST\\n", sorted by name, of the tensors that were read from it, DIGEST being XXH3-64
of the tensor's bytes followed, for FP8, by those of its scales (wherever they lie). Tensors that nothing asked for are
in no digest. For other files it is XXH3-64 of all their bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from waste.container.layout import VERSION
from waste.container.manifest import Manifest
from waste.convert.source import Headers, Source, fingerprint
from waste.errors import InputError, UsageError, WasteError
from waste.io.checksum import Hasher, checksum, to_hex
from waste.io.files import shown
from waste.models.formats import Formats

RESTART_HINT = "the same command with --restart discards what was done"


@dataclass(frozen=True)
class SourceFile:
    """One file of the source as it was found. `mtime_ns` is for this machine only and goes into no manifest."""

    name: str
    nbytes: int
    mtime_ns: int
    fingerprint: str


@dataclass(frozen=True)
class Identity:
    """Everything that decides the bytes of a container: same identity, same container."""

    tool: str
    options: dict[str, str]
    source: dict[str, str | None]
    files: tuple[SourceFile, ...]

    def to_json(self) -> dict[str, Any]:
        """As the journal keeps it."""
        return {
            "tool": self.tool,
            "version": VERSION,
            "options": self.options,
            "source": self.source,
            "files": [vars(file) for file in self.files],
        }


def identify(source: Source, headers: Headers, small: Mapping[str, bytes], formats: Formats, tool: str) -> Identity:
    """The identity of converting `source`, whose weights must be here. `small`: the other files that are read."""
    files = []
    for name, nbytes in headers.files.items():
        path = source.directory / name
        files.append(SourceFile(name, nbytes, path.stat().st_mtime_ns, to_hex(fingerprint(path))))
    for name, data in small.items():
        mtime = (source.directory / name).stat().st_mtime_ns
        files.append(SourceFile(name, len(data), mtime, to_hex(checksum(data))))
    return _identity(source, files, formats, tool)


def sketch(source: Source, headers: Headers, small: Mapping[str, bytes], formats: Formats, tool: str) -> Identity:
    """As `identify`, without looking at any file: fingerprints and times are zero. Its size is that of the real one."""
    sizes = {**headers.files, **{name: len(data) for name, data in small.items()}}
    files = [SourceFile(name, nbytes, 0, to_hex(0)) for name, nbytes in sizes.items()]
    return _identity(source, files, formats, tool)


def _identity(source: Source, files: list[SourceFile], formats: Formats, tool: str) -> Identity:
    about: dict[str, str | None] = {"source": source.kind, "name": source.name, "revision": source.revision}
    return Identity(tool, formats.texts(), about, tuple(sorted(files, key=lambda file: file.name)))


def refuse_other_options(found: Mapping[str, Any], wanted: Identity) -> None:
    """UsageError when the unfinished conversion `found` has other options, another source or tool than `wanted`.

    Looks at no file of the source: a `sketch` will do.
    """
    now = wanted.to_json()
    for key in ("options", "source"):
        before = found.get(key) or {}
        for name, value in now[key].items():
            if before.get(name) != value:
                hint = RESTART_HINT
                if key == "options":
                    given = " ".join(f"--{option} {before.get(option)}" for option in now[key])
                    hint = f"{given} goes on with it; {RESTART_HINT}"
                raise UsageError(
                    f"the unfinished conversion has {name} {before.get(name)!r}, this one {value!r}: "
                    "it cannot be resumed",
                    hint=hint,
                )
    for key, what in (("tool", "waste"), ("version", "container version")):
        if found.get(key) != now[key]:
            raise UsageError(
                f"the unfinished conversion was begun by {what} {found.get(key)!r}, this is {now[key]!r}",
                hint=RESTART_HINT,
            )


def refuse_changes(found: Mapping[str, Any], wanted: Identity) -> None:
    """Compare the identity of an unfinished conversion with the one asked for.

    Raises UsageError when options or tool differ, InputError when the source does, naming what changed.
    """
    hint = RESTART_HINT
    if found == wanted.to_json():
        return
    refuse_other_options(found, wanted)
    before_files = {file.get("name"): file for file in found.get("files", ())}
    for file in wanted.files:
        before = before_files.pop(file.name, None)
        if before != vars(file):
            raise InputError(
                f"source file {file.name!r} {_difference(before, file)} since the unfinished conversion was begun",
                hint=hint,
            )
    raise InputError(
        f"source file {next(iter(before_files), '?')!r} has gone since the unfinished conversion was begun", hint=hint
    )


def _difference(before: Mapping[str, Any] | None, now: SourceFile) -> str:
    if before is None:
        return "has been added"
    if before.get("nbytes") != now.nbytes:
        return f"has changed from {before.get('nbytes')} to {now.nbytes} bytes"
    if before.get("fingerprint") != now.fingerprint:
        return "has changed its content"
    return "has been written again (its time stamp changed)"


def refuse_moving_source(source: Source, identity: Identity) -> None:
    """InputError when a source file has changed since `identity` was taken: the result would be a mixture."""
    for file in identity.files:
        path = source.directory / file.name
        try:
            status = path.stat()
        except OSError as error:
            raise _moved(path, "has disappeared") from error
        if (status.st_size, status.st_mtime_ns) != (file.nbytes, file.mtime_ns):
            raise _moved(path, "has changed")


def _moved(path: os.PathLike[str], what: str) -> WasteError:
    return InputError(
        f"{shown(path)} {what} while it was being converted: nothing was finished",
        hint="when the source is complete, run the same command with --restart",
    )


def describe(identity: Identity, headers: Headers, digests: Mapping[str, int]) -> dict[str, Any]:
    """The manifest's provenance. `digests`: of every source tensor that was read, by name."""
    by_file: dict[str, list[str]] = {name: [] for name in headers.files}
    for tensor in digests:
        by_file[headers.tensors[tensor].path.name].append(tensor)
    files = []
    for file in identity.files:
        digest = file.fingerprint
        if file.name in by_file:
            hasher = Hasher()
            for tensor in sorted(by_file[file.name]):
                hasher.update(f"{tensor}:{to_hex(digests[tensor])}\n".encode())
            digest = to_hex(hasher.value)
        files.append({"name": file.name, "nbytes": file.nbytes, "fingerprint": file.fingerprint, "digest": digest})
    return {**identity.source, "files": files}


def made_from(manifest: Manifest, identity: Identity) -> bool:
    """Whether `manifest` says that its container comes from converting `identity`.

    Compares sizes and fingerprints; files newer than the container have to be compared by their digests.
    """
    if (manifest.tool, manifest.options) != (identity.tool, identity.options):
        return False
    about = {key: manifest.provenance.get(key) for key in identity.source}
    known = [(file["name"], file["nbytes"], file["fingerprint"]) for file in manifest.provenance.get("files", ())]
    return about == identity.source and known == [(f.name, f.nbytes, f.fingerprint) for f in identity.files]
