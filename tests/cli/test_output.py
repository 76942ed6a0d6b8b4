"""The printer: what a terminal gets, what a pipe gets, and that progress leaves no trace."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from waste.cli import output
from waste.cli.output import Output, one_line
from waste.events import Notice, Progress


def printer(waste: Any, **kwargs: Any) -> tuple[Output, Any, Any]:
    env = waste.environment(**kwargs)
    return Output(env), env.stdout, env.stderr


def screen(written: str) -> str:
    """What is left on a terminal's lines: carriage returns go back, erasures erase."""
    lines = [""]
    for part in re.split(r"(\r|\n|\x1b\[K|\x1b\[\d*m)", written):
        if part == "\n":
            lines.append("")
        elif part == "\r":
            lines[-1] = ""
        elif not part.startswith("\x1b"):
            lines[-1] += part
    return "\n".join(lines)


def test_a_table_in_a_pipe_is_tab_separated_and_never_folded(waste: Any) -> None:
    out, stdout, _ = printer(waste)
    out.table([("name", "x" * 300), ("odd", "a\tb\nc")], title="Title")
    assert stdout.getvalue() == f"name\t{'x' * 300}\nodd\ta\\tb\\nc\n"


def test_a_table_at_a_terminal_is_aligned_by_cells(waste: Any) -> None:
    out, stdout, _ = printer(waste, stdout_terminal=True, NO_COLOR="1")
    out.table([("四", "1"), ("abc", "22")], title="Title", right=(1,))
    assert stdout.getvalue() == "Title\n  四    1\n  abc  22\n"


def test_titles_are_bold_only_where_colour_is_allowed(waste: Any) -> None:
    out, stdout, _ = printer(waste, stdout_terminal=True)
    out.table([("a", "b")], title="Title")
    assert stdout.getvalue().startswith("\x1b[1mTitle\x1b[0m\n")
    out, stdout, _ = printer(waste, stderr_terminal=True)
    out.table([("a", "b")], title="Title")
    assert "\x1b" not in stdout.getvalue()


def test_progress_is_drawn_at_a_terminal_and_gone_afterwards(waste: Any) -> None:
    out, stdout, stderr = printer(waste, stderr_terminal=True)
    out.on_event(Progress("load", 1 << 20, 4 << 20))
    assert "load  25%" in stderr.getvalue()
    assert "1.00 MiB of 4.00 MiB" in stderr.getvalue()
    out.text("first token")
    assert screen(stderr.getvalue()) == ""
    out.on_event(Progress("prefill", 3, 9, "tokens"))
    out.on_event(Notice("something\nodd"))
    assert screen(stderr.getvalue()) == "something\\nodd\n"
    out.aside("a thought\n")
    assert screen(stderr.getvalue()) == "something\\nodd\na thought\n"
    out.on_event(Progress("prefill", 5, 9, "tokens"))
    out.aside("another")
    assert screen(stderr.getvalue()).endswith("\nanother")
    out.aside("\n")
    out.on_event(Progress("prefill", 9, 9, "tokens"))
    assert screen(stderr.getvalue()) == "something\\nodd\na thought\nanother\n"
    assert stdout.getvalue() == "first token"


@pytest.mark.parametrize(
    ("kwargs", "flags"),
    [({}, {}), ({"stdout_terminal": True}, {}), ({"stderr_terminal": True, "TERM": "dumb"}, {}),
     ({"stderr_terminal": True}, {"quiet": True})],
)  # fmt: skip
def test_progress_is_silent_elsewhere(waste: Any, kwargs: dict[str, Any], flags: dict[str, bool]) -> None:
    out, _, stderr = printer(waste, **kwargs)
    out.configure(**flags)
    for done in range(5):
        out.on_event(Progress("convert", done, 4))
    assert stderr.getvalue() == ""


def test_the_rate_is_of_what_was_done_while_somebody_looked(waste: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed conversion starts at half; a first chunk took a time nobody knows."""
    out, _, stderr = printer(waste, stderr_terminal=True)
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    out.on_event(Progress("convert", 50 * 10**6, 100 * 10**6))
    now = 110.0
    out.on_event(Progress("convert", 60 * 10**6, 100 * 10**6))
    assert screen(stderr.getvalue()).endswith("  1.00 MB/s  40.0 s left")


def test_verbose_says_what_a_phase_took(waste: Any) -> None:
    out, _, stderr = printer(waste)
    out.configure(verbose=True)
    out.on_event(Progress("load", 0, 2048))
    out.on_event(Progress("load", 2048, 2048))
    assert re.fullmatch(r"load: 2\.00 KiB in \d+\.\d+ s\n", stderr.getvalue())


def test_quiet_silences_all_but_failures(waste: Any) -> None:
    out, _, stderr = printer(waste)
    out.configure(quiet=True, verbose=True)
    out.notice("n")
    out.detail("d")
    out.aside("a")
    out.on_event(Notice("e"))
    assert stderr.getvalue() == ""
    out.failure("bad\nthing", "do\tthis")
    assert stderr.getvalue() == "error: bad\\nthing\nhint: do\\tthis\n"


def test_json_keeps_text_readable_and_survives_names_that_are_no_text(waste: Any) -> None:
    out, stdout, _ = printer(waste)
    out.json({"a": "四", "b": 1.5}, lines=True)
    assert stdout.getvalue() == '{"a": "四", "b": 1.5}\n'
    out, stdout, _ = printer(waste)
    out.json({"path": "caf\udce9"})
    assert json.loads(stdout.getvalue())["path"] == "caf\udce9"
    assert stdout.getvalue().isascii()
    with pytest.raises(ValueError, match="JSON"):
        out.json({"a": float("nan")})


def test_one_line_keeps_letters_and_escapes_the_rest() -> None:
    assert one_line("a b é 四\t\n\r\x1b\x7f\u2028") == "a b é 四\\t\\n\\r\\x1b\\x7f\\u2028"


def test_a_stderr_nobody_reads_does_not_end_the_answer(waste: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out, stdout, stderr = printer(waste)

    def fail(text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(stderr, "write", fail)
    out.notice("lost")
    out.aside("lost")
    out.text("kept")
    assert stdout.getvalue() == "kept"
