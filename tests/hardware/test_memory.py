"""How much RAM may be used, read from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from waste.hardware.memory import Memory, detect, resident_bytes

GIB = 1 << 30
HIERARCHY = "sys/fs/cgroup/memory"
UNLIMITED = 9223372036854771712  # version one's "no limit"


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


def old_group(path: str, limit: int, usage: int, stat: str) -> dict[str, str]:
    at = f"{HIERARCHY}/{path}".rstrip("/")
    files = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n", "memory.stat": stat}
    return {f"{at}/{name}": text for name, text in files.items()}


def mounts(*lines: str) -> dict[str, str]:
    """/proc/self/mountinfo of the given "group mount type options"."""
    text = ""
    for i, line in enumerate(lines):
        group, place, kind, options = line.split(" ")
        text += f"{40 + i} 31 0:{40 + i} {group} {place} rw,relatime shared:{i} - {kind} {kind} {options}\n"
    return {"proc/self/mountinfo": text}


def test_without_groups_it_is_mem_available(tmp_path: Path) -> None:
    assert detect(machine(tmp_path, {})) == Memory(64 * GIB, 60 * GIB, None, "MemAvailable")


def test_a_limit_anywhere_up_the_tree_counts_and_cache_is_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n"}
    files |= group("a/b", "max", 0, 0) | group("a", 6 * GIB, 5 * GIB, 4 * GIB) | group("", 32 * GIB, 0, 0)
    assert detect(machine(tmp_path, files)) == Memory(64 * GIB, 5 * GIB, 6 * GIB, "memory.max of control group '/a'")


@pytest.mark.parametrize(
    ("limits", "member", "usable", "limit", "source"),
    [
        ({"": {"max": 8 * GIB}}, "/", 7, 8, "memory.max of control group '/'"),
        ({"a": {"max": 6 * GIB}, "a/b": {"max": "max"}}, "/a/b", 5, 6, "memory.max of control group '/a'"),
        ({"": {"max": "max", "high": 8 * GIB}}, "/", 7, 8, "memory.high of control group '/'"),
        ({"": {"max": 9 * GIB, "high": 8 * GIB}}, "/", 7, 8, "memory.high of control group '/'"),
        ({"": {"max": 8 * GIB, "high": 9 * GIB}}, "/", 7, 8, "memory.max of control group '/'"),
        ({"": {"max": 3 * GIB}, "a": {"max": 2 * GIB}}, "/a", 1, 2, "memory.max of control group '/a'"),
        ({"": {"max": 128 * GIB, "high": "max"}}, "/", 60, None, "MemAvailable"),
    ],
    ids=["own", "parent", "high", "high below max", "max below high", "own below parent", "above the machine"],
)
def test_limits_of_version_two(
    tmp_path: Path, limits: dict[str, dict[str, object]], member: str, usable: int, limit: int | None, source: str
) -> None:
    files = {"proc/self/cgroup": f"0::{member}\n", "sys/fs/cgroup/cgroup.controllers": "memory\n"}
    for path, values in limits.items():
        files |= group(path, values["max"], GIB, 0)
        if "high" in values:
            files[f"sys/fs/cgroup/{path}/memory.high".replace("//", "/")] = f"{values['high']}\n"
    found = detect(machine(tmp_path, files))
    assert found == Memory(64 * GIB, usable * GIB, limit and limit * GIB, source)
    assert found.most_bytes == (limit or 64) * GIB


def test_what_a_sibling_uses_of_the_parents_limit_is_gone(tmp_path: Path) -> None:
    """The tightest limit and the one that leaves least are two: the second is the one that is named."""
    files = {"proc/self/cgroup": "0::/a/b\n"} | group("a", 32 * GIB, 30 * GIB, 0) | group("a/b", 8 * GIB, GIB, 0)
    assert detect(machine(tmp_path, files)) == Memory(64 * GIB, 2 * GIB, 8 * GIB, "memory.max of control group '/a'")


def test_cache_is_what_can_be_dropped(tmp_path: Path) -> None:
    """Shared memory, tmpfs and locked files are in `file`, and stay."""
    files = {"proc/self/cgroup": "0::/\n"} | group("", 8 * GIB, 7 * GIB, 6 * GIB)
    lists = f"inactive_file {GIB}\nactive_file {2 * GIB}\n"
    shared = f"anon {GIB}\nfile {6 * GIB}\nshmem {2 * GIB}\n"
    for stat, usable in ((shared + lists, 4), (shared, 5), (f"anon {7 * GIB}\n", 1), ("", 1)):
        files["sys/fs/cgroup/memory.stat"] = stat
        assert detect(machine(tmp_path, files)).available_bytes == usable * GIB, stat


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory,hugetlb"])
def test_version_one(tmp_path: Path, controllers: str) -> None:
    files = {"proc/self/cgroup": f"5:cpu:/x\n4:{controllers}:/job\n0::/\n"}
    files |= old_group("job", 8 * GIB, 3 * GIB, f"cache 1\ntotal_cache {GIB}\n") | old_group("", UNLIMITED, 0, "")
    source = "memory.limit_in_bytes of control group '/job'"
    assert detect(machine(tmp_path, files)) == Memory(64 * GIB, 6 * GIB, 8 * GIB, source)


def test_version_one_counts_the_cache_of_the_groups_below(tmp_path: Path) -> None:
    stat = f"cache 9\ninactive_file 9\nactive_file 9\ntotal_cache {5 * GIB}\ntotal_shmem {2 * GIB}\n"
    lists = f"total_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    for text, usable in ((stat, 4), (stat + lists, 3)):
        files = {"proc/self/cgroup": "4:memory:/job\n"} | old_group("job", 8 * GIB, 7 * GIB, text)
        assert detect(machine(tmp_path, files)).available_bytes == usable * GIB


def test_version_one_tells_of_limits_above_what_can_be_seen(tmp_path: Path) -> None:
    stat = f"hierarchical_memory_limit {4 * GIB}\ntotal_inactive_file 0\ntotal_active_file 0\n"
    files = {"proc/self/cgroup": "4:memory:/\n"} | old_group("", UNLIMITED, GIB, stat)
    source = "hierarchical_memory_limit of control group '/'"
    assert detect(machine(tmp_path, files)) == Memory(64 * GIB, 3 * GIB, 4 * GIB, source)


def test_both_versions_side_by_side(tmp_path: Path) -> None:
    """Limits count wherever the memory controller is; version two's tree is then mounted elsewhere."""
    place = "/sys/fs/cgroup/unified"
    tables = mounts("/ /sys/fs/cgroup/memory cgroup rw,memory", f"/ {place} cgroup2 rw")
    files = {"proc/self/cgroup": "4:memory:/job\n1:name=systemd:/s\n0::/new\n"} | tables
    files |= old_group("job", 8 * GIB, GIB, "") | {f"{place[1:]}/new/memory.pressure": ""}
    assert detect(machine(tmp_path, files)).available_bytes == 7 * GIB
    for name, text in (("max", 5 * GIB), ("current", GIB), ("stat", "")):
        files[f"{place[1:]}/new/memory.{name}"] = f"{text}\n"
    expected = Memory(64 * GIB, 4 * GIB, 5 * GIB, "memory.max of control group '/new'")
    assert detect(machine(tmp_path, files)) == expected


