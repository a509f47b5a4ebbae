"""`treadle undo`: take a plan back."""

from __future__ import annotations

from typing import Any

from treadle.cli.application import pace
from treadle.cli.apply import DryRunOption, FolderArgument, opened
from treadle.cli.options import JsonOption, ThrottleOption, UriArgument, UriOption
from treadle.cli.output import print_json, say
from treadle.cli.progress import model_bars
from treadle.errors import UsageError


def undo(
    folder: FolderArgument,
    uri: UriArgument = None,
    uri_option: UriOption = None,
    dry_run: DryRunOption = False,
    throttle: ThrottleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove everything that a plan made: fields, indexes, options and Treadle's own state.

    Documents are then as they would be without it, but for writes since. If it
    is killed, run it again. Stop treadle watch first.

    \b
    Example:
      treadle undo plan/ mongodb://localhost:27017/shop --dry-run
      treadle undo plan/ mongodb://localhost:27017/shop
    """
    from treadle.advisor.plans.undo import Undoing

    rate = pace(throttle)
    if isinstance(rate, str):
        raise UsageError("undo takes documents per second as --throttle", code="throttle-invalid")
    told: list[str] = []

    def tell(text: str) -> Any:
        told.append(text)
        if not as_json:
            say(text)

    with opened(folder, uri, uri_option) as (plan, database), model_bars() as bars:
        work = Undoing(database, plan, throttle=rate, tell=tell, progress=bars)
        if dry_run:
            told = work.dry_run()
        else:
            work.run()
    if as_json:
        print_json({"would" if dry_run else "undone": told})
    elif dry_run:
        say("\n".join([*told, "Nothing was changed."]))
    else:
        say("Undone: the database is as it was, but for writes since.")
