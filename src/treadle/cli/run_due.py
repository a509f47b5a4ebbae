"""`treadle run-due`: the scheduled work that is due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from treadle.cli.application import open_store
from treadle.cli.options import FINDINGS, AppOption, JsonOption
from treadle.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from treadle.upkeep.schedule import Ran


def run_due(
    app_name: AppOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compute the values declared with maintain="schedule" that are due; for cron.

    Work that is not due, or that another process is doing, is skipped. What it
    writes can be computed again at any time. Exits with 1 when a run failed.

    \b
    Example:
      treadle run-due --app shop.models:store
    """
    with open_store(app_name) as (store, call):
        runs = call(store.run_due, dry_run=dry_run)
    if as_json:
        print_json(runs)
    elif not runs:
        say("Nothing is due.")
    elif dry_run:
        for run in runs:
            say(f"{run.name} is due.")
    else:
        print_table(("what", "computed", "written", "removed", "seconds", "outcome"), map(_row, runs))
    if any(run.error for run in runs):
        raise typer.Exit(FINDINGS)


def _row(run: Ran) -> list[str]:
    computed = f"everything: {run.why}" if run.why else "everything" if run.whole else "what changed"
    return [
        run.name,
        computed,
        str(run.written),
        str(run.removed),
        f"{run.seconds:.3f}",
        run.error or "done",
    ]
