"""Banks: read past the page cache or not, the same bytes; on several drives; never a record that is not verified."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from waste.container.layout import record_checksum
from waste.container.reader import Container
from waste.container.verify import verify
from waste.errors import InputError
from waste.events import Event, Notice
from waste.io import direct
from waste.io.buffers import aligned


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins in a process that has told nothing yet."""
    monkeypatch.setattr(direct, "_told", set())


def records(container: Container, layer: int, **options: Any) -> list[bytes]:
    with container.bank(layer, **options) as bank:
        buffer = aligned(bank.layout.stride)
        found = []
        for expert in range(bank.experts):
            bank.read(expert, buffer)
            found.append(buffer.tobytes())
        return found


def flags_of(fd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("flags"))[6:], 8)


def test_records_are_the_same_past_and_through_the_page_cache(tiny: Any) -> None:
    container = Container.open(tiny.path)
    for layer in (1, 4):
        data = (tiny.path / f"experts-{layer:03d}.bin").read_bytes()
        for asked in (True, False):
            assert b"".join(records(container, layer, direct=asked)) == data
        with container.bank(layer, direct=False) as bank:
            assert not bank.direct
            assert bank.drive == tiny.path.stat().st_dev


def test_one_record_is_one_direct_read_into_the_callers_buffer(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, int, int, int]] = []
    real = os.preadv

    def watched(fd: int, views: list, offset: int) -> int:
        (view,) = views
        place = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        calls.append((bool(flags_of(fd) & os.O_DIRECT), place, len(view), offset))
        return real(fd, views, offset)

    with Container.open(tiny.path).bank(1) as bank:
        if not bank.direct:
            pytest.skip("the temporary directory's file system has no direct reads")
        stride = bank.layout.stride
        buffer = aligned(stride)
        monkeypatch.setattr(os, "preadv", watched)
        bank.read(2, buffer)
        assert calls == [(True, buffer.ctypes.data, stride, 2 * stride)]
        calls.clear()
        elsewhere = aligned(stride + 64)[64:]
        bank.read(2, elsewhere)
        assert [call[0] for call in calls] == [False]
        np.testing.assert_array_equal(elsewhere, buffer)


def test_a_refusal_is_told_once_for_all_banks(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def refusing(fd: int, views: list, offset: int) -> int:
        if flags_of(fd) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, views, offset)

    container = Container.open(tiny.path)
    expected = {layer: records(container, layer, direct=False) for layer in (1, 4)}
    monkeypatch.setattr(os, "preadv", refusing)
    events: list[Event] = []
    for layer in (1, 4, 1):
        assert records(container, layer, on_event=events.append) == expected[layer]
    assert len([event for event in events if isinstance(event, Notice)]) == 1


@pytest.mark.parametrize("asked", [True, False])
def test_every_damaged_byte_is_found_on_arrival_whatever_the_reads(tiny: Any, asked: bool) -> None:
    rng = random.Random(5)
    container = Container.open(tiny.path)
    path = tiny.path / "experts-004.bin"
    clean = path.read_bytes()
    stride = len(clean) // 3
    with container.bank(4, direct=asked) as bank:
        buffer = aligned(stride)
        for position in rng.sample(range(len(clean)), 60):
            with path.open("r+b") as file:
                file.seek(position)
                file.write(bytes([clean[position] ^ 1 << rng.randrange(8)]))
            for expert in range(3):
                if expert == position // stride:
                    with pytest.raises(InputError, match=rf"experts-004\.bin', record {expert} "):
                        bank.read(expert, buffer)
                else:
                    bank.read(expert, buffer)
            path.write_bytes(clean)


@pytest.mark.parametrize("asked", [True, False])
def test_a_bank_that_shrinks_is_named_and_one_that_vanishes_is_read_on(tiny: Any, asked: bool) -> None:
    container = Container.open(tiny.path)
    path = tiny.path / "experts-001.bin"
    expected = records(container, 1)
    with container.bank(1, direct=asked) as bank:
        stride = bank.layout.stride
        buffer = aligned(stride)
        for size in (3 * stride - 1, 2 * stride, stride + 4096, stride + 1, 0):
            os.truncate(path, size)
            for expert in range(3):
                if (expert + 1) * stride <= size:
                    bank.read(expert, buffer)
                    assert buffer.tobytes() == expected[expert]
                else:
                    with pytest.raises(InputError, match=rf"experts-001\.bin', record {expert}: the file ends"):
                        bank.read(expert, buffer)
        path.write_bytes(b"".join(expected))
        path.unlink()
        bank.read(2, buffer)
        assert buffer.tobytes() == expected[2]
    with pytest.raises(InputError, match=r"experts-001\.bin' is missing"):
        container.bank(1)


# -- several drives


