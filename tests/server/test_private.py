"""Nobody but the user who started it gets at a local server, its folder or what its log says."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import DuplicateKeyError, OperationFailure

from tests.server.test_server import USER, becomes_true, insert_in_transaction, python, runs, values
from treadle import Document, Store
from treadle.errors import UsageError
from treadle.server import guard
from treadle.server import local as server

pytestmark = pytest.mark.server
SECRET = "hunter2-in-a-document"
STRANGER = 65_000
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_folder_and_everything_in_it_are_for_this_user_alone(tmp_path: Path) -> None:
    for path in (None, tmp_path / "data"):
        with server.start(path) as running:
            assert 0o700 == mode(running.path)
            assert 0o600 == mode(running.path / "treadle" / "mongod.log")
            assert running.password_file is not None
            assert 0o600 == mode(running.password_file)
            open_to_others = [each for each in running.path.rglob("*") if mode(each) & 0o077]
            assert [] == [each for each in open_to_others if each.parent != running.path / "treadle"]
            assert 0o700 == mode(running.path / "treadle")


def test_without_the_password_nothing_is_read_or_written() -> None:
    with server.start() as running:
        with MongoClient[Any]("127.0.0.1", running.port, directConnection=True) as stranger:
            for command in (
                lambda: stranger.shop.items.insert_one({"value": 1}),
                stranger.shop.items.find_one,
                lambda: stranger.admin.command("createUser", "me", pwd="me", roles=["root"]),
                lambda: stranger.admin.command("replSetGetConfig"),
                lambda: stranger.admin.command("shutdown"),
            ):
                with pytest.raises(OperationFailure) as raised:
                    command()
                assert 13 == raised.value.code
        # A login that fails is retried by the driver for seconds, so one command stands for all.
        for user, password in (("treadle", "guess"), ("__system", "x")):
            guess = MongoClient[Any](
                "127.0.0.1", running.port, directConnection=True, username=user, password=password
            )
            with guess, pytest.raises(OperationFailure) as raised:
                guess.shop.items.find_one()
            assert 18 == raised.value.code
        with MongoClient[Any](running.uri) as owner:
            owner.shop.items.insert_one({"value": 1})


@pytest.mark.all
def test_the_password_is_in_no_command_line_message_or_environment() -> None:
    with server.start() as running:
        assert running.password_file is not None
        password = running.password_file.read_text()
        assert password in running.uri
        assert password not in running.address
        seen = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                seen += [
                    (process / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")
                ]
            except OSError:
                continue
        # A temporary folder's name is on the command line of its guard and of its mongod.
        assert 2 <= sum(str(running.path) in each for each in seen)
        assert [] == [each for each in seen if password in each]
        for file in running.path.joinpath("treadle").glob("*.*"):
            assert password.encode() not in file.read_bytes(), file
        with pytest.raises(UsageError) as raised:
            server.start(running.path, arguments=["--oplogSize", "8"])
        assert password not in str(raised.value)


@pytest.mark.all
def test_the_server_runs_no_code_and_offers_no_zlib() -> None:
    with server.start() as running, MongoClient[Any](running.uri) as client:
        client.shop.items.insert_one({"value": 1})
        with pytest.raises(OperationFailure, match=r"[Jj]ava[Ss]cript|scripting|where"):
            list(client.shop.items.find({"$where": "true"}))
        compressors = client.admin.command("hello", compression=["zlib", "snappy", "zstd"])["compression"]
        assert ["snappy", "zstd"] == compressors


def test_no_value_of_a_document_is_in_the_log(tmp_path: Path) -> None:
    """Slow queries, failed plans, validators that only warn, and index builds would quote them."""
    with server.start(tmp_path / "data") as running, MongoClient[Any](running.uri) as client:
        client.admin.command("profile", 0, slowms=-1)
        items = client.shop.items
        items.insert_many([{"_id": n, "name": SECRET, "number": 4_711_471_100} for n in range(2)])
        items.update_one({"name": SECRET}, {"$set": {"other": SECRET}})
        list(items.find({"name": SECRET}).sort("name"))
        list(items.aggregate([{"$match": {"number": 4_711_471_100}}]))
        with pytest.raises(DuplicateKeyError):
            items.create_index("name", unique=True)
        with pytest.raises(OperationFailure):
            list(items.find({"$expr": {"$eq": [{"$divide": ["$number", 0]}, SECRET]}}))
        client.shop.command("collMod", "items", validator={"name": {"$type": "int"}}, validationAction="warn")
        items.insert_one({"name": SECRET, "number": 4_711_471_100})
        with client.start_session() as session, session.start_transaction():
            items.insert_one({"name": SECRET}, session=session)
        log = running.path / "treadle" / "mongod.log"
        time.sleep(0.2)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"Slow query", "Document would fail validation"} <= {entry["msg"] for entry in entries}
    slow = [entry["attr"] for entry in entries if entry["msg"] == "Slow query"]
    assert any(each.get("ns") == "shop.items" and "durationMillis" in each for each in slow)
    text = "\n".join(map(json.dumps, entries))
    assert SECRET not in text
    assert "4711471100" not in text


def test_what_a_log_line_keeps() -> None:
    line = {"t": 1, "s": "I", "c": "WRITE", "id": 1, "ctx": "c", "msg": "m"}
    attributes = {"ns": "a.b", "command": {"_id": 1}, "error": {"code": 2, "errmsg": SECRET}, "key": 5}
    entry = json.dumps({**line, "attr": attributes}).encode()
    kept = json.loads(guard.without_values(entry, listening=True))
    assert {**line, "attr": {"ns": "a.b", "error": {"code": 2}}} == kept
    assert kept == json.loads(guard.without_values(entry, listening=False))
    assert b"ld.so says" == guard.without_values(b"ld.so says", listening=False)
    assert b"" == guard.without_values(SECRET.encode(), listening=True)


@as_root
@pytest.mark.parametrize("part", [".", "treadle", "treadle/private"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "data"
    (folder / part).mkdir(parents=True, mode=0o777)
    os.chown(folder / part, STRANGER, STRANGER)
    with pytest.raises(UsageError, match="belongs to another user") as raised:
        server.start(folder)
    assert "local-server-folder" == raised.value.code
    assert STRANGER == (folder / part).stat().st_uid


@pytest.mark.all
@as_root
def test_a_link_of_another_user_is_refused_and_ones_own_is_followed(tmp_path: Path) -> None:
    link, folder = tmp_path / "link", tmp_path / "folder"
    folder.mkdir()
    link.symlink_to(folder)
    with server.start(link) as running:
        assert folder == running.path
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(UsageError, match="another user's link"):
        server.start(link)


@pytest.mark.all
def test_a_folder_that_anybody_could_exchange_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    for folder in (parent / "data", parent / "below" / "data"):
        parent.chmod(0o777)
        with pytest.raises(UsageError, match=rf"lies in {parent}, in which any user") as raised:
            server.start(folder)
        assert "local-server-folder" == raised.value.code
        parent.chmod(0o1777)
        server.start(folder).stop()


@pytest.mark.all
def test_a_lock_of_another_user_holds_nobody_up(tmp_path: Path) -> None:
    """In a folder of an older version, which anybody could enter, somebody holds every lock."""
    state = tmp_path / "treadle"
    state.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    held = []
    for name in ("start", "users", "guard"):
        held.append((state / f"{name}.lock").open("w"))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    begin = time.monotonic()
    with server.start(tmp_path) as running:
        assert time.monotonic() - begin < server.START_SECONDS_MAX / 2
        assert 0o700 == mode(running.path)
        with pytest.raises(BlockingIOError):
            fcntl.flock((state / "private" / "guard.lock").open(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    for each in held:
        each.close()


@pytest.mark.all
def test_a_folder_from_before_gets_a_password_and_keeps_its_data(tmp_path: Path) -> None:
    """As version 0.1 left it: no key, no users, open to readers, with a log that others may have open."""
    with server.start(tmp_path, arguments=["--noauth"]) as before:
        assert before.uri == before.address
        assert before.password_file is None
        with MongoClient[Any](before.uri) as client:
            client.shop.items.insert_one({"value": 1})
    tmp_path.chmod(0o755)
    log = tmp_path / "treadle" / "mongod.log"
    log.chmod(0o644)
    with log.open() as opened_before:
        for _ in range(2):
            with server.start(tmp_path) as running:
                assert [1] == values(running.uri)
                stranger = MongoClient[Any]("127.0.0.1", running.port, directConnection=True)
                with stranger, pytest.raises(OperationFailure):
                    stranger.shop.items.find_one()
        assert os.fstat(opened_before.fileno()).st_ino != log.stat().st_ino
    assert (0o700, 0o600) == (mode(tmp_path), mode(log))


@pytest.mark.all
def test_a_folder_that_lost_its_key_gets_another(tmp_path: Path) -> None:
    with server.start(tmp_path) as first:
        insert_in_transaction(first.uri, 1)
    assert first.password_file is not None
    for damage in (lambda file: file.unlink(), lambda file: file.write_text("half")):
        damage(first.password_file)
        with server.start(tmp_path) as running:
            assert first.uri != running.uri
            assert [1] == values(running.uri)


@pytest.mark.all
def test_processes_that_start_at_once_share_one_server(tmp_path: Path) -> None:
    processes = [python(USER, str(tmp_path)) for _ in range(3)]
    (said,) = {process.stdout.readline() for process in processes if process.stdout}
    uri, pid, _ = said.split("\t")
    insert_in_transaction(uri, 1)
    with server.start(tmp_path) as running:
        assert (uri, [1]) == (running.uri, values(running.uri))
    for process in processes:
        process.communicate("")
    assert becomes_true(lambda: not runs(int(pid)))


@pytest.mark.all
def test_a_server_that_an_older_version_started_is_shared_without_a_password(tmp_path: Path) -> None:
    """Its file says nothing of a key."""
    with server.start(tmp_path, arguments=["--noauth"]) as running:
        file = tmp_path / "treadle" / "server.json"
        info = json.loads(file.read_text())
        del info["key"]
        file.write_text(json.dumps(info))
        with server.start(tmp_path) as shared:
            assert (running.uri, running.pid) == (shared.uri, shared.pid)


def test_errors_of_a_local_store_do_not_name_the_password() -> None:
    class Note(Document, collection="notes"):
        text: str

    with Store.local([Note]) as store:
        client = store.database.client
        credentials = client.options.pool_options._credentials
        assert credentials is not None
        assert all(credentials.password not in repr(each) for each in (client, store, store.database))


@pytest.mark.all
@pytest.mark.parametrize("source", ["system", "package", "none"])
def test_zones_are_those_that_python_knows(tmp_path: Path, source: str) -> None:
    """Mexico keeps standard time all year since October 2022; the tables inside mongod 6.0.5 do not know."""
    check = """
import sys
from datetime import datetime
from pymongo import MongoClient
from treadle.server import local as server
with server.start() as running, MongoClient(running.uri) as client:
    zone = {"date": datetime(2024, 7, 1), "timezone": "America/Mexico_City", "format": "%z"}
    print(next(client.shop.aggregate([{"$documents": [{}]}, {"$project": {"z": {"$dateToString": zone}}}]))["z"])
"""
    folder = next(
        (each for each in ("/usr/share/zoneinfo", "/usr/lib/zoneinfo") if Path(each, "UTC").is_file()), None
    )
    if folder is None:
        pytest.skip("this machine has no zone tables")
    environment = {}
    if source != "system":
        environment["PYTHONTZPATH"] = ""
    if source == "package":
        package = tmp_path / "site" / "tzdata"
        package.mkdir(parents=True)
        package.joinpath("__init__.py").touch()
        package.joinpath("zoneinfo").symlink_to(folder)
        environment["PYTHONPATH"] = os.pathsep.join([str(package.parent), *sys.path])
    said = python(check, **environment).communicate()[0].strip()
    if source == "none":
        assert re.fullmatch(r"[+-]\d{4}", said)  # Whatever mongod knows by itself; it starts all the same.
    else:
        assert "-0600" == said
