"""`waste info`: the figures against independent counts, the same ones in text and JSON, damage found and named."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from waste.cli import info as info_module
from waste.container.reader import Container
from waste.errors import ResourceError
from waste.models.config import ModelConfig
from waste.models.formats import DEFAULT_EXPERTS, DEFAULT_TRUNK
from waste.planner.footprint import divide, tokenizer_bytes


def document(waste: Any, *argv: str) -> dict[str, Any]:
    done = waste("info", *argv, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["schema"] == "waste.info/1"
    return found


def rows(waste: Any, *argv: str) -> dict[str, str]:
    done = waste("info", *argv)
    assert done.code == 0, done.err
    return {line.split("\t")[0]: line.partition("\t")[2] for line in done.out.splitlines()}


def weights_in(checkpoint: Path) -> int:
    """Numbers in a checkpoint's tensors, scales left out, straight from the headers of its files."""
    total = 0
    for path in checkpoint.glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, tensor in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__" and not name.endswith("_scale_inv"):
                total += math.prod(tensor["shape"])
    return total


def test_parameters_are_the_numbers_in_the_checkpoint(waste: Any, nano_checkpoint: Path, default_nano: Path) -> None:
    expected = weights_in(nano_checkpoint)
    for model in (nano_checkpoint, default_nano):
        found = document(waste, str(model))
        assert found["parameters"] == expected
        assert 0 < found["draft_parameters"] < found["active_parameters"] < found["parameters"]


def test_bytes_add_up_to_what_lies_on_the_disk(waste: Any, default_nano: Path) -> None:
    found = document(waste, str(default_nano))
    assert found["disk_bytes"] == sum(path.stat().st_size for path in default_nano.iterdir())
    experts = found["experts"]
    assert found["bank_bytes"] == sum(path.stat().st_size for path in default_nano.glob("experts-*.bin"))
    assert found["bank_bytes"] == (experts["layers"] + 1) * experts["per_layer"] * experts["record_bytes"]
    trunk = sum(row["bytes"] for row in found["formats"] if row["part"] == "trunk")
    assert found["trunk_bytes"] == trunk
    # A token reads one row of the embedding, 4,096 rows of 256 columns in q8; and all of the rest.
    unread = 4095 * (256 + 2 * 2)
    used = experts["layers"] * experts["per_token"] * experts["record_bytes"]
    assert found["token_bytes"] == trunk - unread + used
    kinds = {(row["part"], row["kind"]): row["tensors"] for row in found["formats"]}
    assert kinds["trunk", "kda"] == 5 * 4
    assert kinds["draft", "mla"] == 6
    assert kinds["experts", None] == 3 * 8 * 32
    assert {row["format"] for row in found["formats"] if row["part"] == "experts"} == {DEFAULT_EXPERTS}


def test_the_shape_is_what_the_config_says(waste: Any, nano_checkpoint: Path, default_nano: Path) -> None:
    for model in (nano_checkpoint, default_nano):
        found = document(waste, str(model))
        assert found["family"] == "glm5_next"
        layers = {"total": 8, "kda": 6, "mla": 2, "indexed": 2, "dense": 1, "moe": 7, "draft": 1}
        assert found["layers"] == layers
        shape = {key: found["experts"][key] for key in ("per_layer", "layers", "per_token", "shared")}
        assert shape == {"per_layer": 32, "layers": 7, "per_token": 4, "shared": 1}
        assert (found["context_tokens"], found["vocabulary_rows"]) == (4096, 4096)


def test_the_ram_floor_is_the_least_that_the_planner_accepts(waste: Any, default_nano: Path) -> None:
    container = Container.open(default_nano)
    config = ModelConfig.from_json(container.manifest.config)
    facts = info_module._facts(config, info_module._formats(container), 500, 50 << 20)
    floor, baseline = facts.ram_floor_bytes, facts.baseline_bytes + tokenizer_bytes(config)
    assert divide(config, container.manifest, floor, 500, baseline).slots == config.router.top_k
    with pytest.raises(ResourceError):
        divide(config, container.manifest, floor - 1, 500, baseline)
    short, long = (document(waste, str(default_nano), "--ctx", n) for n in ("100", "4000"))
    assert short["ram_floor_context_tokens"] == 100
    assert short["ram_floor_bytes"] < long["ram_floor_bytes"]
    assert document(waste, str(default_nano), "--ctx", "9999999")["ram_floor_context_tokens"] == 4096


