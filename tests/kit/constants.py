"""The fixture `constants`: other values for numbers that are constants of the package.

constants(tree_batch=2)     sets TREE_BATCH in each module that defines or imports it
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import pytest

import treadle


@functools.cache
def import_all() -> None:
    """Import the modules that the package itself imports when they are first needed."""
    for package in ("engine", "patterns", "upkeep", "store"):
        path = [f"{folder}/{package}" for folder in treadle.__path__]
        for module in pkgutil.walk_packages(path, f"treadle.{package}."):
            importlib.import_module(module.name)


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set constants by their names in lower case, until the end of the test."""

    def set_constants(**values: Any) -> None:
        import_all()
        for name, value in values.items():
            constant = name.upper()
            modules = [
                module
                for path, module in list(sys.modules.items())
                if path.startswith("treadle.") and constant in vars(module)
            ]
            assert modules, f"no module has {constant}"
            for module in modules:
                monkeypatch.setattr(module, constant, value)

    return set_constants
