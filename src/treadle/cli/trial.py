"""`treadle trial`: what the advisor's findings bring, with recorded requests on a copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.cli.options import JsonOption, UriArgument, UriOption
from treadle.cli.output import TABLE_WIDTH_MAX, print_json, say, stdout
from treadle.cli.progress import step_bar

if TYPE_CHECKING:
    from treadle.advisor import Report
    from treadle.advisor.loop.results import TrialReport
    from treadle.advisor.loop.workload_file import Workload


def trial(
    uri: UriArgument = None,
    uri_option: UriOption = None,
    workload: Annotated[
        str, typer.Option("--workload", metavar="FILE", help="What treadle record wrote.", show_default=False)
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="CODE@PLACE", help="Only this finding; may be given several times."),
    ] = None,
    documents: Annotated[
        int, typer.Option("--documents", min=100, help="About how many documents are copied.")
    ] = 100_000,
    as_json: JsonOption = False,
) -> None:
    """Try what the advisor finds: with recorded requests, on a copy in a private server.

    Compares every answer, and says for each finding what reads gain, what
    writes cost, and whether to do it. Writes nothing to the database. Exits
    with 0 whatever the verdicts are.

    \b
    Example:
      treadle trial mongodb://localhost:27017/shop --workload shop.workload
      treadle trial mongodb://localhost:27017/shop --workload shop.workload --only computed@reviews.product_id
    """
    _, report, _ = tried(uri, uri_option, workload, only or [], documents)
    if as_json:
        print_json(report.as_json(), ensure_ascii=False, allow_nan=False)
    else:
        from treadle.advisor.loop.trial_text import show

        console = stdout()
        if not console.is_terminal:
            console.width = TABLE_WIDTH_MAX
        show(report, console)


def tried(
    uri: str | None,
    uri_option: str | None,
    workload: str,
    only: list[str],
    documents: int,
) -> tuple[Report, TrialReport, Workload]:
    """Scan the database with the workload, and try what is found; `treadle plan` continues from there."""
    from pymongo.errors import ConnectionFailure

    from treadle.advisor import scan
    from treadle.advisor.loop import workload_file
    from treadle.advisor.loop.trial import try_findings
    from treadle.advisor.reading import Lost, Refused
    from treadle.cli.connection import connected_database
    from treadle.cli.record import restore_profiler_of
    from treadle.errors import DataError, UsageError

    if not workload:
        raise UsageError(
            "Name the requests with --workload, as treadle record writes them.", code="workload-missing"
        )
    recorded = workload_file.read(Path(workload))
    with connected_database(uri, uri_option) as database, step_bar() as report_step:
        restore_profiler_of(database)
        if recorded.database != database.name:
            say(f"The workload was recorded on {recorded.database}, not on {database.name}.", err=True)
        try:
            report = scan(
                database,
                workload=recorded.profile_documents(database.name),
                progress=lambda step: report_step(step.what, step.done, step.total),
            )
            trial = try_findings(
                database,
                report,
                recorded,
                only=only,
                documents=documents,
                progress=report_step,
            )
            return report, trial, recorded
        except Lost:
            raise ConnectionFailure from None
        except Refused as refused:
            raise DataError(
                f"The collections of {database.name} could not be read: {refused.reason}; log in as a user "
                "with the role read on it.",
                code="scan-refused",
            ) from None
