"""`--size`: the formats that lose least of those whose whole container, tokenizer and manifest included, fits."""

from __future__ import annotations

from dataclasses import replace

from waste.convert.assemble import container_bytes
from waste.convert.mixes import EXPERTS, Costs, Mix, best_mixes
from waste.convert.options import ConvertOptions
from waste.convert.preflight import Prepared
from waste.convert.source import Source
from waste.convert.work import work_for
from waste.errors import UsageError
from waste.models.formats import Formats, read_classes
from waste.units import format_bytes


def fitted(source: Source, prepared: Prepared, options: ConvertOptions) -> Prepared:
    """`prepared` in the formats that `options` leave open, chosen for its size; as it is where there is no size.

    UsageError when the smallest choice is too large, naming what it takes.
    """
    if options.size is None:
        return prepared
    mixes = _mixes(prepared, options)
    texts = sum(map(len, prepared.texts.values()))
    for mix in mixes:
        if mix.nbytes + texts <= options.size:
            candidate = _in_formats(prepared, mix.formats)
            if container_bytes(source, candidate) <= options.size:
                return candidate
    least = smallest(source, prepared, options)
    given = _given(options)
    whose = f" with {given}" if given else ""
    asked, takes = format_bytes(options.size), format_bytes(least)
    if asked == takes:  # three digits do not tell them apart
        asked, takes = f"{options.size} B", f"{least} B"
    raise UsageError(
        f"a size of {asked} is too small: {source.label}{whose} takes {takes} at least",
        hint=f"--size {-(-least // (1 << 20))}MiB",
    )


def smallest(source: Source, prepared: Prepared, options: ConvertOptions) -> int:
    """Bytes of the smallest container in formats that `options` allow."""
    return container_bytes(source, _in_formats(prepared, _mixes(prepared, options)[-1].formats))


def _mixes(prepared: Prepared, options: ConvertOptions) -> list[Mix]:
    fixed = {} if options.trunk is None else dict(read_classes(options.trunk))
    if options.experts is not None:
        fixed[EXPERTS] = options.experts
    return best_mixes(prepared.config, fixed, Costs.measured())


def _in_formats(prepared: Prepared, formats: Formats) -> Prepared:
    return replace(prepared, formats=formats, work=work_for(prepared.config, formats, prepared.names))


def _given(options: ConvertOptions) -> str:
    """The options that leave less to choose, as they were given."""
    texts = (("--experts", options.experts), ("--trunk", options.trunk))
    return " ".join(f"{name} {text}" for name, text in texts if text is not None)
