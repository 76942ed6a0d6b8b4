"""`waste run --jsonl`: an answer a line, in order and at once; what is wrong with a line is that line's own affair."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waste.cli import jsonl
from waste.cli.jsonl import _parse, _read_line, _request
from waste.cli.request import Request
from waste.container.load import LoadReport
from waste.engine.engine import Engine
from waste.engine.first_token import FirstToken
from waste.errors import InputError, UsageError

END, UNTHINK = 256, 259
ANSWER = [*b"hmm", UNTHINK, *"It is 四.".encode(), END]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, scripted: Any, tmp_path: Path) -> Callable[..., Any]:
    """Let `Engine.open` give a scripted engine; a directory m.waste stands for its container."""
    (tmp_path / "m.waste").mkdir()

    def install(script: list[int] = ANSWER, **kwargs: Any) -> Any:
        engine = scripted(script, **kwargs)
        monkeypatch.setattr(Engine, "open", staticmethod(lambda path, **options: engine))
        return engine

    return install


def lines_of(*requests: object) -> bytes:
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def answers(done: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


def prompt_of(engine: Any, index: int) -> str:
    return bytes(i for i in engine.sessions[index].evaluated[0] if i < 256).decode()


def test_an_answer_a_line_in_order(waste: Any, use: Any) -> None:
    engine = use()
    data = lines_of({"prompt": "one", "id": "a"}, {"prompt": "two", "id": 7}, {"prompt": "three"})
    done = waste("run", "m.waste", "--jsonl", "--seed", "5", stdin=data)
    assert (done.code, done.err) == (0, "")
    found = answers(done)
    assert [(a["schema"], a["event"], a["line"], a["id"]) for a in found] == [
        ("waste.run/1", "done", 1, "a"),
        ("waste.run/1", "done", 2, 7),
        ("waste.run/1", "done", 3, None),
    ]
    assert {(a["text"], a["reasoning"], a["finish_reason"], a["seed"]) for a in found} == {
        ("It is 四.", "hmm", "stop", 5)
    }
    assert [prompt_of(engine, i) for i in range(3)] == ["user:one", "user:two", "user:three"]
    assert engine.closed
    streamed = answers(waste("run", "m.waste", "one", "--json"))[-1]
    # One schema, but for how a cold start went, which is told of one answer alone.
    start = FirstToken(0.0, LoadReport(0, 0.0, 0.0, True), 0, 0.0, 0.0, 0.0).figures().keys()
    assert (streamed.keys() - start) | {"line", "id", "text", "reasoning"} == found[0].keys()


def test_what_a_line_does_not_say_the_options_say(waste: Any, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = use()
    seen: list[Request] = []
    original = Request.answer

    def spy(self: Request, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Request, "answer", spy)
    data = lines_of(
        {"prompt": "q"},
        {"prompt": "q", "system": "own", "effort": "high", "max_tokens": 0, "stop": "x", "temp": 0, "top_k": 3},
        {"prompt": "q <|ctl|>", "raw": True, "seed": None, "stop": ["y", "z"], "top_p": 1, "min_p": 0.5},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "repeat_penalty": 1.5},
    )
    argv = ("--system", "base", "--effort", "low", "-n", "4", "--stop", "S", "--seed", "9", "--temp", "0.5")
    done = waste("run", "m.waste", "--jsonl", *argv, stdin=data)
    assert done.code == 0, done.out
    assert prompt_of(engine, 0) == "system:baseuser:q[low]"
    assert engine.sessions[1].evaluated == []
    assert engine.sessions[2].evaluated[0] == list(b"q <|ctl|>")
    assert prompt_of(engine, 3) == "system:baseuser:aassistant:b[low]"
    assert prompt_of(engine, 4) == "system:suser:a[low]"
    assert [(r.max_tokens, r.stops, r.effort) for r in seen[:3]] == [
        (4, ("S",), "low"),
        (0, ("x",), "high"),
        (4, ("y", "z"), None),
    ]
    plain = {"temp": 0.5, "top_p": None, "top_k": None, "min_p": None, "repeat_penalty": None, "seed": 9}
    assert seen[0].sampling == plain
    assert seen[1].sampling == {**plain, "temp": 0, "top_k": 3}
    assert seen[2].sampling == {**plain, "top_p": 1, "min_p": 0.5}
    assert seen[4].sampling == {**plain, "repeat_penalty": 1.5}


WRONG = [
    ("not json", "not JSON"),
    ("[1]", "an array, expected an object"),
    ('"text"', '"text", expected an object'),
    ("{}", "prompt"),
    ('{"prompt": null}', "prompt"),
    ('{"prompt": ""}', "empty"),
    ('{"prompt": " \\n"}', "empty"),
    ('{"prompt": 7}', "prompt is 7, expected a string"),
    ('{"prompt": ["a"]}', "prompt is an array"),
    ('{"prompt": "a", "messages": []}', "messages"),
    ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "either"),
    ('{"messages": [{"role": "user"}]}', "messages[0]"),
    ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "messages[0]"),
    ('{"messages": [{"role": "user", "content": 1}]}', "messages[0].content is 1"),
    ('{"messages": [{"role": "king", "content": "a"}]}', "king"),
    ('{"messages": ["a"]}', "messages"),
    ('{"messages": [{"role": "user", "content": "a"}], "raw": true}', "messages"),
    ('{"messages": [{"role": "user", "content": "a"}], "system": "s"}', "system"),
    ('{"prompt": "a", "raw": true, "system": "s"}', "system"),
    ('{"prompt": "a", "raw": true, "effort": "low"}', "effort"),
    ('{"prompt": "a", "raw": 1}', "raw is 1, expected true or false"),
    ('{"prompt": "a", "effort": "huge"}', "effort"),
    ('{"prompt": "a", "temp": "warm"}', "temp is"),
    ('{"prompt": "a", "temp": true}', "temp is true"),
    ('{"prompt": "a", "temp": NaN}', "NaN is not JSON"),
    ('{"prompt": "a", "temp": 1e999}', "temperature"),
    ('{"prompt": "a", "temp": -1}', "temperature"),
    ('{"prompt": "a", "temp": 1' + "0" * 400 + "}", "temperature"),
    ('{"prompt": "a", "top_p": 1.5}', "top_p"),
    ('{"prompt": "a", "min_p": -0.5}', "min_p"),
    ('{"prompt": "a", "top_k": 1.5}', "top_k is 1.5, expected a whole number"),
    ('{"prompt": "a", "top_k": -1}', "top_k"),
    ('{"prompt": "a", "seed": true}', "seed is true"),
    ('{"prompt": "a", "seed": -1}', "seed"),
    ('{"prompt": "a", "seed": 1' + "0" * 5000 + "}", "not JSON"),
    ('{"prompt": "a", "repeat_penalty": 0}', "repeat_penalty"),
    ('{"prompt": "a", "max_tokens": -1}', "max_tokens"),
    ('{"prompt": "a", "max_tokens": 2.0}', "max_tokens is 2.0"),
    ('{"prompt": "a", "stop": 1}', "stop is 1"),
    ('{"prompt": "a", "stop": ["x", null]}', "stop"),
    ('{"prompt": "a", "stop": ""}', "stop string is empty"),
    ('{"prompt": "a", "id": true}', "id is true"),
    ('{"prompt": "a", "id": {}}', "id is an object"),
    ('{"prompt": "a", "temprature": 1}', "unknown field 'temprature'"),
    ('{"prompt": "a", "prompt": "b"}', "occurs twice"),
    ('{"prompt": "\\ud800"}', "U+D800"),
    ('{"prompt": "a\\u0000"}', "U+0000"),
    ("[" * 100_000, "not JSON"),
    ('{"prompt": "' + "x" * 2000 + '"}', "2007 tokens"),
]


@pytest.mark.parametrize(("line", "named"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_line_is_an_error_object_and_the_others_go_on(waste: Any, use: Any, line: str, named: str) -> None:
    engine = use()
    data = b"\n" + line.encode() + b"\n \r\n" + lines_of({"prompt": "good", "id": "g"})
    done = waste("run", "m.waste", "--jsonl", "-q", stdin=data)
    wrong, good = answers(done)
    assert (wrong["schema"], wrong["event"], wrong["line"], wrong["id"]) == ("waste.run/1", "error", 2, None)
    assert named in wrong["message"], wrong["message"]
    assert len(wrong["message"]) < 300
    assert "hint" in wrong
    assert (good["event"], good["line"], good["id"], good["text"]) == ("done", 4, "g", "It is 四.")
    assert done.code == 1
    assert done.err == "error: 1 of 2 requests failed; their lines say why\n"
    assert engine.closed


def test_an_error_keeps_its_id(waste: Any, use: Any) -> None:
    use()
    done = waste("run", "m.waste", "--jsonl", stdin=lines_of({"prompt": "a", "id": "x", "temp": -1}))
    assert (answers(done)[0]["id"], answers(done)[0]["event"]) == ("x", "error")


def test_a_failing_engine_is_the_failure_of_that_line(waste: Any, use: Any) -> None:
    engine = use()
    make = engine.session

    def session() -> Any:
        if len(engine.sessions) == 1:
            engine.sessions.append(None)
            raise InputError("'experts-003.bin', record 4 is damaged", hint="copy it again")
        return make()

    engine.session = session
    done = waste("run", "m.waste", "--jsonl", stdin=lines_of(*({"prompt": p} for p in "abc")))
    assert [a["event"] for a in answers(done)] == ["done", "error", "done"]
    assert answers(done)[1]["message"] == "'experts-003.bin', record 4 is damaged"
    assert done.code == 1


@pytest.mark.parametrize(
    ("data", "prompts"),
    [
        (b'{"prompt": "a"}', ["a"]),  # no final newline
        (b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n', ["a", "b"]),
        (b'\n\n  \n{"prompt": "a"}\n\n', ["a"]),
        ('{"prompt": "é 四"}'.encode(), ["é 四"]),
        (b'{"prompt": "\\u00e9\\ud83d\\ude00"}', ["é😀"]),
    ],
)
def test_lines_as_they_come(waste: Any, use: Any, data: bytes, prompts: list[str]) -> None:
    engine = use()
    assert waste("run", "m.waste", "--jsonl", stdin=data).code == 0
    assert [prompt_of(engine, i) for i in range(len(prompts))] == [f"user:{p}" for p in prompts]
    assert len(engine.sessions) == len(prompts)


@pytest.mark.parametrize("data", ["é".encode("latin-1"), '{"prompt": "a"}'.encode("utf-16")])
def test_lines_that_are_not_utf8_are_named_by_byte(waste: Any, use: Any, data: bytes) -> None:
    use()
    done = waste("run", "m.waste", "--jsonl", stdin=data + b"\n")
    assert "byte 0x" in answers(done)[0]["message"]
    assert done.code == 1


def test_from_a_file_or_from_stdin_by_name(waste: Any, use: Any, failed: Any) -> None:
    engine = use()
    (waste.directory / "r.jsonl").write_bytes(lines_of({"prompt": "from file"}))
    assert waste("run", "m.waste", "--jsonl", "-f", "r.jsonl", stdin=b"never read").code == 0
    assert prompt_of(engine, 0) == "user:from file"
    for argv in (("-",), ("-f", "-")):
        assert waste("run", "m.waste", *argv, "--jsonl", stdin=lines_of({"prompt": "piped"})).code == 0
    assert prompt_of(engine, -1) == "user:piped"
    for argv in (("-f", "missing.jsonl"), ("-f", ".")):
        failed(waste("run", "m.waste", "--jsonl", *argv), 3)


@pytest.mark.parametrize("stdin", [b"", b"\n \r\n\n"])
def test_no_request_is_a_usage_error(waste: Any, use: Any, failed: Any, stdin: bytes) -> None:
    use()
    done = waste("run", "m.waste", "--jsonl", stdin=stdin)
    failed(done, 2)
    assert "no requests" in done.err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ((), "no requests"),  # a terminal is never waited for
        (("--no-stdin",), "no requests"),
        (("a prompt",), "--jsonl"),
        (("-p", "a prompt"), "--jsonl"),
        (("--json",), "--json"),
        (("--session", "s.kv"), "--session"),
        (("-f", "a", "-f", "b"), "one file"),
        (("--temp", "-1"), "temperature"),
    ],
)
def test_options_that_do_not_go_with_it(waste: Any, use: Any, failed: Any, argv: tuple[str, ...], named: str) -> None:
    engine = use()
    done = waste("run", "m.waste", *argv, "--jsonl")
    failed(done, 2)
    assert named in done.err
    assert engine.sessions == []


def test_reasoning_can_be_hidden(waste: Any, use: Any) -> None:
    use()
    done = waste("run", "m.waste", "--jsonl", "--reasoning", "hide", "-v", stdin=lines_of({"prompt": "q"}))
    assert answers(done)[0]["reasoning"] is None
    assert "hmm" not in done.out + done.err
    assert "line 1: prompt " in done.err


def test_a_line_too_long_is_passed_by_without_being_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_BYTES", 50)
    monkeypatch.setattr(jsonl, "_SKIPPED", 7)
    stream = io.BytesIO(b"a" * 50 + b"\n" + b"b" * 49 + b"\n" + b"c" * 51 + b"\n" + b"d" * 60 + b"\nlast")
    found = []
    while line := _read_line(stream):
        found.append(line if isinstance(line, bytes) else "too long")
    assert found == ["too long", b"b" * 49 + b"\n", "too long", "too long", b"last"]


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(jsonl.FIELDS) | st.text(max_size=3), inner, max_size=5)
        ),
        max_leaves=8,
    )
)
def test_any_json_is_a_request_or_a_usage_error(value: Any) -> None:
    with contextlib.suppress(UsageError):
        request = _request(_parse(json.dumps(value).encode()), Request())
        assert request.text.strip() or request.messages


class Closing(io.StringIO):
    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_reader_who_leaves_ends_it_quietly(waste: Any, use: Any) -> None:
    engine = use()
    env = waste.environment(lines_of(*({"prompt": "q"} for _ in range(9))), stdout=Closing(after=2))
    done = waste("run", "m.waste", "--jsonl", env=env)
    assert (done.code, done.err, len(engine.sessions)) == (141, "", 3)
    assert engine.closed


def test_ctrl_c_keeps_what_was_answered(waste: Any, use: Any) -> None:
    engine = use()
    make = engine.session

    def session() -> Any:
        if len(engine.sessions) == 2:
            raise KeyboardInterrupt
        return make()

    engine.session = session
    done = waste("run", "m.waste", "--jsonl", stdin=lines_of(*({"prompt": p} for p in "abc")))
    assert (done.code, len(answers(done))) == (130, 2)
    assert "Traceback" not in done.err
    assert engine.closed


def test_a_line_is_answered_before_the_next_one_comes(default_nano: Path) -> None:
    """Through real pipes, as a program would drive it."""
    argv = [sys.executable, "-m", "waste", "run", str(default_nano), "--jsonl", "-n", "8", "--temp", "0", "--raw"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*argv, "--ram", "1GiB"], **pipes, env=clean()) as process:  # type: ignore[call-overload]
        found = []
        for prompt in ("In the beginning", "In the beginning"):
            process.stdin.write(lines_of({"prompt": prompt}))
            process.stdin.flush()
            found.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        assert process.wait(60) == 0
        assert process.stdout.read() == b""
    assert found[0]["text"] == found[1]["text"] != ""
    assert found[0]["expert_misses"] > 0
    assert found[1]["expert_misses"] == 0  # the engine, and so what its cache holds, is one


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_while_it_waits_for_a_line(default_nano: Path, number: int, code: int) -> None:
    argv = [sys.executable, "-m", "waste", "run", str(default_nano), "--jsonl", "-n", "1", "--ram", "1GiB"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes, env=clean()) as process:  # type: ignore[call-overload]
        process.stdin.write(lines_of({"prompt": "Hi"}))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["event"] == "done"
        process.send_signal(number)
        assert process.wait(60) == code
        assert process.stderr.read() == b""


def test_a_closed_stdin_has_no_requests(default_nano: Path) -> None:
    argv = [sys.executable, "-m", "waste", "run", str(default_nano), "--jsonl", "--ram", "1GiB"]
    done = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *argv], capture_output=True, env=clean(), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: no requests")


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WASTE_")}
