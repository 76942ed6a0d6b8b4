"""One measured test as a flat row of plain values, units in the names: the schema of every output format.

A row says what was run, with what, on which machine, and what came out, so that it can be judged years later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from waste.errors import InputError

SCHEMA = "waste.bench/1"

# Why a row has no drive figures, or what kind they are (`drive_note`).
NOTHING_READ = "nothing was read"
BUFFERED = "reads went through the page cache: not a drive speed"
REFUSED = "the file system has no direct reads; " + BUFFERED
SIMULATED = "simulated drive"


@dataclass(frozen=True)
class Row:
    """One test of one arm: a prompt ("prefill") or tokens after it ("decode"). Per token: of those measured.

    None where there is no such figure; `drive_note` says why a drive has none.
    """

    schema: str
    test: str  # prefill or decode
    arm: str  # what --vary chose: "ram=2GiB policy=lru"
    # the model
    model: str
    model_digest: str  # of its manifest
    family: str
    formats: str
    # settings; `asked`: as they were given, None: left to waste
    backend: str
    isa: str
    threads: int
    context_tokens: int
    ram_asked_bytes: int | None
    ram_bytes: int
    vram_asked_bytes: int | None
    vram_bytes: int  # of the tier above RAM, inside `ram_bytes` where it is kept in host memory
    policy: str
    lookahead: int | None  # experts; None: adapts
    fill: bool
    learn: bool
    mlock: bool
    direct_asked: bool
    direct: bool  # whether all banks were read past the page cache
    drives: int  # that the banks lie on
    file_systems: str  # of these drives
    simulated_drive_bytes_per_s: float | None
    cold: bool  # every repeat began with an empty expert cache
    # the workload
    workload: str
    depth_tokens: int
    prompt_tokens: int
    tokens: int  # measured in each repeat
    warm_up_tokens: int
    repeats: int
    # the result: over repeats the median, and where all but the lowest and highest tenth lie
    tokens_per_s: float
    tokens_per_s_p10: float
    tokens_per_s_p90: float
    predicted_tokens_per_s: float | None  # by the plan that was run; None: there was none
    samples_s: list[float]  # wall time of each repeat
    token_ms: float  # wall time, the mean over all repeats: the sum of the lanes
    token_p90_ms: float | None  # nine of ten tokens took no longer
    # ms a token by lane, the mean over all repeats
    trunk_ms: float
    attention_ms: float
    experts_ms: float
    router_ms: float
    sampling_ms: float
    wait_ms: float  # for the drive, with nothing left to compute
    python_ms: float
    clock_ms: float  # what of this the clocks themselves took at least
    # tiers, per token; every use is one of the first four
    vram_hits: float
    ram_hits: float
    late: float
    misses: float
    hit_share: float | None  # there when asked for
    reads: float
    read_bytes: float
    prefetch_reads: float
    prefetch_useful: float
    prefetch_wasted: float
    fill_reads: float
    evictions: float
    promotions: float
    slots: int
    slot_bytes: int
    resident_experts: int  # at the end
    all_experts: int
    # limits
    weights_bytes: int | None  # that a token reads from memory
    memory_bytes_per_s: float | None
    memory_limit_bytes_per_s: float | None
    memory_share: float | None
    drive_bytes_per_s: float | None
    drive_limit_bytes_per_s: float | None
    drive_share: float | None
    drive_note: str
    peak_rss_bytes: int  # of the process, all arms together, while this was measured
    # the machine
    time: str
    waste_version: str
    python_version: str
    numpy_version: str
    system: str
    cpu: str
    cores: int
    usable_threads: int
    instruction_sets: str
    l3_bytes: int
    huge_pages: str
    ram_total_bytes: int
    ram_available_bytes: int
    ram_limit_bytes: int | None
    load_average: float

    @property
    def title(self) -> str:
        """The test in a word or two: "prefill 64", "decode 32 at 1088"."""
        at = self.depth_tokens + (self.prompt_tokens if self.test == "decode" else 0)
        return f"{self.test} {self.tokens}" + (f" at {at}" if at else "")

    @staticmethod
    def texts() -> frozenset[str]:
        """Names of the members that are text."""
        return frozenset(name for name, kind in _kinds().items() if kind is str)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any], where: str) -> Row:
        """The row in `values`, as JSON gives it; members of later versions are left out.

        What an earlier version did not know is None. Raises InputError, naming `where`, for another schema, a member
        that is missing though no row is without it, or a value of another kind.
        """
        if values.get("schema") != SCHEMA:
            raise InputError(
                f"{where} is no row of {SCHEMA}: its schema is {values.get('schema')!r}",
                hint="waste bench MODEL -o jsonl writes such rows",
            )
        found: dict[str, Any] = {}
        for name, kind in _kinds().items():
            if name not in values and NoneType not in _parts(kind):
                raise InputError(f"{where} has no {name!r}")
            value = values.get(name)
            if not _fits(value, kind):
                raise InputError(f"{where}: {name!r} is {value!r:.40}, expected {_named(kind)}")
            found[name] = float(value) if float in _parts(kind) and isinstance(value, int) else value
        return Row(**found)


NAMES = tuple(each.name for each in fields(Row))


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Row)


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is UnionType else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(each, float) for each in value)
    for part in _parts(kind):
        if part is NoneType:
            if value is None:
                return True
        elif part is float:
            # The bound is for whole numbers of hundreds of digits, which no float can hold.
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
                return True
        elif type(value) is part:
            return True
    return False


def _named(kind: Any) -> str:
    if get_origin(kind) is list:
        return "a list of numbers"
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
    return " or ".join(words[part] for part in _parts(kind))
