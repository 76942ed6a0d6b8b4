"""Which number format each class of tensors is stored in, and how people write that down.

Routed experts: one format, "wt3", or that of gate and up and that of down, "wt2+wt3". The trunk: one format for all
its classes, "q6", classes by name on top of that, "q6,kda=q8,shared=wt4", or by name alone, "shared=q8", on top of
the default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from waste.container.layout import RecordLayout
from waste.errors import UsageError
from waste.models.config import ModelConfig
from waste.models.spec import Role, TensorSpec
from waste.quant import get

# By KL divergence per byte on nano-glm (LEARNED: format-mixes). With experts in wt3 this trunk costs .0194, the whole
# of it in q8 .0176, in q6 .0204, in wt4 .0387; for GLM-5.3-Flash it takes 7.0 GB of fast memory, q8 9.3, q6 7.5.
DEFAULT_EXPERTS = "wt3"
DEFAULT_TRUNK = "q8,kda=q6,mla=wt4,indexer=wt4,shared=wt4"

# The classes of trunk tensors with a format of their own. Matrices take whatever the trunk gets; embedding and head
# never less than 8 bits, as every token and every logit goes through one row of theirs; the small ones are exact.
MATRICES = (Role.FIRST, Role.KDA, Role.KDA_GATE, Role.MLA, Role.INDEXER, Role.DENSE, Role.SHARED)
TRUNK = tuple(role.value for role in (*MATRICES, Role.TABLE, Role.SMALL))
_TABLE_BITS = 8
_SMALL = ("bf16", "f32")


@dataclass(frozen=True)
class Formats:
    """The format of every class of tensors: `gate`, `up` and `down` of routed experts, then the trunk's (see `Role`).

    Raises UsageError for an unknown format, a table below 8 bits, small matrices in anything but bf16 or f32.
    """

    gate: str
    up: str
    down: str
    first: str
    kda: str
    kda_gate: str
    mla: str
    indexer: str
    dense: str
    shared: str
    table: str
    small: str

    def __post_init__(self) -> None:
        for fmt in vars(self).values():
            get(fmt)
        if get(self.table).bits < _TABLE_BITS:
            raise UsageError(f"embedding and head (table) are {self.table}; {_TABLE_BITS} bits are the least for them")
        if self.small not in _SMALL:
            raise UsageError(f"small matrices (small) are {self.small}, expected {' or '.join(_SMALL)}")

    def of(self, spec: TensorSpec) -> str:
        """The format that trunk tensor `spec` is stored in."""
        return "f32" if spec.role is Role.EXACT else str(getattr(self, spec.role.value))

    def nbytes(self, spec: TensorSpec) -> int:
        """Bytes of trunk tensor `spec`."""
        return get(self.of(spec)).nbytes(spec.rows, spec.cols)

    def record(self, config: ModelConfig) -> RecordLayout:
        """The record of one routed expert."""
        return RecordLayout.of(self.gate, self.up, self.down, config.hidden_size, config.moe_intermediate_size)

    @property
    def experts_text(self) -> str:
        """The formats of routed experts as `read_formats` reads them."""
        if self.gate != self.up:  # which no converter writes
            return f"{self.gate}+{self.up}+{self.down}"
        return self.gate if self.gate == self.down else f"{self.gate}+{self.down}"

    @property
    def trunk_text(self) -> str:
        """The shortest text that `read_formats` reads these trunk formats from: equal formats, equal text."""
        base = Counter(getattr(self, role.value) for role in MATRICES).most_common(1)[0][0]
        usual = _everywhere(base)
        others = [f"{name}={fmt}" for name in TRUNK if (fmt := getattr(self, name)) != usual[name]]
        return ",".join([base, *others])

    def texts(self) -> dict[str, str]:
        """Both texts by option name, as a manifest and its reader want them."""
        return {"experts": self.experts_text, "trunk": self.trunk_text}


def read_formats(experts: str = DEFAULT_EXPERTS, trunk: str = DEFAULT_TRUNK) -> Formats:
    """The formats that two texts mean. UsageError for anything that is none."""
    inner, plus, down = (part.strip() for part in experts.partition("+"))
    chosen = dict(read_classes(trunk))
    return Formats(gate=inner, up=inner, down=down if plus else inner, **(_default() | chosen))


def read_classes(trunk: str) -> Mapping[str, str]:
    """The formats of the trunk classes that `trunk` speaks of: all of them when it begins with a format.

    UsageError for names of no class, classes that come twice, formats of none.
    """
    first, *rest = trunk.split(",")
    found: dict[str, str] = {}
    if "=" in first:
        rest = [first, *rest]
    else:
        found = _everywhere(first.strip())
    named: set[str] = set()
    for item in rest:
        name, equals, fmt = (part.strip() for part in item.partition("="))
        if not equals or name not in TRUNK:
            raise UsageError(
                f"{item.strip()!r} of the trunk is not CLASS=FORMAT",
                hint=f"one format for all, then classes by name, as q6,kda=q8: {', '.join(TRUNK)}",
            )
        if name in named:
            raise UsageError(f"the trunk's {name} comes twice")
        named.add(name)
        get(fmt)
        found[name] = fmt
    return found


def _everywhere(fmt: str) -> dict[str, str]:
    """Every trunk class in `fmt`, or in the nearest format that the class allows."""
    found = dict.fromkeys(TRUNK, fmt)
    found[Role.TABLE.value] = fmt if get(fmt).bits >= _TABLE_BITS else "q8"
    found[Role.SMALL.value] = "f32" if fmt == "f32" else "bf16"
    return found


def _default() -> dict[str, str]:
    return dict(read_classes(DEFAULT_TRUNK))
