"""A real Chromium for the tests of the HTML report, or one sentence why there is none.

A new machine has none; where the tests run as root and there is apt, it is
installed once. TREADLE_CHROMIUM names another one, or is empty to forbid all
of this.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL_SECONDS_MAX = 240
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
    if os.getuid() != 0 or not shutil.which("apt-get"):
        return None, "no Chromium is installed, and only root can install it with apt-get install chromium"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    why = ""
    for command in (
        ["apt-get", "install", "-y", "--no-install-recommends", "chromium"],
        ["apt-get", "update"],
        ["apt-get", "install", "-y", "--no-install-recommends", "chromium"],
    ):
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, "apt-get took too long to install Chromium"
        if done.returncode:
            why = f"{' '.join(command[:2])} failed"
        elif command[1] == "install":
            return _installed() or (None, "apt-get installed no Chromium")
    return None, why
