"""The model inside a container: its config, once everything in the manifest is known to be what the config implies.

A manifest can be whole, with every checksum right, and still describe what no converter writes: a layer without its
bank, records of other sizes, a norm in 4 bits. Whoever opens a container starts here, so that nothing behind it has
to expect that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from waste.container.manifest import Manifest
from waste.errors import InputError, UsageError
from waste.models.config import ModelConfig
from waste.models.formats import Formats
from waste.models.spec import (
    DRAFT_FILE,
    TRUNK_FILE,
    TensorSpec,
    bank_layers,
    bank_name,
    draft_specs,
    trunk_specs,
)

_CLASSES = tuple(field.name for field in fields(Formats))


def stored_config(manifest: Manifest) -> ModelConfig:
    """The config of the model that `manifest` describes.

    Raises InputError when the config cannot be read (see `ModelConfig.from_json`), or when tensors, banks, formats or
    stop ids are not exactly those of such a model.
    """
    config = ModelConfig.from_json(manifest.config)
    for problem in _problems(manifest, config):
        raise InputError(f"the container contradicts its model: {problem}", hint="convert the model again")
    return config


def _problems(manifest: Manifest, config: ModelConfig) -> Iterator[str]:
    if manifest.architecture != config.family:
        yield f"architecture is {manifest.architecture!r}, the config's family {config.family!r}"
    if manifest.stop_ids != config.eos_token_ids:
        yield f"stop ids are {list(manifest.stop_ids)}, the config's {list(config.eos_token_ids)}"
    if sorted(manifest.formats) != sorted(_CLASSES):
        yield f"formats are given for {', '.join(sorted(manifest.formats)) or 'nothing'}, not for {', '.join(_CLASSES)}"
        return
    try:
        formats = Formats(**manifest.formats)
    except UsageError as error:
        yield error.message
        return
    for file, specs in ((TRUNK_FILE, trunk_specs(config)), (DRAFT_FILE, draft_specs(config))):
        yield from _tensor_problems(manifest, file, specs, formats)
    others = set(manifest.tensor_files()) - {TRUNK_FILE, DRAFT_FILE}
    if others:
        yield f"tensors lie in {min(others)!r}"
    yield from _bank_problems(manifest, config, formats)


def _tensor_problems(manifest: Manifest, file: str, specs: list[TensorSpec], formats: Formats) -> Iterator[str]:
    entries = {entry.name: entry for entry in manifest.tensors_of(file)}
    for spec in specs:
        entry = entries.pop(spec.name, None)
        if entry is None:
            yield f"{file} lacks tensor {spec.name!r}"
        elif (entry.shape, entry.fmt) != (spec.shape, formats.of(spec)):
            yield (
                f"tensor {spec.name!r} of {file} is {list(entry.shape)} in {entry.fmt}, "
                f"expected {list(spec.shape)} in {formats.of(spec)}"
            )
    for name in entries:
        yield f"{file} holds {name!r}, a tensor that the model does not have"


def _bank_problems(manifest: Manifest, config: ModelConfig, formats: Formats) -> Iterator[str]:
    banks = {bank.layer: bank for bank in manifest.banks}
    layout = formats.record(config)
    for layer in bank_layers(config):
        bank = banks.pop(layer, None)
        if bank is None:
            yield f"layer {layer} has no experts"
        elif (bank.file, bank.experts) != (bank_name(layer), config.router.experts):
            yield (
                f"layer {layer} has {bank.experts} experts in {bank.file!r}, "
                f"expected {config.router.experts} in {bank_name(layer)!r}"
            )
        elif bank.layout != layout:
            yield f"the expert records of layer {layer} have other formats or sizes than the model"
    for layer in banks:
        yield f"layer {layer} has experts that the model does not have"
