"""`waste convert` as a command: results on stdout, the rest on stderr, exit codes; the conversion has its own tests."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import waste.convert as conversion
from waste.cli.convert import HELP, _document, _rows
from waste.kernels import isa
from waste.models.formats import DEFAULT_EXPERTS, DEFAULT_TRUNK, read_formats


def size_of(container: Path) -> int:
    return sum(path.stat().st_size for path in container.iterdir())


def test_a_dry_run_reports_on_stdout_and_writes_nothing(waste: Any, nano_checkpoint: Path, tmp_path: Path) -> None:
    done = waste("convert", str(nano_checkpoint), "out.waste", "--dry-run")
    assert (done.code, done.err) == (0, "")
    found = dict(line.split("\t") for line in done.out.splitlines())
    assert found["source"] == "nano-glm"
    assert found["formats"] == f"experts {DEFAULT_EXPERTS}, trunk {DEFAULT_TRUNK}"
    assert {"to read", "to write", "free there", "time"} <= found.keys()
    done = waste(
        "convert", str(nano_checkpoint), "out.waste", "--dry-run", "--json", "--experts", "bf16", "--trunk", "q8"
    )
    report = json.loads(done.out)
    assert (report["schema"], report["dry_run"], report["family"]) == ("waste.convert/1", True, "glm5_next")
    q8 = dict.fromkeys(("first", "kda", "kda_gate", "mla", "indexer", "dense", "shared", "table"), "q8")
    assert report["formats"] == {"gate": "bf16", "up": "bf16", "down": "bf16", **q8, "small": "bf16"}
    assert list(tmp_path.iterdir()) == []


def test_gate_and_up_may_differ_from_down(waste: Any, failed: Any, nano_checkpoint: Path) -> None:
    done = waste("convert", str(nano_checkpoint), "o", "--dry-run", "--experts", "wt2+wt3", "--trunk", "q6")
    assert "formats\texperts wt2+wt3, trunk q6\n" in done.out
    for wrong in ("wt2+", "+wt2", "wt2+wt3+wt4", "+"):
        failed(waste("convert", str(nano_checkpoint), "o", "--dry-run", "--experts", wrong), 2)
    failed(waste("convert", str(nano_checkpoint), "o", "--dry-run", "--trunk", "wt2+wt3"), 2)


def test_the_help_says_the_default() -> None:
    assert f"Default: --experts {DEFAULT_EXPERTS} --trunk {DEFAULT_TRUNK}," in HELP


def test_classes_of_the_trunk_have_formats_of_their_own(waste: Any, failed: Any, nano_checkpoint: Path) -> None:
    command = ("convert", str(nano_checkpoint), "o", "--dry-run", "--trunk")
    found = dict(line.split("\t") for line in waste(*command, "wt4,kda=q8,shared=q6").out.splitlines())
    assert found["formats"] == f"experts {DEFAULT_EXPERTS}, trunk wt4,kda=q8,shared=q6"
    assert found["kda"] == "q8, 1.27 MiB"  # five layers of four 256 x 256 matrices: 260 bytes a row
    assert found["mla"].startswith("wt4, ")
    assert found["loss"].endswith(" times that of the default formats, by the example model")
    assert "loss" not in dict(line.split("\t") for line in waste(*command, DEFAULT_TRUNK).out.splitlines())
    done = waste(*command, "kda=wt4,moe=q8")
    failed(done, 2)
    assert "'moe=q8'" in done.err
    failed(waste(*command, "table=wt4"), 2)


def test_the_loss_is_that_of_classes_the_model_has(nano_checkpoint: Path, tmp_path: Path) -> None:
    formats = read_formats(trunk=f"{DEFAULT_TRUNK},kda_gate=wt2".replace("kda=q6", "kda=wt3"))
    report = conversion.plan_conversion(str(nano_checkpoint), tmp_path / "o", conversion.ConvertOptions())
    report = replace(report, formats=formats)
    assert "loss" not in dict(_rows(report))  # nobody measured kda_gate in wt2
    config = replace(report.config, attention=("mla",) * report.config.num_layers, kda=None)
    report = replace(report, config=config)
    rows, document = dict(_rows(report)), _document(report)
    assert rows.keys() & {"kda", "kda_gate", "loss"} == set()
    assert document["example_kl"] == document["example_kl_of_default"] > 0


def test_a_size_chooses_the_formats(waste: Any, failed: Any, nano_checkpoint: Path, tmp_path: Path) -> None:
    command = ("convert", str(nano_checkpoint), "o", "--size")
    report = json.loads(waste(*command, "15.5MB", "--dry-run", "--json").out)
    assert 14e6 < report["write_bytes"] <= 15.5e6
    assert sum(report["class_bytes"].values()) < report["write_bytes"]
    assert report["example_kl"] > report["example_kl_of_default"] > 0
    done = waste(*command, "15.5MB")
    assert done.code == 0
    assert size_of(tmp_path / "o") == report["write_bytes"]
    done = waste(*command, "1MB", "--force")
    failed(done, 2)
    assert "hint: --size " in done.err
    for wrong in ("large", "0", "-5GB"):
        failed(waste(*command, wrong), 2)
    by_variable = waste("convert", str(nano_checkpoint), "o", "--dry-run", "--json", WASTE_SIZE="15.5MB")
    assert json.loads(by_variable.out)["class_bytes"] == report["class_bytes"]
    failed(waste("convert", str(nano_checkpoint), "o", "--dry-run", WASTE_SIZE="large"), 2)


def test_the_instruction_set_is_a_setting(
    waste: Any, failed: Any, nano_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen for native code when the command runs; one the processor lacks is refused."""
    command = ("convert", str(nano_checkpoint), "o", "--dry-run")
    try:
        assert waste(*command, env=waste.environment(WASTE_ISA="portable")).code == 0
        assert isa.code_of() == 0
        assert waste(*command).code == 0
        assert isa.ISAS[isa.code_of()] == isa.usable()[-1]
        monkeypatch.setattr(isa, "usable", lambda: ("portable",))
        done = waste(*command, env=waste.environment(WASTE_ISA="avx512"))
        failed(done, 1)
        assert "'avx512'" in done.err
    finally:
        isa.force(None)


