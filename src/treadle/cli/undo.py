"""`treadle undo`: take a plan back."""

from __future__ import annotations

import typer

from treadle.cli.application import pace
from treadle.cli.apply import DryRunOption, FolderArgument, opened
from treadle.cli.options import FINDINGS, JsonOption, ThrottleOption, UriArgument, UriOption
from treadle.cli.output import print_json, say
from treadle.cli.progress import model_bars


def undo(
    folder: FolderArgument,
    uri: UriArgument = None,
    uri_option: UriOption = None,
    dry_run: DryRunOption = False,
    throttle: ThrottleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove everything that a plan made: fields, indexes, options and Treadle's own state.

    What cannot be restored is counted and printed; then it exits with 1. If it
    is killed, run it again. Stop treadle watch first.

    \b
    Example:
      treadle undo plan/ mongodb://localhost:27017/shop --dry-run
      treadle undo plan/ mongodb://localhost:27017/shop
    """
    from treadle.advisor.loop.undo import undo as undo_plan

    told: list[str] = []

    def log(text: str) -> None:
        told.append(text)
        if not as_json:
            say(text)

    with opened(folder, uri, uri_option, edited=True) as (plan, database), model_bars() as bars:
        left = undo_plan(database, plan, dry_run=dry_run, throttle=pace(throttle), log=log, progress=bars)
    if as_json:
        print_json({"would": told} if dry_run else {"undone": told, "left": left})
    elif dry_run:
        say("Nothing was changed.")
    else:
        say("\n".join([*left, "Not undone."] if left else ["Undone: nothing of the plan is left."]))
    if left:
        raise typer.Exit(FINDINGS)
