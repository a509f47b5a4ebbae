"""The command `treadle`: wiring only; what a verb does is in `treadle.commands`.

The verbs themselves are wired in `treadle.verbs`; here is what happens
around them. Exit codes: 0 clean, 1 findings, 2 usage, 3 cannot connect.
Everything heavy is imported inside the verbs, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from treadle.errors import TreadleError, UsageError

try:
    import typer
except ModuleNotFoundError:
    # Only the installed command imports this module, and it can do nothing else.
    sys.stderr.write("The command line needs typer and rich; run pip install 'treadle[cli]'.\n")
    raise SystemExit(2) from None

# Imported for the verbs that they add, in the order in which the help lists them.
from treadle.verbs import advice, keeping, migrating  # noqa: F401
from treadle.verbs.shared import BUG, FINDINGS, INTERRUPTED, NO_CONNECTION, USAGE, app


@app.callback(invoke_without_command=True)
def treadle(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
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
    """Run the command line; the exit code. Whatever goes wrong is told without passwords."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        outcome = app(args=given, prog_name="treadle", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except TreadleError as error:
        return _say(str(error), given, _exit_code(error))
    except Exception as error:
        sentence = _cannot_connect(error)
        if sentence is not None:
            return _say(sentence, given, NO_CONNECTION)
        # The parser's errors have no common public class in all versions of typer.
        format_message = getattr(error, "format_message", None)
        if format_message is not None:
            return _say(f"{format_message()} See treadle --help.", given, USAGE)
        import traceback

        return _say(traceback.format_exc(), given, BUG)
    return outcome if isinstance(outcome, int) else 0


def _cannot_connect(error: Exception) -> str | None:
    """One sentence where the application's own client reaches no server."""
    if "pymongo" not in sys.modules:
        return None
    from pymongo.errors import ConnectionFailure

    if not isinstance(error, ConnectionFailure):
        return None
    return f"No connection: {str(error).partition(', Timeout')[0]}. Check the URI that the application uses."


def _say(message: str, given: Sequence[str], code: int) -> int:
    import os

    from treadle.commands.redaction import redact

    # The name is that of `connection.ENVIRONMENT_VARIABLE`, which would import the driver.
    text = redact(message, [*given, os.environ.get("MONGODB_URI", "")])
    typer.echo(text.rstrip("\n"), err=True)
    return code


def _exit_code(error: TreadleError) -> int:
    from treadle.commands.connection import CannotConnect

    if isinstance(error, CannotConnect):
        return NO_CONNECTION
    return USAGE if isinstance(error, UsageError) else FINDINGS


if __name__ == "__main__":
    raise SystemExit(main())
