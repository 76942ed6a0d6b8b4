"""The engine allocates what the budget lists and nothing else: a process stays inside the RAM it was given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Processes of their own: a test run has a history that would count as baseline. The first says what budget
# leaves `room` for experts, the second lives with it.
PLAN = """
import json, sys
from waste.engine.engine import Engine
import waste.backends.cpu
from waste.hardware.memory import resident_bytes

path, room = sys.argv[1], int(sys.argv[2])
baseline = resident_bytes()
with Engine.open(path, ram=2 << 30, ctx=1024) as generous:
    fixed = generous.budget.fixed_bytes - generous.budget.baseline_bytes
    slot, k = generous.budget.slot_bytes, generous.config.router.top_k
print(json.dumps(baseline + fixed + k * slot + room))
"""

# VmHWM, not getrusage: ru_maxrss survives exec, so it would report the test run's own peak.
RUN = """
import json, sys
from pathlib import Path
from waste.engine.engine import Engine

with Engine.open(sys.argv[1], ram=int(sys.argv[2]), ctx=1024) as engine:
    session = engine.session()
    session.eval([i * 7919 % 4000 for i in range(900)])
    for i in range(60):
        session.eval([i])
    status = Path("/proc/self/status").read_text().split()
    peak = int(status[status.index("VmHWM:") + 1]) * 1024
    print(json.dumps([peak, engine.budget.ram_bytes, engine.budget.slots]))
"""


@pytest.mark.parametrize("room_mib", [16, 48])
def test_peak_rss_stays_inside_the_budget(exact_nano: Path, room_mib: int) -> None:
    def python(program: str, *arguments: object) -> object:
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    ram = python(PLAN, exact_nano, room_mib << 20)
    peak, budget, slots = python(RUN, exact_nano, ram)
    assert slots < 224, "the budget is so large that nothing is tested"
    assert peak <= budget
