"""`treadle verify`: name every stored value that is wrong."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.cli.application import call_with_progress, pace
from treadle.cli.options import (
    FINDINGS,
    LIMIT_DEFAULT,
    AppOption,
    FieldsOption,
    JsonOption,
    LimitOption,
    ModelsArgument,
    ThrottleOption,
)
from treadle.cli.output import counted, print_extended_json, print_table, say, shortened

if TYPE_CHECKING:
    from treadle.graph.outcomes import Finding

VALUE_LENGTH_MAX = 60


def verify(
    app_name: AppOption,
    models: ModelsArgument = None,
    sample: Annotated[
        float | None,
        typer.Option(
            "--sample", help="Only so many of the documents: 0.01 for one percent.", show_default=False
        ),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option("--since", help="Only what changed since then (UTC), and follows.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a verify that was interrupted.")] = False,
    fields: FieldsOption = None,
    throttle: ThrottleOption = None,
    limit: LimitOption = LIMIT_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Name every stored value that is not what it should be. Changes no document.

    Exits with 1 when there are findings.

    \b
    Example:
      treadle verify --app shop.models:store
      treadle verify --app shop.models:store Product --json
      treadle verify --app shop.models:store --sample 0.01 --throttle gentle
    """
    findings = call_with_progress(
        app_name,
        "verify",
        models,
        sample=sample,
        since=since,
        resume=resume,
        fields=fields,
        throttle=pace(throttle),
    )
    if as_json:
        print_extended_json([asdict(each) for each in findings])
    elif not findings and (sample is not None or since is not None):
        looked = f"a sample of {sample:g}" if sample is not None else f"what changed since {since}"
        say(f"Nothing is wrong in {looked}.")
    else:
        show(findings, limit)
    if findings:
        raise typer.Exit(FINDINGS)


def show(findings: list[Finding], limit: int = LIMIT_DEFAULT) -> None:
    """A table of the first findings, and how many there are; first how many per rule, if there are more."""
    if not findings:
        say("Every maintained value is right.")
        return
    if len(findings) > limit:
        numbers = Counter((_rule(each), each.pattern) for each in findings)
        summary = [(rule, pattern, f"{number:,}") for (rule, pattern), number in numbers.most_common()]
        print_table(("rule", "pattern", "findings"), summary)
    rows = [
        (
            each.pattern,
            f"{each.model} {each.document_id}",
            each.path,
            *(shortened(str(value), VALUE_LENGTH_MAX) for value in (each.stored, each.expected)),
        )
        for each in findings[:limit]
    ]
    if rows:
        headings = ("pattern", "document", "path", "stored", "expected")
        print_table(headings, rows, wrapped=("stored", "expected"))
    hidden = len(findings) - limit
    total = counted(len(findings), "finding")
    say(total + (f", {hidden:,} of them not shown; see --limit" if hidden > 0 else "") + ".")


def _rule(finding: Finding) -> str:
    """The maintained field; positions in arrays are none of its name."""
    return f"{finding.model}.{re.sub(r'[.][0-9]+(?=[.]|$)', '', finding.path)}"
