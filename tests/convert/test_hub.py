"""Models of the Hub, from a server on loopback that answers as the Hub does: small files, then checks, then weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from waste.convert import ConvertOptions, convert, plan_conversion
from waste.errors import InputError, ResourceError, UnsupportedError, WasteError
from waste.events import Event, Progress

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/tiny-moe"
TOKEN = "hf_secretsecretsecretsecretsecretse"
Files = Callable[[Path], dict[str, bytes]]


@dataclass
class Hub:
    """What the server holds, how it misbehaves, and what it was asked."""

    folder: Path
    url: str = ""
    gated: bool = False
    status: int = 0  # answer everything with it
    cut: dict[str, int] = field(default_factory=dict)  # file -> how many of its downloads break off half way
    head: str = COMMIT  # what main is
    moves: bool = False  # main gets a new commit as soon as its config has been seen
    log: list[tuple[str, str, str | None]] = field(default_factory=list)  # (method, file, range)

    def fetched(self, suffix: str = "") -> list[str]:
        """Files that were downloaded as a whole or from a point on, in order."""
        return [
            name for method, name, span in self.log if method == "GET" and name.endswith(suffix) and not _peek(span)
        ]

    @property
    def weights(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.safetensors"))


def _peek(span: str | None) -> bool:
    """Whether a range asks for a piece (a header) rather than for the rest."""
    return span is not None and not span.endswith("-")


class Handler(BaseHTTPRequestHandler):
    """/OWNER/NAME/resolve/REVISION/FILE; weights by a redirect to another path, as the Hub sends them to its CDN."""

    protocol_version = "HTTP/1.1"
    hub: Hub
    commit = COMMIT

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        hub = self.hub
        if hub.status:
            return self._refuse(hub.status, "")
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[0] == "cdn":
            return self._send(hub.folder / parts[-1], body=body)
        if len(parts) != 5 or parts[2] != "resolve" or "/".join(parts[:2]) != REPO:
            return self._refuse(404, "RepoNotFound")
        if hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "GatedRepo")
        if parts[3] not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        self.commit = hub.head if parts[3] == "main" else COMMIT
        if hub.moves and parts[3:] == ["main", "config.json"]:
            hub.head = "f" * 40
        path = hub.folder / parts[4]
        if not path.exists():
            return self._refuse(404, "EntryNotFound")
        if not path.name.endswith(".safetensors"):
            return self._send(path, body=body)
        self.send_response(302)
        self.send_header("Location", f"{hub.url}/cdn/{path.name}")
        self._identify(path)
        self.send_header("X-Linked-Size", str(path.stat().st_size))
        self.send_header("X-Linked-ETag", self._etag(path))
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def _send(self, path: Path, *, body: bool) -> None:
        data, span = path.read_bytes(), self.headers.get("Range")
        self.hub.log.append((self.command, path.name, span))
        begin, end = 0, len(data)
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, end) if last else end
        self.send_response(206 if span else 200)
        self._identify(path)
        self.send_header("ETag", self._etag(path))
        self.send_header("Content-Length", str(end - begin))
        if span:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        if self.hub.cut.get(path.name, 0) > 0 and not _peek(span):
            self.hub.cut[path.name] -= 1
            end = begin + (end - begin) // 2
            self.close_connection = True
        self.wfile.write(data[begin:end])

    def _identify(self, path: Path) -> None:
        self.send_header("X-Repo-Commit", self.commit)

    @staticmethod
    def _etag(path: Path) -> str:
        return f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"'

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with the tiny checkpoint; the library is pointed at it, with an empty cache and no token."""
    constants = pytest.importorskip("huggingface_hub.constants")
    found = Hub(tiny.path)
    handler = type("Bound", (Handler,), {"hub": found})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        from huggingface_hub.utils import close_session

        close_session()


def refusal(dst: Path, kind: type[WasteError], options: ConvertOptions | None = None, repo: str = REPO) -> WasteError:
    with pytest.raises(kind) as caught:
        convert(repo, dst, options or ConvertOptions())
    assert "\n" not in caught.value.message
    assert "http" not in caught.value.message
    assert not (dst / "manifest.json").exists()
    return caught.value


def test_converts_as_from_a_folder(hub: Hub, tiny: Any, dst: Path, tmp_path: Path, files_of: Files) -> None:
    events: list[Event] = []
    convert(REPO, dst, ConvertOptions(), events.append)
    convert(str(tiny.path), tmp_path / "local.waste", ConvertOptions())
    ours, local = files_of(dst), files_of(tmp_path / "local.waste")
    manifest = ours.pop("manifest.json")
    local.pop("manifest.json")
    assert ours == local
    assert COMMIT.encode() in manifest
    assert b'"name": "someone/tiny-moe"' in manifest
    downloads = [event for event in events if isinstance(event, Progress) and event.phase == "download"]
    total = sum((tiny.path / name).stat().st_size for name in hub.weights)
    assert (downloads[-1].done, downloads[-1].total) == (total, total)
    assert sorted(hub.fetched(".safetensors")) == hub.weights  # each once