@pytest.mark.parametrize("member", ["/docker/1f", "/", "/../../elsewhere"])
def test_a_container_sees_its_part_of_the_tree(tmp_path: Path, member: str) -> None:
    """The group named in /proc is not below the mount: what is mounted is the group itself, under any name."""
    files = {"proc/self/cgroup": f"4:memory:{member}\n"} | mounts("/docker/1f /my\\040groups cgroup rw,memory")
    at = "my groups"
    files |= {f"{at}/memory.{n}_in_bytes": str(v * GIB) for n, v in (("limit", 8), ("usage", 3))}
    files |= {f"sys/fs/elsewhere/memory.{n}_in_bytes": str(v * GIB) for n, v in (("limit", 2), ("usage", 1))}
    (tmp_path / HIERARCHY).mkdir(parents=True)  # from which ../../elsewhere leads out of all groups
    files |= {f"{at}/elsewhere/memory.{n}_in_bytes": str(v * GIB) for n, v in (("limit", 2), ("usage", 1))}
    assert detect(machine(tmp_path, files)).available_bytes == 5 * GIB


def test_without_mem_available_it_is_what_that_is_made_of(tmp_path: Path) -> None:
    root = machine(tmp_path, {})
    lines = {"MemTotal": 64, "MemFree": 10, "Buffers": 1, "Cached": 20, "Shmem": 5}
    (root / "proc/meminfo").write_text("".join(f"{k}: {v * GIB // 1024} kB\n" for k, v in lines.items()))
    assert detect(root).available_bytes == 26 * GIB


def test_a_full_group_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n"} | group("", 2 * GIB, 3 * GIB, 0)
    assert detect(machine(tmp_path, files)).available_bytes == 0


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "a:b\n", "0::/a\0b\n", "0::/\udcff\n"])
def test_unreadable_files_are_no_limits(tmp_path: Path, text: str) -> None:
    root = machine(tmp_path, {})
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_bytes(text.encode("utf-8", "surrogateescape"))
    (root / "proc/self/mountinfo").write_text("1 2\n - \n/ - cgroup2\n")
    assert detect(root) == Memory(64 * GIB, 60 * GIB, None)


@pytest.mark.parametrize("limit", ["", "max", "-1", "1e9", "12 34", "9" * 30, "0x10"])
def test_a_limit_that_is_no_number_is_no_limit(tmp_path: Path, limit: str) -> None:
    files = {"proc/self/cgroup": "0::/\n"} | group("", limit, GIB, 0)
    assert detect(machine(tmp_path, files)) == Memory(64 * GIB, 60 * GIB, None)


def test_this_process_has_a_size() -> None:
    assert 1 << 20 < resident_bytes() < detect().total_bytes
