"""The real mongosh for the tests, or one sentence why there is none.

It is installed once, by npm, into the user's cache folder. Node.js and npm
come with the system; where they are missing and the tests run as root, apt
installs them. TREADLE_MONGOSH names another mongosh, or is empty to forbid all
of this.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests import apt

VERSION = "2.12.0"
INSTALL_SECONDS_MAX = 240
START_SECONDS_MAX = 60
RUN_SECONDS_MAX = 120
# The registry must answer this question before anything is installed, so that a
# machine without a network is known at once.
QUESTION = ["view", f"mongosh@{VERSION}", "version", "--fetch-retries=0", "--fetch-timeout=10000"]
QUIET = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]


def find() -> tuple[Path | None, str]:
    """The path of a mongosh, and why there is none."""
    told = os.environ.get("TREADLE_MONGOSH")
    if told is not None:
        return (Path(told), "") if told else (None, "TREADLE_MONGOSH is empty")
    folder = _cache()
    # The workers of one test run must not install it at the same time.
    with (folder / "mongosh.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        installed = folder / f"mongosh-{VERSION}"
        if _starts(installed):
            return _program(installed), ""
        why = _install(folder, installed)
        return (None, why) if why else (_program(installed), "")


def run(program: Path, uri: str, script: str, folder: Path) -> str:
    """What a script prints; `folder` is the home of mongosh, which keeps logs and settings there."""
    settings = folder / ".mongodb" / "mongosh"
    settings.mkdir(parents=True)
    (settings / "config").write_text(json.dumps({"enableTelemetry": False, "disableLogging": True}))
    (folder / "script.js").write_text(script)
    done = subprocess.run(
        [program, uri, "--quiet", "--norc", "--file", folder / "script.js"],
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for folder in (Path(home) / "treadle", Path(tempfile.gettempdir()) / f"treadle-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="treadle-"))


def _program(installed: Path) -> Path:
    return installed / "node_modules" / ".bin" / "mongosh"


def _starts(installed: Path) -> bool:
    if not _program(installed).exists():
        return False
    return VERSION == _said([str(_program(installed)), "--version"], START_SECONDS_MAX)[0]


def _install(folder: Path, installed: Path) -> str:
    """Install it beside, then put it in its place as a whole; the empty text, or what went wrong."""
    npm = shutil.which("npm")
    if not npm:
        why = apt.install("nodejs", "npm")
        npm = shutil.which("npm")
        if not npm:
            return f"npm is not installed, and {why or 'apt-get installed none'}"
    version, why = _said([npm, *QUESTION, *QUIET], START_SECONDS_MAX)
    if VERSION != version:
        return f"npm cannot reach its registry ({why})"
    beside = tempfile.mkdtemp(dir=folder, prefix="installing-")
    try:
        # Without scripts: mongosh does not need those of its dependencies, and nothing of them is run here.
        command = [
            npm,
            "install",
            "--prefix",
            beside,
            "--ignore-scripts",
            "--omit=optional",
            "--prefer-offline",
            *QUIET,
        ]
        _, why = _said([*command, f"mongosh@{VERSION}"], INSTALL_SECONDS_MAX)
        if why:
            return f"npm did not install mongosh ({why})"
        if not _starts(Path(beside)):
            return f"mongosh {VERSION} was installed, but does not start; Node.js may be too old for it"
        shutil.rmtree(installed, ignore_errors=True)
        os.rename(beside, installed)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return ""


def _said(command: list[str], seconds: float) -> tuple[str, str]:
    """What a command printed, and what went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no end after {seconds} seconds"
    except OSError as error:
        return "", str(error)
    first = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[0]
    return done.stdout.strip(), first if done.returncode else ""