def test_what_info_calls_the_ram_floor_is_enough_to_run(default_nano: Path, nano_checkpoint: Path) -> None:
    """In processes of their own: what this one occupies says nothing about that of `waste run`."""

    def command(*argv: str) -> str:
        done = subprocess.run([sys.executable, "-m", "waste", *argv], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    floors = [json.loads(command("info", str(m), "--json"))["ram_floor_bytes"] for m in (default_nano, nano_checkpoint)]
    command("run", str(default_nano), "Hi", "-n", "1", "--no-stdin", "--ram", str(floors[0]))
    assert abs(floors[1] - floors[0]) < 2 << 20  # and the converter is no part of it


def test_text_says_the_same_as_json(waste: Any, default_nano: Path) -> None:
    text, found = rows(waste, str(default_nano)), document(waste, str(default_nano))
    assert text["layers"] == "8: 6 KDA, 2 MLA (2 sparse); 1 dense, 7 MoE; 1 draft layer beside them"
    assert text["experts"].startswith(f"{DEFAULT_EXPERTS}\t768\t")  # the formats table, after the experts' count
    assert text["1 GiB of cache"].startswith("holds 224 of 224 experts (100.0%)")
    assert text["RAM floor"].endswith(" at a context of 4096 tokens")
    assert text["source"] == "local"
    assert text["name"] == found["provenance"]["name"] == "nano-glm"
    assert text["option"] == f"trunk {DEFAULT_TRUNK}"
    assert found["options"] == {"experts": DEFAULT_EXPERTS, "trunk": DEFAULT_TRUNK}
    assert found["damage"] is None


def test_a_checkpoint_is_told_in_its_own_formats_and_as_a_container(waste: Any, nano_checkpoint: Path) -> None:
    found = document(waste, str(nano_checkpoint))
    assert (found["kind"], found["source"], found["name"]) == ("checkpoint", "local", "nano-glm")
    assert {row["format"] for row in found["stored"]} == {"BF16", "F32", "F8_E4M3"}
    assert found["disk_bytes"] == sum(path.stat().st_size for path in nano_checkpoint.glob("*.safetensors"))
    assert sum(row["bytes"] for row in found["stored"]) < found["disk_bytes"]
    parts = found["trunk_bytes"] + found["draft_bytes"] + found["bank_bytes"]
    found_options = {"experts": DEFAULT_EXPERTS, "trunk": DEFAULT_TRUNK}
    assert found["container"] == {"options": found_options, "weight_bytes": parts}
    text = rows(waste, str(nano_checkpoint))
    assert text["weights"].startswith(("BF16", "F32", "F8_E4M3"))
    assert "on disk" in text


def test_verify_finds_every_damage_and_names_its_place(waste: Any, default_nano: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.waste"
    shutil.copytree(default_nano, copy)
    assert document(waste, "copy.waste", "--verify")["damage"] == []
    assert rows(waste, "copy.waste", "--verify")["verified"] == "every byte"
    stride = document(waste, "copy.waste")["experts"]["record_bytes"]
    for name, offset in (("experts-003.bin", 5 * stride + 777), ("trunk.bin", 100)):
        with (copy / name).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
    done = waste("info", "copy.waste", "--verify", "--json")
    assert done.code == 3
    damage = json.loads(done.out)["damage"]
    assert len(damage) == 2
    assert any("experts-003.bin" in place and "record 5" in place for place in damage)
    assert any("trunk.bin" in place and "embed_tokens.weight" in place for place in damage)
    assert done.err.splitlines()[0].startswith("error: 'copy.waste' is damaged in 2 places")
    done = waste("info", "copy.waste", "--verify")
    assert done.code == 3
    assert sum(line.startswith("damaged\t") for line in done.out.splitlines()) == 2


def test_progress_of_verify_is_for_terminals(waste: Any, default_nano: Path) -> None:
    assert waste("info", str(default_nano), "--verify").err == ""
    env = waste.environment(stderr_terminal=True)
    assert "verify" in waste("info", str(default_nano), "--verify", env=env).err


def test_what_is_no_model_is_said(waste: Any, failed: Any, tmp_path: Path, default_nano: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("missing", "empty", "file", "missing.waste"):
        done = waste("info", name)
        failed(done, 3)
        assert repr(name) in done.err
    copy = tmp_path / "cut.waste"
    shutil.copytree(default_nano, copy)
    with (copy / "experts-002.bin").open("r+b") as file:
        file.truncate(1000)
    done = waste("info", "cut.waste")
    failed(done, 3)
    assert "experts-002.bin" in done.err


def test_a_container_on_two_drives_is_told_and_verified_with_its_experts(
    waste: Any, failed: Any, default_nano: Path, tmp_path: Path
) -> None:
    shutil.copytree(default_nano, tmp_path / "split.waste")
    (tmp_path / "other").mkdir()
    bank = (tmp_path / "split.waste" / "experts-002.bin").rename(tmp_path / "other" / "experts-002.bin")
    done = waste("info", "split.waste")
    failed(done, 3)
    assert "experts-002.bin" in done.err
    assert "--experts-dir" in done.err
    whole, split = document(waste, str(default_nano)), document(waste, "split.waste", "--experts-dir", "other")
    differ = {"path": "", "ram_floor_bytes": 0}  # the latter by what this process has taken meanwhile
    assert {**whole, **differ} == {**split, **differ}
    assert rows(waste, "split.waste", "--verify", "--experts-dir", "other")["verified"] == "every byte"
    with bank.open("r+b") as file:
        file.seek(99)
        file.write(b"\xff\x00\xff")
    done = waste("info", "split.waste", "--verify", "--json", env=waste.environment(WASTE_EXPERTS_DIR="other"))
    assert done.code == 3
    (damage,) = json.loads(done.out)["damage"]
    assert "other/experts-002.bin" in damage
    assert "record 0" in damage


@pytest.mark.parametrize(
    "argv",
    [
        ("--verify",),
        ("--ctx", "5"),
        ("--revision", "x"),
        ("--experts-dir", "x"),
        ("x", "--config"),
        ("NANO", "--verify"),
        ("NANO", "--experts-dir", "."),
        ("--ctx", "0"),
        ("CONTAINER", "--revision", "main"),
    ],
)
def test_options_that_do_not_go_together(
    waste: Any, failed: Any, nano_checkpoint: Path, default_nano: Path, argv: tuple[str, ...]
) -> None:
    places = {"NANO": str(nano_checkpoint), "CONTAINER": str(default_nano)}
    failed(waste("info", *(places.get(word, word) for word in argv)), 2)


def test_a_model_of_the_hub_is_told_from_its_headers(
    waste: Any, nano_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from waste.convert import locate
    from waste.convert.source import LocalSource

    local = LocalSource(nano_checkpoint)
    asked: list[tuple[str, str | None]] = []

    def open_source(name: str, revision: str | None, on_event: object) -> Any:
        asked.append((name, revision))
        return SimpleNamespace(
            kind="hub",
            name=name,
            revision="0" * 40,
            directory=nano_checkpoint,
            headers=local.headers,
            close=local.close,
        )

    monkeypatch.setattr(locate, "open_source", open_source)
    found = document(waste, "owner/Name", "--revision", "v2")
    assert asked == [("owner/Name", "v2")]
    assert (found["source"], found["name"], found["revision"]) == ("hub", "owner/Name", "0" * 40)
    assert rows(waste, "owner/Name")["revision"] == "0" * 40


def test_this_machine(waste: Any) -> None:
    found = document(waste)
    assert found["kind"] == "machine"
    assert 0 < found["ram_available_bytes"] <= found["ram_total_bytes"]
    assert 1 <= found["cores"] <= found["threads"]
    text = rows(waste)
    assert text["CPU"] == found["cpu"]
    assert "GiB" in text["RAM"] or "MiB" in text["RAM"]
    done = waste("info", env=waste.environment(stdout_terminal=True, NO_COLOR="1"))
    assert done.out.splitlines()[0] == "This machine"


def test_settings_with_their_origins(waste: Any, tmp_path: Path) -> None:
    (tmp_path / "waste.toml").write_text("ctx = 512\n")
    env = waste.environment(WASTE_THREADS="2", WASTE_EXPERTS_DIR="/a:/b c", WASTE_VRAM="1GiB")
    done = waste("info", "--config", env=env)
    found = {line.split("\t")[0]: line.split("\t")[1:3] for line in done.out.splitlines()}
    assert found["threads"] == ["2", "WASTE_THREADS"]
    assert found["ctx"] == ["512", "waste.toml"]
    assert found["backend"] == ["cpu", "default"]
    assert found["ram"] == ["-", "default"]
    assert found["vram"] == [str(1 << 30), "WASTE_VRAM"]
    assert found["experts_dir"] == ["/a:/b c", "WASTE_EXPERTS_DIR"]
    assert found["lookahead"] == ["auto", "default"]
    settings = document(waste, "--config")["settings"]
    assert settings["ctx"] == {"value": 512, "origin": "waste.toml"}
    assert settings["ram"] == {"value": None, "origin": "default"}
    assert settings["experts_dir"] == {"value": [], "origin": "default"}
    assert settings["learn"] == {"value": False, "origin": "WASTE_LEARN"}  # no test learns by the way


def test_a_control_group_that_limits_memory_is_named(waste: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from waste.hardware import memory

    source = "memory.high of control group '/a'"
    limited = memory.Memory(64 << 30, 5 << 30, 6 << 30, source)
    monkeypatch.setattr(memory, "detect", lambda root: limited)
    assert rows(waste)["RAM"] == f"64.0 GiB, 5.00 GiB free, limited to 6.00 GiB (free by {source})"
    assert document(waste)["ram_limit_source"] == source
