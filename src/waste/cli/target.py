"""Which of `waste run [MODEL] [PROMPT]` a word is, and where a MODEL lies; the bundled example when there is none.

With two words the first is the MODEL. A single one is the MODEL if -p or --file already gives the prompt, or
if it exists, ends with .waste or is written like a path or a Hub name (a slash and no white space); else it is
the PROMPT for the bundled example.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from waste.cli.config import Config
from waste.cli.output import Output
from waste.errors import InputError, ResourceError, UsageError, WasteError
from waste.events import Notice, OnEvent

SUFFIX = ".waste"


def split_words(
    first: str | None, second: str | None, option: str | None, has_file: bool
) -> tuple[str | None, str | None]:
    """(model, prompt) of the two positional words and -p. Raises UsageError when the prompt comes twice."""
    if second is not None and option is not None:
        raise UsageError("the prompt is given twice: as an argument and with -p")
    if first is None or second is not None:
        return first, second if option is None else option
    if option is not None or has_file or looks_like_model(first):
        return first, option
    return None, first


def looks_like_model(word: str) -> bool:
    """Whether a single word means a model rather than a prompt."""
    if word in ("", "-"):
        return False
    if word.endswith(SUFFIX):
        return True
    written_as_path = "/" in word and not any(c.isspace() for c in word)
    return written_as_path or os.path.lexists(word)


def existing_container(name: str, hint: str = "waste convert SRC DST makes one") -> Path:
    """The container called `name`. InputError where there is nothing (with `hint`), or a checkpoint."""
    place = Path(name)
    if not place.exists():
        raise InputError(f"no such container: {name!r}", hint=hint)
    if (place / "config.json").exists() and not (place / "manifest.json").exists():
        raise InputError(
            f"{name!r} is a checkpoint, not a container",
            hint=f"waste convert {name} {place.name or 'model'}.waste",
        )
    return place


def bundled_example(config: Config, out: Output, purpose: str) -> Path:
    """The container of the bundled example, made at the first use; says that it is taken, and what for."""
    from importlib.metadata import version

    from waste.bundled import bundled_checkpoint

    source = bundled_checkpoint()
    place = bundled_container(source, config.cache_dir, version("waste"), out.on_event)
    out.notice(f"no MODEL given: the bundled example {source.name} {purpose}")
    return place


def bundled_container(source: Path, cache: Path, version: str, on_event: OnEvent) -> Path:
    """The bundled checkpoint `source` as a container in `cache`, converted at the first use.

    Made in a directory of its own and renamed, so that two first runs at the same time do not meet and a
    killed one leaves nothing under the final name. One that is damaged anywhere is made again: nobody asked for it
    by name, so nobody would know what to do about it.
    """
    place = cache / f"{source.name}-{version}{SUFFIX}"
    if os.path.lexists(place):
        if _is_whole(place):
            return place
        _remove(place)
    on_event(Notice(f"preparing the bundled example {source.name} in {str(cache)!r}, once"))
    _build(place, lambda target: _convert(source, target, on_event))
    return place


def _is_whole(place: Path) -> bool:
    """Whether this version would write such a container, in the default formats, and every byte is as it was written.

    16 MiB for nano-glm, read in some hundredths of a second.
    """
    from waste.container.reader import Container
    from waste.container.verify import verify
    from waste.models.formats import read_formats
    from waste.models.stored import stored_config

    try:
        container = Container.open(place)
        stored_config(container.manifest)
        return container.manifest.formats == vars(read_formats()) and not verify(container)
    except (WasteError, OSError):
        return False


def _remove(place: Path) -> None:
    import shutil

    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _convert(source: Path, target: Path, on_event: OnEvent) -> None:
    from waste.convert import ConvertOptions, convert

    convert(str(source), target, ConvertOptions(), on_event)


def _build(place: Path, make: Callable[[Path], None]) -> None:
    import shutil
    import tempfile

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in place.parent.glob(".making-*"):  # by a first run that was killed; it takes seconds, not a day
            if time.time() - left.stat().st_mtime > 86_400:
                _remove(left)
        work = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
    except OSError as error:
        raise ResourceError(
            f"cannot write to the cache directory {str(place.parent)!r}: {error.strerror}",
            hint="set XDG_CACHE_HOME to a directory that can be written",
        ) from None
    try:
        make(work / place.name)
        try:
            (work / place.name).rename(place)
        except OSError:
            if not place.exists():  # else somebody else was faster, with the same bytes
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
