"""`treadle setup`: create what the models declare."""

from __future__ import annotations

from typing import Annotated

import typer

from treadle.cli.application import open_store
from treadle.cli.options import AppOption, JsonOption
from treadle.cli.output import print_json, say


def setup(
    app_name: AppOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Create the collections, validators and indexes that the models declare.

    Nothing is dropped. To undo, drop the indexes that it lists and set
    validation="off".

    \b
    Example:
      treadle setup --app shop.models:store --dry-run
    """
    with open_store(app_name) as (store, call):
        actions = call(store.setup, dry_run=dry_run)
    if as_json:
        print_json(actions)
        return
    for action in actions:
        say(f"{'would ' if dry_run else ''}{action}")
    if not actions:
        say("Everything is as declared.")
