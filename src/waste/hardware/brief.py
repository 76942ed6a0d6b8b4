"""This machine in brief, for `waste info`: read from the system's tables, nothing is measured."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from waste.hardware import memory

# What kernels may be built for, as the kernel's cpuinfo spells it: x86 "flags", ARM "Features".
_INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512vbmi": "AVX-512 VBMI",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
    "asimd": "NEON",
    "asimddp": "NEON dot product",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
    "sve2": "SVE2",
}


@dataclass(frozen=True)
class Brief:
    """What the machine has. `cores` is physical, `threads` logical, `usable_threads` what this process may use."""

    system: str  # "Linux 6.8.0 x86_64"
    cpu: str
    cores: int
    threads: int
    usable_threads: int
    instruction_sets: tuple[str, ...]
    ram: memory.Memory
    disk_path: str
    disk_free_bytes: int
    disk_total_bytes: int


def look(directory: Path, root: Path = Path("/")) -> Brief:
    """Read the figures; disk space is that of `directory`. `root` replaces the file system root in tests."""
    processors = _cpuinfo(root / "proc/cpuinfo")
    threads = len(processors) or os.cpu_count() or 1
    disk = shutil.disk_usage(directory)
    return Brief(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_model_name(processors),
        cores=_physical_cores(processors) or threads,
        threads=threads,
        usable_threads=_usable_threads(threads),
        instruction_sets=_instruction_sets(processors),
        ram=memory.detect(root),
        disk_path=str(directory),
        disk_free_bytes=disk.free,
        disk_total_bytes=disk.total,
    )


def _cpuinfo(path: Path) -> list[dict[str, str]]:
    """One table for each logical processor; empty where the system has no such file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    tables = []
    for block in text.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        table = {name.strip(): value.strip() for name, _, value in pairs}
        if "processor" in table:
            tables.append(table)
    return tables


def _model_name(processors: list[dict[str, str]]) -> str:
    for table in processors:
        name = table.get("model name") or table.get("Model")
        if name:
            return " ".join(name.split())
    return platform.processor() or platform.machine() or "unknown"


def _physical_cores(processors: list[dict[str, str]]) -> int:
    """Different (socket, core) pairs; 0 where the table does not say (ARM, some virtual machines)."""
    pairs = {(table.get("physical id"), table.get("core id")) for table in processors if "core id" in table}
    return len(pairs)


def _instruction_sets(processors: list[dict[str, str]]) -> tuple[str, ...]:
    """Those every processor has, in the order of the table above."""
    flags: set[str] | None = None
    for table in processors:
        found = set((table.get("flags") or table.get("Features") or "").split())
        flags = found if flags is None else flags & found
    return tuple(name for flag, name in _INSTRUCTION_SETS.items() if flag in (flags or ()))


def _usable_threads(threads: int) -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return threads
