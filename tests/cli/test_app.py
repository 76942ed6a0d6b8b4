"""The command as a whole: help, version, usage errors, imports, and how processes end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from waste.cli.config import Config
from waste.cli.failures import Terminated
from waste.errors import ExitCode

COMMANDS = ("run", "convert", "bench", "info")


def start(*argv: str, code: str | None = None, **kwargs: Any) -> subprocess.Popen[bytes]:
    """A real process: `waste ARGV`, or `code` in its place."""
    command = [sys.executable, "-m", "waste", *argv] if code is None else [sys.executable, "-c", code, *argv]
    env = {key: value for key, value in os.environ.items() if not key.startswith("WASTE_")}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": env}
    return subprocess.Popen(command, **{**pipes, **kwargs})


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=str)
def test_help_opens_with_an_example_to_paste(
    waste: Any, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], flag: str
) -> None:
    assert waste(*command, flag).code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Usage: waste {' '.join(command)}".rstrip())
    assert lines[1] == ""
    assert lines[2].startswith(f"  waste {' '.join(command)}".rstrip() + " ")
    assert max(map(len, lines)) <= 110


def test_no_arguments_at_all_show_the_help(waste: Any) -> None:
    for argv in ((), ("convert",)):
        done = waste(*argv)
        assert done.code == 2
        assert done.err.startswith("Usage: waste")
        assert "error" not in done.err.splitlines()[0]


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (("rnu",), "no such command 'rnu'. Did you mean 'run'?", "`waste --help`"),
        (("info", "--jsno"), "no such option: --jsno", "did you mean --json?"),
        (("run", "--temp"), "option '--temp' requires an argument", "--help`"),
        (("convert", "only-source"), "missing argument 'DST'", "`waste convert --help`"),
        (("info", "a", "b"), "got unexpected extra argument", "`waste info --help`"),
        (("convert", "a", "b", "--threads", "x"), "--threads", "`waste convert --help`"),
    ],
    ids=str,
)
def test_usage_errors_say_what_was_meant(
    waste: Any, failed: Any, argv: tuple[str, ...], message: str, hint: str
) -> None:
    done = waste(*argv)
    failed(done, 2)
    assert message in done.err.splitlines()[0]
    assert hint in done.err.splitlines()[1]


def test_a_setting_that_makes_no_sense_stops_every_command(waste: Any, failed: Any) -> None:
    for argv in (("info",), ("run", "hi"), ("convert", "a", "b")):
        failed(waste(*argv, env=waste.environment(WASTE_THREDS="1")), 2)
    assert waste("--help", env=waste.environment(WASTE_THREDS="1")).code == 0


@pytest.mark.parametrize(("cause", "code"), [(KeyboardInterrupt(), 130), (Terminated(), 143)])
def test_a_signal_in_another_error_s_clothes_is_a_signal(
    waste: Any, monkeypatch: pytest.MonkeyPatch, cause: BaseException, code: int
) -> None:
    """Python 3.11 says "RuntimeError: Error calling __set_name__" when Ctrl-C comes while a class is made."""

    def load(*_: Any) -> Any:
        raise RuntimeError("Error calling __set_name__ on 'Field'") from cause

    monkeypatch.setattr(Config, "load", load)
    done = waste("run", "hi")
    assert (done.code, done.out, done.err) == (code, "", "")


def test_ctrl_c_while_the_command_line_is_imported_ends_quietly() -> None:
    code = (
        "import sys; from waste.__main__ import main\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'waste.cli.app':\n"
        "            raise RuntimeError('Error calling __set_name__') from KeyboardInterrupt()\n"
        "sys.meta_path.insert(0, Stop()); sys.exit(main())"
    )
    process = start(code=code)
    assert process.communicate(timeout=60) == (b"", b"") and process.returncode == 130


def test_exit_codes_are_what_the_documentation_says() -> None:
    codes = {code.name: code.value for code in ExitCode}
    assert codes == {"DONE": 0, "NO": 1, "USAGE": 2, "INPUT": 3, "RESOURCE": 4, "BUG": 70, "INTERRUPTED": 130}


def test_version_and_help_import_nothing_heavy() -> None:
    code = (
        "import json, sys; from waste.cli.app import main; codes = [main(['--version']), main(['run', '--help'])];"
        "sys.stderr.write(json.dumps([codes, sorted(sys.modules)]))"
    )
    process = start(code=code)
    out, err = process.communicate(timeout=60)
    codes, modules = json.loads(err)
    assert codes == [0, 0]
    assert out.startswith(b"waste ")
    heavy = {
        "numpy",
        "torch",
        "rich",
        "safetensors",
        "tiktoken",
        "tokenizers",
        "huggingface_hub",
        "jinja2",
        "click",
        "pydantic",
    }
    assert heavy.isdisjoint(modules)
    assert not [name for name in modules if name.startswith("waste.") and name.split(".")[1] not in ("cli", "errors", "units", "events")]  # fmt: skip  # noqa: E501


# Real processes. `SCRIPT` is the command with an engine that never comes to an end.
SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from conftest import ScriptedEngine, UNTHINK
from waste.cli.app import main
from waste.engine.engine import Engine
engine = ScriptedEngine([UNTHINK, *b"word word "], context=10**9)
session = engine.session()
evaluate = session.eval
def slow(ids, **kwargs):
    time.sleep(0.01)
    return evaluate(ids, **kwargs)
session.eval = slow
engine.session = lambda: session
Engine.open = staticmethod(lambda path, **kwargs: engine)
sys.exit(main(["run", {container!r}, "-p", "q", "-n", "1000000"]))
"""


@pytest.fixture
def endless(tmp_path: Path) -> str:
    (tmp_path / "m.waste").mkdir()
    return SCRIPT.format(tests=str(Path(__file__).parent), container=str(tmp_path / "m.waste"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_signals_end_a_run_with_what_was_written(endless: str, number: int, code: int) -> None:
    process = start(code=endless)
    assert process.stdout is not None
    first = process.stdout.read(4)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (first + out).startswith(b"word")
    assert process.returncode == code
    assert b"Traceback" not in err
    assert b"error" not in err


def test_a_closed_pipe_ends_the_process_quietly(endless: str) -> None:
    process = start(code=endless)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(4) == b"word"
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=20) == 141
    assert err == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("argv", [("info",), ("--help",)], ids=str)
def test_a_full_device_is_an_error_with_a_message(argv: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(*argv, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert b"No space left on device" in err
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err


def test_help_into_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start("run", "--help", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141
    assert err == b""


def test_a_piped_answer_is_utf8_whatever_the_locale(endless: str) -> None:
    code = endless.replace("word word ", "\\xe5\\x9b\\x9b").replace("1000000", "4")
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    out, _ = start(code=code, env=env).communicate(timeout=60)
    assert out.decode("utf-8") == "四\n"


def test_at_a_real_terminal_nobody_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "m.waste").mkdir()
    ours, theirs = pty.openpty()
    process = start("run", str(tmp_path / "m.waste"), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert process.wait(timeout=20) == 2
    assert b"no prompt" in os.read(ours, 10_000)
    os.close(ours)


def test_streams_the_caller_closed_do_not_matter() -> None:
    for closing in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
        command = f'"{sys.executable}" -m waste info --config {closing}'
        done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, closing
        assert b"Traceback" not in done.stderr
