"""`treadle archive`: old documents to where their models archive them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.application import open_store, pace
from treadle.cli.options import AppOption, JsonOption, ThrottleOption
from treadle.cli.output import print_json
from treadle.cli.progress import model_bars

if TYPE_CHECKING:
    from treadle.model.document import Document


def archive(
    app_name: AppOption,
    models: Annotated[
        list[str] | None, typer.Argument(help="Names of models; all that have an archive, if none is given.")
    ] = None,
    throttle: ThrottleOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many would move.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Move documents that are old enough to where their models archive them.

    Readers and writers continue. It can be stopped at any time, and the next
    run continues. To undo, bring single documents back with store.restore.

    \b
    Example:
      treadle archive --app shop.models:store --dry-run
      treadle archive --app shop.models:store Sale --throttle 5000
    """
    moved: dict[str, int] = {}
    with model_bars(lines=True) as report, open_store(app_name) as (store, call):
        for model in _chosen(store, models):
            options = {"throttle": pace(throttle), "dry_run": dry_run, "progress": report}
            moved[model.__name__] = call(store.archive, model, **options)
    if as_json:
        print_json(moved)
        return
    for name, number in moved.items():
        typer.echo(f"{name}: {number:,} {'would move' if dry_run else 'moved'}.")


def _chosen(store: Any, names: list[str] | None) -> list[type[Document]]:
    from treadle.errors import UsageError
    from treadle.graph.calls import MovingRule

    entries = {
        entry.model.__name__: entry.model
        for entry in store.graph.entries.values()
        if any(rule.target is entry for rule in entry.rules.of_type(MovingRule))
    }
    unknown = [name for name in names or [] if name not in entries]
    if unknown or not entries:
        known = ", ".join(sorted(entries)) or "none"
        missing = f"{', '.join(unknown)} has no archive" if unknown else "no model has an archive"
        raise UsageError(f"{missing} here; models with one: {known}", code="archive-undeclared")
    return [entries[name] for name in names] if names else list(entries.values())
