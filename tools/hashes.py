"""Write requirements-dev.txt and requirements-demo.txt: what `make` installs for tests and demo, with hashes.

The versions are those of constraints.txt. Run it after a change of that file,
or of the extras in pyproject.toml: `make hashes`. It asks the package
index that pip itself is set up to use for the files of each version, so that
the list serves every platform for which there are any.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# The extras whose packages each file lists.
REQUIREMENTS = {"requirements-dev.txt": "dev", "requirements-demo.txt": "cli,local"}
HEADER = "# Written by tools/hashes.py from constraints.txt and pyproject.toml; run `make hashes`.\n"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """The versions of packages, by their normal names."""
    lines = [line.split(" ")[0].strip() for line in text.splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith(("#", "--"))]
    return {normal(name): version for name, version in pairs}


def installed(extras: str) -> dict[str, str]:
    """What pip would install for these extras, without installing it; for an editable install besides."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", report.name, "-c", str(CONSTRAINTS), "hatchling", f"{ROOT}[{extras}]"]
        subprocess.run(command, check=True)
        found = json.loads(Path(report.name).read_text())["install"]
    packages = {normal(each["metadata"]["name"]): each["metadata"]["version"] for each in found}
    packages.pop("treadle", None)
    return packages


def index() -> str:
    """The index that pip uses."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    chosen = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if chosen:
        return chosen.rstrip("/")
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url).rstrip("/")


def files(base: str, name: str, version: str) -> dict[str, str]:
    """The files of one version with their hashes, from the index's page of links."""
    with urllib.request.urlopen(f"{base}/{name}/", timeout=60) as reply:
        links = re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"', reply.read().decode())
    exact, start = re.compile(rf"-{re.escape(version)}(\.tar\.gz|\.zip|-.*\.whl)"), len(name)
    named = {link.rsplit("/", 1)[-1]: digest for link, digest in links}
    return {
        file: digest
        for file, digest in named.items()
        if normal(file[:start]) == name and exact.fullmatch(file[start:])
    }


def requirement(base: str, name: str, version: str) -> str:
    """One package with the hashes of its files, and the platform if they are all of one."""
    known = files(base, name, version)
    if not known:
        sys.exit(f"{name} {version}: the index names no files")
    marker = ""
    wheels = [file for file in known if file.endswith(".whl")]
    if wheels and all("linux" in file for file in wheels):
        marker = ' ; sys_platform == "linux"'
    lines = [f"{name}=={version}{marker}", *(f"--hash=sha256:{each}" for each in sorted(known.values()))]
    return " \\\n    ".join(lines) + "\n"


def main() -> None:
    base = index()
    for file, extras in REQUIREMENTS.items():
        packages = installed(extras)
        lines = [requirement(base, name, version) for name, version in sorted(packages.items())]
        (ROOT / file).write_text(HEADER + "".join(lines))
        sys.stdout.write(f"{file}: {len(lines)} packages\n")


if __name__ == "__main__":
    main()
