"""Runs one mongod as a child, and ends it when its last user has gone.

`local.py` runs this as a script and never imports it, so it needs nothing but
the standard library and starts in a few milliseconds.

The rules:
- Each user of the server holds a shared lock on `users.lock`. The kernel
  drops it when the user dies, however it dies. Once the guard gets that lock
  for itself, there are no users left.
- The guard holds `guard.lock` for as long as mongod runs, and the kernel kills
  mongod when the guard dies. A process that gets `guard.lock` knows that no
  server runs, whatever process ids are on file.
- A temporary folder is removed once it has neither users nor a server.
- mongod's output reaches its log through the guard, which leaves out whatever
  may come from documents. (mongod itself can do that in its paid edition only.)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

POLL_SECONDS = 0.05
START_POLL_SECONDS = 0.01
TERMINATE_SECONDS_MAX = 10.0
PREDECESSOR_SECONDS_MAX = 1.0
PORT_IN_USE_STATUS = 48
SET_PARENT_DEATH_SIGNAL = 1
LISTENING = '"id":23016,'
RECORDER_SECONDS_MAX = 5.0

# Until mongod listens there are no clients, and these components are about the server itself.
OF_THE_SERVER = {"-", "ACCESS", "ASIO", "CONTROL", "FTDC", "NETWORK", "STORAGE", "WT"}
OF_THE_DISK = ("WiredTiger error", "WiredTiger error message")
# Attributes of a log line that hold names and figures of the server, never values of documents.
KEPT = re.compile(
    "ns|namespace|collection|db|dbName|index|uuid|type|code|codeName|error|error_str|exitCode|signal|port|host|"
    "remote|protocol|appName|connectionId|connectionCount|state|oldState|newState|term|terminationCause|"
    "planSummary|queryHash|planCacheKey|(keys|docs)Examined|keys(Inserted|Deleted)|n(returned|inserted|deleted|"
    "Matched|Modified)|num(Yields|Killed)|writeConflicts|reslen|hasSortStage|usedDisk|duration(Millis)?"
)

# Blocked, and received by `pause`, so that a signal ends a pause at once and is never lost.
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main(request: dict[str, Any]) -> None:
    """Start mongod, report where it listens or why not, then wait for its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.umask(0o077)
    state, private = Path(request["state"]), Path(request["private"])
    users = os.open(private / "users.lock", os.O_RDWR | os.O_CLOEXEC)
    os.set_inheritable(request["guard_lock"], False)
    mongod = None
    try:
        mongod, outcome = launch(request, state, users)
        if mongod is not None:
            outcome = {**request["options"], **outcome, "pid": mongod.pid}
            write_whole(state / "server.json", json.dumps(outcome))
    except OSError as error:
        outcome = {"errno": error.errno, "error": error.strerror}
        if mongod is not None:
            end(mongod, gently=False)
            mongod = None
    report(outcome)
    if mongod is not None:
        watch(mongod, users, temporary=request["temporary"])
    if request["temporary"]:
        if not nobody_uses(users):
            os.close(request["guard_lock"])
            if not wait_for_last_user(private, users):
                return
        shutil.rmtree(request["folder"], ignore_errors=True)


def launch(
    request: dict[str, Any], state: Path, users: int
) -> tuple[subprocess.Popen[bytes] | None, dict[str, Any]]:
    """A listening mongod and its port, or None and its exit status.

    mongod itself binds the port, so there is no gap in which another process
    could take a free one; when a port is taken, the next is tried.
    """
    ports = list(request["ports"])
    patience = time.monotonic() + PREDECESSOR_SECONDS_MAX
    status = PORT_IN_USE_STATUS
    while ports:
        port = [] if ports[0] is None else ["--port", str(ports[0])]
        mongod, recorder = spawn([*request["command"], *port], state / "mongod.log")
        listening = None
        while listening is None and mongod.poll() is None:
            if nobody_uses(users):
                end(mongod, gently=False)
                return None, {"status": None}
            pause(START_POLL_SECONDS)
            listening = listening_port(state / "mongod.log")
        if listening is not None:
            return mongod, {"port": listening}
        status = mongod.returncode
        recorder.join(RECORDER_SECONDS_MAX)  # All that it said is in the log.
        if status == PORT_IN_USE_STATUS or mentions(state, "Address already in use"):
            del ports[0]
        elif mentions(state, "DBPathInUse") and time.monotonic() < patience:
            pause(POLL_SECONDS)  # A mongod whose guard was killed may still be ending.
        else:
            break
    return None, {"status": status}


