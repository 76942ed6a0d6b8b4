"""When memory counts as short: on made-up machines, by a made-up clock."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from waste.hardware.pressure import Pressure, PressureWatch

GIB = 1 << 30


class Machine:
    """Its files, its time, and this process's major faults."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 100.0
        self.faults = 5000
        self.looks = 0
        self.memory(64, 30)

    def write(self, path: str, text: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def memory(self, total: float, available: float) -> None:
        lines = {"MemTotal": total, "MemAvailable": available}
        self.write("proc/meminfo", "".join(f"{k}: {int(v * GIB) // 1024} kB\n" for k, v in lines.items()))

    def pressure(self, some: float, full: float, at: str = "proc/pressure/memory") -> None:
        rows = (
            f"{kind} avg10={now:.2f} avg60=99.00 avg300=99.00 total=1\n"
            for kind, now in (("some", some), ("full", full))
        )
        self.write(at, "".join(rows))

    def group(self, some: float, full: float) -> None:
        """This process in a group of its own."""
        self.write("proc/self/cgroup", "0::/job\n")
        self.write("sys/fs/cgroup/job/cgroup.type", "domain\n")
        self.pressure(some, full, "sys/fs/cgroup/job/memory.pressure")

    def watch(self) -> PressureWatch:
        def major_faults() -> int:
            self.looks += 1
            return self.faults

        return PressureWatch(self.root, clock=lambda: self.now, major_faults=major_faults)

    def after(self, watch: PressureWatch, seconds: float, faults: int = 0) -> Pressure | None:
        self.now += seconds
        self.faults += faults
        return watch.check()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_with_memory_to_spare_and_no_psi_is_well(machine: Machine) -> None:
    watch = machine.watch()
    assert [machine.after(watch, 1) for _ in range(20)] == [None] * 20


def test_files_are_read_once_a_second_at_most(machine: Machine) -> None:
    watch = machine.watch()
    machine.memory(64, 0.1)
    answers = [machine.after(watch, 0.25) for _ in range(12)]
    assert [answer is not None for answer in answers] == [False, False, False, True] * 3
    assert machine.looks == 1 + 3


@pytest.mark.parametrize(("total", "floor"), [(16, 0.64), (32, 1.28), (64, 2), (1024, 2)])
def test_little_left_is_told_with_the_figures(machine: Machine, total: float, floor: float) -> None:
    """4 % of the memory, and never more than 2 GiB."""
    watch = machine.watch()
    machine.memory(total, floor * 1.001)
    assert machine.after(watch, 1) is None
    machine.memory(total, floor * 0.5)
    found = machine.after(watch, 1)
    assert found is not None
    assert found.short_bytes == pytest.approx(1.5 * floor * GIB, rel=1e-3)
    assert re.search(r"[\d.]+ [GM]iB of .* left \(MemAvailable\), [\d.]+ [GM]iB should be$", found.reason)
    assert "\n" not in found.reason


def test_a_control_group_has_its_own_floor(machine: Machine) -> None:
    """And page cache in it is not used up."""
    machine.group(0, 0)
    watch = machine.watch()
    limits = {"max": 10 * GIB, "current": int(9.9 * GIB), "stat": f"file {GIB}\n"}
    for name, text in limits.items():
        machine.write(f"sys/fs/cgroup/job/memory.{name}", f"{text}\n")
    assert machine.after(watch, 1) is None
    machine.write("sys/fs/cgroup/job/memory.stat", "file 0\n")
    found = machine.after(watch, 1)
    assert found is not None
    assert "memory.max of control group '/job'" in found.reason
    assert found.short_bytes == pytest.approx(0.7 * GIB, rel=1e-2)


@pytest.mark.parametrize(("some", "full", "short"), [(9.99, 0, False), (10, 0, True), (9, 4.99, False), (9, 5, True)])
def test_time_lost_by_the_own_group_counts_always(machine: Machine, some: float, full: float, short: bool) -> None:
    machine.group(0, 0)
    watch = machine.watch()
    machine.group(some, full)
    found = machine.after(watch, 1)
    assert (found is not None) == short
    if found is not None:
        assert found.short_bytes == 0
        assert f"{full if full >= 5 else some:.2f} %" in found.reason


def test_time_lost_by_others_counts_only_when_memory_is_short(machine: Machine) -> None:
    """Another container may thrash inside its own limit for ever."""
    watch = machine.watch()
    machine.pressure(90, 60)
    machine.memory(64, 64 * 0.2)
    assert machine.after(watch, 1) is None
    machine.memory(64, 64 * 0.18)
    found = machine.after(watch, 1)
    assert found is not None and found.short_bytes == 0
    assert "60.00 %" in found.reason


def test_the_topmost_group_is_the_machine_not_this_process(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.pressure(90, 90, "sys/fs/cgroup/memory.pressure")
    assert machine.after(machine.watch(), 1) is None


def test_major_faults_count_as_a_rate_and_when_they_go_on(machine: Machine) -> None:
    watch = machine.watch()
    assert machine.after(watch, 1, 9000) is None  # a program starts
    assert machine.after(watch, 1, 199) is None
    assert machine.after(watch, 1, 200) is None
    assert machine.after(watch, 4, 799) is None  # below 200 a second
    assert machine.after(watch, 1, 200) is None
    found = machine.after(watch, 2, 900)
    assert found is not None and "450 pages a second" in found.reason


def test_after_a_verdict_old_figures_are_given_time_to_settle(machine: Machine) -> None:
    """PSI looks ten seconds back: what it says right after the cache has shrunk is about before."""
    machine.group(50, 50)
    watch = machine.watch()
    answers = [machine.after(watch, 1, 1000) is not None for _ in range(22)]
    assert [i for i, short in enumerate(answers) if short] == [0, 10, 20]


def test_little_left_is_told_at_once_whatever_was_told_before(machine: Machine) -> None:
    machine.group(50, 50)
    watch = machine.watch()
    assert machine.after(watch, 1) is not None
    machine.memory(64, 1)
    assert machine.after(watch, 1) is not None
    assert machine.after(watch, 1) is not None


@pytest.mark.parametrize("text", ["", "some", "some avg10=", "some avg10=x avg60=0", "full avg10=nan avg60=0", "\x00"])
def test_psi_that_cannot_be_read_says_nothing(machine: Machine, text: str) -> None:
    machine.group(0, 0)
    machine.memory(64, 10)
    watch = machine.watch()
    machine.write("proc/pressure/memory", text)
    machine.write("sys/fs/cgroup/job/memory.pressure", text)
    assert machine.after(watch, 1) is None


def test_files_that_vanish_say_nothing(machine: Machine) -> None:
    machine.group(90, 90)
    watch = machine.watch()
    (machine.root / "sys/fs/cgroup/job/memory.pressure").unlink()
    assert machine.after(watch, 1) is None


def test_this_machine_can_be_watched() -> None:
    now = 0.0
    watch = PressureWatch(clock=lambda: now)
    now = 2.0
    found = watch.check()
    assert found is None or found.reason
