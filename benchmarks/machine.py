"""Where and with what something was measured; nothing that names a host, a user or a path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from pymongo import MongoClient

PACKAGES = ("pymongo", "pydantic", "pydantic-core", "beanie", "odmantic", "mongoengine")


def surroundings(uri: str, *, quick: bool) -> dict[str, str]:
    """The machine, and the versions of everything that takes part."""
    with MongoClient[Any](uri) as client:
        mongod = str(client.server_info()["version"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "memory": f"{memory:.0f} GiB",
        "system": _system(),
        "python": platform.python_version(),
        "mongod": mongod,
    }
    for package in ("treadle", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    # A checkout that runs without being installed has no metadata.
    if found["treadle"] == "not installed":
        import treadle

        found["treadle"] = treadle.__version__
    if quick:
        found["mode"] = "quick: few rounds and documents, good for nothing but seeing that it runs"
    return found


def _system() -> str:
    """The distribution and the kernel's version, without what a builder added to its name."""
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        distribution = platform.system()
    kernel = ".".join(platform.release().split("-")[0].split(".")[:2])
    return f"{distribution}, kernel {kernel}, {platform.machine()}"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
