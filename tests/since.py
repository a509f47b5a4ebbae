"""The marker `since("6.0", why)`: a test of what older servers do not have.

On an older server, which TREADLE_MONGOD chooses, it is not run, and the end of
the run says which tests were NOT RUN and why. There is a fixed maximum per
server, so that nothing goes missing unnoticed.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

WORDS = "NOT RUN on "
# How many tests each server may leave out, at most.
NOT_RUN_MAX = {"5.0.4": 29, "6.0.27": 0}


@functools.cache
def server_version() -> str:
    """The version of the chosen server; empty for the one of the `local` extra, which has everything."""
    mongod = os.environ.get("TREADLE_MONGOD")
    if not mongod:
        return ""
    told = subprocess.run([mongod, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"db version v(\d+\.\d+\.\d+)", told)
    return found[1] if found else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("since"):
        version, why = mark.args
        if server_version() and _numbers(server_version()) < _numbers(version):
            pytest.skip(f"{WORDS}{server_version()}: {why} since {version}")


def left_out(config: pytest.Config) -> Counter[str]:
    """How many tests were not run, by the reason."""
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    reasons: Counter[str] = Counter()
    for report in reporter.stats.get("skipped", ()) if reporter is not None else ():
        if isinstance(report.longrepr, tuple) and WORDS in report.longrepr[2]:
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    return reasons


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reasons = left_out(config)
    for reason, number in sorted(reasons.items()):
        terminalreporter.write_line(f"{number} tests {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    number, most = left_out(session.config).total(), NOT_RUN_MAX.get(server_version(), 0)
    if number > most:
        sys.stdout.write(f"\n{number} tests were NOT RUN, more than the {most} that may be\n")
        session.exitstatus = 1