def spawn(command: list[str], log: Path) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """Start mongod so that the kernel kills it when this process dies, and record what it says."""
    library = ctypes.CDLL(None)
    guard = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if sys.platform == "linux":
            library.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    # A new file: one of an older version may have been opened by another user.
    log.unlink(missing_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # No recorder of an earlier attempt is running, so there is a single thread, as preexec_fn asks for.
    mongod = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=prepare,  # noqa: PLW1509
    )
    recorder = threading.Thread(target=record, args=(mongod.stdout, output), daemon=True)
    recorder.start()
    return mongod, recorder


def record(said: IO[bytes], output: int) -> None:
    """Write what mongod says to its log, without values of documents."""
    listening = False
    with said, os.fdopen(output, "wb", buffering=0) as log:
        for line in said:
            # A full disk must not hold mongod up.
            with contextlib.suppress(OSError):
                log.write(without_values(line, listening=listening))
            listening = listening or LISTENING.encode() in line


def without_values(line: bytes, *, listening: bool) -> bytes:
    """One line of mongod's output, without attributes in which documents may be quoted."""
    try:
        entry = json.loads(line)
        attributes = entry.get("attr", {})
        of_the_server = not listening and entry["c"] in OF_THE_SERVER
    except (ValueError, KeyError, AttributeError, TypeError):
        return b"" if listening else line  # The loader's words, or the parser's of the command line.
    if of_the_server or entry.get("msg") in OF_THE_DISK:
        return line
    return json.dumps({**entry, "attr": kept(attributes)}).encode() + b"\n"


def kept(attributes: Any) -> Any:
    if not isinstance(attributes, dict):
        return attributes
    # An error may also be a text, which quotes what it is about.
    return {
        name: kept(value)
        for name, value in attributes.items()
        if KEPT.fullmatch(name) and not (name == "error" and isinstance(value, str))
    }


def listening_port(log: Path) -> int | None:
    """The port that mongod says it listens at, once it has said so."""
    for line in log.read_text(errors="replace").splitlines():
        if LISTENING in line:
            try:
                return int(json.loads(line)["attr"]["port"])
            except ValueError:
                return None  # The line is still being written.
    return None


def mentions(state: Path, words: str) -> bool:
    return words in (state / "mongod.log").read_text(errors="replace")


def watch(mongod: subprocess.Popen[bytes], users: int, *, temporary: bool) -> None:
    """Return when mongod has ended: by itself, by request, or for want of users."""
    unused = terminated = False
    while mongod.poll() is None and not unused and not terminated:
        unused = nobody_uses(users)
        terminated = not unused and pause(POLL_SECONDS) == signal.SIGTERM
    # A folder that is removed next needs no clean shutdown.
    end(mongod, gently=not (temporary and unused))


def end(mongod: subprocess.Popen[bytes], *, gently: bool) -> None:
    if gently and mongod.poll() is None:
        mongod.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            mongod.wait(TERMINATE_SECONDS_MAX)
    if mongod.poll() is None:
        mongod.kill()
    mongod.wait()


def wait_for_last_user(private: Path, users: int) -> bool:
    """Wait, after mongod's end, until the temporary folder can be removed.

    A user may start a server there again, under another guard; then that
    guard removes the folder.
    """
    while not nobody_uses(users):
        if pause(POLL_SECONDS) == signal.SIGTERM:
            return False
    try:
        guard_lock = os.open(private / "guard.lock", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(guard_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def nobody_uses(users: int) -> bool:
    """Whether the last user is gone; if so, no new one gets in before this process ends."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def pause(seconds: float) -> int | None:
    """Wait, or give the number of the signal that came first."""
    received = signal.sigtimedwait(SIGNALS, seconds)
    return None if received is None else received.si_signo


def report(outcome: dict[str, Any]) -> None:
    """Send the outcome to the starter, which may be gone, and close its pipe."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(outcome).encode() + b"\n")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that no reader sees half of it."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
