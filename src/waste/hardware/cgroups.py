"""The control groups whose memory limits bind this process: its own, and every one up the tree.

Version 2 (one tree) and version 1 (a tree for each controller) may be mounted side by side; a container often sees
only the lower part of a tree, mounted as if it were the whole. Nothing here fails: what cannot be read is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Where distributions mount the trees; tried beside what mountinfo says, which may be hidden or hide the tree's files.
_USUAL_MOUNTS = {2: ("sys/fs/cgroup", "sys/fs/cgroup/unified"), 1: ("sys/fs/cgroup/memory",)}


@dataclass(frozen=True)
class Group:
    """One control group of the memory controller (version 1) or of the unified tree (version 2)."""

    version: int
    name: str  # as /proc/self/cgroup writes it: "/user.slice/run-1.scope"; "/" is the top that can be seen
    directory: Path

    def text(self, file: str) -> str | None:
        """The content of one of its files; None where there is none or it cannot be read."""
        return read_text(self.directory / file)

    def number(self, file: str) -> int | None:
        """A file that holds one number; None for "max", which is no limit."""
        return _whole(self.text(file) or "")

    def table(self, file: str) -> dict[str, int]:
        """A file of lines "key number"."""
        pairs = (line.split() for line in (self.text(file) or "").splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _whole(pair[1]) is not None}


def memory_groups(root: Path = Path("/")) -> tuple[Group, ...]:
    """This process's groups, each tree from the lowest one up. `root` replaces the file system root in tests.

    A group that is not visible here is left out; the directory need not hold the controller's files.
    """
    found: dict[Path, Group] = {}
    for version, path in _memberships(root):
        for seen_from, mount in _mounts(root, version):
            parts = _below(path, seen_from)
            for depth in range(len(parts), -1, -1):
                directory = mount.joinpath(*parts[:depth])
                if directory not in found and directory.is_dir():
                    found[directory] = Group(version, "/" + "/".join((*seen_from, *parts[:depth])), directory)
    return tuple(found.values())


def read_text(path: Path) -> str | None:
    """A small text file of the system; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*[0-9]{1,20}\s*", text) else None


def _memberships(root: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(version, path of this process's group) of each tree that may limit memory."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)  # hierarchy, controllers, path
        if len(fields) < 3:
            continue
        if fields[1] == "":
            yield 2, _parts(fields[2])
        elif "memory" in fields[1].split(","):
            yield 1, _parts(fields[2])


def _mounts(root: Path, version: int) -> Iterator[tuple[tuple[str, ...], Path]]:
    """(group that is mounted, where) of the trees of `version`."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        # "35 31 0:32 /docker/1f2 /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
        mount, _, source = line.partition(" - ")
        place, kind = mount.split(), source.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        if (version == 2 and kind[0] == "cgroup2") or (
            version == 1 and kind[0] == "cgroup" and "memory" in kind[2].split(",")
        ):
            yield _parts(place[3]), root.joinpath(*_parts(_unescaped(place[4])))
    for usual in _USUAL_MOUNTS[version]:
        yield (), root / usual


def _below(path: tuple[str, ...], top: tuple[str, ...]) -> tuple[str, ...]:
    """`path` as seen from `top`: empty when it lies elsewhere, so that only the mounted group itself is asked."""
    if ".." in path or path[: len(top)] != top:
        return ()
    return path[len(top) :]


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part and part != ".")


def _unescaped(text: str) -> str:
    """mountinfo writes blanks as \\040 and so on."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
