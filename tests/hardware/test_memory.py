"""How much RAM may be used, read from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from waste.hardware.memory import Memory, detect, resident_bytes

GIB = 1 << 30


def machine(root: Path, files: dict[str, str], total: int = 64, available: int = 60) -> Path:
    info = f"MemTotal: {total * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available * GIB // 1024} kB\n"
    for name, text in {"proc/meminfo": info, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(path: str, limit: object, usage: int, cache: int) -> dict[str, str]:
    at = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{usage}\n",
        f"{at}/memory.stat": f"anon {usage - cache}\nfile {cache}\n",
    }


def test_without_groups_it_is_mem_available(tmp_path: Path) -> None:
    assert detect(machine(tmp_path, {})) == Memory(64 * GIB, 60 * GIB, None)


def test_a_limit_anywhere_up_the_tree_counts_and_cache_is_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n"}
    files |= group("a/b", "max", 0, 0) | group("a", 6 * GIB, 5 * GIB, 4 * GIB) | group("", 32 * GIB, 0, 0)
    assert detect(machine(tmp_path, files)) == Memory(64 * GIB, 5 * GIB, 6 * GIB)


def test_version_one(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/job\n0::/\n",
        f"{at}/memory.limit_in_bytes": str(8 * GIB),
        f"{at}/memory.usage_in_bytes": str(3 * GIB),
        f"{at}/memory.stat": f"cache 1\ntotal_cache {GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",  # version one's "no limit"
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
        "sys/fs/cgroup/memory/memory.stat": "",
    }
    assert detect(machine(tmp_path, files)) == Memory(64 * GIB, 6 * GIB, 8 * GIB)


def test_a_full_group_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n"} | group("", 2 * GIB, 3 * GIB, 0)
    assert detect(machine(tmp_path, files)).available_bytes == 0


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "a:b\n"])
def test_unreadable_files_are_no_limits(tmp_path: Path, text: str) -> None:
    assert detect(machine(tmp_path, {"proc/self/cgroup": text})).limit_bytes is None


def test_this_process_has_a_size() -> None:
    assert 1 << 20 < resident_bytes() < detect().total_bytes
