"""A real Chromium for the tests of the HTML report, or one sentence why there is none.

A new machine has none; where the tests run as root and there is apt, it is
installed once. TREADLE_CHROMIUM names another one, or is empty to forbid all
of this.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from tests import apt

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def find() -> tuple[str | None, str]:
    """The path of a Chromium, and why there is none."""
    told = os.environ.get("TREADLE_CHROMIUM")
    if told is not None:
        return (told, "") if told else (None, "TREADLE_CHROMIUM is empty")
    # The workers of one test run must not install it at the same time.
    with (Path(tempfile.gettempdir()) / f"treadle-chromium-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _installed() or _install()


def _installed() -> tuple[str, str] | None:
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    return (found, "") if found else None


def _install() -> tuple[str | None, str]:
    why = apt.install("chromium")
    if why:
        return None, f"no Chromium is installed, and {why}"
    return _installed() or (None, "apt-get installed no Chromium")
