"""`treadle migrate status`, `run`, `rollback`: the Store's own calls, with progress, rate and time left."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bson import json_util
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from treadle.commands.app import Reporter, models_named, several
from treadle.commands.maintain import counted
from treadle.engine.convert import identical
from treadle.errors import UsageError
from treadle.graph.reports import Progress
from treadle.model.document import Document
from treadle.store.async_store import AsyncStore
from treadle.store.blocking.store import Store
from treadle.upkeep.migrations.run import Migrated

SHOWN_MAX = 20
LINE_EVERY_SECONDS = 1.0


def versioned(store: Store | AsyncStore, names: list[str]) -> list[type[Document]]:
    """The models that were named, or all that have versions."""
    chosen = models_named(store, names)
    if chosen:
        return chosen
    entries = store.graph.by_collection.values()
    found: list[type[Document]] = [entry.model for entry in entries if entry.versioned]
    if not found:
        raise UsageError("no model of this store has a version=", code="version-invalid")
    return found


def status(store: Store | AsyncStore, names: list[str]) -> list[dict[str, Any]]:
    """Per model the number of documents of each version, and those that were set aside."""
    models = versioned(store, names)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for model in models:
        calls += [("migration_status", (model,), {}), ("migration_failures", (model,), {})]
    results = several(store, calls)
    return [
        {
            "model": model.__name__,
            "version": store.graph.entry(model).settings.version,
            "versions": results[2 * number],
            "set_aside": [_aside(each) for each in results[2 * number + 1]],
        }
        for number, model in enumerate(models)
    ]


def run(store: Store | AsyncStore, names: list[str], **options: Any) -> list[Migrated]:
    """Migrate the models, one after another; stops between two batches when interrupted."""
    models = versioned(store, names)
    with _until_interrupted() as stop:
        calls = [("migrate", (model,), {**options, "stop": stop}) for model in models]
        results: list[Migrated] = several(store, calls, stop=lambda result: not result.finished)
    return results


@contextmanager
def _until_interrupted() -> Iterator[Callable[[], bool]]:
    """Whether the user wants to stop: a first signal is noted, a second one is as usual."""
    asked: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    for wanted in (signal.SIGINT, signal.SIGTERM):
        before[wanted] = signal.signal(wanted, note)
    try:
        yield lambda: bool(asked)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# -- progress -----------------------------------------------------------------------------------


@contextmanager
def progress(console: Console) -> Iterator[Reporter]:
    """A bar with rate and time left; a line each second where there is no terminal."""
    if not console.is_terminal:
        yield _lines()
        return
    rate = TextColumn("{task.fields[rate]}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        rate,
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}
        began = time.monotonic()

        def report(progress: Progress) -> None:
            if progress.model not in tasks:
                tasks[progress.model] = bar.add_task(progress.model, total=progress.total, rate="")
            speed = progress.done / max(time.monotonic() - began, 1e-6)
            bar.update(
                tasks[progress.model],
                completed=progress.done,
                total=progress.total,
                rate=f"{speed:,.0f}/s",
            )

        yield report


def _lines() -> Reporter:
    began: dict[str, float] = {}
    said: dict[str, float] = {}

    def report(progress: Progress) -> None:
        now = time.monotonic()
        start = began.setdefault(progress.model, now)
        if now - said.get(progress.model, 0.0) < LINE_EVERY_SECONDS and progress.done < progress.total:
            return
        said[progress.model] = now
        sys.stderr.write(describe(progress, now - start) + "\n")

    return report


def describe(progress: Progress, seconds: float) -> str:
    """How far a run has come, how fast it is and how long it will take."""
    told = f"{progress.model}: {progress.done:,} of {progress.total:,}"
    if seconds <= 0 or not progress.done:
        return told
    speed = progress.done / seconds
    return f"{told}, {speed:,.0f}/s, {(progress.total - progress.done) / speed:,.0f} s left"


# -- output -------------------------------------------------------------------------------------


def _aside(each: Any) -> dict[str, Any]:
    return {"model": each.model, "document_id": each.document_id, "reason": each.reason}


def as_json(value: Any) -> str:
    """Relaxed Extended JSON, in which ids keep their type."""
    return json_util.dumps(value, json_options=json_util.RELAXED_JSON_OPTIONS, indent=2)


def results_as_json(results: list[Migrated]) -> str:
    return as_json(
        [
            {
                "model": each.model,
                "to": each.to,
                "migrated": each.migrated,
                "remaining": each.remaining,
                "finished": each.finished,
                "set_aside": [_aside(one) for one in each.set_aside],
                "samples": [
                    {"document_id": one.document_id, "before": one.before, "after": one.after}
                    for one in each.samples
                ],
            }
            for each in results
        ]
    )


def show_status(rows: list[dict[str, Any]], console: Console) -> None:
    for row in rows:
        told = ", ".join(f"version {version}: {count:,}" for version, count in row["versions"].items())
        console.print(f"{row['model']} (version {row['version']}): {told or 'no documents'}", markup=False)
        _show_aside(row["set_aside"], console)


def show_results(results: list[Migrated], console: Console, dry_run: bool) -> None:
    for each in results:
        if dry_run:
            console.print(
                f"{each.model}: {counted(each.remaining, 'document')} would be brought to version {each.to}.",
                markup=False,
            )
            for sample in each.samples:
                _show_sample(sample, console)
        else:
            were, remain = _verbs(each.migrated)[0], _verbs(each.remaining)[1]
            how = "" if each.finished else " The run was stopped; run it again and it goes on from here."
            console.print(
                f"{each.model}: {counted(each.migrated, 'document')} {were} brought to version {each.to}, "
                f"{each.remaining:,} {remain}.{how}",
                markup=False,
            )
        _show_aside([_aside(one) for one in each.set_aside], console)


def _verbs(number: int) -> tuple[str, str]:
    return ("was", "remains") if number == 1 else ("were", "remain")


def _show_sample(sample: Any, console: Console) -> None:
    console.print(f"  _id {sample.document_id!r}", markup=False)
    before, after = sample.before, sample.after
    for name in {**before, **after}:
        if name in before and (name not in after or not identical(before[name], after[name])):
            console.print(f"    - {name}: {before[name]!r}", markup=False)
        if name in after and (name not in before or not identical(before[name], after[name])):
            console.print(f"    + {name}: {after[name]!r}", markup=False)


def _show_aside(rows: list[dict[str, Any]], console: Console) -> None:
    if not rows:
        return
    console.print(f"  {len(rows):,} set aside; mend them and run again with --retry:", markup=False)
    for row in rows[:SHOWN_MAX]:
        console.print(f"    {row['model']} {row['document_id']!r}: {row['reason']}", markup=False)
    if len(rows) > SHOWN_MAX:
        console.print(f"    and {len(rows) - SHOWN_MAX:,} more", markup=False)
