"""The one printer of the command line: what goes to stdout, what to stderr, in colour or not, as JSON or text.

stdout carries results only. Everything else (progress, notices, reasoning, timings) goes to stderr and is
silent with -q. The two streams are judged separately, and colour never carries meaning alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from waste.cli import config
from waste.cli.environment import Environment
from waste.errors import ResourceError
from waste.events import Event, Notice, Progress
from waste.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

REDRAW_S = 0.1
BAR_COLUMNS = 14  # leaves the figures of "convert" whole in 80 columns
DIM, RED, BOLD, RESET = "\x1b[2m", "\x1b[31m", "\x1b[1m", "\x1b[0m"


class OutputClosed(Exception):
    """Whoever read our stdout has left (`waste run ... | head`). Not a failure: end quietly."""


def one_line(text: str) -> str:
    """`text` with line breaks, tabs and control characters escaped, so that it stays one field of one line."""
    return "".join(c if c.isprintable() or c == " " else c.encode("unicode_escape").decode("ascii") for c in text)


class Output:
    """One for each run of `waste`, handed to its command as `ctx.obj`; the command says how loud it may be."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.stdout_is_terminal = env.stdout.isatty()
        self.stderr_is_terminal = env.stderr.isatty()
        self._phases: dict[str, tuple[float, int]] = {}  # when a phase was first heard of, and how far it was
        self._bar: _Bar | None = None
        self.configure()

    def configure(self, *, quiet: bool = False, verbose: bool = False, no_color: bool = False) -> None:
        """Apply -q, -v and --no-color; -q wins over -v."""
        self.quiet = quiet
        self.verbose = verbose and not quiet
        color = config.allows_color(self.env.environ) and not no_color
        self.stdout_color = color and self.stdout_is_terminal
        self.stderr_color = color and self.stderr_is_terminal
        drawable = self.stderr_is_terminal and config.allows_cursor(self.env.environ) and not quiet
        self._bar = _Bar(self) if drawable else None

    # -- stdout: results

    def text(self, text: str) -> None:
        """Write `text` to stdout as it is, at once. Raises OutputClosed, or ResourceError when it cannot be written."""
        if not text:
            return
        self.clear_progress()
        try:
            self.env.stdout.write(text)
            self.env.stdout.flush()
        except OSError as error:
            discard(self.env)
            if isinstance(error, BrokenPipeError):
                raise OutputClosed from None
            raise ResourceError(f"cannot write to standard output: {error.strerror}") from None

    def line(self, text: str) -> None:
        """One line of a result."""
        self.text(text + "\n")

    def json(self, document: dict[str, Any], *, lines: bool = False) -> None:
        """One JSON document on stdout; with `lines`, on a single line."""
        indent = None if lines else 2
        text = json.dumps(document, ensure_ascii=False, indent=indent, allow_nan=False)
        if any("\ud800" <= c <= "\udfff" for c in text):  # a path that is not UTF-8
            text = json.dumps(document, indent=indent, allow_nan=False)
        self.line(text)

    def table(self, rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = ()) -> None:
        """Rows of equal length: aligned at a terminal, tab-separated in a pipe (title and alignment left out).

        `right`: columns of numbers.
        """
        if not self.stdout_is_terminal:
            for row in rows:
                self.line("\t".join(map(one_line, row)))
            return
        from rich.table import Table
        from rich.text import Text

        if title:
            self.line(f"{BOLD}{title}{RESET}" if self.stdout_color else title)
        grid = Table.grid(padding=(0, 2))
        for i in range(len(rows[0]) if rows else 0):
            grid.add_column(no_wrap=True, justify="right" if i in right else "left")
        for row in rows:
            grid.add_row(*(Text(one_line(cell)) for cell in row))
        for line in rendered(grid, 10_000, color=False).splitlines():  # a terminal folds long lines better than a table
            self.line(("  " + line).rstrip())

    # -- stderr: everything else

    def notice(self, message: str) -> None:
        """One line the user should see, unless -q."""
        if not self.quiet:
            self._tell(one_line(message))

    def detail(self, message: str) -> None:
        """One line for -v."""
        if self.verbose:
            self._tell(one_line(message))

    def aside(self, text: str) -> None:
        """Running text beside the answer (reasoning): dim on stderr, unless -q."""
        if not self.quiet and text:
            self.clear_progress()
            self._stderr(f"{DIM}{text}{RESET}" if self.stderr_color else text)

    def failure(self, message: str, hint: str | None) -> None:
        """The last words of a command that failed, two lines at most, -q or not."""
        label = f"{RED}error:{RESET}" if self.stderr_color else "error:"
        self._tell(f"{label} {one_line(message)}")
        if hint:
            self._tell(f"hint: {one_line(hint)}")

    def interrupted(self) -> None:
        """The user or the system ended the command: leave the cursor on a fresh line of the terminal."""
        self.clear_progress()
        if self.stderr_is_terminal:
            self._stderr("\n")

    def on_event(self, event: Event) -> None:
        """The callback handed to lower packages: progress is drawn at a terminal only, notices are printed."""
        if isinstance(event, Notice):
            self.notice(event.message)
            return
        now = time.monotonic()
        started, begun = self._phases.setdefault(event.phase, (now, event.done))
        if self._bar is not None:
            self._bar.draw(event, begun, now - started)
        if event.done >= event.total:
            self.clear_progress()
            del self._phases[event.phase]
            if started < now:  # a phase of one event says nothing about its time
                self.detail(f"{event.phase}: {_amount(event, event.total)} in {_elapsed(started)}")

    def clear_progress(self) -> None:
        """Take the progress line off the screen, if there is one."""
        if self._bar is not None:
            self._bar.clear()

    def _tell(self, line: str) -> None:
        self.clear_progress()
        self._stderr(line + "\n")

    def _stderr(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a stderr nobody reads must not end the answer
            self.env.stderr.write(text)
            self.env.stderr.flush()


def rendered(renderable: RenderableType, width: int, *, color: bool) -> str:
    """What Rich draws in `width` columns, as text to write ourselves: one place decides what goes where, and when."""
    from rich.console import Console

    paper = io.StringIO()
    system: Literal["standard"] | None = "standard" if color else None
    console = Console(file=paper, width=width, force_terminal=color, color_system=system, highlight=False)
    console.print(renderable, end="")
    return paper.getvalue()


class _Bar:
    """One line of stderr, redrawn in place."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._drawn = False
        self._last = 0.0

    def draw(self, event: Progress, begun: int, elapsed_s: float) -> None:
        now = time.monotonic()
        if self._drawn and now - self._last < REDRAW_S:
            return
        self._last, self._drawn = now, True
        columns = 80
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(self._output.env.stderr.fileno()).columns or columns
        name, *figures = _progress_parts(event, begun, elapsed_s)
        bar = self._picture(event) if columns >= 60 else ""
        room = max(columns - 1, 20) - len(name) - (BAR_COLUMNS + 2 if bar else 0)
        self._output._stderr(f"\r{name}{bar}{''.join(f'  {figure}' for figure in figures)[:room]}\x1b[K")

    def _picture(self, event: Progress) -> str:
        from rich.progress_bar import ProgressBar

        bar = ProgressBar(total=max(event.total, 1), completed=event.done, width=BAR_COLUMNS)
        return "  " + rendered(bar, BAR_COLUMNS, color=self._output.stderr_color)

    def clear(self) -> None:
        if self._drawn:
            self._drawn = False
            self._output._stderr("\r\x1b[K")


def _progress_parts(event: Progress, begun: int, elapsed_s: float) -> Iterator[str]:
    """`begun`: how far the phase was when it was first heard of, `elapsed_s` ago; that much has no known time."""
    share = event.done / event.total if event.total else 1.0
    yield f"{one_line(event.phase)} {share:4.0%}"
    yield f"{_amount(event, event.done)} of {_amount(event, event.total)}"
    if elapsed_s > 1 and event.done > begun:
        rate = (event.done - begun) / elapsed_s
        yield format_rate(rate) if event.unit == "bytes" else f"{rate:.0f} {event.unit}/s"
        yield f"{format_seconds((event.total - event.done) / rate)} left"


def _amount(event: Progress, count: int) -> str:
    return format_bytes(count) if event.unit == "bytes" else f"{count} {event.unit}"


def _elapsed(started: float) -> str:
    return format_seconds(time.monotonic() - started)


def discard(env: Environment) -> None:
    """Point stdout at nothing, so that what is left in its buffer cannot fail again when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, env.stdout.fileno())
        os.close(nothing)
