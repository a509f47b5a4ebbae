"""A mongod that is no replica set, for tests of what Treadle refuses there."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from treadle.server.local import _zone_folder, find_mongod

READY_SECONDS_MAX = 60.0
# The shell kills mongod when this process closes the pipe, or ends in any way.
KEEPER = '"$@" </dev/null & pid=$!; read -r _; kill -9 $pid'


class StandaloneServer:
    """Runs until `stop`, the end of its `with` block, or the end of this process."""

    def __init__(self, parameters: Mapping[str, Any] = {}, arguments: Sequence[str] = ()) -> None:
        self._folder = tempfile.mkdtemp(prefix="treadle-standalone-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.uri = f"mongodb://127.0.0.1:{self.port}/"
        zones = _zone_folder()
        options = ["--timeZoneInfo", zones] if zones else []
        options += [f"--setParameter={name}={value}" for name, value in parameters.items()]
        self._process = subprocess.Popen(
            [
                "sh", "-c", KEEPER, "sh", str(find_mongod()), "--dbpath", self._folder, "--bind_ip", "127.0.0.1", "--port", str(self.port),
                "--nounixsocket", "--quiet", "--wiredTigerCacheSizeGB", "0.25", *options, *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + READY_SECONDS_MAX
        with MongoClient[Any](self.uri, serverSelectionTimeoutMS=200) as client:
            while True:
                try:
                    client.admin.command("ping")
                    return
                except PyMongoError:
                    assert time.monotonic() < end, "mongod does not answer"

    def stop(self) -> None:
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> StandaloneServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
