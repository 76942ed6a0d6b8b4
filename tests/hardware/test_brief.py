"""The machine in brief, read from a file system of the test's making."""

from __future__ import annotations

from pathlib import Path

from waste.hardware.brief import look

X86 = """\
processor\t: {n}
model name\t: Some  CPU @ 3.00GHz
physical id\t: {socket}
core id\t\t: {core}
flags\t\t: fpu sse2 avx2 fma f16c {more}

"""
MEMINFO = "MemTotal:       16384 kB\nMemAvailable:    8192 kB\n"


def machine(root: Path, cpuinfo: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(cpuinfo)
    (root / "proc/meminfo").write_text(MEMINFO)
    return root


def test_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    places = [(socket, core) for _ in range(2) for socket in range(2) for core in range(3)]
    text = "".join(
        X86.format(n=n, socket=socket, core=core, more="avx512f" if n else "")
        for n, (socket, core) in enumerate(places)
    )
    brief = look(tmp_path, machine(tmp_path, text))
    assert (brief.cpu, brief.cores, brief.threads) == ("Some CPU @ 3.00GHz", 6, 12)
    assert brief.instruction_sets == ("AVX2", "FMA", "F16C")  # AVX-512 is not on every processor
    assert (brief.ram.total_bytes, brief.ram.available_bytes) == (16384 << 10, 8192 << 10)


def test_arm_has_no_core_ids(tmp_path: Path) -> None:
    text = "".join(f"processor\t: {n}\nFeatures\t: fp asimd asimddp i8mm\n\n" for n in range(4))
    brief = look(tmp_path, machine(tmp_path, text + "Model\t\t: A Board\n"))
    assert (brief.cores, brief.threads) == (4, 4)
    assert brief.instruction_sets == ("NEON", "NEON dot product", "I8MM")


def test_a_system_without_tables_still_answers(tmp_path: Path) -> None:
    brief = look(tmp_path, tmp_path)
    assert brief.threads >= brief.usable_threads >= 1
    assert brief.cpu
    assert brief.instruction_sets == ()
    assert 0 <= brief.disk_free_bytes <= brief.disk_total_bytes
