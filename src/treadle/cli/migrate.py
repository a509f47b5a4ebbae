"""`treadle migrate status`, `run` and `rollback`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.application import models_named, open_store, pace
from treadle.cli.options import FINDINGS, INTERRUPTED, AppOption, JsonOption, ModelsArgument, ThrottleOption
from treadle.cli.output import counted, print_extended_json, say
from treadle.cli.progress import model_bars
from treadle.errors import UsageError

if TYPE_CHECKING:
    from treadle.cli.application import AnyStore
    from treadle.model.document import Document
    from treadle.upkeep.migrate import Migrated, Sample

SET_ASIDE_LINES_MAX = 20

BatchOption = Annotated[int, typer.Option("--batch", help="Documents per batch.")]
RetryOption = Annotated[bool, typer.Option("--retry", help="Retry the documents that were set aside.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count, and show some before and after.")]


def status(app_name: AppOption, models: ModelsArgument = None, as_json: JsonOption = False) -> None:
    """Count the documents of each version, and list those set aside. Writes nothing.

    \b
    Example:
      treadle migrate status --app shop.models:store
    """
    with open_store(app_name) as (store, call):
        rows = [
            {
                "model": model.__name__,
                "version": store.graph.entry(model).model.__treadle__.version,
                "versions": call(store.migration_status, model),
                "set_aside": [asdict(each) for each in call(store.migration_failures, model)],
            }
            for model in versioned(store, models)
        ]
    if as_json:
        print_extended_json(rows)
        return
    for row in rows:
        counts = ", ".join(f"version {version}: {count:,}" for version, count in row["versions"].items())
        say(f"{row['model']} (version {row['version']}): {counts or 'no documents'}")
        _show_set_aside(row["set_aside"])


def run(
    app_name: AppOption,
    models: ModelsArgument = None,
    to: Annotated[int | None, typer.Option("--to", help="The version to reach.", show_default=False)] = None,
    batch: BatchOption = 1000,
    throttle: ThrottleOption = None,
    retry: RetryOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring documents to the current version, while readers and writers continue.

    Ctrl-C stops it after the current batch; the next run continues from there.
    To undo, use rollback. Exits with 1 when documents were set aside.

    \b
    Example:
      treadle migrate run --app shop.models:store --dry-run
      treadle migrate run --app shop.models:store User --throttle 5000
    """
    results: list[Migrated] = []
    with model_bars(lines=True) as report, open_store(app_name) as (store, call), _stop_on_signal() as stop:
        for model in versioned(store, models):
            options = {
                "to": to,
                "batch": batch,
                "throttle": pace(throttle),
                "retry": retry,
                "dry_run": dry_run,
            }
            results.append(call(store.migrate, model, progress=report, stop=stop, **options))
            if not results[-1].finished:
                break
    if as_json:
        print_extended_json([asdict(result) for result in results])
    else:
        for result in results:
            _show_result(result, dry_run)
    if not dry_run and not all(result.finished for result in results):
        raise typer.Exit(INTERRUPTED)
    if any(result.set_aside for result in results):
        raise typer.Exit(FINDINGS)


def rollback(
    app_name: AppOption,
    to: Annotated[int, typer.Option("--to", help="The version to go back to.")],
    models: ModelsArgument = None,
    batch: BatchOption = 1000,
    throttle: ThrottleOption = None,
    retry: RetryOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring documents back to an older version. To undo, use run.

    \b
    Example:
      treadle migrate rollback --app shop.models:store User --to 1
    """
    run(app_name, models, to, batch, throttle, retry, dry_run, as_json)


def versioned(store: AnyStore, names: list[str] | None) -> list[type[Document]]:
    """The models that were named, or all that have versions."""
    if names:
        return models_named(store, names)
    models: list[type[Document]] = [
        entry.model for entry in store.graph.by_collection.values() if entry.versions.is_versioned
    ]
    if not models:
        raise UsageError("no model of this store has a version=", code="version-invalid")
    return models


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Whether to stop after this batch: the first signal asks for that, a second one acts as usual."""
    received: list[int] = []
    handlers: dict[int, Any] = {}

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        restore()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, receive)
    try:
        yield lambda: bool(received)
    finally:
        restore()


def _show_result(result: Migrated, dry_run: bool) -> None:
    if dry_run:
        remaining = counted(result.remaining, "document")
        say(f"{result.model}: {remaining} would be brought to version {result.to}.")
        for sample in result.samples:
            _show_sample(sample)
    else:
        migrated = counted(result.migrated, "document") + (" was" if result.migrated == 1 else " were")
        remaining = f"{result.remaining:,} " + ("remains" if result.remaining == 1 else "remain")
        hint = "" if result.finished else " The run was stopped; run it again and it continues from here."
        say(f"{result.model}: {migrated} brought to version {result.to}, {remaining}.{hint}")
    _show_set_aside([asdict(each) for each in result.set_aside])


def _show_sample(sample: Sample) -> None:
    from treadle.query.comparison import identical

    say(f"  _id {sample.document_id!r}")
    before, after = sample.before, sample.after
    for name in {**before, **after}:
        if name in before and name in after and identical(before[name], after[name]):
            continue
        for sign, document in (("-", before), ("+", after)):
            if name in document:
                say(f"    {sign} {name}: {document[name]!r}")


def _show_set_aside(documents: list[dict[str, Any]]) -> None:
    if documents:
        say(f"  {len(documents):,} set aside; correct them and run again with --retry:")
    for each in documents[:SET_ASIDE_LINES_MAX]:
        say(f"    {each['model']} {each['document_id']!r}: {each['reason']}")
    if len(documents) > SET_ASIDE_LINES_MAX:
        say(f"    and {len(documents) - SET_ASIDE_LINES_MAX:,} more")
