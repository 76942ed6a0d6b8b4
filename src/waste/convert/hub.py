"""Checkpoints of the Hugging Face Hub, through its own library and cache: small files first, weights when wanted.

HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE and HF_ENDPOINT are the library's business and hold as everywhere. A connection
that is cut in the middle of a file is resumed by the library; whole files are never fetched twice.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from waste.convert.source import SMALL_FILES, Headers, json_object
from waste.errors import InputError, ResourceError, WasteError
from waste.events import OnEvent, Progress, ignore
from waste.io.files import read_file, shown
from waste.io.safetensors import INDEX_NAME, SINGLE_NAME, Checkpoint, TensorInfo, read_header
from waste.models.hf_config import CONFIG_FILE
from waste.units import format_bytes

_INDEX_LIMIT = 100_000_000
# Files at a time. One stream of a CDN rarely fills a line; more than a few do not help.
_STREAMS = 4


class HubSource:
    """A model of the Hub, "owner/name", at one commit."""

    kind = "hub"

    def __init__(self, repo: str, revision: str | None, on_event: OnEvent = ignore) -> None:
        """Fetches config, tokenizer files and index, nothing else. `revision`: branch, tag or commit.

        Raises InputError: no such model or revision, access refused, no connection, offline and not in the cache.
        """
        from huggingface_hub import constants

        self.label = repr(repo)
        self.name = repo
        self._wanted = revision or constants.DEFAULT_REVISION
        # .../snapshots/COMMIT/config.json: everything after this is asked for by commit, so that a branch that
        # moves meanwhile cannot mix two versions.
        config = self._get(CONFIG_FILE, self._wanted)
        self.directory = config.parent
        self.revision: str | None = config.parent.name
        for name in SMALL_FILES:
            self._optional(name)
        self._weights = self._weight_map()
        self._sizes: dict[str, int] = {}
        self._checkpoint: Checkpoint | None = None

    def headers(self) -> Headers:
        """From the files that are here, and by ranged requests from those that are not."""
        if not self._absent():
            checkpoint = self._open()
            return Headers(checkpoint.tensors, checkpoint.files, checkpoint.unindexed)
        found: dict[str, Mapping[str, TensorInfo]] = {}
        with ThreadPoolExecutor(_STREAMS) as pool:
            names = sorted(set(self._weights.values())) or [SINGLE_NAME]
            for name, header in zip(names, pool.map(self._header, names), strict=True):
                found[name] = header
        files = {name: self._size(name) for name in found}
        if not self._weights:
            return Headers(found[SINGLE_NAME], files)
        tensors = {}
        for tensor, name in self._weights.items():
            if tensor not in found[name]:
                raise InputError(
                    f"tensor {tensor!r} is not in {name!r} of {self.label}, where {INDEX_NAME!r} places it"
                )
            tensors[tensor] = found[name][tensor]
        return Headers(tensors, files)

    def download_bytes(self) -> int:
        return sum(map(self._size, self._absent()))

    def fetch(self, on_event: OnEvent) -> Checkpoint:
        absent = self._absent()
        if absent:
            self._refuse_full_cache()
            _Download(self._get, self.revision or self._wanted, absent, self.download_bytes(), on_event).run()
        return self._open()

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = Checkpoint.open(self.directory)
        return self._checkpoint

    def _weight_map(self) -> dict[str, str]:
        """tensor -> file by the index; empty for a model in one file."""
        path = self.directory / INDEX_NAME
        if not path.exists():
            return {}
        found = json_object(read_file(path, limit=_INDEX_LIMIT), shown(path)).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise InputError(f"{INDEX_NAME!r} of {self.label} has no weight_map, or an empty one")
        for name in found.values():
            if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
                raise InputError(f"{INDEX_NAME!r} of {self.label} places a tensor in {name!r}, which is no plain name")
        return found

    def _absent(self) -> list[str]:
        """Weight files that are not in the cache."""
        names = sorted(set(self._weights.values())) or [SINGLE_NAME]
        return [name for name in names if not (self.directory / name).exists()]

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            path = self.directory / name
            if path.exists():
                self._sizes[name] = path.stat().st_size
            else:
                from huggingface_hub import get_hf_file_metadata, hf_hub_url

                with self._explained(name):
                    size = get_hf_file_metadata(hf_hub_url(self.name, name, revision=self.revision)).size
                self._sizes[name] = size or 0
        return self._sizes[name]

    def _header(self, name: str) -> Mapping[str, TensorInfo]:
        path = self.directory / name
        if path.exists():
            return read_header(path)
        from huggingface_hub import HfApi

        self._refuse_offline(name)
        with self._explained(name):
            found = HfApi().parse_safetensors_file_metadata(self.name, name, revision=self.revision)
        tensors = {}
        for tensor, info in found.tensors.items():
            begin, end = info.data_offsets
            tensors[tensor] = TensorInfo(tensor, info.dtype, tuple(info.shape), Path(name), begin, end - begin)
        return tensors

    def _get(self, name: str, revision: str, tqdm_class: Any = None) -> Path:
        """One file of the repository, in the cache."""
        from huggingface_hub import hf_hub_download

        with self._explained(name):
            return Path(hf_hub_download(self.name, name, revision=revision, tqdm_class=tqdm_class))

    def _optional(self, name: str) -> None:
        """Fetch a file that a repository need not have; offline, one that is not in the cache counts as such."""
        with contextlib.suppress(_NotThereError):
            self._get(name, self.revision or self._wanted)

    def _refuse_offline(self, name: str) -> None:
        from huggingface_hub import constants

        if constants.is_offline_mode():
            raise _offline(self.label, name)

    def _refuse_full_cache(self) -> None:
        from waste.convert.target import existing_parent, free_bytes

        place = existing_parent(self.directory)
        needed, free = self.download_bytes(), free_bytes(place)
        if needed > free:
            raise ResourceError(
                f"downloading {self.label} to {shown(place)} needs {format_bytes(needed)}, "
                f"{format_bytes(free)} are free there",
                hint="set HF_HUB_CACHE to a folder on a larger drive",
            )

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """The library's errors as one line each; its log lines and warnings not at all."""
        with _silence():
            try:
                yield
            except (WasteError, KeyboardInterrupt):
                raise
            except Exception as error:
                raise _explain(error, self.label, self._wanted, name) from error