def test_stdout_is_path_and_size(waste: Any, nano_checkpoint: Path, tmp_path: Path) -> None:
    expected = json.loads(waste("convert", str(nano_checkpoint), "out.waste", "--dry-run", "--json").out)["write_bytes"]
    done = waste("convert", str(nano_checkpoint), "out.waste", "--json")
    assert done.code == 0
    result = json.loads(done.out)
    assert (result["path"], result["unchanged"]) == ("out.waste", False)
    assert result["container_bytes"] == expected == size_of(tmp_path / "out.waste")
    assert done.err.startswith("nano-glm -> out.waste: 25.4 M weights")


def test_what_is_there_already_is_left_alone(waste: Any, nano_checkpoint: Path, default_nano: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in default_nano.iterdir()}
    done = waste("convert", str(nano_checkpoint), str(default_nano))
    assert (done.code, done.out) == (0, f"{default_nano}\t{size_of(default_nano) / 2**20:.1f} MiB\n")
    assert done.err.splitlines() == [f"'{default_nano}' is converted already: nothing to do"]
    other = waste("convert", str(nano_checkpoint), str(default_nano), "--trunk", "bf16")
    assert (other.code, other.out) == (2, "")
    assert "--force" in other.err
    assert {path: path.stat().st_mtime_ns for path in default_nano.iterdir()} == before


def test_an_interrupted_conversion_says_how_to_go_on(
    waste: Any, nano_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "convert", interrupt)
    done = waste("convert", str(nano_checkpoint), "out.waste")
    assert (done.code, done.out) == (130, "")
    assert done.err.splitlines()[-1] == "interrupted: the same command goes on from here"


def test_formats_come_from_flags_or_settings(waste: Any, nano_checkpoint: Path) -> None:
    env = waste.environment(WASTE_EXPERTS="q8")
    done = waste("convert", str(nano_checkpoint), "o", "--dry-run", "--trunk", "f32", env=env)
    assert "formats\texperts q8, trunk f32\n" in done.out


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (("missing", "o"), 3, "'missing'"),
        (("NANO", "o", "--experts", "q5"), 2, "--experts is 'q5'"),
        (("NANO", "o", "--trunk", " "), 2, "--trunk is empty"),
        (("NANO", "o", "--trunk", "q6,q8"), 2, "--trunk is 'q6,q8': 'q8'"),
        (("NANO", "o", "--trunk", ""), 2, "--trunk"),
        (("NANO", "o", "--threads", "0"), 2, "--threads"),
        (("NANO", "o", "--revision", "main"), 2, "--revision"),
        (("broken", "o"), 3, "model-00002-of-00003.safetensors"),
        (("NANO", "full"), 2, "'full'"),
    ],
    ids=str,
)
def test_what_cannot_be_converted(
    waste: Any, failed: Any, nano_checkpoint: Path, tmp_path: Path, argv: tuple[str, ...], code: int, named: str
) -> None:
    shutil.copytree(nano_checkpoint, tmp_path / "broken")
    (tmp_path / "broken/model-00002-of-00003.safetensors").unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/something").write_text("mine")
    done = waste("convert", *(str(nano_checkpoint) if word == "NANO" else word for word in argv))
    failed(done, code)
    assert named in done.err
    assert not (tmp_path / "o").exists()


def test_a_dry_run_says_no_where_there_is_no_room(
    waste: Any, nano_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 1: it ran, and the answer is no."""
    monkeypatch.setattr("waste.convert.target.free_bytes", lambda _: 1 << 20)
    done = waste("convert", str(nano_checkpoint), "out.waste", "--dry-run", "--json")
    assert (done.code, json.loads(done.out)["fits"]) == (1, False)
    assert waste("convert", str(nano_checkpoint), "out.waste", "--dry-run").code == 1