@pytest.fixture
def spread(tiny: Any, tmp_path: Path) -> tuple[Any, Path, Path]:
    """The tiny container with its two banks in two other directories."""
    first, second = tmp_path / "first drive", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (tiny.path / "experts-001.bin").rename(first / "experts-001.bin")
    (tiny.path / "experts-004.bin").rename(second / "experts-004.bin")
    return tiny, first, second


def test_banks_are_found_wherever_they_lie(spread: tuple[Any, Path, Path], tmp_path: Path) -> None:
    tiny, first, second = spread
    container = Container.open(tiny.path, experts_dirs=[tmp_path, second, first])
    for (layer, expert), blobs in tiny.experts.items():
        with container.bank(layer) as bank:
            found = records(container, layer)[expert]
            for section, blob in zip(bank.layout.sections, blobs, strict=True):
                assert found[section.offset : section.offset + section.nbytes] == blob.tobytes()
    assert container.place("experts-004.bin") == second / "experts-004.bin"
    assert container.place("trunk.bin") == tiny.path / "trunk.bin"
    assert verify(container) == []
    with (second / "experts-004.bin").open("r+b") as file:
        file.write(b"x")
    (line,) = verify(container)
    assert str(second / "experts-004.bin") in line


def test_some_banks_may_stay_in_the_container(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    (tiny.path / "experts-004.bin").rename(tmp_path / "fast" / "experts-004.bin")
    container = Container.open(tiny.path, experts_dirs=[tmp_path / "fast"])
    assert len(records(container, 1)) == len(records(container, 4)) == 3


def test_a_bank_that_is_nowhere_is_named_with_every_place(spread: tuple[Any, Path, Path], tmp_path: Path) -> None:
    tiny, first, _ = spread
    with pytest.raises(InputError, match=r"experts-001\.bin' is missing"):
        Container.open(tiny.path)
    with pytest.raises(InputError, match=r"experts-004\.bin' is missing, and in none of") as caught:
        Container.open(tiny.path, experts_dirs=[first, tmp_path])
    assert repr(str(first)) in caught.value.message
    assert "--experts-dir" in (caught.value.hint or "")


def test_a_bank_in_two_places_is_refused_unless_it_is_one_file(spread: tuple[Any, Path, Path], tmp_path: Path) -> None:
    tiny, first, second = spread
    dirs = [first, second]
    (tiny.path / "experts-001.bin").symlink_to(first / "experts-001.bin")
    os.link(second / "experts-004.bin", tiny.path / "experts-004.bin")
    assert Container.open(tiny.path, experts_dirs=[*dirs, *dirs, tiny.path])
    assert Container.open(tiny.path)
    (tiny.path / "experts-001.bin").unlink()
    (tiny.path / "experts-001.bin").write_bytes((first / "experts-001.bin").read_bytes())
    with pytest.raises(InputError, match=r"two files 'experts-001\.bin'") as caught:
        Container.open(tiny.path, experts_dirs=dirs)
    for place in (tiny.path, first):
        assert repr(str(place / "experts-001.bin")) in caught.value.message


def test_a_link_to_nothing_gives_way_to_the_file_itself(spread: tuple[Any, Path, Path]) -> None:
    tiny, first, second = spread
    (tiny.path / "experts-001.bin").symlink_to("unmounted")
    assert Container.open(tiny.path, experts_dirs=[first, second]).place("experts-001.bin").parent == first
    with pytest.raises(InputError, match="a link to a file that is not there"):
        Container.open(tiny.path)


def test_moved_banks_have_their_size_checked_and_directories_must_exist(spread: tuple[Any, Path, Path]) -> None:
    tiny, first, second = spread
    with (second / "experts-004.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"experts-004\.bin' is too long"):
        Container.open(tiny.path, experts_dirs=[first, second])
    (second / "experts-004.bin").unlink()
    (second / "experts-004.bin").mkdir()
    with pytest.raises(InputError, match="is a directory"):
        Container.open(tiny.path, experts_dirs=[first, second])
    for wrong, words in ((first / "no", "does not exist"), (first / "experts-001.bin", "is not a directory")):
        with pytest.raises(InputError, match=f"the experts directory .* {words}"):
            Container.open(tiny.path, experts_dirs=[first, wrong])


def test_a_bank_of_another_conversion_is_refused(spread: tuple[Any, Path, Path]) -> None:
    """Same name, same size, every record valid: only the answers would be wrong."""
    tiny, first, second = spread
    path = second / "experts-004.bin"
    with Container.open(tiny.path, experts_dirs=[first, second]).bank(4) as bank:
        stride = bank.layout.stride
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    record = data[stride : 2 * stride]
    record[stride // 2] ^= 1
    record[24:32] = np.frombuffer(record_checksum(record).to_bytes(8, "little"), np.uint8)
    path.write_bytes(data.tobytes())
    with pytest.raises(InputError, match=r"experts-004\.bin' is of another conversion"):
        Container.open(tiny.path, experts_dirs=[first, second])
