"""`treadle apply`: carry out a plan on a live database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from treadle.cli.application import pace
from treadle.cli.options import JsonOption, ThrottleOption, UriArgument, UriOption
from treadle.cli.output import print_json, say
from treadle.cli.progress import model_bars

FolderArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="The folder that treadle plan wrote.", show_default=False)
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="List everything and change nothing.")]


def apply(
    folder: FolderArgument,
    uri: UriArgument = None,
    uri_option: UriOption = None,
    dry_run: DryRunOption = False,
    throttle: ThrottleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Carry out a plan while the database is in use; each step is verified.

    What was there before is noted first, so that treadle undo takes back
    exactly what was made. If it is killed, run it again: it continues.

    \b
    Example:
      treadle apply plan/ mongodb://localhost:27017/shop --dry-run
      treadle apply plan/ mongodb://localhost:27017/shop --throttle gentle
    """
    from treadle.advisor.loop.apply import apply as apply_plan
    from treadle.advisor.loop.apply import apply_dry_run

    lines: list[str] = []
    with opened(folder, uri, uri_option) as (plan, database), model_bars() as bars:
        if dry_run:
            lines = apply_dry_run(database, plan)
        else:
            log = (lambda text: None) if as_json else say
            apply_plan(database, plan, throttle=pace(throttle), log=log, progress=bars)
    if dry_run:
        print_json({"would": lines}) if as_json else say("\n".join([*lines, "Nothing was changed."]))
    elif as_json:
        print_json({"applied": plan.id, "findings": plan.findings})
    else:
        say(f"Applied. Next: treadle prove {folder} URI; treadle undo {folder} URI takes it back.")
        say("From now on run treadle watch --app models:store in that folder: it keeps the values right.")


def _tell(as_json: bool) -> Any:
    return lambda text: say(text, err=as_json)


@contextmanager
def opened(
    folder: str, uri: str | None, uri_option: str | None, edited: bool = False
) -> Iterator[tuple[Any, Any]]:
    """The plan of a folder and the database of a URI; a refusal of the server is one sentence."""
    from pymongo.errors import ConnectionFailure, OperationFailure

    from treadle.advisor.loop.plan import read
    from treadle.cli.connection import connected_database
    from treadle.errors import DataError
    from treadle.plan.server_errors import is_transient

    plan = read(Path(folder), edited)
    with connected_database(uri, uri_option) as database:
        try:
            yield plan, database
        except KeyboardInterrupt:
            say(f"Interrupted. {CONTINUES.format(folder=folder)}", err=True)
            raise
        except ConnectionFailure:
            say(f"The connection was lost. {CONTINUES.format(folder=folder)}", err=True)
            raise
        except OperationFailure as error:
            if is_transient(error):
                raise DataError(
                    f"Others hold documents of the plan for too long. {CONTINUES.format(folder=folder)}",
                    code="plan-stopped",
                ) from None
            if error.code not in NO_RIGHTS:
                raise
            raise DataError(
                "The server refuses this login a step of the plan; log in as a user with the roles readWrite "
                f"and dbAdmin on {database.name}, and run it again: it continues.",
                code="plan-refused",
            ) from None


CONTINUES = "Run it again and it continues; treadle undo {folder} URI takes it back."
# Unauthorized, and a login that was not given.
NO_RIGHTS = (13, 33, 18)
