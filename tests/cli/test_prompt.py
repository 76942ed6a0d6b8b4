"""What arrives as a prompt: bytes kept as they are, everything that is no UTF-8 text refused by its byte."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waste.cli.environment import Environment
from waste.cli.prompt import MAX_BYTES, PromptSources, decode_text, read_prompt
from waste.errors import ExitCode, InputError, UsageError


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def world(stdin: BinaryIO) -> Environment:
    return Environment({}, stdin, io.StringIO(), io.StringIO())


def ask(text: str | None = None, *, stdin: bytes = b"", files: tuple[str, ...] = (), read: bool = True) -> str | None:
    sources = PromptSources(text, files, read)
    return read_prompt(sources, world(io.BytesIO(stdin)), lambda line: pytest.fail(line))


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_utf8_text_arrives_unchanged_but_for_one_final_newline(text: str) -> None:
    if text.startswith("\ufeff"):
        return
    got = decode_text((text + "\n").encode(), "stdin")
    assert got == (text.removesuffix("\r") if text.endswith("\r") else text)
    if not text.endswith("\n"):
        assert decode_text(text.encode(), "stdin") == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"one\ntwo\n\n", "one\ntwo\n"),
        (b"one\r\ntwo\r\n", "one\r\ntwo"),
        (b"no newline", "no newline"),
        (b"\xef\xbb\xbfwith a mark\n", "with a mark"),
        (b"  kept  \n", "  kept  "),
        (rb"a\nb", "a\\nb"),
        ("\U0001f468\u200d\U0001f469\n".encode(), "\U0001f468\u200d\U0001f469"),
    ],
)
def test_line_ends_marks_and_backslashes(data: bytes, text: str) -> None:
    assert decode_text(data, "stdin") == text


@pytest.mark.parametrize(
    ("data", "byte", "offset"),
    [
        ("caf\xe9".encode("latin-1"), "0xe9", 3),
        (b"\xef\xbb\xbfab\xff", "0xff", 5),
        ("ab".encode("utf-16"), "0xff", 0),
        ("ab".encode("utf-16-be"), "0x00", 0),
        (b"a\0b", "0x00", 1),
        (b"half a character \xf0\x9f", "0xf0", 17),
        (b"surrogate \xed\xa0\x80", "0xed", 10),
    ],
)
def test_what_is_no_text_is_refused_by_byte_and_offset(data: bytes, byte: str, offset: int) -> None:
    with pytest.raises(UsageError) as caught:
        decode_text(data, "stdin")
    assert f"byte {byte} at offset {offset}" in caught.value.message
    assert caught.value.exit_code is ExitCode.USAGE


def test_pipe_then_files_then_argument(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("file a\n")
    (tmp_path / "b.txt").write_text("file b")
    got = ask("question", stdin=b"piped\n", files=("a.txt", "b.txt"))
    assert got == "piped\n\nfile a\n\nfile b\n\nquestion"


def test_an_empty_pipe_adds_nothing_and_no_stdin_is_not_read() -> None:
    assert ask("question") == "question"
    assert ask("question", stdin=b"ignored", read=False) == "question"
    assert ask("-", stdin=b"piped\n") == "piped"
    assert ask(stdin=b"piped\n") == "piped"
    with pytest.raises(UsageError, match="--no-stdin"):
        ask("-", read=False)


@pytest.mark.parametrize("stdin", [b"", b"\n", b" \t\n\n"])
@pytest.mark.parametrize("text", [None, "", "  \n"])
def test_nothing_to_ask_is_an_error(text: str | None, stdin: bytes) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        ask(text, stdin=stdin)


def test_without_stdin_argument_or_file_there_is_no_prompt() -> None:
    assert ask(read=False) is None


def test_an_argument_is_taken_literally() -> None:
    assert ask("a\\nb  ") == "a\\nb  "
    with pytest.raises(UsageError, match="byte 0xe9 at offset 5"):
        ask(os.fsdecode("é: caf\xe9"[:3].encode() + b" \xe9"))


def test_an_argument_that_an_ascii_locale_could_not_read_is_still_utf8() -> None:
    assert ask("你好 é".encode().decode("ascii", "surrogateescape")) == "你好 é"


@pytest.mark.parametrize("name", ["missing.txt", "", "folder"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot read the prompt file"):
        ask(files=(name,))


def test_an_endless_file_is_refused_before_it_fills_the_memory() -> None:
    assert MAX_BYTES < 1 << 30
    with pytest.raises(UsageError, match="too long"):
        ask(files=("/dev/zero",))


def test_a_silent_pipe_is_announced_once_and_still_read() -> None:
    reader, writer = os.pipe()
    said: list[str] = []

    def announce(line: str) -> None:
        said.append(line)
        os.write(writer, b"at last\n")
        os.close(writer)

    rescue = threading.Timer(20, os.close, [writer])  # so that a silent failure does not wait for ever
    rescue.start()
    with os.fdopen(reader, "rb") as stdin:
        got = read_prompt(PromptSources(None), world(stdin), announce, patience_s=0.02)
    rescue.cancel()
    assert got == "at last"
    assert len(said) == 1
    assert "--no-stdin" in said[0]


def test_a_pipe_that_speaks_is_not_announced() -> None:
    before = threading.active_count()
    assert ask(stdin=b"x" * 100_000) == "x" * 100_000
    assert threading.active_count() <= before + 1  # a cancelled timer may still be winding down
