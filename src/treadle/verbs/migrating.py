"""The verbs of `treadle migrate`: status, run, rollback."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from treadle.verbs.shared import FINDINGS, INTERRUPTED, AppOption, Group, JsonOption, ModelsArgument, app

migrate_app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Documents of older versions: count, migrate, roll back.",
)
app.add_typer(migrate_app, name="migrate")
BatchOption = Annotated[int, typer.Option("--batch", help="Documents per batch.")]
ThrottleOption = Annotated[
    float | None, typer.Option("--throttle", help="At most so many documents per second.", show_default=False)
]
RetryOption = Annotated[bool, typer.Option("--retry", help="Try those again that were set aside.")]


@migrate_app.command("status")
def migrate_status(app_name: AppOption, models: ModelsArgument = None, as_json: JsonOption = False) -> None:
    """Count the documents of each version, and list those set aside. Writes nothing.

    \b
    Example:
      treadle migrate status --app shop.models:store
    """
    from rich.console import Console

    from treadle.commands import app, migrate

    rows = migrate.status(app.load_store(app_name), models or [])
    if as_json:
        typer.echo(migrate.as_json(rows))
    else:
        migrate.show_status(rows, Console(soft_wrap=True))


@migrate_app.command("run")
def migrate_run(
    app_name: AppOption,
    models: ModelsArgument = None,
    to: Annotated[int | None, typer.Option("--to", help="The version to reach.", show_default=False)] = None,
    batch: BatchOption = 1000,
    throttle: ThrottleOption = None,
    retry: RetryOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and show what becomes of some.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring documents to the current version, while readers and writers go on.

    Ctrl-C stops it after the batch at hand; the next run goes on from there.
    To undo, use rollback. Exits with 1 when documents were set aside.

    \b
    Example:
      treadle migrate run --app shop.models:store --dry-run
      treadle migrate run --app shop.models:store User --throttle 5000
    """
    options = {"to": to, "batch": batch, "throttle": throttle, "retry": retry, "dry_run": dry_run}
    _migrate(app_name, models, options, as_json)


@migrate_app.command("rollback")
def migrate_rollback(
    app_name: AppOption,
    to: Annotated[int, typer.Option("--to", help="The version to go back to.")],
    models: ModelsArgument = None,
    batch: BatchOption = 1000,
    throttle: ThrottleOption = None,
    retry: RetryOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and show what becomes of some.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring documents back to an older version. To undo, use run.

    \b
    Example:
      treadle migrate rollback --app shop.models:store User --to 1
    """
    options = {"to": to, "batch": batch, "throttle": throttle, "retry": retry, "dry_run": dry_run}
    _migrate(app_name, models, options, as_json)


def _migrate(app_name: str, models: list[str] | None, options: dict[str, Any], as_json: bool) -> None:
    from rich.console import Console

    from treadle.commands import app, migrate

    with migrate.progress(Console(stderr=True)) as report:
        results = migrate.run(app.load_store(app_name), models or [], progress=report, **options)
    if as_json:
        typer.echo(migrate.results_as_json(results))
    else:
        migrate.show_results(results, Console(soft_wrap=True), options["dry_run"])
    if not options["dry_run"] and not all(each.finished for each in results):
        raise typer.Exit(INTERRUPTED)
    if any(each.set_aside for each in results):
        raise typer.Exit(FINDINGS)
