"""`waste run --session FILE`: the same answer with less to evaluate, and a file that is never half changed."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from waste.engine.engine import Engine
from waste.engine.session import Session
from waste.io.replace import Replacement

PROMPT = "In the beginning the"
COMMON = ("--temp", "0", "-n", "12", "--ram", "1GiB", "--raw")


@pytest.fixture
def ask(waste: Any, default_nano: Path) -> Any:
    """ask(prompt, *options) -> (result, the answer, figures)."""

    def run(prompt: str, *options: str, env: Any = None) -> tuple[Any, str, dict[str, Any]]:
        done = waste("run", str(default_nano), "-p", prompt, *COMMON, "--json", *options, env=env)
        lines = [json.loads(line) for line in done.out.splitlines()]
        return done, "".join(line.get("text", "") for line in lines), lines[-1] if lines else {}

    return run


def test_the_same_prompt_again_and_one_that_goes_on(waste: Any, ask: Any) -> None:
    _, plain, figures = ask(PROMPT)
    tokens = figures["prompt_tokens"]
    assert figures["reused_tokens"] == 0
    for reused in (0, tokens, tokens):  # of a new file, then of the one before: nothing of the prompt is evaluated
        done, answer, figures = ask(PROMPT, "--session", "s.kv")
        assert (done.code, answer, figures["reused_tokens"]) == (0, plain, reused)
        assert "could not be reused" not in done.err
        assert ("reused" in done.err) == (reused > 0)
    assert os.listdir(waste.directory) == ["s.kv"]

    longer = PROMPT + plain + " and so on"
    _, expected, figures = ask(longer)
    done, answer, figures = ask(longer, "--session", "s.kv", "--ctx", "500", "--threads", "1")
    assert answer == expected
    assert tokens <= figures["reused_tokens"] < figures["prompt_tokens"]
    assert f" tok ({figures['reused_tokens']} reused) " in done.err


def test_after_the_answer_nothing_of_it_is_evaluated_again(waste: Any, default_nano: Path) -> None:
    with Engine.open(default_nano, ram="1GiB") as engine:
        from waste.generate import Prompt, generate

        ids = engine.tokenizer.encode(PROMPT)
        made = generate(engine, Prompt(ids), max_tokens=12).ids
        waste("run", str(default_nano), "-p", PROMPT, *COMMON, "--session", "s.kv")
        # The last token drawn is not evaluated: no logits after it were wanted.
        assert engine.restore("s.kv", [*ids, *made]).position == len(ids) + 11
        assert engine.restore("s.kv", [*ids, made[0]]).position == len(ids)
        assert engine.restore("s.kv", ids[:-1]).position == 0


def test_another_prompt_starts_anew_and_says_so(waste: Any, ask: Any) -> None:
    ask(PROMPT, "--session", "s.kv")
    _, expected, _ = ask("In the end")
    done, answer, figures = ask("In the end", "--session", "s.kv")
    assert (answer, figures["reused_tokens"]) == (expected, 0)
    found = re.search(
        r"^session: (\d+) of (\d+) saved tokens could not be reused, as only the first (\d+) ", done.err, re.M
    )
    assert found
    lost, saved, common = map(int, found.groups())
    assert lost == saved > figures["prompt_tokens"] > common > 0
    _, _, figures = ask("In the end", "--session", "s.kv")  # and it is the one that is kept now
    assert figures["reused_tokens"] == figures["prompt_tokens"]


def test_a_file_that_is_no_session_of_this_model_is_refused_and_kept(
    waste: Any, default_nano: Path, exact_nano: Path, failed: Any
) -> None:
    argv = ("-p", PROMPT, *COMMON, "--session", "s.kv")
    path = waste.directory / "s.kv"
    assert waste("run", str(exact_nano), *argv).code == 0
    for data, named in (
        (path.read_bytes(), "another model"),
        (b"my notes\n", "not a session"),
        (b"", "not a session"),
        (path.read_bytes()[:-1], "damaged"),
    ):
        path.write_bytes(data)
        model = exact_nano if named == "damaged" else default_nano
        done = waste("run", str(model), *argv)
        failed(done, 3)
        assert named in done.err
        assert path.read_bytes() == data
    assert os.listdir(waste.directory) == ["s.kv"]


@pytest.mark.parametrize(
    ("name", "code"), [("", 2), (".", 3), ("/dev/null", 3), ("missing/s.kv", 4), ("/proc/s.kv", 4)]
)
def test_a_place_that_cannot_hold_a_session_is_said_before_the_prompt_is_evaluated(
    waste: Any, default_nano: Path, failed: Any, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    monkeypatch.setattr(Session, "eval", lambda *_, **__: pytest.fail("evaluated"))
    failed(waste("run", str(default_nano), "-p", PROMPT, *COMMON, "--session", name), code)


def test_a_session_in_use_is_not_written_twice(waste: Any, default_nano: Path, failed: Any) -> None:
    with Replacement(waste.directory / "s.kv"):
        done = waste("run", str(default_nano), "-p", PROMPT, *COMMON, "--session", "s.kv")
    failed(done, 4)
    assert "another process" in done.err


def test_a_context_too_small_is_refused_with_the_number_needed(waste: Any, ask: Any, failed: Any) -> None:
    ask(PROMPT, "--session", "s.kv")
    _, _, figures = ask(PROMPT)
    tokens = figures["prompt_tokens"]
    for context in (tokens, tokens - 1):  # the second is also too small for what was saved: one answer says it all
        done, _, _ = ask(PROMPT, "--session", "s.kv", "--ctx", str(context))
        failed(done, 2)
        assert f"the prompt has {tokens} tokens, the context holds {context}" in done.err
        assert f"hint: --ctx {tokens + 1 + 256}\n" in done.err


def test_a_full_disk_costs_the_session_but_not_the_answer(
    waste: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plain, _ = ask(PROMPT)
    ask("Something else", "--session", "s.kv")
    before = (waste.directory / "s.kv").read_bytes()

    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    done, answer, figures = ask(PROMPT, "--session", "s.kv")
    assert (done.code, answer, figures["event"]) == (4, plain, "done")
    assert "error: no space left while writing" in done.err
    assert (waste.directory / "s.kv").read_bytes() == before
    assert os.listdir(waste.directory) == ["s.kv"]


def test_no_tokens_leave_the_file_alone(waste: Any, ask: Any) -> None:
    ask(PROMPT, "--session", "s.kv", "-n", "0")
    assert os.listdir(waste.directory) == []
    ask(PROMPT, "--session", "s.kv")
    before = (waste.directory / "s.kv").read_bytes()
    assert ask(PROMPT, "--session", "s.kv", "-n", "0")[0].code == 0
    assert (waste.directory / "s.kv").read_bytes() == before


@pytest.mark.parametrize("evaluations", [1, 4])  # in the prompt, in the answer
def test_ctrl_c_leaves_the_old_file(waste: Any, ask: Any, monkeypatch: pytest.MonkeyPatch, evaluations: int) -> None:
    ask("Something else", "--session", "s.kv")
    before = (waste.directory / "s.kv").read_bytes()
    real, count = Session.eval, 0

    def interrupted(self: Session, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == evaluations:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "eval", interrupted)
        assert ask(PROMPT, "--session", "s.kv")[0].code == 130
    assert (waste.directory / "s.kv").read_bytes() == before
    assert os.listdir(waste.directory) == ["s.kv"]


def test_a_kill_at_any_moment_leaves_a_whole_file(waste: Any, ask: Any, default_nano: Path) -> None:
    ask(PROMPT, "--session", "s.kv")
    path = waste.directory / "s.kv"
    before = path.read_bytes()
    argv = ["run", str(default_nano), "-p", "Once more", *COMMON, "--session", "s.kv"]
    for calls in (1, 5, 40):  # of pwrite; the last is never reached in the first checkpoint
        code = (
            "import os, sys\nreal, left = os.pwrite, [int(sys.argv[1])]\n"
            "def pwrite(*a):\n    left[0] -= 1\n    return real(*a) if left[0] else os.kill(os.getpid(), 9)\n"
            "os.pwrite = pwrite\nfrom waste.cli.app import main\nsys.exit(main(sys.argv[2:]))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(calls), *argv], capture_output=True, check=False)
        assert done.returncode == -9
        assert path.read_bytes() == before
    _, _, figures = ask(PROMPT, "--session", "s.kv")
    assert figures["reused_tokens"] == figures["prompt_tokens"]
    assert os.listdir(waste.directory) == ["s.kv"]


def test_a_chat_prompt_is_kept_too(waste: Any, default_nano: Path) -> None:
    argv = ("run", str(default_nano), "Who are you?", "-n", "4", "--temp", "0", "--ram", "1GiB", "--session", "s.kv")
    first = waste(*argv)
    second = waste(*argv, "-v")
    assert first.code == second.code == 0
    assert first.out == second.out
    assert " reused) " in second.err
    assert "session of " in second.err
