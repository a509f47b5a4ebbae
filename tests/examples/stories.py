"""The stories under `examples/`, and the documents that they write."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from treadle import Store

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "story")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"examples.{name}")


def told(name: str, database: Any) -> Store:
    """The store of a story that was just told on this database."""
    store = Store(database, module(name).MODELS)
    module(name).story(store)
    return store
