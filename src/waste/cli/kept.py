"""`--session FILE`: the session that a run begins with, and what it leaves for the next one.

Two checkpoints are kept, after the prompt and after the answer, so that the same prompt again and one that goes on
after the answer both find theirs. The file changes only when a run has ended well: a run that fails or is
interrupted leaves what was there.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from waste.cli.output import Output
from waste.errors import UsageError, WasteError
from waste.units import format_bytes

if TYPE_CHECKING:
    from waste.engine.engine import Engine
    from waste.engine.session import Session
    from waste.generate import Prompt
    from waste.kvcache.store import Restored


class KeptSession:
    """For one answer. Opened before the prompt is evaluated: a place that cannot be written is said at once."""

    def __init__(self, engine: Engine, name: str, prompt: Prompt, out: Output) -> None:
        """Restore what fits the prompt; errors as `Engine.restore` and `Engine.saving`."""
        from waste.generate import room_for

        if not name:
            raise UsageError("--session is empty, expected a file name")
        room_for(engine, len(prompt.ids))  # with the number that answer and prompt need, not what the file needs
        self._path = Path(name)
        self._out = out
        self._failure: WasteError | None = None
        self._file = engine.saving(self._path)
        try:
            self.session: Session = engine.session()
            if os.path.exists(self._path):
                found = self.session.restore(self._path, engine.digest, prompt.ids, on_event=out.on_event)
                self._tell(found, len(prompt.ids))
        except BaseException:
            self._file.close()
            raise

    def keep(self) -> None:
        """Take a checkpoint. A disk that is full now is said by `finish`: it must not cost the answer."""
        if self._failure is None:
            try:
                self.session.checkpoint(self._file)
            except WasteError as error:
                self._failure = error

    def finish(self) -> None:
        """After the answer: the second checkpoint, and the file is replaced. Nothing was evaluated, nothing changes."""
        if self._file.position == 0 and self._failure is None:
            return
        self.keep()
        if self._failure is not None:
            raise self._failure
        self._file.publish()
        size = format_bytes(os.path.getsize(self._path))
        self._out.detail(f"session of {self.session.position} tokens saved in {str(self._path)!r}, {size}")

    def _tell(self, found: Restored, prompt_tokens: int) -> None:
        """Say what of the file is of no use; a prompt that only asks again needs no more than it holds itself."""
        saved, reused = found.saved_tokens, len(found.ids)
        if reused < min(saved, prompt_tokens):
            self._out.notice(
                f"session: {saved - reused} of {saved} saved tokens could not be reused, "
                f"as only the first {found.common_tokens} are also the prompt's"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
