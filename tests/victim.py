"""A process that performs one write and is killed, by the kernel, just before one of its commands.

Started through a fork server that has everything imported already, so that
hundreds of them cost little. Killing before each *writing* command covers
every moment between two commands, because reads leave nothing behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Collection
from typing import Any

from pymongo import MongoClient

from tests import shop
from tests.faults import Heard
from treadle import DataError, Store

WRITES = ("insert", "update", "delete", "findAndModify")
SECONDS_MAX = 60.0
CONTEXT = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Let the fork server import what the victims need; it does not know the path of its starter."""
    CONTEXT.set_forkserver_preload(["tests.victim"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
    try:
        # The first child starts the fork server.
        first = CONTEXT.Process(target=os.getpid)
        first.start()
        first.join(SECONDS_MAX)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def perform(
    uri: str, database: str, scenario: str, skip: int, commands: Collection[str], small: bool
) -> None:
    """Run one scenario, and die after `skip` of these commands."""
    heard = Heard()
    client: MongoClient[Any] = MongoClient(uri, event_listeners=[heard])
    store = Store(client[database], shop.MODELS, limits=shop.SMALL if small else None)
    store.recover()
    heard.clear()
    heard.before(commands, skip, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with contextlib.suppress(DataError):
        shop.BY_NAME[scenario].act(store)


def kill(
    uri: str,
    database: str,
    scenario: str,
    skip: int,
    commands: Collection[str] = WRITES,
    small: bool = False,
) -> bool:
    """Whether the victim was killed; if not, it came to its end."""
    victim = CONTEXT.Process(target=perform, args=(uri, database, scenario, skip, tuple(commands), small))
    victim.start()
    victim.join(SECONDS_MAX)
    assert victim.exitcode in (0, -signal.SIGKILL)
    return victim.exitcode != 0
