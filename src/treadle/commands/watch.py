"""`treadle watch`, `run-due` and `status`: maintenance beside the writers, and how it stands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from typing import Any

from pymongo.errors import PyMongoError
from rich.console import Console
from rich.table import Table

from treadle.commands.app import call
from treadle.store.async_store import AsyncStore
from treadle.store.blocking.store import Store
from treadle.store.shell import is_scheduled
from treadle.upkeep.schedule import Ran, jobs
from treadle.upkeep.status import RuleStatus, Status

STATUS_SECONDS_MAX = 30.0
# How often to look whether something scheduled is due.
LOOK_SECONDS_MIN = 0.5
LOOK_SECONDS_MAX = 15.0


def watch(store: Store | AsyncStore, name: str, metrics_port: int | None, say: Callable[[str], None]) -> None:
    """Run the worker, and what is scheduled, until SIGTERM or Ctrl-C."""
    _log_to(say)
    if isinstance(store, Store):
        _watch(store, name, metrics_port, say)
    else:
        asyncio.run(_watch_async(store, name, metrics_port, say))


def _watch(store: Store, name: str, metrics_port: int | None, say: Callable[[str], None]) -> None:
    worker = store.worker(name)
    stopping = threading.Event()

    def stop() -> None:
        worker.stop()
        stopping.set()

    with ExitStack() as stack:
        if metrics_port is not None:
            from treadle.commands import metrics

            stack.enter_context(metrics.served(metrics_port, store.status, worker))
            say(f"Metrics at http://127.0.0.1:{metrics_port}/metrics")
        _on_signals(stop)
        say("Watching; stop with Ctrl-C or SIGTERM.")
        scheduled = threading.Thread(target=_run_due, args=(store, stopping, say), daemon=True)
        scheduled.start()
        if _streams(store) or not is_scheduled(store.graph):
            worker.run()
        stopping.wait()
        scheduled.join()
    say(_summary(worker.totals))


def _run_due(store: Store, stopping: threading.Event, say: Callable[[str], None]) -> None:
    """Run what is due, now and then, until it is time to stop."""
    while is_scheduled(store.graph) and not stopping.is_set():
        try:
            for ran in store.run_due():
                say(_told(ran))
        except PyMongoError as error:
            say(f"What is scheduled could not be run, and is tried again: {error}")
        stopping.wait(_period(store))


async def _watch_async(
    store: AsyncStore, name: str, metrics_port: int | None, say: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    worker = store.worker(name)
    stopping = asyncio.Event()

    def stop() -> None:
        worker.stop()
        loop.call_soon_threadsafe(stopping.set)

    def status() -> Status:
        return asyncio.run_coroutine_threadsafe(store.status(), loop).result(STATUS_SECONDS_MAX)

    with ExitStack() as stack:
        if metrics_port is not None:
            from treadle.commands import metrics

            stack.enter_context(metrics.served(metrics_port, status, worker))
            say(f"Metrics at http://127.0.0.1:{metrics_port}/metrics")
        _on_signals(stop)
        say("Watching; stop with Ctrl-C or SIGTERM.")
        scheduled = asyncio.create_task(_run_due_async(store, stopping, say))
        if _streams(store) or not is_scheduled(store.graph):
            await worker.run()
        await stopping.wait()
        await scheduled
    await store.close()
    say(_summary(worker.totals))


async def _run_due_async(store: AsyncStore, stopping: asyncio.Event, say: Callable[[str], None]) -> None:
    while is_scheduled(store.graph) and not stopping.is_set():
        try:
            for ran in await store.run_due():
                say(_told(ran))
        except PyMongoError as error:
            say(f"What is scheduled could not be run, and is tried again: {error}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _period(store))


def _on_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop())


def _streams(store: Store | AsyncStore) -> bool:
    return any(rule.maintain == "stream" for rule in store.graph.rules)


def _period(store: Store | AsyncStore) -> float:
    """How long to wait before looking again; half of the shortest schedule, within bounds."""
    every = [job.every.total_seconds() / 2 for job in jobs(store.graph)]
    return max(LOOK_SECONDS_MIN, min([LOOK_SECONDS_MAX, *every]))


def _told(ran: Ran) -> str:
    if ran.error is not None:
        return f"{ran.name}: failed: {ran.error}"
    removed = f", {ran.removed} removed" if ran.removed else ""
    return f"{ran.name}: {ran.written} written{removed} in {ran.seconds:.1f} s"


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
