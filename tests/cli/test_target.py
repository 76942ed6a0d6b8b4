"""Telling a MODEL from a PROMPT, and the bundled example in the user's cache."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from waste.cli import target
from waste.cli.target import bundled_container, looks_like_model, split_words
from waste.container.reader import Container
from waste.container.verify import verify
from waste.convert import ConvertOptions, convert
from waste.errors import InputError, ResourceError, UsageError
from waste.events import Event


@pytest.mark.parametrize(
    "word", ["x.waste", "./x", "dir/x", "/abs", "owner/Name-5.3", "here", "~/m", "a b.waste", "dangling"]
)
def test_words_that_mean_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert looks_like_model(word)


@pytest.mark.parametrize("word", ["hello", "What is 1/2 of 3?", "-", "", "In the beginning", "x.wasted", "é"])
def test_words_that_mean_a_prompt(word: str) -> None:
    assert not looks_like_model(word)


def test_which_word_is_which() -> None:
    def split(first: str | None, second: str | None, option: str | None, has_file: bool) -> tuple[str | None, ...]:
        return split_words(first, second, option, has_file)

    assert split("m", "p", None, False) == ("m", "p")
    assert split("m.waste", None, None, False) == ("m.waste", None)
    assert split("hello", None, None, False) == (None, "hello")
    assert split("hello", None, "p", False) == ("hello", "p")
    assert split("hello", None, None, True) == ("hello", None)
    assert split("-", None, None, False) == (None, "-")
    assert split(None, None, "p", False) == (None, "p")
    assert split(None, None, None, False) == (None, None)
    with pytest.raises(UsageError, match="twice"):
        split("m", "p", "p", False)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by one that makes a directory with a mark; the targets, in order."""
    made: list[Path] = []

    def convert(source: Path, place: Path, on_event: object) -> None:
        made.append(place)
        place.mkdir()
        (place / "mark").write_text(f"{len(made)}")

    monkeypatch.setattr(target, "_convert", convert)
    monkeypatch.setattr(target, "_is_whole", lambda place: (place / "mark").exists())
    return made


def test_the_example_is_converted_once(tmp_path: Path, conversions: list[Path]) -> None:
    cache, said = tmp_path / "not/there/yet", list[Event]()
    first = bundled_container(Path("/x/nano-glm"), cache, "1.2", said.append)
    assert first == cache / "nano-glm-1.2.waste"
    assert len(said) == 1
    assert bundled_container(Path("/x/nano-glm"), cache, "1.2", said.append) == first
    assert len(conversions) == 1
    assert len(said) == 1
    assert [p.name for p in cache.iterdir()] == [first.name]
    assert conversions[0] != first  # made elsewhere, then renamed


def test_another_version_is_another_container(tmp_path: Path, conversions: list[Path]) -> None:
    bundled_container(Path("nano"), tmp_path, "1", lambda event: None)
    bundled_container(Path("nano"), tmp_path, "2", lambda event: None)
    assert len(conversions) == 2


def test_a_broken_one_is_made_again(tmp_path: Path, conversions: list[Path]) -> None:
    place = bundled_container(Path("nano"), tmp_path, "1", lambda event: None)
    (place / "mark").unlink()
    assert bundled_container(Path("nano"), tmp_path, "1", lambda event: None) == place
    assert (place / "mark").read_text() == "2"


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_is_no_container_is_made_again(tmp_path: Path, conversions: list[Path], kind: str) -> None:
    place = tmp_path / "nano-1.waste"
    if kind == "file":
        place.write_text("junk")
    else:
        place.symlink_to("nowhere")
    assert bundled_container(Path("nano"), tmp_path, "1", lambda event: None) == place
    assert (place / "mark").read_text() == "1"


def test_a_container_is_whole_if_every_byte_is(default_nano: Path, tmp_path: Path) -> None:
    assert target._is_whole(default_nano)
    copy = tmp_path / "copy.waste"
    shutil.copytree(default_nano, copy)
    with (copy / "experts-004.bin").open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 4]))
    assert not target._is_whole(copy)
    (copy / "trunk.bin").unlink()
    assert not target._is_whole(copy)


def test_a_container_of_before_has_every_byte_and_is_made_again(default_nano: Path, tmp_path: Path) -> None:
    """One format for the whole trunk, as an unreleased state of the same version wrote it into the user's cache."""
    copy = tmp_path / "copy.waste"
    shutil.copytree(default_nano, copy)
    manifest = Container.open(copy).manifest
    old = replace(manifest, formats=dict.fromkeys(("gate", "up", "down", "trunk"), "q8"))
    (copy / "manifest.json").write_bytes(old.to_bytes())
    assert verify(Container.open(copy)) == []
    assert not target._is_whole(copy)


def test_a_container_in_other_formats_is_made_again(nano_checkpoint: Path, tmp_path: Path) -> None:
    """The defaults may change while the version stays."""
    convert(str(nano_checkpoint), tmp_path / "other.waste", ConvertOptions(experts="wt2"))
    assert verify(Container.open(tmp_path / "other.waste")) == []
    assert not target._is_whole(tmp_path / "other.waste")


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, place: Path, on_event: object) -> None:
        place.mkdir()
        raise InputError("no luck")

    monkeypatch.setattr(target, "_convert", fail)
    with pytest.raises(InputError, match="no luck"):
        bundled_container(Path("nano"), tmp_path, "1", lambda event: None)
    assert list(tmp_path.iterdir()) == []


def test_two_first_runs_at_once_both_get_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winner = tmp_path / "nano-1.waste"

    def convert(source: Path, place: Path, on_event: object) -> None:
        place.mkdir()
        (place / "mark").write_text("mine")
        winner.mkdir()  # somebody else finishes first
        (winner / "mark").write_text("theirs")

    monkeypatch.setattr(target, "_convert", convert)
    assert bundled_container(Path("nano"), tmp_path, "1", lambda event: None) == winner
    assert (winner / "mark").read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == [winner.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, conversions: list[Path]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cache directory") as caught:
        bundled_container(Path("nano"), tmp_path / "file/cache", "1", lambda event: None)
    assert "XDG_CACHE_HOME" in (caught.value.hint or "")
