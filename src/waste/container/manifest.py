"""manifest.json: what a container holds, where every byte of it lies, and the checksums of all of it.

The text is canonical JSON and carries its own digest (XXH3-64 of the document without the
member `digest`). A reader serialises what it understood and compares, so any changed byte of
the file is noticed. There is no time stamp: equal inputs give equal bytes.

Every byte of every file has exactly one owner: tensors tile their file, each up to the next
multiple of 64; records tile their bank; the remaining files have a digest each. Hence file
sizes follow from the entries, and no byte is outside all checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from waste import quant
from waste.container.document import AGAIN, Node, parse, serialise
from waste.container.layout import TRUNK_ALIGN, VERSION, RecordLayout, Section, align_up, matrix_shape
from waste.errors import InputError, UnsupportedError
from waste.io.checksum import checksum, from_hex, to_hex

MANIFEST_NAME = "manifest.json"
FORMAT = "waste"

_MAX_DIM = 1 << 31
_MAX_NDIM = 8
_MAX_BYTES = 1 << 62
_MAX_NAME_BYTES = 255  # of a file, as file systems have it
_UPGRADE = "upgrade waste, or convert the model again with this version"

_TENSOR_KEYS = frozenset(("name", "file", "fmt", "shape", "offset", "nbytes", "checksum"))
_SECTION_KEYS = frozenset(("fmt", "rows", "cols", "offset", "nbytes"))
_LAYOUT_KEYS = frozenset(("gate", "up", "down", "stride"))
_BANK_KEYS = frozenset(("layer", "file", "experts", "layout", "digest"))
_FILE_KEYS = frozenset(("name", "nbytes", "digest"))
_KEYS = frozenset(
    (
        *("format", "version", "digest", "tool", "options", "provenance", "architecture", "config"),
        *("stop_ids", "formats", "tensors", "banks", "files"),
    )
)


@dataclass(frozen=True)
class TensorEntry:
    """One trunk tensor: `nbytes` bytes of format `fmt` at `offset` of `file`.

    `shape` is the tensor's own; `layout.matrix_shape` tells the matrix it is encoded as. `checksum`
    covers the bytes and the zeros up to the next multiple of 64.
    """

    name: str
    file: str
    fmt: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class BankEntry:
    """The routed experts of one layer: `experts` records of `layout` in `file`.

    `digest` is the checksum of the little-endian record checksums one after another.
    """

    layer: int
    file: str
    experts: int
    layout: RecordLayout
    digest: int


@dataclass(frozen=True)
class FileEntry:
    """A small file (tokenizer, chat template): its size in bytes and the checksum of its bytes."""

    name: str
    nbytes: int
    digest: int


@dataclass(frozen=True)
class Manifest:
    """Everything manifest.json says.

    tool: version of waste that wrote the container; options: of the conversion; provenance: source,
    revision, its file sizes and digests; config: the normalised model configuration, opaque here;
    formats: number format by role. The three dicts hold plain JSON values with string keys.
    """

    tool: str
    options: dict[str, Any]
    provenance: dict[str, Any]
    architecture: str
    config: dict[str, Any]
    stop_ids: tuple[int, ...]
    formats: dict[str, str]
    tensors: tuple[TensorEntry, ...]
    banks: tuple[BankEntry, ...]
    files: tuple[FileEntry, ...]

    def to_bytes(self) -> bytes:
        """The canonical text. ValueError for a manifest that `from_bytes` would refuse."""
        document = self._document()
        document["digest"] = to_hex(checksum(serialise(document)))
        data = serialise(document)
        try:
            Manifest.from_bytes(data, MANIFEST_NAME)
        except (InputError, UnsupportedError) as error:
            raise ValueError(f"the manifest is inconsistent: {error.message}") from error
        return data

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """The manifest in `data`; `where` names it in messages.

        Raises InputError for damage, contradictions and containers of other programs,
        UnsupportedError for an unknown version or number format.
        """
        root = parse(data, where)
        _refuse_foreign(root, where)
        version = root.member("version").integer(0, _MAX_DIM)
        if version != VERSION:
            raise UnsupportedError(
                f"{where} describes a container of version {version}, this waste reads version {VERSION}", hint=_UPGRADE
            )
        _verify_text(root, data, where)
        manifest = cls(
            tool=root.member("tool").text(),
            options=root.member("options").object(),
            provenance=root.member("provenance").object(),
            architecture=root.member("architecture").text(),
            config=root.member("config").object(),
            stop_ids=tuple(node.integer(0, _MAX_DIM) for node in root.member("stop_ids").elements()),
            formats=root.member("formats").texts(),
            tensors=tuple(_tensor(node) for node in root.member("tensors").elements()),
            banks=tuple(_bank(node) for node in root.member("banks").elements()),
            files=tuple(_file(node) for node in root.member("files").elements()),
        )
        for problem in manifest._problems():
            raise InputError(f"{where}: {problem}", hint=AGAIN)
        return manifest

    def tensors_of(self, file: str) -> tuple[TensorEntry, ...]:
        """The tensors in one file, by offset."""
        return tuple(entry for entry in self.tensors if entry.file == file)

    def tensor_files(self) -> tuple[str, ...]:
        """Names of the files that hold tensors, in order of first mention."""
        return tuple(dict.fromkeys(entry.file for entry in self.tensors))

    def file_sizes(self) -> dict[str, int]:
        """Exact size in bytes of every file of the container but the manifest itself."""
        sizes = {entry.file: align_up(entry.offset + entry.nbytes, TRUNK_ALIGN) for entry in self.tensors}
        sizes.update({bank.file: bank.experts * bank.layout.stride for bank in self.banks})
        sizes.update({entry.name: entry.nbytes for entry in self.files})
        return sizes

    def weights_digest(self) -> int:
        """What tells one model from another: the config and every weight, in its number format, by checksum.

        Who converted it when, from where, with which tokenizer, does not count: the same logits, the same digest.
        """
        document = self._document()
        return checksum(serialise({key: document[key] for key in ("architecture", "config", "tensors", "banks")}))

    def _document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "tool": self.tool,
            "options": self.options,
            "provenance": self.provenance,
            "architecture": self.architecture,
            "config": self.config,
            "stop_ids": list(self.stop_ids),
            "formats": self.formats,
            "tensors": [
                {**vars(entry), "shape": list(entry.shape), "checksum": to_hex(entry.checksum)}
                for entry in self.tensors
            ],
            "banks": [
                {**vars(bank), "layout": _layout_document(bank.layout), "digest": to_hex(bank.digest)}
                for bank in self.banks
            ],
            "files": [{**vars(entry), "digest": to_hex(entry.digest)} for entry in self.files],
        }

    def _problems(self) -> Iterator[str]:
        """What contradicts itself, first things first."""
        yield from _repeated("tensor", (entry.name for entry in self.tensors))
        yield from _repeated("layer", (bank.layer for bank in self.banks))
        owners = [*self.tensor_files(), *(bank.file for bank in self.banks), *(entry.name for entry in self.files)]
        yield from _repeated("file", owners)
        for name in owners:
            if not _is_plain(name):
                yield f"{name!r} is not the plain name of a file in the container"
        for file in self.tensor_files():
            end = 0
            for entry in self.tensors_of(file):
                if entry.offset != end:
                    yield f"tensor {entry.name!r} lies at {entry.offset} of {file!r}, expected {end}"
                end = align_up(entry.offset + entry.nbytes, TRUNK_ALIGN)


def _refuse_foreign(root: Node, where: str) -> None:
    """Other programs use the suffix .waste, or a manifest.json, too."""
    members = root.object()
    if members.get("format") == FORMAT:
        return
    if "format_version" in members and "trunk" in members:
        raise InputError(
            f"{where} belongs to a container of sqliteai/waste, another program with the same suffix",
            hint="convert the original checkpoint: waste convert SRC DST",
        )
    raise InputError(f'{where} does not belong to a waste container: it lacks "format": "{FORMAT}"')


def _verify_text(root: Node, data: bytes, where: str) -> None:
    """Compare digest and every byte of the text with what the parsed document should look like."""
    document = dict(root.object(_KEYS))
    stored = document.pop("digest")
    try:
        computed, text = to_hex(checksum(serialise(document))), serialise(root.value)
    except RecursionError:
        raise InputError(f"{where} is damaged: it is nested too deeply", hint=AGAIN) from None
    if stored != computed:
        raise InputError(f"{where} is damaged: its digest says {stored!r:.40}, its text gives {computed!r}", hint=AGAIN)
    if text != data:
        raise InputError(f"{where} is damaged: its text is not as waste writes it", hint=AGAIN)


def _tensor(node: Node) -> TensorEntry:
    node.object(_TENSOR_KEYS)
    fmt = _format_name(node.member("fmt"))
    shape = tuple(dim.integer(1, _MAX_DIM) for dim in node.member("shape").elements())
    nbytes = node.member("nbytes")
    if len(shape) > _MAX_NDIM or (len(shape) != 2 and fmt != "f32"):
        raise node.member("shape").wrong(f"the shape of a matrix, as format {fmt} demands")
    expected = quant.get(fmt).nbytes(*matrix_shape(shape))
    if nbytes.integer(0, _MAX_BYTES) != expected:
        raise nbytes.wrong(f"{expected}, the bytes of {list(shape)} in {fmt}")
    return TensorEntry(
        name=node.member("name").text(),
        file=node.member("file").text(),
        fmt=fmt,
        shape=shape,
        offset=node.member("offset").integer(0, _MAX_BYTES),
        nbytes=expected,
        checksum=_checksum(node.member("checksum")),
    )


def _bank(node: Node) -> BankEntry:
    node.object(_BANK_KEYS)
    return BankEntry(
        layer=node.member("layer").integer(0, _MAX_DIM),
        file=node.member("file").text(),
        experts=node.member("experts").integer(1, _MAX_DIM),
        layout=_layout(node.member("layout")),
        digest=_checksum(node.member("digest")),
    )


def _layout(node: Node) -> RecordLayout:
    """The layout, which must be the very one that its formats and sizes lead to."""
    node.object(_LAYOUT_KEYS)
    gate, up, down = (_section(node.member(name)) for name in ("gate", "up", "down"))
    found = RecordLayout(gate, up, down, node.member("stride").integer(1, _MAX_BYTES))
    expected = RecordLayout.of(gate.fmt, up.fmt, down.fmt, hidden=gate.cols, inner=gate.rows)
    if found != expected:
        raise node.wrong(f"the layout of hidden size {gate.cols} and inner size {gate.rows}")
    return found


def _section(node: Node) -> Section:
    node.object(_SECTION_KEYS)
    return Section(
        fmt=_format_name(node.member("fmt")),
        rows=node.member("rows").integer(1, _MAX_DIM),
        cols=node.member("cols").integer(1, _MAX_DIM),
        offset=node.member("offset").integer(0, _MAX_BYTES),
        nbytes=node.member("nbytes").integer(0, _MAX_BYTES),
    )


def _layout_document(layout: RecordLayout) -> dict[str, Any]:
    sections = zip(("gate", "up", "down"), layout.sections, strict=True)
    return {**{name: dict(vars(section)) for name, section in sections}, "stride": layout.stride}


def _file(node: Node) -> FileEntry:
    node.object(_FILE_KEYS)
    return FileEntry(
        name=node.member("name").text(),
        nbytes=node.member("nbytes").integer(0, _MAX_BYTES),
        digest=_checksum(node.member("digest")),
    )


def _format_name(node: Node) -> str:
    name = node.text()
    if name not in quant.names():
        raise UnsupportedError(f"{node.place}: number format {name!r} is unknown to this waste", hint=_UPGRADE)
    return name


def _checksum(node: Node) -> int:
    try:
        return from_hex(node.text())
    except ValueError:
        raise node.wrong("a checksum of 16 hexadecimal digits") from None


def _repeated(what: str, values: Iterable[str | int]) -> Iterator[str]:
    seen: set[str | int] = set()
    for value in values:
        if value in seen:
            yield f"{what} {value!r} occurs twice"
        seen.add(value)


def _is_plain(name: str) -> bool:
    """A name that cannot leave the directory, and cannot be the manifest."""
    if name in ("", ".", "..", MANIFEST_NAME) or any(char in name for char in "/\\\0"):
        return False
    return len(name.encode("utf-8", "surrogatepass")) <= _MAX_NAME_BYTES
