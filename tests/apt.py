"""What a test needs from the system's packages: installed where the tests run as root and there is apt."""

from __future__ import annotations

import os
import shutil
import subprocess

INSTALL_SECONDS_MAX = 240


def install(*packages: str) -> str:
    """Install them; the empty text, or why they could not be installed."""
    names = " ".join(packages)
    if os.getuid() != 0 or not shutil.which("apt-get"):
        return f"only root can install it with apt-get install {names}"
    why = ""
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    for command in (install, ["apt-get", "update"], install):
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get took too long to install {names}"
        if done.returncode:
            why = f"{' '.join(command[:2])} failed"
        elif command is install:
            return ""
    return why
