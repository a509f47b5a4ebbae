"""Why the local server did not start, in one sentence each.

mongod says it in its output, in its exit status, or, on a full disk, not at
all. Each sentence says where, what is wrong, and what to do about it.
"""

from __future__ import annotations

import errno
import json
import shutil
import signal
from pathlib import Path

from treadle.errors import UsageError

STATE = "treadle"  # The part of a server's folder that is Treadle's own.
LOG_BYTES_MAX = 200_000
DISK_BYTES_MIN = 1_000_000

# What mongod's output says, in the order in which it is to be believed:
# WiredTiger also reports a wrong version as "Permission denied".
LOG_SIGNS = (
    ("No space left on device", "local-server-disk-full", "disk-full"),
    ("error while loading shared libraries: ", "mongod-library-missing", "library"),
    ("' not found (required by", "mongod-library-missing", "library"),
    ("DBPathInUse", "local-server-folder", "in-use"),
    ("unsupported WiredTiger", "local-server-version", "version"),
    ("Wrong mongod version", "local-server-version", "version"),
    ("UPGRADE PROBLEM", "local-server-version", "version"),
    ("Failed to start up WiredTiger", "local-server-version", "version"),
    ("Permission denied", "local-server-folder", "permission"),
    ("Error parsing command line: ", "local-server-options", "options"),
    ("Unknown --setParameter", "local-server-options", "options"),
    ('"codeName":"BadValue"', "local-server-options", "options"),
    ("Address already in use", "local-server-failed", "port"),
)
SENTENCES = {
    "disk-full": "The disk of {folder} is full, so mongod cannot start there; "
    "free some space or choose another folder.",
    "library": "{mongod} lacks a shared library ({detail}); install the package that has it "
    "(OpenSSL for libssl and libcrypto), or set TREADLE_MONGOD to another mongod.",
    "in-use": "{folder} is in use by another mongod; stop that one or choose another folder.",
    "version": "{folder} holds data that {mongod} cannot read, damaged or of another version of "
    "MongoDB; set TREADLE_MONGOD to the version that wrote it, or choose another folder.",
    "permission": "{folder} holds files that mongod may not open; "
    "correct their permissions or choose another folder.",
    "options": "{mongod} refuses its options ({detail}); correct parameters= or arguments=.",
    "port": "The port given by arguments= is taken; leave --port out or give another.",
    "processor": "{mongod} needs processor instructions (AVX) that this machine lacks; "
    "set TREADLE_MONGOD to a build for this machine.",
    "other": "mongod ({mongod}) could not start in {folder}: {detail}; "
    "choose another folder, or set TREADLE_MONGOD to another mongod.",
}


def folder_error(folder: Path, error: OSError) -> UsageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return sentence("disk-full", "local-server-disk-full", folder, folder)
    is_file = error.errno in (errno.EEXIST, errno.ENOTDIR)
    problem = "is a file, or lies under one" if is_file else f"cannot be used ({error.strerror})"
    message = f"The server's folder {folder} {problem}; give a folder that may be written to."
    return UsageError(message, code="local-server-folder")


def explanation(folder: Path, mongod: Path, status: int | None, detail: str | None = None) -> UsageError:
    """Why mongod did not start, by its output and its exit status."""
    try:
        output = (folder / STATE / "mongod.log").read_bytes()[-LOG_BYTES_MAX:].decode(errors="replace")
    except OSError:
        output = ""
    lines = [line for line in output.splitlines() if line.strip()]
    for sign, code, name in LOG_SIGNS:
        for line in lines:
            if sign in line:
                return sentence(name, code, folder, mongod, _message(line))
    # A full disk may have no room even for the line that says so.
    if shutil.disk_usage(folder).free < DISK_BYTES_MIN:
        return sentence("disk-full", "local-server-disk-full", folder, mongod)
    if status == -signal.SIGILL:
        return sentence("processor", "local-server-failed", folder, mongod)
    if detail is None:
        detail = f"it ended with status {status}" if status is not None else "it ended"
        errors = [line for line in lines if '"s":"F"' in line or '"s":"E"' in line] or lines[-1:]
        detail += f", saying {_message(errors[0])!r}" if errors else ""
    return sentence("other", "local-server-failed", folder, mongod, detail)


def _message(line: str) -> str:
    """The message in one line of output, which may be JSON."""
    try:
        entry = json.loads(line)
        attributes = entry.get("attr", {})
        error = attributes.get("error")
        message = error.get("errmsg") if isinstance(error, dict) else attributes.get("reason")
        return str(message or entry["msg"])
    except (ValueError, KeyError, AttributeError):
        return line.strip().removeprefix("Error parsing command line: ")


def sentence(name: str, code: str, folder: Path, mongod: Path, detail: str = "") -> UsageError:
    message = SENTENCES[name].format(folder=folder, mongod=mongod, detail=detail)
    return UsageError(message, code=code)