def test_by_path_into_the_cache_is_the_same_container(hub: Hub, dst: Path, tmp_path: Path, files_of: Files) -> None:
    convert(REPO, dst, ConvertOptions(revision="main"))
    snapshot = next((tmp_path / "cache").glob("models--*/snapshots/*"))
    convert(str(snapshot), tmp_path / "path.waste", ConvertOptions())
    ours, theirs = files_of(dst), files_of(tmp_path / "path.waste")
    assert (
        ours.pop("manifest.json").replace(b'"hub"', b'"local"').splitlines()[-5:]
        == theirs["manifest.json"].splitlines()[-5:]
    )
    assert ours == {name: data for name, data in theirs.items() if name != "manifest.json"}


def test_plan_downloads_no_weights(hub: Hub, tiny: Any, dst: Path) -> None:
    plan = plan_conversion(REPO, dst, ConvertOptions())
    assert hub.fetched(".safetensors") == []
    local = plan_conversion(str(tiny.path), dst, ConvertOptions())
    assert plan.download_bytes == sum((tiny.path / name).stat().st_size for name in hub.weights)
    assert (plan.read_bytes, plan.weights, plan.vision) == (local.read_bytes, local.weights, local.vision)
    result = convert(REPO, dst, ConvertOptions())
    assert result.nbytes == plan.write_bytes
    assert plan_conversion(REPO, dst, ConvertOptions()).finished


def test_nothing_is_downloaded_twice(hub: Hub, dst: Path, tmp_path: Path) -> None:
    convert(REPO, dst, ConvertOptions())
    hub.log.clear()
    assert convert(REPO, dst, ConvertOptions()).unchanged
    convert(REPO, tmp_path / "other.waste", ConvertOptions(experts="q8"))
    assert hub.fetched(".safetensors") == []


def test_cut_connections_are_resumed(
    hub: Hub, dst: Path, clean: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)  # 10 MB are more than a shard has here
    shard = hub.weights[1]
    hub.cut[shard] = 1
    convert(REPO, dst, ConvertOptions())
    spans = [span for method, name, span in hub.log if (method, name) == ("GET", shard) and not _peek(span)]
    assert spans[0] is None
    begin = int(str(spans[1]).removeprefix("bytes=").rstrip("-"))
    assert 0 < begin < (hub.folder / shard).stat().st_size  # went on from there, not from the start
    assert (dst / "trunk.bin").read_bytes() == clean["trunk.bin"]


