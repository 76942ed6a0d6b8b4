"""`waste run` as a script sees it: only the answer on stdout, everything else on stderr, the right exit code."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waste import generate as generation
from waste.cli import target
from waste.engine.engine import Engine
from waste.errors import ResourceError

END, OTHER_END, THINK, UNTHINK, CONTROL, TOOL = range(256, 262)


def ids_of(text: str) -> list[int]:
    return list(text.encode())


ANSWER = [*ids_of("hmm"), UNTHINK, *ids_of("It is 四."), END]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, scripted: Any, tmp_path: Path) -> Callable[..., Any]:
    """Let `Engine.open` give a scripted engine; a directory m.waste stands for its container."""
    (tmp_path / "m.waste").mkdir()

    def install(script: list[int] = ANSWER, **kwargs: Any) -> Any:
        engine = scripted(script, **kwargs)

        def open_engine(path: Path, **options: Any) -> Any:
            engine.opened_with = {"path": Path(path), **options}
            return engine

        monkeypatch.setattr(Engine, "open", staticmethod(open_engine))
        return engine

    return install


def test_stdout_is_the_answer_and_stderr_the_rest(waste: Any, use: Any) -> None:
    engine = use()
    done = waste("run", "m.waste", "What is 2+2?")
    assert (done.code, done.out) == (0, "It is 四.\n")
    reasoning, timing = done.err.splitlines()
    assert reasoning == "hmm"
    for part in ("prompt ", " tok/s", "answer 14 tok", "TTFT ", "experts ", " hit ", " miss", "read "):
        assert part in timing
    assert engine.closed


def test_quiet_is_the_answer_alone(waste: Any, use: Any) -> None:
    use()
    done = waste("run", "m.waste", "Hi", "-q")
    assert (done.out, done.err) == ("It is 四.\n", "")


def test_reasoning_can_be_hidden(waste: Any, use: Any) -> None:
    use()
    assert "hmm" not in waste("run", "m.waste", "Hi", "--reasoning", "hide").err
    assert "hmm" not in waste("run", "m.waste", "Hi", env=waste.environment(WASTE_REASONING="hide")).err


def test_the_last_newline_is_not_doubled(waste: Any, use: Any) -> None:
    use([UNTHINK, *ids_of("line\n"), END])
    assert waste("run", "m.waste", "Hi").out == "line\n"


def test_no_tokens_print_nothing_and_succeed(waste: Any, use: Any) -> None:
    use()
    done = waste("run", "m.waste", "Hi", "-n", "0")
    assert (done.code, done.out, done.err) == (0, "", "")


def prompt_of(engine: Any) -> str:
    return bytes(i for i in engine.sessions[0].evaluated[0] if i < 256).decode()


def test_piped_text_comes_before_the_argument(waste: Any, use: Any) -> None:
    engine = use()
    assert waste("run", "m.waste", "summarise", stdin=b"notes\r\nmore\n\n").code == 0
    assert prompt_of(engine) == "user:notes\r\nmore\n\n\nsummarise"


@pytest.mark.parametrize(
    ("argv", "stdin", "prompt"),
    [
        (("m.waste", "-p", "-x"), None, "-x"),
        (("m.waste", "-p", "a\\nb"), None, "a\\nb"),
        (("m.waste", "-"), b"from stdin\n", "from stdin"),
        (("m.waste",), b"from stdin", "from stdin"),
        (("m.waste", "-f", "q.txt"), None, "a question"),
        (("m.waste", "--", "--help"), None, "--help"),
        (("m.waste", "q", "--no-stdin"), b"ignored", "q"),
    ],
)
def test_where_a_prompt_comes_from(
    waste: Any, use: Any, argv: tuple[str, ...], stdin: bytes | None, prompt: str
) -> None:
    engine = use()
    (waste.directory / "q.txt").write_text("a question\n")
    done = waste("run", *argv, stdin=stdin)
    assert done.code == 0, done.err
    assert prompt_of(engine) == f"user:{prompt}"


def test_system_effort_and_raw(waste: Any, use: Any) -> None:
    engine = use()
    waste("run", "m.waste", "q", "--system", "be brief", "--effort", "low")
    assert prompt_of(engine) == "system:be briefuser:q[low]"
    engine = use([*ids_of("a<think>b"), END])
    done = waste("run", "m.waste", "q <|user|>", "--raw")
    assert engine.sessions[0].evaluated[0] == ids_of("q <|user|>")
    assert done.out == "a<think>b\n"


def test_an_effort_the_template_does_not_know_is_said(waste: Any, use: Any) -> None:
    use()
    assert "changes nothing" not in waste("run", "m.waste", "q", "--effort", "low").err
    use(template="{% for m in messages %}{{ m.content }}{% endfor %}<think>")
    assert "--effort changes nothing" in waste("run", "m.waste", "q", "--effort", "low").err
    assert "--effort" not in waste("run", "m.waste", "q", "-n", "2").err


def test_without_a_template_raw_is_the_hint(waste: Any, use: Any, failed: Any) -> None:
    use(template=None)
    done = waste("run", "m.waste", "q")
    failed(done, 2)
    assert "--raw" in done.err


def test_options_reach_the_engine(waste: Any, use: Any) -> None:
    engine = use()
    env = waste.environment(WASTE_THREADS="3", WASTE_CTX="99")
    waste("run", "m.waste", "q", "--ram", "2GiB", "--backend", "reference", "--ctx", "500", env=env)
    found = engine.opened_with
    assert (found["ram"], found["threads"], found["backend"], found["ctx"]) == (2 << 30, 3, "reference", 500)
    assert found["path"] == Path("m.waste")


def test_json_lines_carry_pieces_and_figures(waste: Any, use: Any) -> None:
    use()
    done = waste("run", "m.waste", "Hi", "--json", "--temp", "0", "--seed", "5")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert {line["schema"] for line in lines} == {"waste.run/1"}
    assert "".join(line["text"] for line in lines if line["event"] == "text") == "It is 四."
    assert "".join(line["text"] for line in lines if line["event"] == "reasoning") == "hmm"
    last = lines[-1]
    assert last["event"] == "done"
    assert (last["finish_reason"], last["ended_by"], last["answered"], last["seed"]) == ("stop", "end", True, 5)
    assert last["completion_tokens"] == len(ANSWER) - 1
    assert last["first_token_s"] == pytest.approx(last["load_s"] + last["ttft_s"])
    assert (last["trunk_s"], last["trunk_read_bytes"], last["trunk_direct"]) == (0.125, 3 << 20, True)
    assert last["prompt_stall_s"] == 0.5 * last["prompt_tokens"]
    for key in ("prompt_s", "ttft_s", "decode_s", "load_s", "prompt_tokens_per_s", "decode_tokens_per_s"):
        assert isinstance(last[key], float)
    for key in ("prompt_tokens", "expert_hits", "expert_misses", "read_bytes", "context_tokens"):
        assert isinstance(last[key], int)


def test_verbose_tells_what_the_first_token_waited_for(waste: Any, use: Any) -> None:
    use()
    assert "first token" not in waste("run", "m.waste", "Hi").err
    err = waste("run", "m.waste", "Hi", "-v").err
    assert "first token after" in err
    assert "trunk 3.00 MiB in 0.12 s (25.2 MB/s), prompt " in err
    use()
    assert "first token" not in waste("run", "m.waste", "Hi", "-v", "-n", "0").err  # there was none


def test_a_limit_inside_reasoning_is_said(waste: Any, use: Any) -> None:
    use(ids_of("hmm ") * 100)
    done = waste("run", "m.waste", "Hi", "-n", "12")
    assert (done.code, done.out) == (0, "")
    assert "no answer: the limit of 12 tokens came first" in done.err
    last = json.loads(waste("run", "m.waste", "Hi", "-n", "12", "--json").out.splitlines()[-1])
    assert (last["answered"], last["finish_reason"]) == (False, "length")


def test_a_single_token_has_no_rate_and_no_plural(waste: Any, use: Any) -> None:
    use()
    done = waste("run", "m.waste", "Hi", "-n", "1")
    assert "the limit of 1 token came first; raise it with -n" in done.err
    assert "| answer 1 tok 0.00 s - tok/s |" in done.err


def test_the_end_of_the_context_is_said(waste: Any, use: Any) -> None:
    use([UNTHINK, *ids_of("x" * 500)], context=40)
    done = waste("run", "m.waste", "short", "-n", "1000")
    assert done.code == 0
    assert "the context of 40 tokens is full" in done.err
    last = json.loads(waste("run", "m.waste", "short", "-n", "1000", "--json").out.splitlines()[-1])
    assert (last["finish_reason"], last["ended_by"]) == ("length", "context")


def test_a_prompt_too_long_fails_with_both_counts(waste: Any, use: Any, failed: Any) -> None:
    engine = use(context=64)
    done = waste("run", "m.waste", stdin=b"the capital of France is Paris. " * 50)
    failed(done, 2)
    assert "1607 tokens" in done.err
    assert "holds 64" in done.err
    assert all(session.evaluated == [] for session in engine.sessions)


def test_stop_strings_are_left_out(waste: Any, use: Any) -> None:
    use([UNTHINK, *ids_of("one STOP two END three"), END])
    assert waste("run", "m.waste", "q", "--stop", "END", "--stop", "STOP").out == "one \n"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--temp", "-1"), "temperature"),
        (("--temp", "nan"), "temperature"),
        (("--top-p", "1.5"), "top_p"),
        (("--min-p", "-0.1"), "min_p"),
        (("--top-k", "-2"), "top_k"),
        (("--repeat-penalty", "0"), "repeat_penalty"),
        (("--seed", "-1"), "seed"),
        (("-n", "-1"), "--max-tokens"),
        (("--temp", "warm"), "--temp"),
        (("--ram", "lots"), "--ram"),
        (("--threads", "0"), "--threads"),
        (("--ctx", "0"), "--ctx"),
        (("--backend", "tpu"), "--backend"),
        (("--effort", "huge"), "--effort"),
        (("--reasoning", "maybe"), "--reasoning"),
        (("--stop", ""), "stop string"),
        (("--temprature", "1"), "--temprature"),
        (("-p", "again"), "twice"),
        (("--raw", "--system", "s"), "--system"),
        (("--raw", "--effort", "low"), "--effort"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_senseless_options_are_usage_errors(
    waste: Any, use: Any, failed: Any, argv: tuple[str, ...], named: str
) -> None:
    use()
    done = waste("run", "m.waste", "q", *argv)
    failed(done, 2)
    assert named in done.err


@pytest.mark.parametrize("stdin", [b"", b"\n \n", "é".encode("latin-1"), "x".encode("utf-16"), b"a\0b"])
def test_prompts_that_are_no_text_are_usage_errors(waste: Any, use: Any, failed: Any, stdin: bytes) -> None:
    engine = use()
    failed(waste("run", "m.waste", stdin=stdin), 2)
    assert engine.sessions == []


def test_an_empty_prompt_argument_is_a_usage_error(waste: Any, use: Any, failed: Any) -> None:
    use()
    failed(waste("run", "m.waste", "-p", ""), 2)
    failed(waste("run", "m.waste", ""), 2)


def test_a_terminal_without_a_prompt_is_never_waited_for(waste: Any, use: Any, failed: Any) -> None:
    use()
    failed(waste("run", "m.waste"), 2)
    failed(waste("run"), 2)


def test_a_missing_model_is_said_before_the_prompt_is_read(waste: Any, failed: Any) -> None:
    done = waste("run", "missing.waste")
    failed(done, 3)
    assert "no such container: 'missing.waste'" in done.err
    done = waste("run", "zai-org/GLM-5.3-Flash")
    failed(done, 3)
    assert "waste convert zai-org/GLM-5.3-Flash" in done.err


def test_a_checkpoint_is_not_run_but_told_how_to_convert(waste: Any, failed: Any) -> None:
    (waste.directory / "ckpt").mkdir()
    (waste.directory / "ckpt/config.json").write_text("{}")
    done = waste("run", "ckpt", "q")
    failed(done, 3)
    assert "hint: waste convert ckpt ckpt.waste" in done.err


def test_one_word_runs_the_bundled_example(waste: Any, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = use()
    asked: list[Path] = []

    def bundled(source: Path, cache: Path, version: str, on_event: object) -> Path:
        asked.append(cache)
        return waste.directory / "m.waste"

    monkeypatch.setattr(target, "bundled_container", bundled)
    done = waste("run", "In the beginning", env=waste.environment(XDG_CACHE_HOME="/some/cache"))
    assert (done.code, done.out) == (0, "It is 四.\n")
    assert asked == [Path("/some/cache/waste")]
    assert "the bundled example nano-glm answers" in done.err
    assert prompt_of(engine) == "user:In the beginning"
    engine = use()
    assert waste("run", stdin=b"piped").code == 0
    assert prompt_of(engine) == "user:piped"


def test_failures_of_the_engine_keep_their_exit_code(
    waste: Any, use: Any, failed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use()

    def refuse(path: Path, **options: Any) -> Any:
        raise ResourceError("too little RAM", hint="--ram 8GiB")

    monkeypatch.setattr(Engine, "open", staticmethod(refuse))
    done = waste("run", "m.waste", "q")
    failed(done, 4)
    assert done.err == "error: too little RAM\nhint: --ram 8GiB\n"


def test_sampling_values_come_from_flag_then_setting_then_publisher(
    waste: Any, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use()
    seen: list[Any] = []
    original = generation.generate

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["sampling"])
        return original(*args, **kwargs)

    monkeypatch.setattr(generation, "generate", spy)
    published = {"temperature": 0.25, "top_p": 0.5}
    monkeypatch.setattr(generation, "published_sampling", lambda engine: published)
    waste("run", "m.waste", "q", "--seed", "1")
    assert (seen[-1].temperature, seen[-1].top_p, seen[-1].top_k, seen[-1].seed) == (0.25, 0.5, 0, 1)
    waste("run", "m.waste", "q", "--temp", "0", env=waste.environment(WASTE_TOP_P="0.75"))
    assert (seen[-1].temperature, seen[-1].top_p) == (0, 0.75)
    published.clear()
    waste("run", "m.waste", "q")
    assert (seen[-1].temperature, seen[-1].top_p) == (0.7, 0.95)


def test_the_real_thing_says_the_same_every_time(waste: Any, default_nano: Path) -> None:
    argv = ("run", str(default_nano), "Who are you?", "-n", "48", "--ram", "1GiB")
    first = waste(*argv, "--temp", "0", "--json")
    assert first.code == 0, first.err
    lines = [json.loads(line) for line in first.out.splitlines()]
    done = lines[-1]
    text = "".join(line["text"] for line in lines if line["event"] == "text")
    assert text
    assert done["expert_hits"] + done["expert_misses"] > 0
    assert done["read_bytes"] >= done["expert_misses"] * 32768  # some were read before anybody asked
    assert done["read_bytes"] % 32768 == 0
    assert waste(*argv, "--top-k", "1", "--threads", "1", "-q").out == text + "\n"
    seeded = [waste(*argv, "--seed", seed, "-q", "--reasoning", "hide").out for seed in ("1", "1", "2")]
    assert seeded[0] == seeded[1]


class Broken(io.StringIO):
    """A stdout that fails after some characters."""

    def __init__(self, error: OSError, after: int = 0) -> None:
        super().__init__()
        self._error, self._left = error, after

    def write(self, text: str) -> int:
        self._left -= len(text)
        if self._left < 0:
            raise self._error
        return super().write(text)


def test_a_reader_who_leaves_ends_the_run_quietly(waste: Any, use: Any) -> None:
    engine = use([UNTHINK, *ids_of("x" * 10_000)], context=20_000)
    env = waste.environment(stdout=Broken(BrokenPipeError(32, "Broken pipe"), after=5))
    done = waste("run", "m.waste", "q", "-n", "10000", env=env)
    assert done.code == 141
    assert done.err == ""
    assert len(engine.sessions[0].evaluated) < 10  # and at once
    assert engine.closed


def test_a_full_disk_under_stdout_is_an_error(waste: Any, use: Any, failed: Any) -> None:
    use([UNTHINK, *ids_of("xyz"), END])
    done = waste("run", "m.waste", "q", env=waste.environment(stdout=Broken(OSError(28, "No space left on device"))))
    assert done.code == 4
    assert done.err == "error: cannot write to standard output: No space left on device\n"


def test_ctrl_c_ends_with_130_and_keeps_what_was_written(waste: Any, use: Any) -> None:
    engine = use([UNTHINK, *ids_of("abcdef")])
    evaluate = type(engine.session()).eval

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.evaluated) == 4:
            raise KeyboardInterrupt
        return evaluate(self, *args, **kwargs)

    engine.session = lambda: session
    session = type("Interrupted", (type(engine.sessions[0]),), {"eval": interrupt})(engine._script)
    done = waste("run", "m.waste", "q")
    assert (done.code, done.out) == (130, "abc")
    assert "Traceback" not in done.err
    assert engine.closed


def test_a_bug_is_reported_as_one(waste: Any, use: Any, monkeypatch: pytest.MonkeyPatch, failed: Any) -> None:
    engine = use()
    engine.session = lambda: 1 / 0
    done = waste("run", "m.waste", "q")
    failed(done, 70)
    assert "bug in waste, please report: ZeroDivisionError: division by zero (test_run.py:" in done.err
    done = waste("run", "m.waste", "q", env=waste.environment(WASTE_DEBUG="1"))
    assert "Traceback" in done.err
    assert done.code == 70


def test_at_a_terminal_reasoning_is_dim_unless_colour_is_off(waste: Any, use: Any) -> None:
    use()
    env = waste.environment(stderr_terminal=True)
    assert "\x1b[2mh\x1b[0m" in waste("run", "m.waste", "q", env=env).err
    for env, argv in (
        (waste.environment(stderr_terminal=True, NO_COLOR="1"), ()),
        (waste.environment(stderr_terminal=True, TERM="dumb"), ()),
        (waste.environment(stderr_terminal=True), ("--no-color",)),
        (waste.environment(stdout_terminal=True), ()),  # the other stream's terminal
    ):
        assert "\x1b[2m" not in waste("run", "m.waste", "q", *argv, env=env).err
