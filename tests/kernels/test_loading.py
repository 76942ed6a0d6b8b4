"""Loading native code: what stops it is reported as what it was."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from waste import kernels
from waste.errors import ResourceError


class Stopped(BaseException):
    """What a signal handler raises."""


class Broken(MetaPathFinder, Loader):
    """Finds `_cpu`, whose initialisation ends as the extension's does: an ImportError caused by `cause`."""

    def __init__(self, cause: BaseException | None) -> None:
        self._cause = cause

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "waste.kernels._cpu" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError("Encountered an error while initializing the extension.") from self._cause


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`load(cause)`: imports `waste.kernels` anew. Everybody else keeps the one that is loaded."""

    def again(cause: BaseException | None) -> None:
        monkeypatch.setattr(sys, "meta_path", [Broken(cause), *sys.meta_path])
        monkeypatch.delitem(sys.modules, "waste.kernels._cpu")
        monkeypatch.setitem(sys.modules, "waste.kernels", None)
        monkeypatch.delitem(sys.modules, "waste.kernels")
        importlib.import_module("waste.kernels")

    before = sys.modules["waste"].__dict__["kernels"]
    yield again
    sys.modules["waste"].__dict__["kernels"] = before


@pytest.mark.parametrize("signalled", [KeyboardInterrupt(), Stopped()])
def test_a_signal_while_it_loads_is_a_signal(load: Any, signalled: BaseException) -> None:
    """Loading takes a fifth of a short command's time, so Ctrl-C often comes right then."""
    with pytest.raises(type(signalled)):
        load(signalled)


@pytest.mark.parametrize("cause", [None, ValueError("bad")])
def test_code_that_does_not_load_is_named(load: Any, cause: Exception | None) -> None:
    with pytest.raises(ResourceError, match="native code cannot be loaded"):
        load(cause)
    assert issubclass(kernels.NativeCodeError, ImportError)
