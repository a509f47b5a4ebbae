"""The private local server, with real mongod processes throughout."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from treadle.errors import UsageError
from treadle.server import local as server

pytestmark = pytest.mark.server
WAIT_SECONDS_MAX = 60.0

# Starts a server in the folder of its first argument ("" for a temporary one),
# says where, and stays until its input ends.
USER = """
import sys
from treadle.server import local as server
running = server.start(sys.argv[1] or None)
print(running.uri, running.pid, running.path, sep="\\t", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[server.LocalServer]:
    with server.start() as running:
        yield running


@pytest.fixture
def user() -> Iterator[Callable[[str | Path], tuple[subprocess.Popen[str], list[str]]]]:
    """Make another process that uses a server; give it and what it says."""
    started = []

    def make(folder: str | Path) -> tuple[subprocess.Popen[str], list[str]]:
        process = python(USER, str(folder))
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().rstrip("\n").split("\t")

    yield make
    for process in started:
        process.kill()
        process.communicate()


def python(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def runs(pid: int) -> bool:
    """Whether a process runs; one that merely was not reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        # The first thread may have ended while others still hold files and ports.
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def becomes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def insert_in_transaction(uri: str, value: int) -> None:
    with MongoClient[dict[str, Any]](uri) as client, client.start_session() as session:
        session.with_transaction(
            lambda session: client.shop.items.insert_one({"value": value}, session=session)
        )


def values(uri: str) -> list[int]:
    with MongoClient[dict[str, Any]](uri) as client:
        return sorted(item["value"] for item in client.shop.items.find())


def script(folder: Path, text: str) -> Path:
    """A stand-in for a mongod that cannot run; what it prints is what ld.so prints."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mongod"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_only_this_machine_can_connect(shared: server.LocalServer) -> None:
    """mongod listens at 127.0.0.1 alone and leaves no socket file in /tmp."""
    listening = subprocess.run(
        ["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True
    ).stdout
    addresses = re.findall(rf": ([0-9A-F]+):{shared.port:04X} 0+:0000 0A", listening)
    assert ["0100007F"] == addresses
    assert not Path(f"/tmp/mongodb-{shared.port}.sock").exists()


def test_stop_waits_for_mongod_and_removes_a_temporary_folder() -> None:
    running = server.start()
    assert runs(running.pid)
    running.stop()
    assert (False, False) == (runs(running.pid), running.path.exists())
    running.stop()  # The second time does nothing.


def test_a_server_ends_with_a_killed_parent(user: Any) -> None:
    """After kill -9 of the parent, neither mongod nor the temporary folder stays."""
    process, (_, pid, folder) = user("")
    assert (True, True) == (runs(int(pid)), Path(folder).exists())
    process.kill()
    assert becomes_true(lambda: not runs(int(pid)))
    assert becomes_true(lambda: not Path(folder).exists())


@pytest.mark.all
def test_a_server_ends_with_a_parent_that_forgets_to_stop_it(user: Any) -> None:
    process, (_, pid, folder) = user("")
    process.communicate("")
    assert (False, False) == (runs(int(pid)), Path(folder).exists())


@pytest.mark.all
def test_a_server_survives_the_thread_that_started_it() -> None:
    started: list[server.LocalServer] = []
    thread = threading.Thread(target=lambda: started.append(server.start()))
    thread.start()
    thread.join()
    with started[0] as running:
        time.sleep(0.3)
        insert_in_transaction(running.uri, 1)


@pytest.mark.all
def test_mongod_dies_with_a_killed_guard() -> None:
    with server.start() as running:
        os.kill(parent(running.pid), signal.SIGKILL)
        assert becomes_true(lambda: not runs(running.pid))
    assert not running.path.exists()


@pytest.mark.all
def test_a_forked_child_does_not_stop_its_parents_server(shared: server.LocalServer) -> None:
    """Neither the inherited exit handlers nor an explicit stop reach the server."""
    with MongoClient[dict[str, Any]](shared.uri) as client:
        client.admin.command("ping")
    child = os.fork()
    if child == 0:
        shared.stop()
        os._exit(0)
    os.waitpid(child, 0)
    forking = """
import os
from treadle.server import local as server
running = server.start()
if os.fork() == 0:
    raise SystemExit  # Runs the exit handlers.
os.wait()
print(os.path.exists(f"/proc/{running.pid}/fd"))
"""
    assert "True\n" == python(forking).communicate()[0]
    time.sleep(0.2)
    assert runs(shared.pid)


@pytest.mark.all
def test_a_fork_does_not_keep_the_server_of_a_killed_parent() -> None:
    forking = """
import os, time
from treadle.server import local as server
running = server.start()
child = os.fork()
if child == 0:
    time.sleep(60)
print(running.pid, child, flush=True)
time.sleep(60)
"""
    process = python(forking)
    assert process.stdout is not None
    pid, child = (int(word) for word in process.stdout.readline().split())
    try:
        process.kill()
        assert becomes_true(lambda: not runs(pid))
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


def test_a_kept_folder_keeps_its_data_and_while_it_can_its_port(tmp_path: Path) -> None:
    folder = tmp_path / "a folder with spaces"
    with server.start(folder) as first:
        insert_in_transaction(first.uri, 1)
    with server.start(str(folder)) as second:
        insert_in_transaction(second.uri, 2)
    assert (first.uri, folder) == (second.uri, second.path)
    with socket.create_server(("127.0.0.1", first.port)):
        begin = time.monotonic()
        with server.start(folder) as third:
            insert_in_transaction(third.uri, 3)
            # Asked whether it is mongod, the other one stays silent; mongod would wait 30 s.
            assert time.monotonic() - begin < 30
            assert first.port != third.port
            assert [1, 2, 3] == values(third.uri)


def test_two_processes_share_a_server_until_the_last_one_ends(user: Any) -> None:
    process, (uri, pid, folder) = user("")
    with server.start(folder) as running:
        assert (uri, int(pid)) == (running.uri, running.pid)
    time.sleep(0.3)
    insert_in_transaction(uri, 1)
    process.kill()
    assert becomes_true(lambda: not runs(int(pid)))


@pytest.mark.all
def test_a_server_with_other_options_is_not_shared() -> None:
    with server.start(arguments=["--oplogSize", "8"]) as running:
        with pytest.raises(UsageError, match="'--oplogSize', '8'") as raised:
            server.start(running.path, arguments=["--oplogSize", "9"])
        assert "local-server-options" == raised.value.code
        with server.start(running.path) as same:
            assert running.uri == same.uri
        insert_in_transaction(running.uri, 1)


@pytest.mark.all
def test_parameters_and_arguments_reach_mongod() -> None:
    arguments = ["--oplogSize=1", "--syncdelay", "1"]
    with (
        server.start(parameters={"ttlMonitorEnabled": False}, arguments=arguments) as running,
        MongoClient[dict[str, Any]](running.uri) as client,
    ):
        options = client.admin.command("getCmdLineOpts")["parsed"]
        assert (1, 1.0, "false") == (
            options["replication"]["oplogSizeMB"],
            options["storage"]["syncPeriodSecs"],
            options["setParameter"]["ttlMonitorEnabled"],
        )


def test_an_unknown_option_is_an_error_that_names_it() -> None:
    with pytest.raises(UsageError, match="unrecognised option '--teir'") as raised:
        server.start(arguments=["--teir"])
    assert "local-server-options" == raised.value.code


@pytest.mark.all
def test_a_killed_mongod_starts_again_where_clients_look_for_it() -> None:
    """An open client goes on, and the folder is still a temporary one."""
    with server.start() as first, MongoClient[dict[str, Any]](first.uri) as client:
        client.shop.items.insert_one({"value": 1})
        os.kill(first.pid, signal.SIGKILL)
        with server.start(first.path) as second:
            assert (first.uri, True) == (second.uri, first.pid != second.pid)
            client.shop.items.insert_one({"value": 2})
            assert [1, 2] == values(second.uri)
    assert (False, False) == (runs(second.pid), first.path.exists())


@pytest.mark.all
def test_what_a_crash_left_behind_is_no_obstacle(tmp_path: Path, user: Any) -> None:
    """mongod.lock of a killed mongod, and a server file with a process id used again."""
    process, (uri, pid, folder) = user(tmp_path)
    insert_in_transaction(uri, 1)
    os.kill(parent(int(pid)), signal.SIGKILL)
    process.kill()
    assert becomes_true(lambda: not runs(int(pid)))
    assert (tmp_path / "mongod.lock").read_text().strip() == pid
    file = tmp_path / "treadle" / "server.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pid": os.getpid()}))
    with server.start(folder) as running:
        assert os.getpid() != running.pid
        assert [1] == values(running.uri)


