"""Imports point one way: a package may import earlier ranks only, and none of its own rank."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "src" / "waste"

RANKS = [
    {"errors", "units", "events"},
    {"io", "kernels"},  # kernels: native code, which knows nothing of this package but its errors
    {"quant"},  # above kernels, as the trellis formats are encoded and decoded natively
    {"hardware", "container", "tokenizer"},
    {"backends", "chat"},
    {"kvcache"},
    {"layers"},
    {"models"},
    {"planner", "convert", "tiers"},
    {"engine"},
    {"generate"},
    {"bench"},
    {"cli"},
]
# errors stands below its rank mates; the package root and its entry points see everything.
FREE = {"__init__", "__main__", "bundled"}
ALLOWED_MATES = {("units", "errors"), ("events", "errors")}
# Engine.generate hands over to waste.generate when it is called: a convenience of the Python interface.
DELEGATES = {("engine", "generate")}

RANK = {name: i for i, names in enumerate(RANKS) for name in names}


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_units(path: Path) -> list[tuple[str, int, bool]]:
    """(unit of waste, line, only for types) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "waste" and len(parts) > 1:
                found.append((parts[1], node.lineno, id(node) in typing_only))
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_to_earlier_ranks(path: Path) -> None:
    here = unit_of(path)
    if here in FREE:
        return
    assert here in RANK, f"{path} belongs to no rank: add {here!r} to RANKS and say why"
    for unit, line, typing_only in imported_units(path):
        if unit == here or unit in FREE or (here, unit) in ALLOWED_MATES | DELEGATES:
            continue
        assert unit in RANK, f"{path}:{line} imports waste.{unit}, which belongs to no rank"
        if not typing_only:
            assert RANK[unit] < RANK[here], f"{path}:{line}: waste.{here} must not import waste.{unit}"


def test_every_file_says_what_it_is_for() -> None:
    silent = [p for p in ROOT.rglob("*.py") if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert silent == []
