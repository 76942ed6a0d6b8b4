"""Killed at any point and run again, a conversion gives the same bytes; it resumes nothing that has changed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from waste.container.reader import Container
from waste.convert import ConvertOptions, Preflight, convert, plan_conversion
from waste.convert.journal import Journal
from waste.errors import InputError, ResourceError, UsageError, WasteError
from waste.models.formats import DEFAULT_EXPERTS, DEFAULT_TRUNK

Files = Callable[[Path], dict[str, bytes]]
ONE = ConvertOptions(threads=1)
TRELLIS = ConvertOptions(threads=1, experts="wt2+wt3", trunk="q6")
WRAPPER = "model.language_model."


class Crash(BaseException):
    """The process is gone: nothing after this may touch the disk."""


class Power:
    """Counts what changes the disk, and cuts the power before the `limit`-th of it (of one kind, if given).

    A write that is cut leaves half of its bytes.
    """

    KINDS = ("pwrite", "fsync", "replace", "ftruncate", "unlink", "mkdir", "open")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.limit = 0
        self.kind: str | None = None
        self.dead = False
        self.on = False
        for kind in self.KINDS:
            monkeypatch.setattr(os, kind, self._guard(kind, getattr(os, kind)))

    def _guard(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self.on or (kind == "open" and not args[1] & os.O_CREAT):
                return real(*args, **kwargs)
            if self.dead:
                raise Crash
            self.counts[kind] += 1
            seen = self.counts[self.kind] if self.kind else self.counts.total()
            if self.limit and seen >= self.limit and self.kind in (None, kind):
                self.dead = True
                if kind == "pwrite":
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
                raise Crash
            return real(*args, **kwargs)

        return guarded

    @contextlib.contextmanager
    def until(self, limit: int, kind: str | None = None) -> Iterator[None]:
        """Cut the power at the `limit`-th change (0: never)."""
        self.counts.clear()
        self.limit, self.kind, self.dead, self.on = limit, kind, False, True
        try:
            yield
        finally:
            self.on = False


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Power:
    # Forecasts take a third of a tiny conversion and write nothing.
    monkeypatch.setattr("waste.convert.conversion.forecast", lambda *_: 0.0)
    monkeypatch.setattr("waste.convert.conversion.container_bytes", lambda *_: 1)
    return Power(monkeypatch)


@pytest.fixture
def small(original: Any, tmp_path: Path) -> Any:
    """Two layers, no draft layer: fewer places to crash at."""
    tiny = original.at(tmp_path / "small" / "ckpt")
    keep = ("layers.0.", "layers.1.", "embed_tokens", f"{WRAPPER}norm", "lm_head")
    tiny.tensors = {name: t for name, t in tiny.tensors.items() if any(word in name for word in keep)}
    text = tiny.text
    text |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "indexer_types": ["full"] * 2}
    text |= {"layer_types": text["layer_types"][:2], "mlp_layer_types": ["dense", "sparse"]}
    text["linear_attn_config"] |= {"kda_layers": [0], "full_attn_layers": [1]}
    tiny.shards = 1
    return tiny.write()


def accepted(path: Path) -> bool:
    try:
        Container.open(path)
    except WasteError:
        return False
    return True


def run(source: Any, dst: Path, options: ConvertOptions = ONE) -> Any:
    return convert(str(source.path), dst, options)


# -- killed


def test_power_cut_at_every_kind_of_change(small: Any, tmp_path: Path, power: Power, files_of: Files) -> None:
    """Every rename, truncate and delete, a sample of creates, syncs and writes, each in a conversion of its own."""
    whole = tmp_path / "whole.waste"
    with power.until(0):
        run(small, whole)
    counts = Counter(power.counts)
    clean = files_of(whole)
    assert counts["pwrite"] > 100
    strides = {"pwrite": 37, "fsync": 3, "open": 2}
    points = [(kind, n) for kind in Power.KINDS for n in range(1, counts[kind] + 1, strides.get(kind, 1))]
    points += [("pwrite", counts["pwrite"] - n) for n in range(3)]
    for kind, limit in points:
        dst = tmp_path / f"{kind}-{limit}.waste"
        with power.until(limit, kind), pytest.raises(Crash):
            run(small, dst)
        before_manifest = not (dst / "manifest.json").exists()
        assert before_manifest or accepted(dst), (kind, limit)
        run(small, dst)
        assert files_of(dst) == clean, (kind, limit)
        shutil.rmtree(dst)


@pytest.mark.parametrize("options", [ONE, TRELLIS], ids=["default", "trellis"])
@pytest.mark.parametrize("step", [12, 61])
def test_power_cut_again_and_again(
    small: Any, tmp_path: Path, power: Power, files_of: Files, step: int, options: ConvertOptions
) -> None:
    """However often it is killed, a conversion gets on as long as each life finishes one item."""
    whole, dst = tmp_path / "whole.waste", tmp_path / "out.waste"
    run(small, whole, options)
    for lives in range(1000):
        try:
            with power.until(step + lives % 3):
                run(small, dst, options)
        except Crash:
            assert not accepted(dst) or (dst / "convert.journal").exists()
            continue
        break
    assert 1 < lives < 999
    assert files_of(dst) == files_of(whole)


@pytest.mark.parametrize("options", [ONE, TRELLIS], ids=["default", "trellis"])
def test_killed_at_random_moments(
    tiny: Any, tmp_path: Path, files_of: Files, monkeypatch: pytest.MonkeyPatch, options: ConvertOptions
) -> None:
    """Real processes, real SIGKILL, twenty times."""
    real = os.pwrite
    run(tiny, tmp_path / "whole.waste", options)
    clean = files_of(tmp_path / "whole.waste")

    def slow(fd: int, data: Any, offset: int) -> int:
        time.sleep(0.001)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    rng = random.Random(7)
    kills, made = 0, 0
    while kills < 20 and made < 40:
        dst = tmp_path / f"{made}.waste"
        made += 1
        finished = False
        while not finished and kills < 20:
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    run(tiny, dst, replace(options, threads=2))
                    os._exit(0)
                os._exit(1)
            time.sleep(rng.uniform(0.05, 0.4))
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            finished = not os.WIFSIGNALED(status)
            kills += not finished
            assert finished or not (dst / "manifest.json").exists() or accepted(dst)
        monkeypatch.setattr(os, "pwrite", real)
        run(tiny, dst, options)
        monkeypatch.setattr(os, "pwrite", slow)
        assert files_of(dst) == clean
    assert kills == 20


# -- what a resume trusts


@pytest.fixture
def unfinished(tiny: Any, dst: Path, power: Power) -> Path:
    """A conversion that died at the first small file: all weights are sealed."""
    with power.until(5, "replace"), pytest.raises(Crash):
        run(tiny, dst)  # after trunk, draft and the banks of layers 1 and 2
    return dst


def test_resume_takes_over_what_is_finished(
    tiny: Any, unfinished: Path, clean: dict[str, bytes], files_of: Files
) -> None:
    plan = plan_conversion(str(tiny.path), unfinished, ONE)
    result = run(tiny, unfinished)
    assert result.resumed_bytes == plan.read_bytes  # all weights; only texts and manifest were missing
    assert files_of(unfinished) == clean
    assert any("continuing" in notice for notice in result.notices)


def test_unfinished_is_no_container(unfinished: Path) -> None:
    with pytest.raises(InputError, match="unfinished"):
        Container.open(unfinished)


@pytest.mark.parametrize("what", ["flip", "cut", "grow", "gone"])
@pytest.mark.parametrize("file", ["trunk.bin", "experts-001.bin"])
def test_damaged_part_files_are_written_again(
    tiny: Any, dst: Path, power: Power, clean: dict[str, bytes], files_of: Files, what: str, file: str
) -> None:
    with power.until(1 if file == "trunk.bin" else 3, "replace"), pytest.raises(Crash):
        run(tiny, dst)
    part = dst / f"{file}.part"
    data = bytearray(part.read_bytes())
    if what == "flip":
        data[len(data) // 2] ^= 1
    elif what == "cut":
        del data[len(data) // 3 :]
    elif what == "grow":
        data += b"\1" * 5000
    part.write_bytes(data)
    if what == "gone":
        part.unlink()
    run(tiny, dst)
    assert files_of(dst) == clean


def test_sealed_file_of_the_wrong_size_is_written_again(
    tiny: Any, unfinished: Path, clean: dict[str, bytes], files_of: Files
) -> None:
    path = unfinished / "experts-001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    run(tiny, unfinished)
    assert files_of(unfinished) == clean


def test_sums_are_not_taken_of_an_embedding_that_was_damaged(
    tiny: Any, unfinished: Path, clean: dict[str, bytes], files_of: Files
) -> None:
    with (unfinished / "trunk.bin").open("r+b") as file:
        file.write(b"\xff" * 8)
    with pytest.raises(InputError, match=r"trunk\.bin', tensor 'embed_tokens.weight' is damaged") as caught:
        run(tiny, unfinished)
    assert "--restart" in (caught.value.hint or "")
    run(tiny, unfinished, replace(ONE, restart=True))
    assert files_of(unfinished) == clean


@pytest.mark.parametrize("cut", [1, 17, 300, 5000])
def test_torn_journal(tiny: Any, unfinished: Path, clean: dict[str, bytes], files_of: Files, cut: int) -> None:
    journal = unfinished / "convert.journal"
    data = journal.read_bytes()
    journal.write_bytes(data[:-cut])
    run(tiny, unfinished)
    assert files_of(unfinished) == clean


def test_flipped_bytes_in_the_journal(
    tiny: Any, unfinished: Path, tmp_path: Path, clean: dict[str, bytes], files_of: Files, copy_of: Callable[..., Path]
) -> None:
    """Everything from the damaged line on is done again; damage in the first line is refused."""
    size = (unfinished / "convert.journal").stat().st_size
    rng = random.Random(3)
    for i, at in enumerate([0, 20, *(rng.randrange(size) for _ in range(6))]):
        dst = copy_of(unfinished, tmp_path / f"{i}.waste")
        journal = dst / "convert.journal"
        data = bytearray(journal.read_bytes())
        first = data.index(b"\n")
        data[at] ^= 4
        journal.write_bytes(data)
        if at <= first:
            with pytest.raises(UsageError, match="damaged"):
                run(tiny, dst)
            run(tiny, dst, ConvertOptions(threads=1, restart=True))
        else:
            run(tiny, dst)
        assert files_of(dst) == clean


# -- what a resume refuses


@pytest.mark.parametrize("options", [{"experts": "q8"}, {"trunk": "f32"}])
def test_changed_options_do_not_resume(tiny: Any, unfinished: Path, files_of: Files, options: dict[str, str]) -> None:
    before = files_of(unfinished)
    changed, heard = ConvertOptions(threads=1, **options), list[Any]()
    for attempt in (
        lambda: convert(str(tiny.path), unfinished, changed, heard.append, heard.append),
        lambda: plan_conversion(str(tiny.path), unfinished, changed, heard.append),
    ):
        with pytest.raises(UsageError) as caught:
            attempt()
        ((name, value),) = options.items()
        assert name in caught.value.message
        assert value in caught.value.message
        hint = caught.value.hint or ""
        assert f"--experts {DEFAULT_EXPERTS} --trunk {DEFAULT_TRUNK} goes on" in hint
        assert "--restart" in hint
    assert not any(isinstance(event, Preflight) for event in heard)  # nothing was announced
    assert files_of(unfinished) == before
    run(tiny, unfinished, ConvertOptions(threads=1, restart=True, **options))
    manifest = Container.open(unfinished).manifest
    assert manifest.options == {"experts": DEFAULT_EXPERTS, "trunk": DEFAULT_TRUNK} | options


@pytest.mark.parametrize("what", ["weights", "time", "config", "added", "gone"])
def test_changed_source_does_not_resume(tiny: Any, unfinished: Path, remake: Callable[..., Any], what: str) -> None:
    shard = sorted(tiny.path.glob("*.safetensors"))[1]
    named = shard.name
    if what == "weights":
        data = bytearray(shard.read_bytes())
        status = shard.stat()
        data[-64:] = bytes(64)
        shard.write_bytes(data)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))  # a copy may keep the time stamp
    elif what == "time":
        os.utime(shard, ns=(1, 1))
    elif what == "config":
        named = "config.json"
        tiny.text["routed_scaling_factor"] = 1.5
        (tiny.path / named).write_text(json.dumps(tiny.config))
    elif what == "added":
        named = "tiktoken.model"
        (tiny.path / named).write_bytes(b"")
    else:
        named = "generation_config.json"
        (tiny.path / named).unlink()
    with pytest.raises(InputError) as caught:
        run(tiny, unfinished)
    assert repr(named) in caught.value.message
    assert "--restart" in (caught.value.hint or "")
    run(tiny, unfinished, ConvertOptions(threads=1, restart=True))
    assert accepted(unfinished)


def test_another_version_does_not_resume(tiny: Any, unfinished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waste.convert.conversion.tool_version", lambda: "99.0")
    with pytest.raises(UsageError, match=r"99\.0"):
        run(tiny, unfinished)


def test_source_that_changes_meanwhile(tiny: Any, dst: Path) -> None:
    shard = sorted(tiny.path.glob("*.safetensors"))[0]

    def touch(event: Any) -> None:
        if getattr(event, "phase", "") == "convert" and event.done > event.total // 2:
            os.utime(shard, ns=(5, 5))

    with pytest.raises(InputError, match="while it was being converted") as caught:
        convert(str(tiny.path), dst, ONE, touch)
    assert shard.name in caught.value.message
    assert not (dst / "manifest.json").exists()


def test_two_conversions_do_not_share_a_target(tiny: Any, unfinished: Path) -> None:
    with (unfinished / "convert.journal").open("rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match="another conversion"):
            run(tiny, unfinished)
    run(tiny, unfinished)


# -- what lies at the target


def test_finished_stays_as_it_is(tiny: Any, dst: Path, files_of: Files) -> None:
    first = run(tiny, dst)
    before = {path: path.stat().st_mtime_ns for path in dst.iterdir()}
    assert plan_conversion(str(tiny.path), dst, ONE).finished
    again = run(tiny, dst)
    assert (again.unchanged, again.nbytes) == (True, first.nbytes)
    assert {path: path.stat().st_mtime_ns for path in dst.iterdir()} == before
    assert any("already" in notice for notice in again.notices)


def test_newer_source_is_compared_to_the_last_byte(tiny: Any, dst: Path) -> None:
    """Sizes and samples agree, the time stamp does not: only reading it all tells."""
    run(tiny, dst)
    shard = sorted(tiny.path.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data)
    assert run(tiny, dst).unchanged
    changed = bytearray(data)
    begin = 8 + int.from_bytes(data[:8], "little")
    room = len(data) - begin - 1024
    sampled = {begin + room * i // 63 + j for i in range(64) for j in range(1024)}
    at = next(i for i in range(len(data) - 1, begin, -1) if i not in sampled)
    changed[at] ^= 1
    shard.write_bytes(changed)
    with pytest.raises(UsageError, match="another source"):
        run(tiny, dst)


@pytest.mark.parametrize("what", ["options", "source"])
def test_another_finished_container_is_kept_unless_forced(
    tiny: Any, tmp_path: Path, dst: Path, remake: Callable[..., Any], files_of: Files, what: str
) -> None:
    run(tiny, dst)
    (dst / "usage.json").write_text("{}")  # learned by the old container
    before = files_of(dst)
    other = remake(tmp_path / "other" / "ckpt", seed=9) if what == "source" else tiny
    options = {"experts": "q8"} if what == "options" else {}
    for call in (plan_conversion, convert):
        with pytest.raises(UsageError, match="finished container") as caught:
            call(str(other.path), dst, ConvertOptions(**options))
        assert "--force" in (caught.value.hint or "")
    assert files_of(dst) == before
    run(other, dst, ConvertOptions(force=True, **options))
    fresh = tmp_path / "fresh.waste"
    run(other, fresh, ConvertOptions(**options))
    assert files_of(dst) == files_of(fresh)


def test_forced_replacement_killed_anywhere(tiny: Any, tmp_path: Path, power: Power, files_of: Files) -> None:
    """At no point does the target look finished and hold a mixture."""
    old, new = ConvertOptions(threads=1), ConvertOptions(threads=1, experts="q8")
    run(tiny, tmp_path / "old", old)
    run(tiny, tmp_path / "new", new)
    before, after = files_of(tmp_path / "old"), files_of(tmp_path / "new")
    forced = ConvertOptions(threads=1, experts="q8", force=True)
    for limit in [*range(1, 9), 12, 15, 19, 23, 90]:
        dst = tmp_path / f"{limit}.waste"
        shutil.copytree(tmp_path / "old", dst)
        with power.until(limit), pytest.raises(Crash):
            run(tiny, dst, forced)
        if accepted(dst):
            found = files_of(dst)
            assert {name: found[name] for name in before} == before
            run(tiny, dst, forced)
        else:
            run(tiny, dst, ConvertOptions(threads=1, experts="q8"))  # it was agreed to; no need to say it again
        assert files_of(dst) == after


def test_damaged_container_is_kept_unless_forced(
    tiny: Any, dst: Path, clean: dict[str, bytes], files_of: Files
) -> None:
    run(tiny, dst)
    (dst / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be used"):
        run(tiny, dst)
    run(tiny, dst, ConvertOptions(force=True))
    assert files_of(dst) == clean


def test_a_container_of_before_is_not_converted_already(
    tiny: Any, dst: Path, clean: dict[str, bytes], files_of: Files
) -> None:
    """Whole, from this source, with these options, but its formats are for classes that there are no more."""
    run(tiny, dst)
    manifest = Container.open(dst).manifest
    old = replace(manifest, formats=dict.fromkeys(("gate", "up", "down", "trunk"), "q8"))
    (dst / "manifest.json").write_bytes(old.to_bytes())
    for attempt in (run, lambda tiny, dst: plan_conversion(str(tiny.path), dst, ONE)):
        with pytest.raises(UsageError, match="cannot be used") as caught:
            attempt(tiny, dst)
        assert "--force" in (caught.value.hint or "")
    run(tiny, dst, ConvertOptions(force=True))
    assert files_of(dst) == clean


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "experts-1.bin", "sub"])
def test_other_peoples_folders_are_left_alone(tiny: Any, dst: Path, name: str) -> None:
    dst.mkdir()
    (dst / name).mkdir() if name == "sub" else (dst / name).write_text("mine")
    for options in (ConvertOptions(), ConvertOptions(force=True), ConvertOptions(restart=True)):
        with pytest.raises(UsageError, match="not empty"):
            run(tiny, dst, options)
    assert [path.name for path in dst.iterdir()] == [name]


def test_weights_without_a_journal_are_left_alone(tiny: Any, dst: Path) -> None:
    dst.mkdir()
    (dst / "trunk.bin").write_text("mine")
    with pytest.raises(UsageError, match=r"trunk\.bin"):
        run(tiny, dst)


def test_target_may_be_an_empty_folder_but_no_file(tiny: Any, dst: Path, tmp_path: Path) -> None:
    dst.mkdir()
    run(tiny, dst)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UsageError, match="not a folder"):
        run(tiny, file)


def test_restart_without_anything_to_restart(tiny: Any, dst: Path) -> None:
    run(tiny, dst, ConvertOptions(restart=True))
    assert accepted(dst)


# -- the journal by itself


def test_journal_cut_at_every_byte_says_a_prefix(unfinished: Path, tmp_path: Path) -> None:
    data = (unfinished / "convert.journal").read_bytes()
    lines = data.splitlines(keepends=True)
    folder = tmp_path / "journal"
    folder.mkdir()
    path = folder / "convert.journal"
    rng = random.Random(5)
    for cut in sorted(
        {0, 1, len(data), len(lines[0]), len(lines[0]) - 1, *(rng.randrange(len(data)) for _ in range(60))}
    ):
        path.write_bytes(data[:cut])
        journal = Journal(folder)
        whole = data[:cut].count(b"\n")
        assert (journal.identity is not None) == (whole > 0)
        facts = [json.loads(line[17:]) for line in lines[:whole]]
        trunk = [fact for fact in facts if fact.get("entry", {}).get("file") == "trunk.bin"]
        assert len(journal.tensors("trunk.bin")) == len(trunk)
        assert journal.sealed("trunk.bin") == any(fact.get("sealed") == "trunk.bin" for fact in facts)
        journal.close()
        assert path.stat().st_size == sum(map(len, lines[:whole]))