@pytest.mark.all
def test_an_unreadable_server_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "treadle").mkdir()
    (tmp_path / "treadle" / "server.json").write_text('{"port": 4')
    with server.start(tmp_path) as running:
        assert [] == values(running.uri)


@pytest.mark.all
def test_a_full_disk_is_told_in_a_sentence() -> None:
    """In a mount namespace of its own, so that nothing stays mounted."""
    inside = """
import sys
from treadle.server import local as server
try:
    server.start(sys.argv[1])
except server.UsageError as error:
    print(error.code, error, sep="\\n")
"""
    commands = 'mount -t tmpfs -o size="$2" none /mnt && exec "$0" -c "$1" /mnt/data'
    for size in ("16k", "64k"):
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", commands, sys.executable, inside, size],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if "unshare" in done.stderr or "mount" in done.stderr:
            pytest.skip("this machine allows no private mounts")
        assert ["local-server-disk-full", "The disk of /mnt/data is full"] == re.findall(
            r"^local-.*|^The disk of \S+ is full", done.stdout, re.MULTILINE
        )
        assert "" == done.stderr


LIBRARY = "error while loading shared libraries: libcrypto.so.3: cannot open shared object file"


@pytest.mark.all
@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        (f"#!/bin/sh\necho 'mongod: {LIBRARY}' >&2; exit 127", "mongod-library-missing",
         r"libcrypto\.so\.3.*install.*TREADLE_MONGOD"),
        ("#!/bin/sh\necho the moon is in the wrong quarter; exit 7", "local-server-failed",
         "status 7, saying 'the moon is"),
        ("\x7fELF for another machine", "local-server-failed", "Exec format error"),
    ],
)  # fmt: skip
def test_a_mongod_that_does_not_run_is_told_in_a_sentence(
    tmp_path: Path, program: str, code: str, words: str
) -> None:
    mongod = tmp_path / "mongod"
    mongod.write_text(program)
    mongod.chmod(0o755)
    with pytest.raises(UsageError, match=words) as raised:
        server.start(tmp_path / "data", mongod=mongod)
    assert code == raised.value.code


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("file", "is a file, or lies under one"),
        ("file/below", "is a file, or lies under one"),
        ("/proc/treadle", "/proc/treadle cannot be used"),
    ],
)
def test_what_cannot_be_a_folder_is_named(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=words) as raised:
        server.start(tmp_path / path)
    assert "local-server-folder" == raised.value.code


