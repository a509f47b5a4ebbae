"""`treadle watch` and `treadle status`: the worker on the command line, and how the maintenance stands."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from typing import Any

from pymongo.errors import PyMongoError
from rich.console import Console
from rich.table import Table

from treadle.async_api import AsyncStore
from treadle.commands.app import call
from treadle.errors import TreadleError
from treadle.maintenance import schedule
from treadle.maintenance.status import RuleStatus, Status
from treadle.sync_api import Store

STATUS_SECONDS_MAX = 30.0
# How often is looked whether scheduled work is due.
DUE_SECONDS = 1.0

log = logging.getLogger("treadle")


def watch(store: Store | AsyncStore, name: str, metrics_port: int | None, say: Callable[[str], None]) -> None:
    """Run the worker until SIGTERM or Ctrl-C, telling on the way what it does."""
    _log_to(say)
    if isinstance(store, Store):
        _watch(store, name, metrics_port, say)
    else:
        asyncio.run(_watch_async(store, name, metrics_port, say))


def _watch(store: Store, name: str, metrics_port: int | None, say: Callable[[str], None]) -> None:
    worker = store.worker(name)
    with ExitStack() as stack:
        if metrics_port is not None:
            from treadle.commands import metrics

            stack.enter_context(metrics.served(metrics_port, store.status, worker))
            say(f"Metrics at http://127.0.0.1:{metrics_port}/metrics")
        signal.signal(signal.SIGINT, lambda *_: worker.stop())
        say("Watching; stop with Ctrl-C or SIGTERM.")
        stack.enter_context(_schedules(store))
        worker.run()
    say(_summary(worker.totals))


async def _watch_async(
    store: AsyncStore, name: str, metrics_port: int | None, say: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    worker = store.worker(name)

    def status() -> Status:
        return asyncio.run_coroutine_threadsafe(store.status(), loop).result(STATUS_SECONDS_MAX)

    with ExitStack() as stack:
        if metrics_port is not None:
            from treadle.commands import metrics

            stack.enter_context(metrics.served(metrics_port, status, worker))
            say(f"Metrics at http://127.0.0.1:{metrics_port}/metrics")
        signal.signal(signal.SIGINT, lambda *_: worker.stop())
        say("Watching; stop with Ctrl-C or SIGTERM.")
        scheduling = asyncio.create_task(_schedule(store))
        try:
            await worker.run()
        finally:
            scheduling.cancel()
            with suppress(asyncio.CancelledError):
                await scheduling
    await store.close()
    say(_summary(worker.totals))


@contextmanager
def _schedules(store: Store) -> Generator[None]:
    """Do what is due beside the worker, in a thread of its own."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(DUE_SECONDS):
            try:
                store.run_due()
            except (PyMongoError, TreadleError) as error:
                log.warning("the scheduled work could not be done: %s", error)

    if not schedule.jobs(store.graph):
        yield
        return
    thread = threading.Thread(target=work, name="treadle-schedules", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


async def _schedule(store: AsyncStore) -> None:
    """The same as a task."""
    while schedule.jobs(store.graph):
        await asyncio.sleep(DUE_SECONDS)
        try:
            await store.run_due()
        except (PyMongoError, TreadleError) as error:
            log.warning("the scheduled work could not be done: %s", error)


def _summary(totals: dict[str, int]) -> str:
    told = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in sorted(totals.items()))
    return f"Stopped. {told or 'Nothing happened'}."


def _log_to(say: Callable[[str], None]) -> None:
    class Saying(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(self.format(record))

    logger = logging.getLogger("treadle")
    logger.setLevel(logging.INFO)
    logger.addHandler(Saying())


# -- status -----------------------------------------------------------------------------------------


def status(store: Store | AsyncStore) -> Status:
    """How the maintenance stands."""
    found: Status = call(store, "status")
    return found


def as_json(found: Status) -> str:
    """The status as one JSON object."""
    return json.dumps(asdict(found), indent=2, default=_plain)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def show(found: Status, console: Console) -> None:
    """A table of the rules, then a line about the worker."""
    if not found.rules:
        console.print("No model maintains anything.")
        return
    table = Table("field", "pattern", "maintained", "behind", "dirty", "last run", "last verify")
    for rule in found.rules:
        table.add_row(
            rule.rule,
            rule.pattern,
            _mode(rule),
            "" if rule.lag_seconds is None else f"{rule.lag_seconds:.1f} s",
            "" if rule.dirty is None else str(rule.dirty),
            _run(rule),
            "never" if rule.findings is None else f"{rule.findings} findings, {_when(rule.verified_at)}",
        )
    console.print(table)
    worker = found.worker
    if worker is not None:
        who = f"active ({worker.owner})" if worker.active else "NOT RUNNING: start treadle watch"
        going_over = f", {worker.owed} collections to go over" if worker.owed else ""
        console.print(
            f"Worker {who}; {worker.lag_seconds:.1f} s and {worker.events} events behind{going_over}."
        )
    if found.set_aside:
        console.print(f"{found.set_aside} documents were set aside; see the collection treadle.set_aside.")
    if found.intents:
        console.print(f"{found.intents} intents are under way or left over from a crash.")


def _mode(rule: RuleStatus) -> str:
    if rule.every_seconds is None:
        return rule.maintain
    return f"{rule.maintain}, every {rule.every_seconds:g} s"


def _run(rule: RuleStatus) -> str:
    if rule.last_run is None:
        return ""
    return f"{_when(rule.last_run)}, {rule.last_seconds or 0.0:.1f} s"


def _when(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"
