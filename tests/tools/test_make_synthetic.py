"""Synthetic containers: whole, verified, finite, spread over their experts, and the same for the same seed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from waste.backends.base import Routing, Selection
from waste.container.reader import Container
from waste.container.verify import verify
from waste.engine.engine import Engine

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_synthetic.py"
TINY = "--hidden 128 --layers 5 --routed 8 --top-k 2 --expert-width 40 --vocab 300 --context 512".split()
LAYERS, EXPERTS = 5, 8


def make(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), str(directory), *TINY, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synthetic") / "tiny.waste"
    done = make(directory, "--experts", "wt2+wt3", "--trunk", "q6")
    assert done.returncode == 0, done.stderr
    return directory


class Chosen:
    """Which experts a trace saw, by layer."""

    def __init__(self) -> None:
        self.experts: dict[int, set[int]] = {}

    def routing(self, layer: int, start: int, routing: Routing) -> None:
        self.experts.setdefault(layer, set()).update(np.unique(routing.ids).tolist())

    def selection(self, layer: int, start: int, tokens: int, selection: Selection | None) -> None:
        pass


def test_it_verifies_and_runs(tiny: Path) -> None:
    """Every byte has its checksum; logits are finite and of a sensible size, and every expert gets work."""
    assert verify(Container.open(tiny)) == []
    with Engine.open(tiny, ram="4GiB", threads=1) as engine:
        assert [engine.config.attention[i] for i in range(LAYERS)] == ["kda", "kda", "kda", "mla", "kda"]
        chosen = Chosen()
        ids = np.random.default_rng(0).integers(0, 259, 200)
        logits = engine.session().eval(ids, all_logits=True, trace=chosen)
        assert np.isfinite(logits).all()
        assert 0.1 < logits.std() < 10
        assert len(np.unique(logits.argmax(-1))) > 20  # tokens differ in what they lead to
        assert set(chosen.experts) == set(range(1, LAYERS))
        assert all(len(seen) == EXPERTS for seen in chosen.experts.values())


def test_its_tokenizer_and_chat_work(tiny: Path) -> None:
    text = "Grüße, 世界!\n\ttab"
    with Engine.open(tiny, ram="4GiB", threads=1) as engine:
        ids = engine.tokenizer.encode(text)
        assert ids == list(text.encode())
        assert engine.tokenizer.decode(ids) == text
        answer = engine.generate("hello", max_tokens=5, temperature=1.0, seed=1)
        assert answer.prompt_tokens == 1 + 5 + 1
        assert len(answer.ids) <= 5


def test_no_two_records_and_no_two_matrices_are_equal(tiny: Path) -> None:
    container = Container.open(tiny)
    seen = set()
    for entry in container.manifest.banks:
        with container.bank(entry.layer) as bank:
            for expert in range(bank.experts):
                record = np.empty(bank.layout.stride, np.uint8)
                bank.read(expert, record)
                seen.update(record[s.offset : s.offset + s.nbytes].tobytes() for s in bank.layout.sections)
    assert len(seen) == 3 * EXPERTS * (LAYERS - 1)


def test_equal_options_give_equal_bytes_and_another_seed_others(tiny: Path, tmp_path: Path) -> None:
    for name, seed in (("again", "0"), ("other", "1")):
        done = make(tmp_path / name, "--experts", "wt2+wt3", "--trunk", "q6", "--seed", seed)
        assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "again") == digests(tiny)
    here, there = digests(tiny), digests(tmp_path / "other")
    weights = [name for name in here if name.endswith(".bin")]
    assert weights and all(here[name] != there[name] for name in weights)


def test_what_cannot_be_is_one_line(tiny: Path, tmp_path: Path) -> None:
    for options, named in ((["--top-k", "9"], "9 of 8"), (["--experts", "wt9"], "wt9"), (["--vocab", "200"], "259")):
        done = make(tmp_path / "never", *options)
        assert done.returncode != 0
        assert named in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "never").exists()
    before = digests(tiny)
    assert make(tiny).returncode != 0
    assert digests(tiny) == before
