"""Where the example checkpoint is: in the installed package, or in the source tree it was installed from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from waste.errors import InputError

_NAME = "nano-glm"


def bundled_checkpoint() -> Path:
    """The directory of the example checkpoint, a Hugging Face release of a small GLM-5.3-Flash-shaped model.

    Raises InputError when the installation came without it.
    """
    installed = files("waste").joinpath("_bundled", _NAME, "config.json")
    if isinstance(installed, Path) and installed.is_file():
        return installed.parent
    tree = Path(__file__).resolve().parents[2] / "examples" / _NAME
    if (tree / "config.json").is_file():
        return tree
    raise InputError(
        f"the example checkpoint {_NAME!r} is not part of this installation of waste",
        hint="pip install --force-reinstall waste",
    )
