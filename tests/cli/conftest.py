"""An application in a folder, and ports without an answer, as the command line may be given them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoke import invoke


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def folder(request: pytest.FixtureRequest, server: Any, database: Any, tmp_path: Path) -> Path:
    """A folder with the application whose source the test's module names APPLICATION, as `shop`."""
    source = request.module.APPLICATION.format(uri=server.uri, name=database.name)
    (tmp_path / "shop.py").write_text(source)
    return tmp_path


@pytest.fixture
def application(folder: Path) -> Callable[..., Any]:
    """A function that runs the command in that folder."""
    return partial(invoke, folder)
