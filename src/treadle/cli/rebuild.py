"""`treadle rebuild`: recompute every maintained value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from treadle.cli.application import call_with_progress, models_named, open_store, pace
from treadle.cli.options import (
    LIMIT_DEFAULT,
    AppOption,
    JsonOption,
    LimitOption,
    ModelsArgument,
    ThrottleOption,
)
from treadle.cli.output import counted, say
from treadle.cli.verify import verify
from treadle.errors import UsageError

if TYPE_CHECKING:
    from treadle.cli.application import AnyStore


def rebuild(
    app_name: AppOption,
    models: ModelsArgument = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="PATTERN", help="Fill this tree pattern from the one declared first."),
    ] = None,
    shadow: Annotated[
        bool,
        typer.Option("--shadow", help="Build the fields with Replaces(…) beside the old values, then swap."),
    ] = False,
    swap: Annotated[
        bool, typer.Option("--swap/--no-swap", help="With --shadow: whether to swap when all is proven.")
    ] = True,
    undo: Annotated[
        str | None, typer.Option(metavar="RULE", help="Show the former values of this field again.")
    ] = None,
    finish: Annotated[
        str | None, typer.Option(metavar="RULE", help="Drop the former values of this field.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would change.")] = False,
    throttle: ThrottleOption = None,
    limit: LimitOption = LIMIT_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Recompute every maintained value, as after declaring a pattern on old data.

    Only maintained fields change; remove them from the documents to undo.

    \b
    Example:
      treadle rebuild --app shop.models:store Product
      treadle rebuild --app shop.models:store Category --to ancestor-array
      treadle rebuild --app shop.models:store Product --shadow
      treadle rebuild --app shop.models:store --undo Product.review_count
    """
    if sum([shadow, undo is not None, finish is not None, to is not None]) > 1:
        raise UsageError(
            "--to, --shadow, --undo and --finish are four things to do; choose one", code="rebuild-option"
        )
    if undo is not None or finish is not None:
        _end_change(app_name, undo, finish, throttle, as_json)
        return
    if to is not None:
        with open_store(app_name) as (store, _):
            models = models_with_tree(store, models or [], to)
    if dry_run:
        verify(app_name, models, limit=limit, as_json=as_json)
        return
    beside = {"shadow": True, "swap": swap} if shadow else {}
    rebuilt = call_with_progress(app_name, "rebuild", models, throttle=pace(throttle), **beside)
    say(f'{{"rebuilt": {rebuilt}}}' if as_json else f"Rebuilt {counted(rebuilt, 'document')}.")


def _end_change(
    app_name: str, undo: str | None, finish: str | None, throttle: str | None, as_json: bool
) -> None:
    """Take a swapped field back, or drop its former values."""
    with open_store(app_name) as (store, call):
        if undo is not None:
            number = call(store.undo_rebuild, undo, throttle=pace(throttle))
            done = f"{undo} shows its former values again in {counted(number, 'document')}."
        else:
            number = call(store.finish_rebuild, finish, throttle=pace(throttle))
            done = f"Dropped the former values of {finish} in {counted(number, 'document')}."
    say(f'{{"documents": {number}}}' if as_json else done)


def models_with_tree(store: AnyStore, names: list[str], pattern: str) -> list[str]:
    """The names of the models that declare this tree pattern, among those named."""
    entries = [store.graph.entry(model) for model in models_named(store, names)]
    chosen = [
        entry.model.__name__
        for entry in entries or store.graph.entries.values()
        if any(rule.pattern == pattern for rule in entry.rules)
    ]
    if not chosen or (names and len(chosen) < len(names)):
        whose = " and ".join(names) or "the store"
        raise UsageError(
            f"--to {pattern!r}: that is not among the trees that {whose} declares; declare the present "
            'pattern first and the new one after it, such as tree=[ChildReferences(children="children"), '
            'AncestorArray(parent="parent_id", ancestors="ancestors")], deploy that, and run this again',
            code="tree-declaration",
        )
    return chosen
