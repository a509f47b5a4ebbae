"""Options that several verbs take, and the exit codes."""

from __future__ import annotations

from typing import Annotated

import typer

FINDINGS, USAGE, NO_CONNECTION = 1, 2, 3
BUG, INTERRUPTED = 70, 130

UriArgument = Annotated[
    str | None,
    typer.Argument(metavar="URI", help="The database; else --uri, else MONGODB_URI.", show_default=False),
]
UriOption = Annotated[
    str | None, typer.Option("--uri", metavar="URI", help="The same, as an option.", show_default=False)
]
AppOption = Annotated[
    str,
    typer.Option(
        "--app", metavar="MODULE:STORE", help="Your Store, such as shop.models:store.", envvar="TREADLE_APP"
    ),
]
ModelsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]...", help="Only these models.", show_default=False)
]
ThrottleOption = Annotated[
    str | None,
    typer.Option(
        "--throttle",
        metavar="RATE",
        help="Documents per second, or gentle: slows down while the server is busy.",
        show_default=False,
    ),
]
LIMIT_DEFAULT = 50
LimitOption = Annotated[int, typer.Option("--limit", metavar="N", min=0, help="The most rows of a table.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option("--field", help="Only this maintained field; may be repeated.", show_default=False),
]
