"""`treadle serve`: what it refuses before it serves anything, and that it ends when told to."""

from __future__ import annotations

import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cli.invoke import assert_one_sentence, invoke, start

APPLICATION = """
from pymongo import AsyncMongoClient, MongoClient
from tests.web.shop import MODELS
from treadle import AsyncStore, Store
store = Store(MongoClient({uri!r})[{name!r}], MODELS)

def asynchronous():
    return AsyncStore(AsyncMongoClient({uri!r})[{name!r}], MODELS)
"""


@pytest.fixture
def folder(server, database, tmp_path: Path) -> Path:
    (tmp_path / "application.py").write_text(APPLICATION.format(uri=server.uri, name=database.name))
    return tmp_path


def refused(folder: Path, *arguments: str, app: str = "application:store", **environment: str) -> str:
    done = invoke(folder, "serve", "--app", app, *arguments, **environment)
    assert 2 == done.returncode
    assert_one_sentence(done.stderr.strip().rstrip("]") + ".")
    return done.stderr


def test_what_cannot_be_served_is_one_sentence(folder):
    assert "takes a token" in refused(folder, "--host", "0.0.0.0")
    assert "can be guessed" in refused(folder, "--token", "short")
    assert "can be guessed" in refused(folder, TREADLE_TOKEN="short")
    assert "cannot be found" in refused(folder, app="nowhere:store")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} cannot be used" in refused(folder, "--port", port)
    with mock.patch.dict(sys.modules, {"uvicorn": None}):
        assert "pip install 'treadle[web]'" in refused(folder)


@pytest.mark.parametrize(
    "app", [pytest.param("application:store", marks=pytest.mark.all), "application:asynchronous"]
)
def test_it_serves_a_store_of_either_kind_and_ends_when_told_to(folder, app, database: Any):
    root = str(Path(__file__).parents[2])
    with start("serve", "--app", app, "--port", "0", folder=folder, PYTHONPATH=root) as process:
        try:
            line = process.stderr.readline()
            address = line.split()[2].rstrip(";")
            assert b"ok\n" == urllib.request.urlopen(f"{address}healthz").read()
            text = urllib.request.urlopen(f"{address}api/status").read()
            assert b'"error": null' in text
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=90)
            assert "Traceback" not in errors
        finally:
            process.kill()
