"""`treadle undo`: take a plan back."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from treadle.cli.apply import DryRunOption, FolderArgument, opened
from treadle.cli.options import JsonOption, UriArgument, UriOption
from treadle.cli.output import print_json, say
from treadle.cli.progress import model_bars


def undo(
    folder: FolderArgument,
    uri: UriArgument = None,
    uri_option: UriOption = None,
    dry_run: DryRunOption = False,
    throttle: Annotated[
        float | None,
        typer.Option(
            "--throttle", metavar="RATE", min=0.001, help="Documents per second.", show_default=False
        ),
    ] = None,
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

    told: list[str] = []

    def tell(text: str) -> Any:
        told.append(text)
        if not as_json:
            say(text)

    with opened(folder, uri, uri_option, edited=True) as (plan, database), model_bars() as bars:
        work = Undoing(database, plan, throttle=throttle, tell=tell, progress=bars)
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
