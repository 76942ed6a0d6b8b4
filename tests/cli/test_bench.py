"""`waste bench` as a script sees it: rows on stdout, the rest on stderr, one line and a code for what goes wrong."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waste.bench.measure import Measurement
from waste.bench.row import Row
from waste.bench.stored import from_text
from waste.bench.trace import Chunk, Mark, Steps, read_trace
from waste.cli import bench as command
from waste.cli import target
from waste.engine.session import Session

RUN = ("-p", "4", "-n", "3", "-r", "2", "--warm-up", "4", "--no-learn", "--threads", "1")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waste.bench.measure.memory_rate", lambda threads: 1e10)
    monkeypatch.setattr("waste.bench.measure.DRIVE_S", 0.01)


@pytest.fixture
def bench(waste: Any, default_nano: Path) -> Callable[..., Any]:
    """`bench(*options)`: measures nano-glm, quickly."""
    return lambda *options, **kwargs: waste("bench", str(default_nano), *RUN, *options, **kwargs)


def rows_in(text: str) -> list[Row]:
    return from_text(text, "stdout")


def test_every_format_carries_the_same_rows(bench: Any, waste: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One measurement, printed five times: equal values in csv, json and jsonl, and their digits in the tables."""
    done = bench("-o", "jsonl", "--vary", "policy=lru,lfu")
    assert (done.code, done.err) == (0, "")
    rows = rows_in(done.out)
    assert [(row.test, row.arm) for row in rows] == [
        (test, arm) for test in ("prefill", "decode") for arm in ("policy=lru", "policy=lfu")
    ]
    monkeypatch.setattr("waste.cli.measured._rows", lambda *_: (rows, None))
    assert rows_in(bench("-o", "csv").out) == rows
    assert bench("--json").out == bench("--json", "-o", "json").out == bench("-o", "json").out
    document = json.loads(bench("-o", "json").out)
    assert document["schema"] == "waste.bench/1"
    assert [Row.from_dict(row, "x") for row in document["rows"]] == rows
    markdown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in bench("-o", "md").out.splitlines()
        if line.startswith("|") and "---" not in line
    ]
    table = [line.split("\t") for line in bench("-o", "table").out.splitlines()]
    assert [[cell.strip() for cell in line] for line in table] == markdown
    lines = [line for line in table if line[0] == "policy=lfu" and line[1] == "decode 3 at 4"]
    row = rows[-1]
    assert float(lines[0][2]) == pytest.approx(row.tokens_per_s, rel=0.01)
    assert [float(cell) for cell in lines[1][2:]] == pytest.approx(
        [getattr(row, f"{name}_ms") for name in "token trunk attention experts router sampling wait python".split()],
        rel=0.01,
        abs=6e-4,
    )
    assert float(lines[2][3]) == pytest.approx(row.ram_hits, rel=0.01)


def test_at_a_terminal_tables_are_aligned_and_progress_is_elsewhere(bench: Any, waste: Any) -> None:
    env = waste.environment(stdout_terminal=True, stderr_terminal=True, NO_COLOR="1")
    done = bench(env=env)
    assert done.code == 0
    for title in ("Speed", "Milliseconds a token", "Experts a token", "Measured with"):
        assert f"{title}\n  " in done.out
    assert "\t" not in done.out and "bench " in done.err and "bench " not in done.out


def test_settings_reach_the_rows(bench: Any) -> None:
    options = (
        "--ram",
        "1GiB",
        "--vram",
        "1MiB",
        "--policy",
        "lru",
        "--lookahead",
        "off",
        "--no-fill",
        "--drive",
        "1GB/s",
        "--cold",
    )
    done = bench(*options, "--depth", "0,2", "--isa", "portable", "-o", "jsonl")
    rows = rows_in(done.out)
    assert [(row.depth_tokens, row.test) for row in rows] == [(d, t) for d in (0, 2) for t in ("prefill", "decode")]
    for row in rows:
        found = (row.ram_asked_bytes, row.policy, row.lookahead, row.fill, row.learn, row.cold, row.threads, row.isa)
        assert found == (1 << 30, "lru", 0, False, False, True, 1, "portable")
        assert row.simulated_drive_bytes_per_s == 1e9
        assert row.vram_asked_bytes == 1 << 20 and 0 < row.vram_bytes <= 1 << 20
        assert (row.prompt_tokens, row.repeats, row.warm_up_tokens) == (4, 2, 4)
        assert row.tokens == (4 if row.test == "prefill" else 3)
        assert row.misses > 0 or row.test == "decode"


