"""`treadle plan`: what a trial supports, as a folder that can be applied and taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle.cli.options import JsonOption, UriArgument, UriOption
from treadle.cli.output import counted, print_json, require_writable, say
from treadle.errors import UsageError


def plan(
    uri: UriArgument = None,
    uri_option: UriOption = None,
    workload: Annotated[
        str, typer.Option("--workload", metavar="FILE", help="What treadle record wrote.", show_default=False)
    ] = "",
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FOLDER", help="Where the plan goes.")
    ] = "plan",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="CODE@PLACE", help="Only this finding; may be repeated.", show_default=False
        ),
    ] = None,
    documents: Annotated[
        int, typer.Option("--documents", min=100, help="At most this many documents in the trial's copy.")
    ] = 100_000,
    maintain: Annotated[
        str,
        typer.Option("--maintain", metavar="HOW", help="stream, or write where every writer uses Treadle."),
    ] = "stream",
    as_json: JsonOption = False,
) -> None:
    """Try what the advisor proposes on a copy, and plan what the figures support. Changes nothing.

    The folder holds models.py, plan.json with the steps, README.md, and the
    recorded reads that treadle prove runs (with their values; mode 0600).

    \b
    Example:
      treadle plan mongodb://localhost:27017/shop --workload shop.workload -o plan/
    """
    from datetime import UTC, datetime
    from uuid import uuid4

    from treadle.advisor.plans.folder import require_free, write
    from treadle.advisor.plans.make import make
    from treadle.advisor.plans.reads import write_reads
    from treadle.advisor.plans.text import readme
    from treadle.cli.trial import require_maintain, tried

    require_maintain(maintain)
    folder = Path(output)
    require_free(folder)
    require_writable(folder, "-o", folder=True)
    _require_unapplied(folder, uri, uri_option)
    report, trial, recorded = tried(uri, uri_option, workload, only or [], documents, maintain=maintain)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    chosen = make(report, trial, identity=uuid4().hex, made=made, maintain=maintain)
    write(chosen, folder, readme(chosen))
    reads = write_reads(chosen, recorded, folder)
    if as_json:
        shown = {"folder": str(folder), "id": chosen.id, "findings": chosen.findings}
        print_json({**shown, "left_out": chosen.left_out, "steps": chosen.steps, "seconds": chosen.seconds})
        return
    say(f"{folder} plans {counted(len(chosen.findings), 'finding')}: {', '.join(chosen.findings)}.")
    for each in chosen.left_out:
        say(f"Left out {each.key}: {each.reason}")
    for number, step in enumerate(chosen.steps, 1):
        say(f"{number}. {step.name}, about {step.seconds:,.0f} s: {step.what}")
    if recorded.redacted:
        say("For treadle prove record once more, without --redact, and give it that as --workload.")
    else:
        say(f"reads.workload in it holds {counted(reads, 'recorded read')} with their values (mode 0600).")
    say(f"Next: treadle apply {folder} URI --dry-run")


def _require_unapplied(folder: Path, uri: str | None, uri_option: str | None) -> None:
    """Refuse to overwrite a plan that is applied: without its folder nobody could undo it."""
    from treadle.advisor.plans.before import row_of
    from treadle.advisor.plans.folder import PLAN, read
    from treadle.cli.connection import connected_database

    if not (folder / PLAN).exists():
        return
    try:
        present = read(folder, edited=True)
    except UsageError:
        return
    with connected_database(uri, uri_option) as database:
        if row_of(database, present) is not None:
            raise UsageError(
                f"The plan in {folder} is applied to {database.name}; undo it first, or name another folder.",
                code="plan-applied",
            )
