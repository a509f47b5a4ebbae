"""The command `treadle`: one file per verb, and a few that several verbs share.

Exit codes: 0 clean, 1 findings, 2 usage, 3 cannot connect. Whatever is heavy
is imported inside functions, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from treadle.errors import TreadleError, UsageError

try:
    import typer
except ModuleNotFoundError:
    # Only the installed command imports this package, and it can do nothing else.
    sys.stderr.write("The command line needs typer and rich; run pip install 'treadle[cli]'.\n")
    raise SystemExit(2) from None

from typer.core import TyperGroup

from treadle.cli import (
    apply,
    archive,
    controls,
    decide,
    demo,
    doctor,
    explain,
    migrate,
    plan,
    prove,
    rebuild,
    record,
    repair,
    run_due,
    scan,
    serve,
    setup,
    status,
    teardown,
    trial,
    undo,
    verify,
    watch,
)
from treadle.cli.options import BUG, FINDINGS, INTERRUPTED, NO_CONNECTION, USAGE


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
migrate_app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Documents of older versions: count, migrate, roll back.",
)
set_aside_app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Documents that could not be processed: list, retry, discard.",
)
# Each holds the verb of its name, and the help lists them in this order.
_MODULES = (
    doctor,
    demo,
    scan,
    record,
    trial,
    plan,
    apply,
    prove,
    undo,
    explain,
    decide,
    setup,
    teardown,
    verify,
    repair,
    rebuild,
    watch,
    run_due,
    archive,
    status,
    serve,
)
for _module in _MODULES:
    _verb = _module.__name__.rpartition(".")[2]
    app.command(_verb.replace("_", "-"))(getattr(_module, _verb))
for _verb in ("status", "run", "rollback"):
    migrate_app.command()(getattr(migrate, _verb))
app.add_typer(migrate_app, name="migrate")
for _verb in ("pause", "resume"):
    app.command(_verb)(getattr(controls, _verb))
for _verb in ("list", "retry", "discard"):
    set_aside_app.command(_verb)(getattr(controls, "list_" if _verb == "list" else _verb))
app.add_typer(set_aside_app, name="set-aside")


@app.callback(invoke_without_command=True)
def treadle(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    # Taken out by `main`, wherever it stands.
    _traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where in the code an error was raised.")
    ] = False,
) -> None:
    """MongoDB's schema design patterns, declared on Pydantic models and kept true.

    \b
    Example:
      treadle demo
      treadle doctor mongodb://localhost:27017/shop
    """
    if version:
        from treadle import __version__

        typer.echo(f"treadle {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. No error message contains a password."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    traced = "--traceback" in given
    given = [each for each in given if each != "--traceback"]
    try:
        outcome = app(args=given, prog_name="treadle", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        from treadle.cli.redaction import redact

        message, code = _describe(error)
        if traced and code != BUG:
            message = f"{_traceback_of(error)}\n{message}"
        # The name is that of `connection.ENVIRONMENT_VARIABLE`, which would import the driver.
        # A finding is CODE@PLACE, which would be taken for a login.
        secrets = [each for each, last in zip(given, ["", *given], strict=False) if last != "--only"]
        text = redact(message, [*secrets, os.environ.get("MONGODB_URI", "")])
        from treadle.cli.output import say

        say(text.rstrip("\n"), err=True)
        return code
    return outcome if isinstance(outcome, int) else 0


def _describe(error: Exception) -> tuple[str, int]:
    """The message for an error, and its exit code."""
    if isinstance(error, TreadleError):
        usual = USAGE if isinstance(error, UsageError) else FINDINGS
        return str(error), getattr(error, "exit_code", usual)
    if "pymongo" in sys.modules:
        from pymongo.errors import ConnectionFailure

        # The application's own client reaches no server.
        if isinstance(error, ConnectionFailure):
            reason = str(error).partition(", Timeout")[0]
            return f"No connection: {reason}. Check the URI that the application uses.", NO_CONNECTION
    # The parser's errors have no common public class in all versions of typer.
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        return f"{format_message().rstrip('.')}. See treadle --help.", USAGE
    return _traceback_of(error), BUG


def _traceback_of(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(error))
