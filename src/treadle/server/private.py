"""What keeps a local server to the user who started it: its folder and its key.

The rules:
- The folder belongs to this user, and no other may enter it (0700). One of
  another user is refused, and so is one that another user could exchange: a
  link of theirs, or a folder in which every user may rename everything.
- What a server's users share by name lies in a folder that was never open to
  other users: a lock that another user took in a folder of an older version
  blocks nothing.
- The key is made here and stays here (0600). mongod has it as its key file,
  and as the password of the one user that it knows.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from treadle.errors import UsageError
from treadle.server.failures import STATE

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
OTHERS = 0o077
KEY = "key"
KEY_BYTES = 32
_KEY_TEXT = re.compile(rb"[0-9a-f]{64}")
_SUPERUSER = 0


def private(folder: Path) -> Path:
    """Where the locks and the key of a server's folder are."""
    return folder / STATE / "private"


def make_private(path: Path) -> Path:
    """The folder of a server, made where it is missing, which this user alone may enter."""
    if path.is_symlink() and path.lstat().st_uid not in (os.geteuid(), _SUPERUSER):
        raise _refused(path, "is another user's link", "name the folder itself")
    path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    folder = path.resolve()
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            advice = f"run chmod o-w on {parent}, or chmod +t"
            raise _refused(folder, f"lies in {parent}, in which any user may exchange it", advice)
    for each in (folder, folder / STATE, private(folder)):
        each.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        _close_to_others(each)
    return folder


def _close_to_others(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _refused(folder, "belongs to another user", "give one of your own, or chown it")
        if status.st_mode & OTHERS:
            os.fchmod(descriptor, PRIVATE_FOLDER)
    finally:
        os.close(descriptor)


def _refused(folder: Path, problem: str, advice: str) -> UsageError:
    return UsageError(
        f"The server's folder {folder} {problem}, who could read or replace what is stored; {advice}.",
        code="local-server-folder",
    )


def key_file(folder: Path) -> Path:
    return private(folder) / KEY


def read_key(folder: Path) -> str | None:
    """The key of a folder's server; None where there is none, or no whole one."""
    try:
        descriptor = os.open(key_file(folder), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        text = file.read()
        if os.fstat(descriptor).st_mode & OTHERS:  # mongod refuses a key that others may read.
            os.fchmod(descriptor, PRIVATE_FILE)
    return text.decode() if _KEY_TEXT.fullmatch(text) else None


def make_key(folder: Path) -> str:
    """Return the key of a folder's server, made where there is none; the caller holds `start.lock`."""
    key = read_key(folder)
    if key is None:
        key = secrets.token_hex(KEY_BYTES)
        unfinished = private(folder) / "key.unfinished"
        unfinished.unlink(missing_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
        with os.fdopen(descriptor, "w") as file:
            file.write(key)
        unfinished.replace(key_file(folder))
    return key
