"""The package's names are there, though imported late."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from typing import Any

import pytest

import treadle
from treadle.store.async_worker import AsyncWorker
from treadle.store.blocking.worker import Worker


def test_every_public_name_has_a_home_and_is_found() -> None:
    assert sorted(treadle.__all__) == sorted(treadle._HOMES)
    for name in treadle.__all__:
        assert name in dir(treadle)
        assert getattr(treadle, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = treadle.nonsense


def test_importing_the_package_imports_no_driver() -> None:
    script = "import sys, treadle; print({'pymongo', 'pydantic'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "set()\n" == run.stdout


@pytest.mark.parametrize("kind", [treadle.Store, treadle.AsyncStore, Worker, AsyncWorker])
def test_the_types_of_every_call_are_found_at_run_time(kind: type[Any]) -> None:
    """By frameworks that read signatures, Pydantic's `validate_call` for one; also of what is imported late."""
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            assert "return" in typing.get_type_hints(function), name
