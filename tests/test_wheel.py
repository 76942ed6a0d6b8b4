"""What `pip install` would put on a machine: the wheel is built as pip builds it, unpacked, and run."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The editable install finds `waste` first through a finder of its own; it is taken out of the way.
FROM_WHEEL = """
import sys
site = sys.argv.pop(1)
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path.insert(0, site)
import waste
from waste.cli.app import main
assert waste.__file__.startswith(site), waste.__file__
sys.exit(main())
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("waste-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_wheel_holds_what_running_needs_and_nothing_else(unpacked: Path) -> None:
    names = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    sources = {f"waste/{p.relative_to(ROOT / 'src' / 'waste')}" for p in (ROOT / "src" / "waste").rglob("*.py")}
    assert sources <= names
    assert {"waste/py.typed", "waste/kernels/_cpu.pyi", "waste/convert/format_costs.json"} <= names
    assert any(n.startswith("waste/kernels/_cpu.") and n.endswith(".so") for n in names)
    bundled = {n.rsplit("/", 1)[-1] for n in names if n.startswith("waste/_bundled/nano-glm/")}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"} <= bundled
    assert not [n for n in names if n.endswith((".cpp", ".hpp", ".cmake", "CMakeLists.txt", "golden.npz"))]
    assert any(n.endswith("entry_points.txt") for n in names)


@pytest.mark.slow
def test_wheel_answers_without_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    """`waste run` with no model finds the bundled checkpoint in the wheel, converts it once and answers."""
    done = subprocess.run(
        [sys.executable, "-c", FROM_WHEEL, str(unpacked), "run", "Who are you?", "--temp", "0"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "nano-glm" in done.stdout
    assert list((tmp_path / "cache" / "waste").glob("*/manifest.json"))
