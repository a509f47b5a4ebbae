"""The verbs of the command line, each a process of its own: what it printed, how long it took, its peak memory.

The peak of a private server that a verb started is told apart: its cache has
a fixed size, and nothing of it is in Python's memory.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

LOOK_SECONDS = 0.05
# Among all processes it is sought less often.
SERVER_EVERY = 20
# Exit codes that are an answer: 1 is "not proven", or "nothing to plan".
ANSWERS = (0, 1)


@dataclass(frozen=True, slots=True)
class Done:
    """One verb that ended."""

    code: int
    output: str
    errors: str
    seconds: float
    mebibytes: float
    # Of the mongod that it started; 0 where it started none.
    server_mebibytes: float

    @property
    def json(self) -> Any:
        return json.loads(self.output)


def perform(uri: str, *arguments: str) -> Done:
    """`treadle` with these arguments on the database of the URI, to its end."""
    # Not as an argument: the URI holds the key of a private server.
    environment = {**os.environ, "MONGODB_URI": uri}
    command = [sys.executable, "-m", "treadle.cli", *arguments]
    begin = perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)
        own = server = 0.0
        try:
            for number in itertools.count():
                if process.poll() is not None:
                    break
                own = max(own, _peak(process.pid))
                if number % SERVER_EVERY == 0:
                    servers = (each for each in _below(process.pid) if _name(each) == "mongod")
                    server = max([server, *map(_peak, servers)])
                sleep(LOOK_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        seconds = perf_counter() - begin
        output.seek(0)
        errors.seek(0)
        done = Done(process.returncode, output.read(), errors.read(), seconds, own, server)
    if done.code not in ANSWERS:
        raise RuntimeError(f"treadle {arguments[0]} ended with {done.code}: {done.errors.strip()[-500:]}")
    return done


def _peak(process: int) -> float:
    """The most memory that a process had so far, in MiB; 0 of one that is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    found = status.partition("VmHWM:")[2].split()
    return int(found[0]) / 1024 if found else 0.0


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def _below(process: int) -> list[int]:
    """All processes that a process started, and those that these did."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold anything.
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    found = [process]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]
