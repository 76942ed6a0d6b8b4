"""A `waste` command that runs in this process, in a world of the test's own making."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import pytest

from waste.chat import ChatFormat
from waste.cli.app import main
from waste.cli.environment import Environment
from waste.container.load import LoadReport
from waste.engine.session import SessionStats
from waste.tokenizer import AddedToken, Tokenizer, TokenizerSpec

END, OTHER_END, THINK, UNTHINK, CONTROL, TOOL = range(256, 262)
ROWS = 270  # of the vocabulary: the last ones stand for no token
TEMPLATE = (
    "{% for m in messages %}<|ctl|>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and a few added tokens; ids 262 and up are holes."""
    added = (
        AddedToken(END, "<|end|>", special=True),
        AddedToken(OTHER_END, "<|user|>", special=True),
        AddedToken(THINK, "<think>"),
        AddedToken(UNTHINK, "</think>"),
        AddedToken(CONTROL, "<|ctl|>", special=True),
        AddedToken(TOOL, "<tool>"),
    )
    return Tokenizer(TokenizerSpec({bytes([i]): i for i in range(256)}, (r"(?s).+",), added, {}))


class ScriptedSession:
    """Answers with the ids of a script, whatever it is asked; repeats the last one when the script is over."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self.position = 0  # a test may set it: that many tokens of any prompt count as held
        self.evaluated: list[list[int]] = []

    @property
    def stats(self) -> SessionStats:
        return SessionStats(7 * self.position, 2 * self.position, 1000 * self.position, 0.5 * self.position)

    def sync(self, ids: Sequence[int], *, on_event: object = None) -> Any:
        return self.eval(ids[self.position :])

    def eval(self, ids: Sequence[int], *, all_logits: bool = False, on_event: object = None) -> Any:
        self.evaluated.append(list(ids))
        self.position += len(ids)
        step = min(len(self.evaluated), len(self._script)) - 1
        logits = np.ones(ROWS, dtype=np.float32)
        # Far above the others: with 9 against 1, sampling left the script once in some hundred tokens.
        logits[self._script[step]] = 90
        logits[262:] = 100  # untrained rows may hold anything
        return logits


class ScriptedEngine:
    """What `generate` and `waste run` need of an engine, around one scripted session."""

    def __init__(self, script: Sequence[int] = (), *, context: int = 1000, template: str | None = TEMPLATE) -> None:
        self.tokenizer = byte_tokenizer()
        self.chat = ChatFormat(template, ("<think>", "</think>"), True, {})
        self.config = SimpleNamespace(vocab_size=ROWS, max_position_embeddings=5000)
        self.context = context
        self.stop_ids = frozenset({END, OTHER_END})
        self.manifest = SimpleNamespace(files=())
        self.load_s = 0.25
        self.load = LoadReport(3 << 20, 0.125, 0.12, True)
        self.budget = SimpleNamespace(slots=5, slot_bytes=4096, ram_bytes=1 << 20)
        self.sessions: list[ScriptedSession] = []
        self.opened_with: dict[str, Any] = {}
        self.closed = False
        self._script = script

    def session(self) -> ScriptedSession:
        self.sessions.append(ScriptedSession(self._script))
        return self.sessions[-1]

    not_learned = None

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


@pytest.fixture
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


class Stream(io.StringIO):
    """Text somebody reads, at a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Input(io.BytesIO):
    """Bytes somebody sends. A terminal's are never read by a test: reading them is an error."""

    def __init__(self, data: bytes | None) -> None:
        super().__init__(data or b"")
        self._terminal = data is None

    def isatty(self) -> bool:
        return self._terminal

    def read(self, size: int | None = -1, /) -> bytes:
        assert not self._terminal, "the command waits for a terminal"
        return super().read(size)


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str


class World:
    """Builds environments and runs commands in them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Containers are shared between tests: what one run learns would change what the next one reads.
        self.variables = {"HOME": str(directory / "home"), "TERM": "xterm", "WASTE_LEARN": "0"}

    def environment(
        self,
        stdin: bytes | None = None,
        *,
        stdout: TextIO | None = None,
        stdout_terminal: bool = False,
        stderr_terminal: bool = False,
        **variables: str,
    ) -> Environment:
        """`stdin` None is a terminal at which nobody types."""
        return Environment(
            {**self.variables, **variables},
            Input(stdin),
            stdout or Stream(stdout_terminal),
            Stream(stderr_terminal),
        )

    def __call__(self, *argv: str, env: Environment | None = None, stdin: bytes | None = None, **kwargs: str) -> Result:
        env = env or self.environment(stdin, **kwargs)
        code = main(argv, env)
        out = env.stdout.getvalue() if isinstance(env.stdout, Stream) else ""
        assert isinstance(env.stderr, Stream)
        return Result(int(code), out, env.stderr.getvalue())


@pytest.fixture
def waste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Run a command in tmp_path: `waste("info", "--json")`. No terminal but stdin's, at which nobody types."""
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def check_failure(result: Result, code: int) -> None:
    lines = result.err.splitlines()
    assert result.code == code, result.err
    assert result.out == ""
    errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    rest = lines[errors[0] + 1 :]
    assert rest == [] or (len(rest) == 1 and rest[0].startswith("hint: ")), result.err
    assert "Traceback" not in result.err


@pytest.fixture
def failed() -> Callable[[Result, int], None]:
    """Assert that a command failed as it should: its code, one `error:` line, at most one `hint:`, no result."""
    return check_failure
