"""Where a checkpoint named on the command line lies: a folder here, or a model of the Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from waste.convert.hub import HubSource
from waste.convert.source import LocalSource, Source
from waste.errors import InputError, UsageError
from waste.events import OnEvent
from waste.io.files import shown

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9._-]{1,96}")


def open_source(source: str, revision: str | None, on_event: OnEvent) -> Source:
    """The checkpoint `source`: a folder if there is one of that name, else a Hub id "owner/name".

    `revision` is a branch, tag or commit of the Hub. Raises InputError when there is no such thing, UsageError for
    a revision of a local folder.
    """
    path = Path(source)
    if source and os.path.lexists(path):
        if revision is not None:
            raise UsageError(f"--revision {revision!r} is for models of the Hub, but {shown(path)} is a local folder")
        return LocalSource(path)
    if _HUB_ID.fullmatch(source) is None or ".." in source:
        raise InputError(
            f"no such directory: {shown(source)}", hint="give the folder of a checkpoint, or a Hub id: owner/name"
        )
    return HubSource(source, revision, on_event)
