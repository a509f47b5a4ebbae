"""Workers, rebuilds and raw writers in processes of their own, to be killed.

Started through a fork server that has everything imported already, so that
a hundred of them cost little.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Generator
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests.kit.command_log import CommandLog
from tests.streamed import Writer
from treadle import DataError, Limits, Store
from treadle.store import common

CONTEXT = multiprocessing.get_context("forkserver")
SECONDS_MAX = 60.0
_prepared = False


# What a process does: given a client and arguments, it makes its Store and returns the work to perform.
Act = Callable[..., Callable[[], Any]]


def prepare() -> None:
    """Start the fork server, once, with everything imported that the processes need.

    The fork server does not know the path of its starter.
    """
    global _prepared
    if _prepared:
        return
    CONTEXT.set_forkserver_preload(["pytest", "tests.kit.processes", "tests.kit.fault_sweep", "tests.shop"])
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
    _prepared = True


def start(target: Any, *arguments: Any, **options: Any) -> Any:
    """A process that does one of the things below."""
    prepare()
    process = CONTEXT.Process(target=target, args=arguments, kwargs=options, daemon=True)
    process.start()
    return process


def end(process: Any, number: int = signal.SIGKILL) -> int | None:
    """End a process by a signal; its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
    process.join(SECONDS_MAX)
    code: int | None = process.exitcode
    return code


def kill_before(uri: str, commands: Collection[str], skip: int, act: Act, *arguments: Any) -> bool:
    """Perform `act` in a process as `die_before` does. Returns whether it was killed, or came to its end."""
    process = start(die_before, uri, commands, skip, act, *arguments)
    process.join(SECONDS_MAX)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


# -- what the processes do -----------------------------------------------------------------------------


def die_before(uri: str, commands: Collection[str], skip: int, act: Act, *arguments: Any) -> None:
    """Perform the work of `act(client, *arguments)`, and be killed before the command after `skip` of these."""
    log = CommandLog()
    with MongoClient[Any](uri, event_listeners=[log]) as client:
        perform = act(client, *arguments)
        log.clear()
        log.before(commands, skip, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with contextlib.suppress(DataError):
            perform()


def models_of(named: str) -> Any:
    module, _, name = named.partition(":")
    return getattr(importlib.import_module(module), name)


def work(
    models: str,
    uri: str,
    database: str,
    *,
    limits: Limits | None = None,
    elsewhere: bool = False,
    clock_seconds: float = 0.0,
) -> None:
    """Run a worker until it is asked to stop.

    `elsewhere` lets it take every other process for one of another host, of
    which nobody can tell whether it has ended; `clock_seconds` sets the clock
    of this process wrong.
    """
    if elsewhere:
        common.is_dead = lambda described: False
    if clock_seconds:
        set_clock_wrong(clock_seconds)
    with MongoClient[Any](uri) as client:
        Store(client[database], models_of(models), limits=limits).worker().run()


def catch_up(client: MongoClient[Any], models: str, database: str) -> Callable[[], Any]:
    """A worker that runs until nothing is left to do."""
    store = Store(client[database], models_of(models))
    store.recover()
    return store.worker().run_until_idle


def rebuild(models: str, uri: str, database: str) -> None:
    """Rebuild everything, again and again."""
    with MongoClient[Any](uri) as client:
        store = Store(client[database], models_of(models))
        while True:
            store.rebuild()


def run_due(models: str, uri: str, database: str) -> None:
    """Do what is due, again and again; by a clock that runs ahead, so that something always is."""
    with MongoClient[Any](uri) as client:
        store: Any = Store(client[database], models_of(models))
        now = dt.datetime.now(dt.UTC)
        while True:
            now += dt.timedelta(days=1)
            store.run_due(now=now)


def write(uri: str, database: str, seed: int, seconds: float, pause: float = 0.0) -> None:
    """Random raw writes for a while; a server that is away for a moment is waited for."""
    with MongoClient[Any](uri) as client:
        writer = Writer(client[database], seed, numbers=60)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(PyMongoError):
                writer.write()
            if pause:
                time.sleep(pause)


def set_clock_wrong(seconds: float) -> None:
    """Let this process believe in another time."""
    real = time.time
    time.time = lambda: real() + seconds

    class Wrong(dt.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return dt.datetime.fromtimestamp(time.time(), tz)

    dt.datetime = Wrong  # type: ignore[misc]


@contextlib.contextmanager
def writers(
    uri: str, database: str, seconds: float, count: int = 4, pause: float = 0.0
) -> Generator[list[Any]]:
    """Some processes that write; the block ends when they have."""
    processes = [start(write, uri, database, seed, seconds, pause) for seed in range(count)]
    try:
        yield processes
    finally:
        for each in processes:
            each.join(SECONDS_MAX + seconds)
    assert [0] * count == [each.exitcode for each in processes]
