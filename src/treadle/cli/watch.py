"""`treadle watch`: maintenance beside the writers, until it is stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.cli.application import Call, load_store
from treadle.cli.options import AppOption
from treadle.cli.output import say

if TYPE_CHECKING:
    from treadle.cli.application import AnyStore
    from treadle.upkeep.schedule import Ran

# How often to check whether scheduled work is due.
CHECK_SECONDS_MIN = 0.5
CHECK_SECONDS_MAX = 15.0


def watch(
    app_name: AppOption,
    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", help="Serve Prometheus metrics on this port.", show_default=False),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", help="The worker's name, if several applications share a database.")
    ] = "worker",
) -> None:
    """Keep values declared with maintain="stream" up to date, and run schedules that are due.

    Runs until SIGTERM or Ctrl-C.
    One worker per database is active; others stand by and take over.

    \b
    Example:
      treadle watch --app shop.models:store --metrics-port 9464
    """
    import logging

    from treadle.cli import metrics
    from treadle.store.common import is_scheduled

    logger = logging.getLogger("treadle")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    store = load_store(app_name)
    worker = store.worker(name)
    stopping = threading.Event()

    def stop(*_: object) -> None:
        worker.stop()
        stopping.set()

    with ExitStack() as stack:
        call = stack.enter_context(_calls_from_threads(store))
        if metrics_port is not None:
            stack.enter_context(metrics.serve(metrics_port, lambda: call(store.status), worker))
            _print(f"Metrics at http://{metrics.ADDRESS}:{metrics_port}/metrics")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        _print("Watching; stop with Ctrl-C or SIGTERM.")
        scheduled = threading.Thread(target=_run_due, args=(store, call, stopping), daemon=True)
        scheduled.start()
        stack.callback(scheduled.join)
        stack.callback(stopping.set)
        if any(rule.maintain == "stream" for rule in store.graph.rules) or not is_scheduled(store.graph):
            call(worker.run)
        stopping.wait()
    counts = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in sorted(worker.totals.items()))
    _print(f"Stopped. {counts or 'Nothing happened'}.")


def _print(line: str) -> None:
    say(line, err=True)


@contextmanager
def _calls_from_threads(store: AnyStore) -> Iterator[Call]:
    """A function that calls a method of the store and waits for it, in whichever thread."""
    import asyncio

    from treadle.store.blocking.store import Store

    if isinstance(store, Store):
        yield lambda method: method()
        return
    runner, stopping = asyncio.Runner(), asyncio.Event()
    loop = runner.get_loop()

    async def close_when_stopping() -> None:
        await stopping.wait()
        await store.close()

    thread = threading.Thread(target=runner.run, args=(close_when_stopping(),), daemon=True)
    thread.start()
    try:
        yield lambda method: asyncio.run_coroutine_threadsafe(method(), loop).result()
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        # Cancels the tasks that the driver leaves behind.
        runner.close()


def _run_due(store: AnyStore, call: Call, stopping: threading.Event) -> None:
    """Run what is due, again and again until it is time to stop."""
    from pymongo.errors import PyMongoError

    from treadle.store.common import is_scheduled
    from treadle.upkeep.schedule import jobs

    # Half of the shortest schedule, within bounds.
    shortest = min((job.every.total_seconds() for job in jobs(store.graph)), default=CHECK_SECONDS_MAX)
    period = max(CHECK_SECONDS_MIN, min(CHECK_SECONDS_MAX, shortest / 2))
    while is_scheduled(store.graph) and not stopping.is_set():
        try:
            for run in call(store.run_due):
                _print(_describe(run))
        except PyMongoError as error:
            _print(f"Scheduled work failed and will be retried: {error}")
        stopping.wait(period)


def _describe(run: Ran) -> str:
    if run.error is not None:
        return f"{run.name}: failed: {run.error}"
    removed = f", {run.removed} removed" if run.removed else ""
    return f"{run.name}: {run.written} written{removed} in {run.seconds:.1f} s"
