"""`waste info`: what a container, a checkpoint, a Hub model or this machine is."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from waste.cli import options
from waste.cli.config import SETTINGS, Config
from waste.cli.output import Output
from waste.errors import InputError, UsageError, WasteError
from waste.units import format_bytes

if TYPE_CHECKING:
    from waste.cli.model_facts import ModelFacts, Stored
    from waste.container.reader import Container
    from waste.models.config import ModelConfig
    from waste.models.formats import Formats

SCHEMA = "waste.info/1"
SHORT = "What a container, a checkpoint or this machine is."
HELP = """\
\b
waste info glm.waste
waste info glm.waste --verify
waste info zai-org/GLM-5.3-Flash --json
waste info

What MODEL holds, what a token costs, and what RAM buys. MODEL is a container, a checkpoint directory, or a model
of the Hugging Face Hub, of which only the config and the headers of the weights are read. Without MODEL: this
machine in brief.
"""


def info(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Container, checkpoint directory, or OWNER/NAME on the Hub.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every byte of a container.")] = False,
    settings: Annotated[bool, typer.Option("--config", help="The settings and where each comes from.")] = False,
    context: options.Context = None,
    experts_dir: options.ExpertsDir = None,
    revision: options.Revision = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> None:
    """Its help is `HELP`."""
    out: Output = ctx.obj
    out.configure(quiet=quiet, verbose=verbose, no_color=no_color)
    config = Config.load(out.env.environ)
    if settings:
        if model is not None:
            raise UsageError("--config is about settings, not about a MODEL")
        _show_settings(config, out, as_json)
    elif model is None:
        for option, given in (
            ("--verify", verify),
            ("--ctx", context is not None),
            ("--experts-dir", experts_dir),
            ("--revision", revision),
        ):
            if given:
                raise UsageError(f"{option} needs a MODEL")
        _show_machine(out, as_json)
    elif _is_container(Path(model)):
        if revision is not None:
            raise UsageError("--revision is for models of the Hub")
        places = config.parse("experts_dir", experts_dir)
        _show_container(model, places, verify, config.get("ctx", context), out, as_json)
    elif verify or experts_dir:
        option = "--verify" if verify else "--experts-dir"
        raise UsageError(f"{option} is for containers, and {model!r} is none")
    else:
        _show_checkpoint(model, revision, config.get("ctx", context), out, as_json)


def _is_container(place: Path) -> bool:
    """Anything that is there and is not a checkpoint; opening it says what it is, should it be neither."""
    return place.exists() and (not (place / "config.json").exists() or (place / "manifest.json").exists())


# -- containers


def _show_container(
    name: str, experts_dirs: Sequence[str], verify: bool, context: int | None, out: Output, as_json: bool
) -> None:
    from waste.cli.model_facts import stored_document, stored_rows
    from waste.container.manifest import MANIFEST_NAME
    from waste.container.reader import Container
    from waste.models.embedding import streams_embedding
    from waste.models.stored import stored_config

    baseline = _baseline_bytes()
    container = Container.open(Path(name), [Path(directory) for directory in experts_dirs])
    manifest = container.manifest
    config = stored_config(manifest)
    facts = _facts(config, _formats(container), context, baseline, table_on_disk=streams_embedding(config, manifest))
    stored = _stored(container, config)
    disk_bytes = sum(manifest.file_sizes().values()) + (container.path / MANIFEST_NAME).stat().st_size
    if not as_json:
        out.table([("container", name), ("on disk", format_bytes(disk_bytes)), *facts.rows()], title="Model")
        out.table(stored_rows(stored), title="Formats", right=(2, 3))
        out.table(list(facts.cost_rows()), title="Running it")
        out.table(_provenance(container), title="Provenance")
    damage = _verify(container, out) if verify else None
    if as_json:
        out.json(
            {
                "schema": SCHEMA,
                "kind": "container",
                "path": name,
                "disk_bytes": disk_bytes,
                **facts.document(),
                "formats": stored_document(stored),
                "stop_ids": list(manifest.stop_ids),
                "tool": manifest.tool,
                "options": manifest.options,
                "provenance": manifest.provenance,
                "damage": damage,
            }
        )
    elif damage is not None:
        out.table([("damaged", place) for place in damage] or [("verified", "every byte")], title="Checksums")
    if damage:
        places = "1 place" if len(damage) == 1 else f"{len(damage)} places"
        raise InputError(f"{name!r} is damaged in {places}: {damage[0]}", hint="copy it again, or convert again")


def _verify(container: Container, out: Output) -> list[str]:
    from waste.container.verify import verify

    return verify(container, out.on_event)


def _formats(container: Container) -> Formats:
    from waste.models.formats import Formats

    return Formats(**container.manifest.formats)  # all of them are there, or `stored_config` had refused it


def _stored(container: Container, config: ModelConfig) -> list[Stored]:
    """Tensors and bytes of each file kind, class and format, experts counted as matrices, without padding."""
    from waste.cli.model_facts import Stored
    from waste.models.spec import DRAFT_FILE, Role, draft_specs, trunk_specs

    roles = {spec.name: spec.role for spec in (*trunk_specs(config), *draft_specs(config))}
    count: Counter[tuple[str, Role, str]] = Counter()
    nbytes: Counter[tuple[str, Role, str]] = Counter()
    for entry in container.manifest.tensors:
        part = "draft" if entry.file == DRAFT_FILE else "trunk"
        count[part, roles[entry.name], entry.fmt] += 1
        nbytes[part, roles[entry.name], entry.fmt] += entry.nbytes
    for bank in container.manifest.banks:
        for section in bank.layout.sections:
            count["experts", Role.EXPERT, section.fmt] += bank.experts
            nbytes["experts", Role.EXPERT, section.fmt] += bank.experts * section.nbytes
    parts, order = ("trunk", "draft", "experts"), list(Role)
    keys = sorted(count, key=lambda key: (parts.index(key[0]), order.index(key[1])))
    return [
        Stored(part, None if role is Role.EXPERT else role.value, fmt, count[part, role, fmt], nbytes[part, role, fmt])
        for part, role, fmt in keys
    ]


def _provenance(container: Container) -> list[tuple[str, str]]:
    manifest = container.manifest
    origin = manifest.provenance
    rows = [("made by", f"waste {manifest.tool.removeprefix('waste ')}")]
    rows += [("option", f"{key} {value}") for key, value in sorted(manifest.options.items())]
    rows += [(key, str(value)) for key, value in origin.items() if value and not isinstance(value, list | dict)]
    files = origin.get("files") or []
    if files:
        rows.append(("source files", f"{len(files)}, {format_bytes(sum(file.get('nbytes', 0) for file in files))}"))
    return rows


# -- checkpoints, here or on the Hub


def _show_checkpoint(name: str, revision: str | None, context: int | None, out: Output, as_json: bool) -> None:
    baseline = _baseline_bytes()  # before the converter is imported, which `waste run` is not

    from waste.cli.model_facts import Stored, stored_document, stored_rows
    from waste.convert import ConvertOptions
    from waste.convert.locate import open_source
    from waste.convert.source import json_object, tensor_names
    from waste.models.hf_config import CONFIG_FILE, GENERATION_FILE, from_hf

    source = open_source(name, revision, out.on_event)
    try:
        read = {
            file: json_object((source.directory / file).read_bytes(), file)
            for file in (CONFIG_FILE, GENERATION_FILE)
            if (source.directory / file).exists()
        }
        # The config first: a model that is not supported is refused before a header is asked for.
        names = tensor_names(source.directory)
        config, notices = from_hf(read[CONFIG_FILE], read.get(GENERATION_FILE), tensor_names=names)
        headers = source.headers()
    finally:
        source.close()
    for notice in notices:
        out.notice(notice)
    facts = _facts(config, ConvertOptions().formats(), context, baseline)
    dtypes = Counter(tensor.dtype for tensor in headers.tensors.values())
    stored = [
        Stored("weights", None, dtype, count, sum(t.nbytes for t in headers.tensors.values() if t.dtype == dtype))
        for dtype, count in sorted(dtypes.items())
    ]
    disk_bytes = sum(headers.files.values())
    container_bytes = facts.sizes.trunk_bytes + facts.sizes.draft_bytes + facts.sizes.bank_bytes
    if as_json:
        out.json(
            {
                "schema": SCHEMA,
                "kind": "checkpoint",
                "source": source.kind,
                "name": source.name,
                "revision": source.revision,
                "disk_bytes": disk_bytes,
                "files": len(headers.files),
                **facts.document(),
                "stored": stored_document(stored),
                "container": {"options": ConvertOptions().formats().texts(), "weight_bytes": container_bytes},
            }
        )
        return
    head = [("checkpoint", source.name), ("weights", f"{format_bytes(disk_bytes)} in {len(headers.files)} files")]
    if source.revision:
        head.append(("revision", source.revision))
    out.table([*head, *facts.rows()], title="Model")
    out.table(stored_rows(stored), title="Formats", right=(2, 3))
    chosen = " ".join(f"--{key} {value}" for key, value in ConvertOptions().formats().texts().items())
    rows = [("on disk", f"{format_bytes(container_bytes)} of weights"), *facts.cost_rows()]
    out.table(rows, title=f"As a container ({chosen})")


def _baseline_bytes() -> int:
    """What the process of `waste run` occupies by itself, by importing what it imports. The RAM floor counts it."""
    import waste.engine.engine
    import waste.generate
    from waste.hardware.memory import resident_bytes

    with contextlib.suppress(ImportError, WasteError):  # the kernels are not built: no reason to say nothing
        import waste.backends.cpu  # noqa: F401
    return resident_bytes()


def _facts(
    config: ModelConfig, formats: Formats, context: int | None, baseline: int, *, table_on_disk: bool = True
) -> ModelFacts:
    from waste.cli.model_facts import ModelFacts
    from waste.engine.budget import DEFAULT_CONTEXT
    from waste.planner.footprint import sizes

    tokens = min(context or DEFAULT_CONTEXT, config.max_position_embeddings)
    return ModelFacts(config, sizes(config, formats, table_on_disk=table_on_disk), tokens, baseline)


# -- this machine, and the settings


def _show_machine(out: Output, as_json: bool) -> None:
    from waste.hardware.brief import look

    brief = look(Path())
    if as_json:
        out.json({"schema": SCHEMA, "kind": "machine", **_machine_document(brief)})
        return
    limit = f", limited to {format_bytes(brief.ram.limit_bytes)}" if brief.ram.limit_bytes is not None else ""
    if brief.ram.limit_source != "MemAvailable":
        limit += f" (free by {brief.ram.limit_source})"
    usable = f", {brief.usable_threads} usable here" if brief.usable_threads != brief.threads else ""
    out.table(
        [
            ("system", brief.system),
            ("CPU", brief.cpu),
            ("cores", f"{brief.cores}, {brief.threads} threads{usable}"),
            ("instructions", ", ".join(brief.instruction_sets) or "none of those known"),
            ("RAM", f"{format_bytes(brief.ram.total_bytes)}, {format_bytes(brief.ram.available_bytes)} free{limit}"),
            ("disk here", f"{format_bytes(brief.disk_free_bytes)} free of {format_bytes(brief.disk_total_bytes)}"),
        ],
        title="This machine",
    )


def _machine_document(brief: Any) -> dict[str, Any]:
    return {
        "system": brief.system,
        "cpu": brief.cpu,
        "cores": brief.cores,
        "threads": brief.threads,
        "usable_threads": brief.usable_threads,
        "instruction_sets": list(brief.instruction_sets),
        "ram_total_bytes": brief.ram.total_bytes,
        "ram_available_bytes": brief.ram.available_bytes,
        "ram_limit_bytes": brief.ram.limit_bytes,
        "ram_limit_source": brief.ram.limit_source,
        "disk_path": brief.disk_path,
        "disk_free_bytes": brief.disk_free_bytes,
        "disk_total_bytes": brief.disk_total_bytes,
    }


def _show_settings(config: Config, out: Output, as_json: bool) -> None:
    values = {setting.key: (config.values[setting.key], setting) for setting in SETTINGS}
    if as_json:
        found = {key: {"value": value.value, "origin": value.origin} for key, (value, _) in values.items()}
        out.json({"schema": SCHEMA, "kind": "config", "settings": found, "files": [str(f) for f in config.files]})
        return
    rows = [(key, _written(value.value), value.origin, setting.meaning) for key, (value, setting) in values.items()]
    out.table(rows, title="Settings (value, origin, meaning)")


def _written(value: Any) -> str:
    """A setting's value as one could write it into a variable; a dash for none."""
    if isinstance(value, tuple):
        value = os.pathsep.join(value) or None
    return "-" if value is None else str(value)