def test_the_bundled_example_is_measured_without_a_model(
    waste: Any, default_nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "bundled_container", lambda *_: default_nano)
    done = waste("bench", *RUN, "-o", "jsonl")
    assert done.code == 0
    assert len(rows_in(done.out)) == 2
    assert done.err == "no MODEL given: the bundled example nano-glm is measured\n"


def test_quiet_and_verbose(bench: Any) -> None:
    assert bench("-q", "-o", "csv").err == ""
    assert "decode: kda " in bench("-v", "-o", "csv").err


def test_a_place_where_nothing_is_learned_is_a_detail(waste: Any, default_nano: Path) -> None:
    place = waste.directory / "m.waste"
    shutil.copytree(default_nano, place)
    (place / "usage.json").unlink(missing_ok=True)
    (place / "usage.json").mkdir()
    options = ("bench", str(place), "-p", "4", "-n", "3", "-r", "1", "--warm-up", "4", "--learn", "-o", "csv")
    assert waste(*options).err == ""
    done = waste(*options, "-v", "--vary", "policy=lru,lfu")
    assert done.code == 0 and done.err.count("usage is not learned: ") == 1


def test_without_repeats_a_slow_model_is_measured_once(
    waste: Any, default_nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PATIENCE_S", 0.0)
    few = ("-p", "4", "-n", "3", "--warm-up", "4", "--no-learn", "-o", "jsonl")
    done = waste("bench", str(default_nano), *few)
    assert [row.repeats for row in rows_in(done.out)] == [1, 1]
    assert done.err == "1 of 3 repeats began within a minute; -r 3 takes them all\n"


def test_interrupted_it_prints_what_it_has(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Measurement._round

    def second_time_interrupted(self: Measurement, turn: int) -> None:
        if turn == 1:
            raise KeyboardInterrupt
        run(self, turn)

    monkeypatch.setattr(Measurement, "_round", second_time_interrupted)
    done = bench("-o", "jsonl")
    assert done.code == 130
    assert [(row.test, row.repeats) for row in rows_in(done.out)] == [("prefill", 1), ("decode", 1)]


@pytest.mark.parametrize("form", ["table", "md", "csv", "json", "jsonl"])
def test_interrupted_at_once_it_prints_nothing_wrong(bench: Any, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "eval", interrupted)
    done = bench("-o", form)
    assert done.code == 130
    assert json.loads(done.out)["rows"] == [] if form == "json" else done.out.strip() == ""


def test_a_closed_pipe_ends_quietly(bench: Any, waste: Any) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    done = bench("-o", "csv", env=waste.environment(stdout=Closed()))
    assert done.code == 141 and "error" not in done.err


# -- comparison


def slower(row: Row, times: float) -> dict[str, Any]:
    """The row as if everything had gone so many times as fast."""
    rates = {name: times * getattr(row, name) for name in ("tokens_per_s", "tokens_per_s_p10", "tokens_per_s_p90")}
    return {**row.as_dict(), **rates}


@pytest.fixture
def old(bench: Any, waste: Any) -> Callable[[float], str]:
    """`old(times)`: a file of rows as if that had been so many times as fast as it is now."""
    rows = rows_in(bench("-o", "jsonl").out)

    def write(times: float) -> str:
        path = waste.directory / f"old-{times}.jsonl"
        path.write_text("".join(json.dumps(slower(row, times)) + "\n" for row in rows))
        return str(path)

    return write


def test_a_regression_is_shown_and_fails_only_if_asked(bench: Any, old: Any) -> None:
    much_faster = old(1000.0)
    done = bench("--compare", much_faster)
    assert done.code == 0 and done.out.count("slower") == 2
    done = bench("--compare", much_faster, "--fail-under", "0.9", "-o", "json")
    assert done.code == 1
    compared = json.loads(done.out)["compared"]
    assert [(each["test"], each["verdict"]) for each in compared] == [("prefill", "slower"), ("decode", "slower")]
    assert all(each["ratio"] == pytest.approx(each["tokens_per_s"] / each["old_tokens_per_s"]) for each in compared)
    assert done.err.startswith("error: 2 tests are slower than 0.9 of before: ")
    done = bench("--compare", old(0.001), "--fail-under", "0.9", "-o", "csv")
    assert done.code == 0 and done.err.count("faster") == 2
    assert len(rows_in(done.out)) == 2


def test_nothing_comparable_is_said_with_what_differs(bench: Any, old: Any) -> None:
    options = ("--compare", old(1.0), "--policy", "lru", "-n", "2", "-o", "csv")
    done = bench(*options)
    assert done.code == 0
    said = "was measured with these settings, on this model: policy was adaptive, is lru, tokens was 3, is 2\n"
    assert done.err.endswith(said)
    assert bench(*options, "--fail-under", "0.5").code == 1


def test_one_repeat_passes_no_judgement(bench: Any, old: Any, waste: Any, failed: Any) -> None:
    """A check that cannot fail must not look like one that was passed."""
    path = waste.directory / old(1.0)
    done = bench("--compare", str(path), "--fail-under", "0.5", "-r", "1")
    failed(done, 2)
    rows = [json.loads(line) | {"repeats": 1} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = bench("--compare", str(path), "--fail-under", "0.5", "-o", "csv")
    assert done.code == 1 and "2 tests are beyond judgement: prefill 4 has 1 repeats of before" in done.err


# -- traces and replays


def test_a_trace_has_the_sessions_of_the_first_arm(bench: Any, waste: Any) -> None:
    done = bench("--trace", "t.trace", "--vary", "policy=lru,lfu", "--depth", "2", "-o", "csv")
    assert done.code == 0, done.err
    entries = read_trace(waste.directory / "t.trace").entries
    kinds = [(type(entry), 0 if isinstance(entry, Mark) else len(entry.ids)) for entry in entries]
    assert kinds == [(Mark, 0), (Chunk, 2), (Chunk, 4), (Steps, 3)] * 2


def test_a_replay_is_a_table_of_sizes_and_policies(bench: Any, waste: Any) -> None:
    bench("--trace", "t.trace", "-n", "8", "-o", "csv")
    done = waste("bench", "--replay", "t.trace", "--slots", "10%,50%")
    assert (done.code, done.err) == (0, "")
    head, *lines = (line.split("\t") for line in done.out.splitlines())
    assert head[:2] == ["slots", "resident"] and head[-1] == "optimum"
    assert [line[0] for line in lines] == ["22", "112"]
    for line in lines:
        hits = [float(cell.removesuffix(" %")) for cell in line[2:]]
        assert hits[-1] == max(hits) and all(0 <= each <= 100 for each in hits)
    document = json.loads(waste("bench", "--replay", "t.trace", "--slots", "40", "-o", "json").out)
    assert document["schema"] == "waste.replay/1"
    assert {row["slots"] for row in document["rows"]} == {40}
    names, *values = waste("bench", "--replay", "t.trace", "--slots", "40", "-o", "csv").out.splitlines()
    assert names.split(",") == list(document["rows"][0]) and len(values) == len(document["rows"])
    assert waste("bench", "--replay", "t.trace", "-o", "md").out.startswith("**Hits of ")


def test_a_plot_is_drawn(bench: Any, waste: Any) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    bench("--trace", "t.trace", "-o", "csv")
    done = waste("bench", "--replay", "t.trace", "--slots", "10%,50%", "--plot", "hits.svg")
    assert (done.code, done.err) == (0, "the curve is in 'hits.svg'\n")
    assert b"<svg" in (waste.directory / "hits.svg").read_bytes()
    done = waste("bench", "--replay", "t.trace", "--slots", "10%", "--plot", "no/such/hits.svg")
    assert done.code == 4 and done.out.count("\n") == 2  # the table is not lost


# -- what goes wrong


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("-p", "x"), 2, "--prompt-tokens is 'x'"),
        (("-p", "64,,5"), 2, "--prompt-tokens"),
        (("-p", "-5"), 2, "--prompt-tokens"),
        (("-p", "²"), 2, "--prompt-tokens"),
        (("-p", "99999999999999999999"), 2, "--prompt-tokens"),
        (("--depth", "1.5"), 2, "--depth is '1.5'"),
        (("-n", "-1"), 2, "'-n'"),
        (("-r", "0"), 2, "'-r'"),
        (("-p", "0", "-n", "0"), 2, "nothing to measure"),
        (("--vary", "ram"), 2, "no values"),
        (("--vary", "rma=1GiB,2GiB"), 2, "no setting 'rma'"),
        (("--vary", "ram=1GiB,nan"), 2, "'nan' is not a size"),
        (("--vary", "policy=lru,lru"), 2, "names lru twice"),
        (("-o", "yaml"), 2, "--output is 'yaml'"),
        (("--drive", "fast"), 2, "--drive 'fast' is not a rate"),
        (("--isa", "sse9"), 2, "--isa is 'sse9'"),
        (("--policy", "fifo"), 2, "--policy is 'fifo'"),
        (("--ctx", "6"), 2, "context of 7 tokens, --ctx is 6"),
        (("--depth", "5000"), 2, "the model goes to 4096"),
        (("--warm-up", "5000"), 2, "a context of 5000 tokens, the model goes to 4096"),
        (("--ram", "1MiB"), 4, "too small"),
        (("--vary", "ram=1MiB,2MiB"), 4, "too small"),
        (("--compare", "missing.jsonl"), 3, "'missing.jsonl'"),
        (("--compare", "."), 3, "'.'"),
        (("--compare", "empty"), 3, "no rows"),
        (("--compare", "garbage"), 3, "garbage"),
        (("--compare", "other"), 3, "schema"),
        (("--compare", "standing"), 3, "has 0 tokens_per_s"),
        (("--fail-under", "0.9"), 2, "--fail-under needs --compare"),
        (("--compare", "empty", "--fail-under", "nan"), 2, "--fail-under is nan"),
        (("--slots", "5%"), 2, "--slots needs --replay"),
        (("--plot", "x.svg"), 2, "--plot needs --replay"),
        (("--trace", "no/such/place"), 4, "no/such/place"),
        (("--replay", "garbage"), 2, "MODEL has no place"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    bench: Any, waste: Any, failed: Any, options: tuple[str, ...], code: int, said: str
) -> None:
    (waste.directory / "empty").touch()
    (waste.directory / "garbage").write_bytes(b"\x00\xff{garbage")
    (waste.directory / "other").write_text('{"schema": "else/1"}\n')
    if "standing" in options:
        (row, *_) = rows_in(bench("-o", "jsonl").out)
        (waste.directory / "standing").write_text(json.dumps(slower(row, 0.0)))
    done = bench(*options)
    failed(done, code)
    assert said in done.err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("nowhere.waste",), 3, "no such container: 'nowhere.waste'"),
        (("file.waste",), 3, "directory"),
        (("--replay", "missing"), 3, "'missing'"),
        (("--replay", "file.waste"), 3, "not a routing trace"),
        (("--replay", "file.waste", "--vary", "ram=1,2"), 2, "--vary has no place"),
        (("--replay", "file.waste", "-p", "64"), 2, "--prompt-tokens has no place"),
        (("--replay", "file.waste", "--cold"), 2, "--cold has no place"),
        (("--replay", "file.waste", "--ram", "1GiB"), 2, "--ram has no place"),
        (("--replay", "file.waste", "--no-learn"), 2, "--learn has no place"),
        (("--replay", "file.waste", "--fail-under", "0.9"), 2, "--fail-under has no place"),
        (("--replay", "missing", "--plot", "x.gif"), 2, "neither .svg nor .png"),
        (("--json", "-o", "csv"), 2, "--json and --output csv"),
        (("--vary", "lookahead=0"), 2, "--vary lookahead is '0', expected auto, off, or a whole number of 1 or more"),
        (("--replay", "file.waste", "--compare", "x"), 2, "--compare has no place"),
        (("--replay", "file.waste", "--slots", "0%"), 2, "above 0%"),
        (("--replay", "file.waste", "--slots", "101%"), 2, "up to 100%"),
        (("--replay", "file.waste", "--slots", "5%,3"), 2, "--slots is '5%,3'"),
        (("--replay", "file.waste", "--slots", "-3"), 2, "--slots"),
        (("--replay", "file.waste", "--slots", "."), 2, "--slots"),
    ],
)
def test_without_a_model_too(waste: Any, failed: Any, options: tuple[str, ...], code: int, said: str) -> None:
    (waste.directory / "file.waste").write_text("text")
    done = waste("bench", *options)
    failed(done, code)
    assert said in done.err


def test_help_opens_with_examples(waste: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert waste("bench", "-h").code == 0
    assert capsys.readouterr().out.split("\n\n")[1].strip().startswith("waste bench glm.waste\n")
