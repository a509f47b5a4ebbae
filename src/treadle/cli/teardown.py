"""`treadle teardown`: take back what `treadle setup` made."""

from __future__ import annotations

from typing import Annotated

import typer

from treadle.cli.application import open_store, pace
from treadle.cli.options import AppOption, JsonOption, ThrottleOption
from treadle.cli.output import print_json, say
from treadle.cli.progress import model_bars


def teardown(
    app_name: AppOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    fields: Annotated[
        bool, typer.Option("--fields", help="Also remove derived fields and the documents of rollups.")
    ] = False,
    throttle: ThrottleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop the indexes, validators, views and state that setup made. Stop the worker first.

    What was there before setup stays, and so does every document of yours.
    Run treadle setup, then treadle rebuild, to undo.

    \b
    Example:
      treadle teardown --app shop.models:store --fields --dry-run
    """
    with open_store(app_name) as (store, call), model_bars() as bars:
        options = {"dry_run": dry_run, "fields": fields, "throttle": pace(throttle)}
        actions = call(store.teardown, **options, progress=bars)
    if as_json:
        print_json(actions)
        return
    for action in actions:
        say(f"{'would ' if dry_run else ''}{action}")
    if not actions:
        say("There is nothing to take back.")
