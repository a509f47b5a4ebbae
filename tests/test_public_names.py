"""The package's names are there, though imported late."""

from __future__ import annotations

import subprocess
import sys

import pytest

import treadle


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
