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
    str, typer.Option("--app", metavar="MODULE:STORE", help="Your Store, such as shop.models:store.")
]
ModelsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]...", help="Only these models.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