def test_connection_that_stays_cut(hub: Hub, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives up in the end; whole files stay, and the next run fetches only the rest."""
    import huggingface_hub.file_download as library

    monkeypatch.setattr(library.time, "sleep", lambda _: None)
    hub.cut[hub.weights[2]] = 10**6
    message = refusal(dst, ResourceError).message
    assert hub.weights[2] in message
    assert not dst.exists()
    hub.cut.clear()
    hub.log.clear()
    convert(REPO, dst, ConvertOptions())
    assert hub.weights[2] in hub.fetched(".safetensors")


def test_config_is_refused_before_any_weight_is_asked_for(hub: Hub, tiny: Any, dst: Path) -> None:
    tiny.text["mhc"] = False
    tiny.write()
    assert "mhc" in refusal(dst, UnsupportedError).message
    assert not any(name.endswith(".safetensors") for _, name, _ in hub.log)


def test_tensors_are_checked_before_any_weight_is_downloaded(hub: Hub, tiny: Any, dst: Path) -> None:
    del tiny.tensors["lm_head.weight"]
    tiny.write()
    assert "lm_head.weight" in refusal(dst, InputError).message
    assert hub.fetched(".safetensors") == []


@pytest.mark.parametrize("shards", [0, 1])
def test_one_file(hub: Hub, tiny: Any, dst: Path, clean: dict[str, bytes], shards: int) -> None:
    tiny.shards = shards
    tiny.write()
    convert(REPO, dst, ConvertOptions())
    assert (dst / "trunk.bin").read_bytes() == clean["trunk.bin"]


# -- refusals


def test_no_such_model(hub: Hub, dst: Path) -> None:
    message = refusal(dst, InputError, repo="nobody/nothing").message
    assert "nobody/nothing" in message
    assert "no such model" in message


def test_misspelt_folder_where_no_hub_is_reached(hub: Hub, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.file_download as library

    def unreachable(*_args: object, **_options: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(library, "get_hf_file_metadata", unreachable)
    message = refusal(dst, ResourceError, repo="checkpoints/nnano").message
    assert message.startswith("no directory 'checkpoints/nnano' here")
    assert "Name or service not known" in message


@pytest.mark.parametrize("name", ["nobody", "a/b/c", "./x", "/abs/path", "some one/x", "x/../y", ""])
def test_names_that_are_no_hub_ids_ask_nobody(hub: Hub, dst: Path, name: str) -> None:
    assert "no such directory" in refusal(dst, InputError, repo=name).message
    assert hub.log == []


def test_no_such_revision(hub: Hub, dst: Path) -> None:
    assert "v2" in refusal(dst, InputError, ConvertOptions(revision="v2")).message


def test_commit_as_revision(hub: Hub, dst: Path) -> None:
    convert(REPO, dst, ConvertOptions(revision=COMMIT))


def test_branch_that_moves_meanwhile(hub: Hub, dst: Path) -> None:
    """Everything comes from the commit of the config, whatever the branch points to by then."""
    hub.moves = True
    convert(REPO, dst, ConvertOptions())
    assert COMMIT.encode() in (dst / "manifest.json").read_bytes()


def test_gated_model_wants_a_token_and_prints_none(hub: Hub, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = True
    error = refusal(dst, InputError)
    assert "token" in error.message
    assert "HF_TOKEN" in (error.hint or "")
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrongwrongwrongwrongwr")
    error = refusal(dst, InputError)
    assert "hf_wrong" not in f"{error.message} {error.hint}"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    convert(REPO, dst, ConvertOptions())


def test_no_safetensors(hub: Hub, tiny: Any, dst: Path) -> None:
    for path in [*tiny.path.glob("*.safetensors"), *tiny.path.glob("*.index.json")]:
        path.unlink()
    assert "model.safetensors" in refusal(dst, InputError).message


def test_no_config(hub: Hub, tiny: Any, dst: Path) -> None:
    (tiny.path / "config.json").unlink()
    assert "config.json" in refusal(dst, InputError).message


@pytest.mark.parametrize(("status", "kind"), [(403, InputError), (500, ResourceError)])
def test_other_answers(
    hub: Hub, dst: Path, status: int, kind: type[WasteError], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.utils._http as library

    monkeypatch.setattr(library.time, "sleep", lambda _: None)
    hub.status = status
    assert str(status) in refusal(dst, kind).message


def test_full_cache(hub: Hub, dst: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("waste.convert.target.free_bytes", lambda path: 1000 if cache in path.parents else 1 << 40)
    assert str(cache) in refusal(dst, ResourceError).message
    assert hub.fetched(".safetensors") == []


# -- offline and the cache


@pytest.fixture
def cached(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything in the cache, and offline from now on."""
    convert(REPO, tmp_path / "first.waste", ConvertOptions())
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.log.clear()
    return next((tmp_path / "cache").glob("models--*/snapshots/*"))


def test_offline_from_the_cache(hub: Hub, cached: Path, dst: Path, tmp_path: Path, files_of: Files) -> None:
    convert(REPO, dst, ConvertOptions())
    assert files_of(dst) == files_of(tmp_path / "first.waste")
    assert hub.log == []


def test_offline_and_not_in_the_cache(hub: Hub, cached: Path, dst: Path) -> None:
    error = refusal(dst, InputError, repo="someone/else")
    assert "offline" in error.message
    assert error.message.startswith("no directory 'someone/else' here")
    assert "HF_HUB_OFFLINE" in f"{error.message} {error.hint}"


@pytest.mark.parametrize("by", ["id", "path"])
def test_link_to_nothing_is_an_incomplete_download(hub: Hub, cached: Path, dst: Path, by: str) -> None:
    link = cached / hub.weights[-1]
    blob = link.resolve()
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    message = refusal(dst, InputError, repo=REPO if by == "id" else str(cached)).message
    assert "download incomplete" in message
    assert hub.weights[-1] in message
    assert blob.name not in message


def test_cache_without_links(hub: Hub, cached: Path, dst: Path, tmp_path: Path, files_of: Files) -> None:
    for path in list(cached.iterdir()):
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    shutil.rmtree(cached.parent.parent / "blobs")
    convert(REPO, dst, ConvertOptions())
    assert files_of(dst) == files_of(tmp_path / "first.waste")


def test_the_environment_is_respected(hub: Hub, dst: Path, tmp_path: Path) -> None:
    """In a process of its own, as the library reads most variables when it is imported; nothing on stdout or stderr."""
    hub.gated = True
    hub.cut[hub.weights[0]] = 1
    cache = tmp_path / "elsewhere"
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN": TOKEN,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    script = (
        "import sys; from pathlib import Path; from waste.convert import ConvertOptions, convert; "
        "convert(sys.argv[1], Path(sys.argv[2]), ConvertOptions())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, REPO, str(dst)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(cache.glob("models--someone--tiny-moe/snapshots/*/config.json"))
    assert (dst / "manifest.json").exists()


def test_info_of_a_model_reads_headers_and_no_weights(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    """`waste info OWNER/NAME` says the same as of the folder, and asks the Hub for pieces of shards only."""
    from waste.cli.app import main

    def told(*argv: str) -> dict[str, Any]:
        assert main([*argv, "--json"]) == 0
        return dict(json.loads(capfd.readouterr().out))

    there, here = told("info", REPO), told("info", str(hub.folder))
    for key in ("family", "parameters", "active_parameters", "trunk_bytes", "bank_bytes", "token_bytes", "layers"):
        assert there[key] == here[key]
    assert there["revision"] == COMMIT
    assert hub.fetched(".safetensors") == []
