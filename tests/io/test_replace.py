"""A file that is replaced while it is being written: the old one or the new one, one writer at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from waste.errors import InputError, ResourceError
from waste.io.replace import Replacement


def test_the_old_file_stays_until_the_new_one_is_published(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with Replacement(path) as new:
        new.write(b"ew", 1)
        assert path.read_bytes() == b"old"
        new.write(b"n", 0)
        new.publish()
        assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_what_is_not_published_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with Replacement(path) as new:
        new.write(b"half", 0)
    new.close()  # twice is no harm
    assert os.listdir(tmp_path) == []


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with Replacement(path) as first:
        with pytest.raises(ResourceError, match="being written by another process"):
            Replacement(path)
        first.write(b"first", 0)
        first.publish()
        with Replacement(path) as second:  # published: the next one may begin
            second.write(b"second", 0)
            second.publish()
    assert path.read_bytes() == b"second"


def test_what_a_killed_process_left_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "f"
    code = (
        "import os, sys; from pathlib import Path; from waste.io.replace import Replacement\n"
        "Replacement(Path(sys.argv[1])).write(b'x' * 1000, 0)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert os.listdir(tmp_path) == ["f.part"]
    with Replacement(path) as new:
        new.write(b"ok", 0)
        new.publish()
    assert path.read_bytes() == b"ok"
    assert os.listdir(tmp_path) == ["f"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with Replacement(tmp_path / "link") as new:
        new.write(b"x", 0)
        new.publish()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"x"


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    for place in (tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match="expected a regular file"):
            Replacement(place)
    with pytest.raises(ResourceError, match=r"'/\S*/missing/f' cannot be written"):
        Replacement(tmp_path / "missing" / "f")
