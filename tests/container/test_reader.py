"""Opening and reading containers: what was written comes back, and no damaged byte is ever accepted."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from waste.container.reader import Container
from waste.container.verify import verify
from waste.container.writer import BankWriter
from waste.errors import InputError, WasteError
from waste.events import Progress
from waste.io.buffers import aligned


def read_everything(path: Path) -> None:
    """Open, load, and read all: what an engine does, at the latest over time."""
    container = Container.open(path)
    for name in container.manifest.tensor_files():
        container.load_tensors(name)
    for entry in container.manifest.banks:
        with container.bank(entry.layer) as bank:
            buffer = aligned(bank.layout.stride)
            for expert in range(bank.experts):
                bank.read(expert, buffer)


def test_what_was_written_is_read(tiny: Any) -> None:
    container = Container.open(tiny.path)
    assert container.manifest == tiny.manifest
    assert container.read_file("tokenizer.json") == b'{"a": 1}'
    read = {}
    for name in ("trunk.bin", "draft.bin"):
        events: list = []
        tensors = container.load_tensors(name, events.append)
        bases = {id(view.base) for view in tensors.values()}
        assert len(bases) == 1
        for entry in container.manifest.tensors_of(name):
            assert tensors[entry.name].ctypes.data % 64 == 0
        size = (tiny.path / name).stat().st_size
        assert [event.phase for event in events] == ["load"] * len(events)
        assert events[-1] == Progress("load", size, size)
        assert [event.done for event in events] == sorted(event.done for event in events)
        read.update(tensors)
    assert {name: blob.tobytes() for name, blob in read.items()} == {n: b.tobytes() for n, b in tiny.tensors.items()}
    for (layer, expert), blobs in tiny.experts.items():
        with container.bank(layer) as bank:
            assert (bank.layer, bank.experts) == (layer, 3)
            buffer = aligned(bank.layout.stride)
            bank.read(expert, buffer)
            for section, blob in zip(bank.layout.sections, blobs, strict=True):
                assert buffer[section.offset : section.offset + section.nbytes].tobytes() == blob.tobytes()
    assert verify(container) == []


def test_equal_inputs_give_equal_containers(tmp_path: Path, build_container: Callable[..., Any]) -> None:
    first, second = build_container(tmp_path / "a"), build_container(tmp_path / "b")
    for path in first.path.iterdir():
        assert path.read_bytes() == (second.path / path.name).read_bytes()


def test_every_flipped_byte_anywhere_is_detected(tiny: Any) -> None:
    """Law 6. All record headers, and random places of every file (test_manifest has every byte of the manifest)."""
    rng = random.Random(6)
    for path in sorted(tiny.path.iterdir()):
        clean = path.read_bytes()
        positions = {rng.randrange(len(clean)) for _ in range(60)}
        if path.name.startswith("experts"):
            stride = len(clean) // 3
            positions |= {record * stride + byte for record in range(3) for byte in range(128)}
            positions |= {record * stride - 1 for record in range(1, 4)}
        for position in sorted(positions):
            damaged = bytearray(clean)
            damaged[position] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(WasteError) as caught:
                read_everything(tiny.path)
            assert repr(str(path)) in caught.value.message, (path.name, position)
            assert "\n" not in caught.value.message
        path.write_bytes(clean)
    read_everything(tiny.path)


def test_every_truncation_and_extension_is_refused_when_opening(tiny: Any) -> None:
    rng = random.Random(7)
    for path in sorted(tiny.path.iterdir()):
        clean = path.read_bytes()
        sizes = {0, 1, len(clean) - 1, len(clean) + 1, len(clean) + 4096}
        sizes.update(rng.randrange(len(clean)) for _ in range(8))
        for size in sorted(sizes):
            path.write_bytes(clean[:size] + bytes(max(0, size - len(clean))))
            with pytest.raises(WasteError) as caught:
                Container.open(tiny.path)
            assert repr(str(path)) in caught.value.message
        path.unlink()
        with pytest.raises(InputError):
            Container.open(tiny.path)
        path.write_bytes(clean)
    read_everything(tiny.path)


def test_damage_behind_an_open_container_is_still_found(tiny: Any) -> None:
    container = Container.open(tiny.path)
    bank = container.bank(1)
    buffer = aligned(bank.layout.stride)
    os.truncate(tiny.path / "experts-001.bin", bank.layout.stride + 100)
    bank.read(0, buffer)
    with pytest.raises(InputError, match=r"experts-001\.bin', record 1: the file ends"):
        bank.read(1, buffer)
    with pytest.raises(InputError, match="cut short"):
        container.bank(1)
    os.truncate(tiny.path / "trunk.bin", 100)
    with pytest.raises(InputError, match=r"trunk\.bin"):
        container.load_tensors("trunk.bin")
    (tiny.path / "tokenizer.json").write_bytes(b'{"a": 2}')
    with pytest.raises(InputError, match=r"tokenizer\.json' is damaged"):
        container.read_file("tokenizer.json")
    bank.close()


def test_a_read_error_names_file_and_record(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Container.open(tiny.path).bank(4)

    def failing(fd: int, buffers: list, offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(InputError, match=r"experts-004\.bin', record 2: read error at byte \d+: Input/output error"):
        bank.read(2, aligned(bank.layout.stride))


def test_verify_lists_every_damage_and_goes_on(tiny: Any) -> None:
    container = Container.open(tiny.path)
    stride = container.manifest.banks[0].layout.stride

    def flip(name: str, position: int) -> None:
        data = bytearray((tiny.path / name).read_bytes())
        data[position] ^= 16
        (tiny.path / name).write_bytes(data)

    flip("chat_template.jinja", 0)
    conv = next(entry for entry in container.manifest.tensors if entry.name == "conv")
    plain = next(entry for entry in container.manifest.tensors if entry.name == "plain")
    flip("trunk.bin", conv.offset)
    flip("draft.bin", plain.offset + plain.nbytes)  # padding
    flip("experts-001.bin", 5)
    flip("experts-001.bin", 2 * stride + stride // 2)
    (tiny.path / "experts-004.bin").unlink()
    events: list = []
    damage = verify(container, events.append)
    expected = ["chat_template.jinja'", "'conv'", "'plain'", "experts-001.bin', record 0", "experts-001.bin', record 2"]
    assert len(damage) == len(expected) + 1
    for line, words in zip(damage, [*expected, "experts-004.bin"], strict=True):
        assert words in line
        assert "\n" not in line
    total = sum(container.manifest.file_sizes().values())
    assert events[-1] == Progress("verify", total, total)
    (tiny.path / "trunk.bin").unlink()
    assert len(verify(container)) == len(damage)


def test_every_flip_is_found_by_verify(tiny: Any) -> None:
    container = Container.open(tiny.path)
    rng = random.Random(8)
    for path in sorted(tiny.path.iterdir()):
        if path.name == "manifest.json":
            continue
        clean = path.read_bytes()
        for position in rng.sample(range(len(clean)), min(40, len(clean))):
            damaged = bytearray(clean)
            damaged[position] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            assert len(verify(container)) == 1
        path.write_bytes(clean)


def test_swapped_replaced_and_foreign_records(tiny: Any, tmp_path: Path, build_container: Callable[..., Any]) -> None:
    path = tiny.path / "experts-001.bin"
    clean = path.read_bytes()
    stride = len(clean) // 3
    container = Container.open(tiny.path)
    # Two records of one bank change places: each is valid, but in the wrong place.
    path.write_bytes(clean[stride : 2 * stride] + clean[:stride] + clean[2 * stride :])
    damage = verify(container)
    assert "record 0 holds layer 1, expert 1, expected layer 1, expert 0" in damage[0]
    assert len(damage) == 2
    with pytest.raises(InputError, match="holds layer 1, expert 1"):
        read_everything(tiny.path)
    # A record of the same place from another conversion: only the bank's digest can tell.
    other = (build_container(tmp_path / "other", seed=9).path / "experts-001.bin").read_bytes()
    path.write_bytes(other[:stride] + clean[stride:])
    assert len(verify(container)) == 1
    assert "another conversion" in verify(container)[0]
    # The bank of another layer, of the same size.
    with BankWriter(tmp_path / "bank", 2, container.manifest.banks[0].layout) as writer:
        for expert in range(3):
            writer.append(*tiny.experts[1, expert])
        writer.seal()
    shutil.copy(tmp_path / "bank", path)
    assert len(verify(container)) == 3


def test_threads_share_a_bank(tiny: Any) -> None:
    bank = Container.open(tiny.path).bank(1)
    failures = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        buffer = aligned(bank.layout.stride)
        for _ in range(60):
            expert = rng.randrange(bank.experts)
            bank.read(expert, buffer)
            gate = bank.layout.gate
            if buffer[gate.offset : gate.offset + gate.nbytes].tobytes() != tiny.experts[1, expert][0].tobytes():
                failures.append(expert)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bank.close()
    assert not failures


def test_misuse_is_a_programming_error(tiny: Any) -> None:
    container = Container.open(tiny.path)
    bank = container.bank(1)
    buffer = aligned(bank.layout.stride)
    for expert in (-1, 3):
        with pytest.raises(ValueError, match="expert"):
            bank.read(expert, buffer)
    with pytest.raises(ValueError, match="bytes"):
        bank.read(0, buffer[:-1])
    bank.close()
    bank.close()
    with pytest.raises(ValueError, match="closed"):
        bank.read(0, buffer)
    with pytest.raises(ValueError, match="layer 2"):
        container.bank(2)
    with pytest.raises(ValueError, match=r"no\.bin"):
        container.load_tensors("no.bin")
    with pytest.raises(InputError, match=r"'usage\.json'"):
        container.read_file("usage.json")


def test_other_things_are_named_for_what_they_are(tmp_path: Path) -> None:
    place = tmp_path / "x"

    def refusal() -> InputError:
        with pytest.raises(InputError) as caught:
            Container.open(place)
        assert repr(str(place)) in caught.value.message or str(place) in caught.value.message
        return caught.value

    assert "does not exist" in refusal().message
    place.write_bytes(b"x")
    assert "is not a directory" in refusal().message
    place.unlink()
    place.mkdir()
    assert "not a waste container" in refusal().message
    (place / "model.safetensors").write_bytes(b"")
    assert "Hugging Face checkpoint" in refusal().message
    assert f"waste convert {str(place)!r}" in (refusal().hint or "")
    (place / "convert.journal").write_bytes(b"")
    assert "unfinished conversion" in refusal().message
    assert "resume" in (refusal().hint or "")
    (place / "manifest.json").write_text('{"format_version": 0, "trunk": [], "layers": {}}')
    assert "sqliteai/waste" in refusal().message
    (place / "manifest.json").unlink()
    (place / "manifest.json").symlink_to("nowhere")
    assert "not there" in refusal().message


def test_a_name_with_a_line_break_stays_on_one_line(tmp_path: Path, build_container: Callable[..., Any]) -> None:
    tiny = build_container(tmp_path / "new\nline")
    read_everything(tiny.path)
    (tiny.path / "trunk.bin").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        Container.open(tiny.path)
    assert "\n" not in caught.value.message


def test_buffers_of_any_origin_are_filled(tiny: Any) -> None:
    with Container.open(tiny.path).bank(1) as bank:
        first, second = np.full(bank.layout.stride, 255, np.uint8), aligned(bank.layout.stride)
        bank.read(2, first)
        bank.read(2, second)
        assert (first == second).all()
