"""The folder a conversion writes: what may be there already, what belongs to it, how much room there is."""

from __future__ import annotations

import contextlib
import os
import re
from enum import Enum
from pathlib import Path

from waste.container.manifest import MANIFEST_NAME
from waste.container.reader import JOURNAL_NAME
from waste.container.strips import sums_name
from waste.errors import ResourceError, UsageError
from waste.io.files import PART_SUFFIX, fsync_directory, shown, writing
from waste.models.hf_config import GENERATION_FILE
from waste.models.spec import DRAFT_FILE, EMBEDDING, TRUNK_FILE
from waste.units import format_bytes

# Everything that a container, finished or not, may consist of. Nothing else is ever deleted.
_OURS = re.compile(
    rf"({re.escape(MANIFEST_NAME)}|{re.escape(JOURNAL_NAME)}|{TRUNK_FILE}|{DRAFT_FILE}|experts-\d{{3}}\.bin"
    rf"|{re.escape(sums_name(EMBEDDING))}|tokenizer\.(model|json)|chat\.json|chat_template\.jinja|{GENERATION_FILE}"
    rf"|usage\.json(\.lock)?)({PART_SUFFIX})?"
)


class State(Enum):
    """What lies at the target."""

    FREE = "free"  # nothing, or an empty folder
    UNFINISHED = "unfinished"  # a journal
    FINISHED = "finished"  # a manifest and no journal


def state_of(directory: Path) -> State:
    """UsageError when something else than a conversion lies at `directory`."""
    if not os.path.lexists(directory):
        return State.FREE
    if not directory.is_dir():
        raise UsageError(f"{shown(directory)} exists and is not a folder", hint="choose another DST")
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise ResourceError(f"{shown(directory)} cannot be read: {error.strerror}") from error
    foreign = sorted(name for name in names if _OURS.fullmatch(name) is None)
    if foreign:
        raise UsageError(
            f"{shown(directory)} is not empty: it holds {foreign[0]!r}, which is not part of a container",
            hint="choose another DST, or empty it first",
        )
    if JOURNAL_NAME in names:
        return State.UNFINISHED
    if MANIFEST_NAME in names:
        return State.FINISHED
    if names:
        raise UsageError(
            f"{shown(directory)} holds {sorted(names)[0]!r} but neither {MANIFEST_NAME!r} nor {JOURNAL_NAME!r}: "
            "neither a container nor an unfinished conversion",
            hint="choose another DST, or empty it first",
        )
    return State.FREE


def make_directory(directory: Path) -> None:
    """Create the folder and its parents. ResourceError where that is not allowed."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        fsync_directory(directory.parent)


def has_data(directory: Path) -> bool:
    """Whether the folder holds anything of a conversion besides its journal."""
    return any(name != JOURNAL_NAME for name in os.listdir(directory))


def remove_manifest(directory: Path) -> None:
    """Take back what makes a folder look finished, durably."""
    with writing(directory):
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        fsync_directory(directory)


def clear(directory: Path) -> None:
    """Delete what belongs to a container, the manifest first and the journal not at all.

    The journal must be there, so that a kill in between leaves an unfinished conversion and nothing that looks
    finished.
    """
    remove_manifest(directory)
    with writing(directory):
        for name in sorted(os.listdir(directory)):
            if name != JOURNAL_NAME and _OURS.fullmatch(name) is not None:
                (directory / name).unlink(missing_ok=True)


def reusable_bytes(directory: Path) -> int:
    """Bytes of weight files in the folder: room that need not be free a second time when a conversion resumes."""
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.name.removesuffix(PART_SUFFIX).endswith(".bin") and _OURS.fullmatch(entry.name):
                total += entry.stat().st_blocks * 512
    return total


def free_bytes(directory: Path) -> int:
    """Bytes that can still be written where `directory` is or will be."""
    place = existing_parent(directory)
    try:
        status = os.statvfs(place)
    except OSError as error:
        raise ResourceError(f"{shown(place)} cannot be read: {error.strerror}") from error
    return status.f_bavail * status.f_frsize


def existing_parent(directory: Path) -> Path:
    """`directory`, or the nearest folder above it that exists."""
    place = directory.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def same_drive(one: Path, other: Path) -> bool:
    """Whether two folders, which need not exist yet, take their space from the same file system."""
    return existing_parent(one).stat().st_dev == existing_parent(other).stat().st_dev


def too_small(directory: Path, needed: int, free: int, smaller: int | None) -> ResourceError:
    """The error for `needed` bytes that do not fit into `free`; `smaller`: a whole number of MiB that would."""
    size = f", or a smaller container: --size {smaller >> 20}MiB" if smaller is not None else ""
    return ResourceError(
        f"{shown(directory)} needs {format_bytes(needed)}, {format_bytes(free)} are free there",
        hint=f"free some space or choose another DST{size}",
    )
