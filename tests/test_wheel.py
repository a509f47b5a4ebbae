"""The wheel: what is in it, and that it works where nothing but the core's dependencies is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import treadle

ROOT = Path(__file__).parent.parent
BUILD_SECONDS_MAX = 120


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the project's own build backend; pip wheel would ask the network for it."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=BUILD_SECONDS_MAX,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and what it says it needs without extras, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        (described,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        needed = metadata.PathDistribution(folder / Path(described).parent).requires or []
    for name in _closure(needed):
        found = metadata.distribution(name)
        for top in {
            file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")
        }:
            place = folder / top
            if not place.exists():
                os.symlink(Path(str(found.locate_file(top))), place)
    return folder


def _closure(needed: list[str]) -> set[str]:
    """The names of all distributions that these requirements lead to, extras left out."""
    names: set[str] = set()
    waiting = list(needed)
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name not in names:
            names.add(requirement.name)
            waiting += metadata.requires(requirement.name) or []
    return names


def run(bare: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Python without site-packages, user folders and environment, with the bare folder alone."""
    script = f"import sys; sys.path.insert(0, {str(bare)!r}); {code}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False, cwd=bare
    )


@pytest.mark.all
def test_the_wheel_holds_the_package_whole_and_nothing_else(wheel: Path) -> None:
    assert f"treadle-{treadle.__version__}-py3-none-any.whl" == wheel.name
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "treadle").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    # What `treadle explain` prints of an error.
    expected.add("treadle/cli/errors.md")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        described = {name for name in held if name.split("/")[0].endswith(".dist-info")}
        commands = archive.read(
            next(name for name in described if name.endswith("/entry_points.txt"))
        ).decode()
    assert expected == held - described
    assert "treadle/py.typed" in expected
    assert any(name.endswith("/licenses/LICENSE") for name in described)
    assert "treadle = treadle.cli:main" in commands


@pytest.mark.all
def test_it_needs_pymongo_and_pydantic_only(bare: Path) -> None:
    """Every public name can be imported where nothing else is installed."""
    done = run(bare, "from treadle import *; import treadle; print(treadle.__file__, treadle.Store, Outlier)")
    assert "" == done.stderr
    assert done.stdout.startswith(str(bare))


@pytest.mark.all
def test_the_bare_environment_really_lacks_the_extras(bare: Path) -> None:
    for name in ("typer", "rich", "pytest", "jinja2", "prometheus_client"):
        assert f"No module named '{name}'" in run(bare, f"import {name}").stderr


@pytest.mark.all
def test_the_command_says_what_to_install_where_the_extra_is_missing(bare: Path) -> None:
    done = run(bare, "from treadle.cli import main; sys.exit(main())")
    assert 2 == done.returncode
    assert "The command line needs typer and rich; run pip install 'treadle[cli]'.\n" == done.stderr


@pytest.mark.all
def test_importing_the_store_loads_no_more_than_it_needs(bare: Path) -> None:
    """What start-up costs is decided here; the times themselves are no matter of tests."""
    loaded = run(bare, "import treadle; print(*sys.modules)").stdout.split()
    assert ["treadle"] == [
        name for name in loaded if name.split(".")[0] in ("treadle", "pymongo", "pydantic")
    ]
    code = "import pymongo; own = set(sys.modules); import treadle; treadle.Store; print(*set(sys.modules) - own)"
    more = set(run(bare, code).stdout.split())
    assert "treadle.store.blocking.store" in more
    assert set() == {name for name in more if name.startswith("treadle.store.async_")}
    assert set() == {name for name in more if name.split(".")[0] in ("pymongo", "gridfs", "dns")}
    rooms = {name.split(".")[1] for name in more if name.startswith("treadle.")}
    assert not rooms & {"advisor", "cli", "demo", "server", "testing", "web"}
