"""The level of the server's profiler: raised for a recording, and set back in every case.

Before it is raised, a note of the former level is written to a file of this
user. The recording holds a lock on it, which the kernel drops when the process
ends, however it ends. Whoever comes next (`record`, `scan`, `doctor`) finds the
note of a recording that was killed, and sets the level back. The note names
the server's process: a server that was restarted has forgotten the level.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bson import json_util
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.reading import translate_errors
from treadle.errors import UsageError
from treadle.server.lock import EXCLUSIVE, FileLock, is_held

EVERYTHING = 2
COMMAND_MILLISECONDS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Level:
    """How much the profiler records."""

    level: int
    slow_milliseconds: int
    sample_rate: float
    filter: Mapping[str, Any] | None = None

    def as_command(self) -> dict[str, Any]:
        body = {"slowms": self.slow_milliseconds, "sampleRate": self.sample_rate}
        return {"profile": self.level, **body, **({"filter": self.filter} if self.filter else {})}

    def raised(self) -> Level:
        """The same, when every operation is recorded."""
        return Level(EVERYTHING, self.slow_milliseconds, 1.0)


def read_level(database: Database[Any]) -> Level:
    """The present level; asking for it takes the right to change it."""
    reply = translate_errors(lambda: _command(database, {"profile": -1}))
    return Level(
        int(reply["was"]),
        int(reply.get("slowms", 100)),
        float(reply.get("sampleRate", 1.0)),
        reply.get("filter"),
    )


def raise_level(database: Database[Any], former: Level) -> None:
    """Let the profiler record every operation."""
    command = former.raised().as_command()
    if former.filter:
        command["filter"] = "unset"
    translate_errors(lambda: _command(database, command))


def set_back(database: Database[Any], former: Level) -> None:
    translate_errors(lambda: _command(database, former.as_command()))


def _command(database: Database[Any], body: Mapping[str, Any]) -> dict[str, Any]:
    return database.command({**body, "comment": "treadle record"}, maxTimeMS=COMMAND_MILLISECONDS_MAX)


# -- what a killed recording leaves ------------------------------------------------------------


def notes_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the notes are: `treadle/recordings` in the user's folder for state."""
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "treadle" / "recordings"


def hello(client: MongoClient[Any]) -> dict[str, Any]:
    """What the server says of itself."""
    return client.admin.command("hello", maxTimeMS=COMMAND_MILLISECONDS_MAX)


def server_process(client: MongoClient[Any]) -> str:
    """Which process of mongod answers; another one after each restart."""
    version = hello(client).get("topologyVersion") or {}
    return f"{version.get('processId', '')}"


class Note:
    """The note of a recording under way; a lock says that it is."""

    def __init__(self, folder: Path, process: str, database: str) -> None:
        name = hashlib.sha256(f"{process}/{database}".encode()).hexdigest()[:32]
        self.path = folder / f"{name}.json"
        self._lock: FileLock | None = None

    def take(self, process: str, database: str, former: Level, output: Path) -> bool:
        """Write the note and hold it; False where another recording holds it."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(self.path)
        except OSError as error:
            raise UsageError(
                f"The former level of the profiler cannot be noted in {self.path.parent}: {error.strerror}; "
                "name a folder that can be written as XDG_STATE_HOME.",
                code="output-invalid",
            ) from None
        if not lock.attempt(EXCLUSIVE):
            lock.close()
            return False
        self._lock = lock
        content = {
            "process": process,
            "database": database,
            "output": str(output.absolute()),
            "former": former.as_command(),
        }
        data = json_util.dumps(content).encode()
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, data, 0)
        os.fsync(lock.descriptor)
        return True

    def drop(self, is_set_back: bool = True) -> None:
        """Let go of the note, and remove it where the level is set back."""
        if self._lock is not None:
            if is_set_back:
                with contextlib.suppress(OSError):
                    self.path.unlink()
            self._lock.close()
            self._lock = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a recording that was killed left: the level before it, and its file."""

    path: Path
    former: Level
    output: str


def leftover(client: MongoClient[Any], database: str, folder: Path | None = None) -> Leftover | None:
    """The note of a recording of this database on this server that no longer runs."""
    folder = notes_folder() if folder is None else folder
    if not folder.is_dir():
        return None
    try:
        process = server_process(client)
    except PyMongoError:
        return None
    path = Note(folder, process, database).path
    if not path.is_file() or is_held(path):
        return None
    try:
        content = json_util.loads(path.read_text())
        command = content["former"]
        former = Level(
            int(command["profile"]),
            int(command["slowms"]),
            float(command["sampleRate"]),
            command.get("filter"),
        )
        return Leftover(path, former, str(content["output"]))
    except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError):
        # Killed before it was written, so nothing was raised.
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def mend(database: Database[Any], folder: Path | None = None) -> str | None:
    """Set the level back where a recording was killed; the sentence that says so.

    A level that somebody has changed since is left alone.
    """
    left = leftover(database.client, database.name, folder)
    if left is None:
        return None
    present = read_level(database)
    # Of a profiler that was at this level before, the recording changed the filter and the sample.
    ours = present == left.former.raised() if left.former.level == EVERYTHING else present.level == EVERYTHING
    if ours and present != left.former:
        set_back(database, left.former)
        text = (
            f"The recording into {left.output} was killed; the profiler of {database.name} is back at level "
            f"{left.former.level}."
        )
    else:
        text = ""
    with contextlib.suppress(OSError):
        left.path.unlink()
    return text or None
