import gc
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from pymongo import MongoClient

from tests.kit.tiers import IS_FULL
from treadle.server.local import LocalServer

pytest_plugins = [
    "treadle.testing",
    "tests.kit.run",
    "tests.kit.constants",
    "tests.support",
    "tests.kit.fault_sweep",
]

# The servers keep their data in memory where there is enough: a tenth of the processor time goes into
# making, flushing and removing files.
MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 << 30:
    os.environ["TMPDIR"] = str(MEMORY)
    tempfile.tempdir = None

# Nothing that is imported for the tests is garbage; to look through it again and again takes a quarter of
# the time of the collection.
gc.disable()

# A fixed seed: what fails in CI fails here too. TREADLE_HYPOTHESIS=wide looks further.
settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    max_examples=60 if IS_FULL else 25,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
)
settings.register_profile("wide", settings.get_profile("steady"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("TREADLE_HYPOTHESIS", "steady"))


# The fixtures that start a server of their own; a test that starts one without them has the mark itself.
SERVERS = {"server", "alone", "forgetful", "guarded", "fault_sweep"}


@pytest.fixture(scope="session")
def server(server: LocalServer) -> LocalServer:
    """The server of the tests; where a version was asked for, it is that one."""
    if expected := os.environ.get("TREADLE_MONGOD_VERSION"):
        with MongoClient[Any](server.uri) as client:
            version = client.server_info()["version"]
        assert expected == version, f"asked for MongoDB {expected}, but {version} is running"
    return server


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that need the server, leave out those of `make test-all`, and put the slow ones first."""
    for item in items:
        if SERVERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("server")
    later = [item for item in items if not IS_FULL and item.get_closest_marker("all")]
    if later:
        config.hook.pytest_deselected(items=later)
        left_out = set(later)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("heavy") is None)
