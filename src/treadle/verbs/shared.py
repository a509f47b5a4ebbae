"""What the verbs share: the application that they join, its exit codes, and options that recur."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

FINDINGS, USAGE, NO_CONNECTION = 1, 2, 3
BUG, INTERRUPTED = 70, 130


class Group(TyperGroup):
    """Verbs whose help is quick: typer would import Pydantic to make sense of an absent `--help`."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


app = typer.Typer(
    cls=Group,
    add_completion=False,
    # Plain help needs no import of rich, and typer's own tracebacks would show
    # local variables, passwords among them.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

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
