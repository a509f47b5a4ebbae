"""`treadle verify`: name every stored value that is wrong."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from treadle.cli.application import call_with_progress
from treadle.cli.options import FINDINGS, AppOption, JsonOption, ModelsArgument
from treadle.cli.output import counted, print_extended_json, print_table, shortened

if TYPE_CHECKING:
    from treadle.graph.outcomes import Finding

ROWS_MAX = 50
VALUE_LENGTH_MAX = 60


def verify(app_name: AppOption, models: ModelsArgument = None, as_json: JsonOption = False) -> None:
    """Name every stored value that is not what it should be. Changes no document.

    Exits with 1 when there are findings.

    \b
    Example:
      treadle verify --app shop.models:store
      treadle verify --app shop.models:store Product --json
    """
    findings = call_with_progress(app_name, "verify", models)
    if as_json:
        print_extended_json([asdict(each) for each in findings])
    else:
        show(findings)
    if findings:
        raise typer.Exit(FINDINGS)


def show(findings: list[Finding]) -> None:
    """A table of the first findings, and how many there are."""
    if not findings:
        typer.echo("Every maintained value is right.")
        return
    rows = [
        (
            each.pattern,
            f"{each.model} {each.document_id}",
            each.path,
            *(shortened(str(value), VALUE_LENGTH_MAX) for value in (each.stored, each.expected)),
        )
        for each in findings[:ROWS_MAX]
    ]
    print_table(("pattern", "document", "path", "stored", "expected"), rows)
    hidden = len(findings) - ROWS_MAX
    total = counted(len(findings), "finding")
    typer.echo(total + (f", {hidden} of them not shown" if hidden > 0 else "") + ".")