@pytest.mark.all
def test_a_folder_of_another_mongod_is_taken_over_only_after_its_end(tmp_path: Path) -> None:
    """Its data stay, though it crashed, its set has another name, and its port is lost."""
    command = [str(server.find_mongod()), "--dbpath", str(tmp_path), "--port", "0"]
    command += ["--nounixsocket", "--replSet", "theirs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        listening = next(line for line in other.stdout if b'"id":23016' in line)
        port = json.loads(listening)["attr"]["port"]
        with MongoClient[dict[str, Any]]("127.0.0.1", port, directConnection=True) as client:
            members = [{"_id": 0, "host": f"localhost:{port}"}]
            client.admin.command("replSetInitiate", {"_id": "theirs", "members": members})
        insert_in_transaction(f"mongodb://127.0.0.1:{port}/?replicaSet=theirs", 1)
        with pytest.raises(UsageError, match="in use by another mongod") as raised:
            server.start(tmp_path)
        assert ("local-server-folder", None) == (raised.value.code, other.poll())
        other.kill()
        other.wait()
    with socket.create_server(("127.0.0.1", port)), server.start(tmp_path) as running:
        assert (
            f"mongodb://treadle@127.0.0.1:{running.port}/?replicaSet=treadle&authSource=admin"
            == running.address
        )
        assert [1] == values(running.uri)


@pytest.mark.all
def test_data_of_another_version_is_told_in_a_sentence(tmp_path: Path) -> None:
    server.start(tmp_path).stop()
    turtle = tmp_path / "WiredTiger.turtle"
    turtle.write_text(re.sub(r"major=\d+,minor=\d+", "major=99,minor=0", turtle.read_text()))
    with pytest.raises(UsageError, match="another version of MongoDB") as raised:
        server.start(tmp_path)
    assert "local-server-version" == raised.value.code


@pytest.mark.all
def test_a_server_needs_no_home_folder() -> None:
    """The other process has neither HOME nor any other variable of ours."""
    process = python(USER, "", HOME="/nowhere")
    assert process.communicate("")[0].startswith("mongodb://treadle:")


def test_mongod_is_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TREADLE_MONGOD, then the PATH, then the package of the `local` extra."""
    named = script(tmp_path / "named", "")
    on_path = script(tmp_path / "bin", "")
    bundled = script(tmp_path / "site" / "fiftyone" / "db" / "bin", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    path = f"{tmp_path}/empty:{on_path.parent}"
    assert named == server.find_mongod({"TREADLE_MONGOD": str(named), "PATH": path})
    assert on_path == server.find_mongod({"TREADLE_MONGOD": "", "PATH": path})
    assert bundled == server.find_mongod({"PATH": str(tmp_path)})
    assert bundled == server.find_mongod({})


def test_the_bundled_mongod_gets_its_run_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = script(tmp_path / "fiftyone" / "db" / "bin", "")
    bundled.chmod(0o644)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert bundled == server.find_mongod({})
    assert 0o755 == bundled.stat().st_mode & 0o777


@pytest.mark.parametrize("entry", ["", ".", None])
def test_what_lies_in_the_working_directory_is_neither_run_nor_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str | None
) -> None:
    planted = script(tmp_path / "fiftyone" / "db" / "bin", "")
    planted.chmod(0o644)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path) if entry is None else entry])
    with pytest.raises(UsageError, match="No mongod was found"):
        server.find_mongod({})
    assert 0o644 == planted.stat().st_mode & 0o777


def test_without_any_mongod_the_error_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UsageError, match=r"pip install 'treadle\[local\]'") as raised:
        server.find_mongod({"PATH": "/nowhere"})
    assert "mongod-missing" == raised.value.code


def test_a_wrong_treadle_mongod_is_named(tmp_path: Path) -> None:
    """It is never passed over in favour of another mongod."""
    (tmp_path / "text").write_text("not a program")
    for name, code in (
        ("absent", "mongod-missing"),
        ("text", "mongod-not-executable"),
        (".", "mongod-not-executable"),
    ):
        path = str(tmp_path / name)
        with pytest.raises(UsageError, match=f"TREADLE_MONGOD names {path}") as raised:
            server.find_mongod({"TREADLE_MONGOD": path, "PATH": os.environ["PATH"]})
        assert code == raised.value.code
    with pytest.raises(UsageError, match="mongod= names /nowhere"):
        server.start(mongod=Path("/nowhere"))