class _NotThereError(InputError):
    """A single file is missing, from the repository or (offline) from the cache."""


class _StoppedError(Exception):
    """Another file of the same download failed."""


class _Download:
    """Several files at once, reported as one; the first failure stops all."""

    def __init__(
        self, get: Callable[[str, str, Any], Path], revision: str, names: list[str], total: int, on_event: OnEvent
    ) -> None:
        self._get = get
        self._revision = revision
        self._names = names
        self._total = total
        self._on_event = on_event
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = 0

    def run(self) -> None:
        reporter = _reporter(self._count)
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="download") as pool:
            waiting = [pool.submit(self._get, name, self._revision, reporter) for name in self._names]
            try:
                for future in waiting:
                    future.result()
            except BaseException:
                self._stop.set()
                for future in waiting:
                    future.cancel()
                raise

    def _count(self, nbytes: float) -> None:
        if self._stop.is_set():
            raise _StoppedError
        with self._lock:
            self._done += int(nbytes)
            self._on_event(Progress("download", min(self._done, self._total), self._total))


def _reporter(count: Callable[[float], None]) -> Any:
    """A progress bar class for the library that shows nothing and counts bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class Reporter(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            count(n or 0)
            return None

    return Reporter


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the library's warnings off stderr, which is the command's: what matters comes as an error."""
    from huggingface_hub.utils import logging as library

    before = library.get_verbosity()
    library.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.set_verbosity(before)


def _offline(label: str, name: str) -> InputError:
    return _NotThereError(
        f"{_not_here(label, name)}{name!r} of {label} is not in the cache, and offline mode is on (HF_HUB_OFFLINE); "
        "download incomplete",
        hint="unset HF_HUB_OFFLINE to download it",
    )


def _not_here(label: str, name: str) -> str:
    """The start of a message about the first file: what was meant may be a folder whose name is misspelt."""
    return f"no directory {label} here, and " if name == CONFIG_FILE else ""


def _explain(error: Exception, label: str, revision: str, name: str) -> WasteError:
    """One line for whatever the library raises. Never repeats its text where that could hold a token."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return InputError(
            f"model {label} is gated: a token of an account with access to it is needed",
            hint="ask for access on its page, then set HF_TOKEN or run: hf auth login",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return InputError(
            f"no directory {label} here, and no such model on the Hub (or a private one)",
            hint="check the spelling; for a private model set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"model {label} has no revision {revision!r}", hint="a branch, a tag or a commit of the Hub")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return _NotThereError(f"model {label} has no file {name!r}: not a safetensors release that can be converted")
    if constants.is_offline_mode():
        return _offline(label, name)
    status = _status(error)
    if status in (401, 403):
        return InputError(f"the Hub refuses access to {label}: status {status}", hint="check HF_TOKEN")
    if status == 429:
        return ResourceError(
            "the Hub refuses more requests for now: status 429", hint="wait, then run the command again"
        )
    if status is not None:
        return ResourceError(f"the Hub answers {name!r} of {label} with status {status}", hint="try again later")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"no space left in the cache while downloading {name!r}",
            hint="free some space, or set HF_HUB_CACHE to a folder on a larger drive, and run the command again",
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return ResourceError(
            f"the cache {shown(os.fspath(constants.HF_HUB_CACHE))} cannot be written: {error.strerror}",
            hint="set HF_HUB_CACHE to a folder that can be written",
        )
    if isinstance(error, errors.HFValidationError):
        return InputError(f"{label} is not a Hub id: expected owner/name", hint="or the folder of a checkpoint")
    return ResourceError(
        f"{_not_here(label, name)}downloading {name!r} of {label} failed: {_reason(error)}",
        hint="check the connection, then run the same command again: finished files are kept",
    )


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error, if there is one."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def _reason(error: BaseException) -> str:
    """The innermost cause in a few words, without addresses, which may be signed."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"https?://\S+", "(address)", " ".join(str(error).split()))
    return text[:200] or type(error).__name__
