"""`treadle plan`: what a trial supports, as a folder that can be applied and taken back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.options import JsonOption, UriArgument, UriOption
from treadle.cli.output import counted, print_json, require_writable, say
from treadle.errors import UsageError

if TYPE_CHECKING:
    from treadle.advisor.loop.plan import AdoptionPlan


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
    as_json: JsonOption = False,
) -> None:
    """Try what the advisor proposes on a copy, and plan what the figures support. Changes nothing.

    The folder holds models.py, plan.json with the steps, README.md, and the
    recorded reads that treadle prove runs (with their values; mode 0600).

    \b
    Example:
      treadle plan mongodb://localhost:27017/shop --workload shop.workload -o plan/
      treadle plan mongodb://localhost:27017/shop --workload shop.workload --only computed@reviews.product_id
    """
    from datetime import UTC, datetime
    from uuid import uuid4

    from treadle.advisor.loop.plan import make, require_free, write
    from treadle.advisor.loop.prove import write_reads
    from treadle.advisor.loop.readme import readme
    from treadle.cli.trial import tried

    folder = Path(output)
    require_free(folder)
    require_writable(folder, "-o")
    _require_no_plan(folder, uri, uri_option)
    report, trial, recorded = tried(uri, uri_option, workload, only or [], documents)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    chosen = make(report, trial, identity=uuid4().hex, made=made)
    write(chosen, folder, readme(chosen))
    reads = write_reads(chosen, recorded, folder)
    if as_json:
        shown: dict[str, Any] = {
            "folder": str(folder),
            "id": chosen.id,
            "findings": chosen.findings,
            "left_out": chosen.left_out,
            "by_application": chosen.by_application,
        }
        print_json({**shown, "steps": [each._asdict() for each in chosen.steps], "seconds": chosen.seconds})
    else:
        _tell(chosen, folder, reads)


def _tell(chosen: AdoptionPlan, folder: Path, reads: int) -> None:
    """Say what was planned, what was not, and what comes next."""
    say(f"{folder} plans {counted(len(chosen.findings), 'finding')}: {', '.join(chosen.findings)}.")
    for each in chosen.left_out:
        say(f"Left out {each.key}: {each.reason}")
    for found in chosen.by_application:
        say(f"For the application, {found.key}: {found.why} README.md has its declaration.")
    for number, step in enumerate(chosen.steps, 1):
        say(f"{number}. {step.name}, about {step.seconds:,.0f} s: {step.what}")
    say(f"reads.workload in it holds {counted(reads, 'recorded read')} with their values (mode 0600).")
    say(f"Next: treadle apply {folder} URI --dry-run")


def _require_no_plan(folder: Path, uri: str | None, uri_option: str | None) -> None:
    """Refuse to overwrite a plan that is applied, and a database to which another one is."""
    from treadle.advisor.loop.apply import require_no_other, row_of
    from treadle.advisor.loop.plan import PLAN, read
    from treadle.cli.connection import connected_database

    try:
        present = read(folder, edited=True) if (folder / PLAN).exists() else None
    except UsageError:
        present = None
    with connected_database(uri, uri_option) as database:
        if present is not None and row_of(database, present) is not None:
            raise UsageError(
                f"The plan in {folder} is applied to {database.name}; undo it first, or name another folder.",
                code="plan-applied",
            )
        require_no_other(database)
