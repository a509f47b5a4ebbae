"""`treadle scan`: which patterns a database asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.options import FINDINGS, INTERRUPTED, NO_CONNECTION, JsonOption, UriArgument, UriOption
from treadle.cli.output import print_json, say, stdout, write_html
from treadle.cli.progress import step_bar
from treadle.errors import DataError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.advisor import Report, Step

STEP_LENGTH = 40


def scan(
    uri: UriArgument = None,
    uri_option: UriOption = None,
    as_json: JsonOption = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Also write the report as one HTML file.")
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Only the table, without declarations.")] = False,
    workload: Annotated[
        str | None,
        typer.Option("--workload", metavar="FILE", help="Profiler documents, instead of system.profile."),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="SEVERITY",
            help="Exit with 1 from info, warning or problem on.",
        ),
    ] = None,
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Show the values that tell kinds and versions apart.")
    ] = False,
    secondary: Annotated[bool, typer.Option("--secondary", help="Prefer a secondary member.")] = False,
    documents: Annotated[
        int, typer.Option("--documents", min=1, help="Larger collections are measured by a uniform sample.")
    ] = 20_000_000,
    sample: Annotated[int, typer.Option("--sample", min=100, help="Documents in such a sample.")] = 4_000,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.001, help="Time limit of one operation.")
    ] = 60.0,
    collections: Annotated[
        int,
        typer.Option("--collections", min=1, help="At most this many collections, the largest."),
    ] = 200,
) -> None:
    """Say which patterns a database asks for, with the evidence. Writes nothing.

    Exits with 0 unless --fail-on asks otherwise, with 3 when nothing answers.
    Ctrl-C prints what is known so far.

    \b
    Example:
      treadle scan mongodb://localhost:27017/shop --html report.html
      treadle scan mongodb://localhost:27017/shop --json --fail-on warning
    """
    from treadle.advisor import Limits
    from treadle.advisor.interface import SEVERITIES
    from treadle.cli.workload import read_workload

    if fail_on is not None and fail_on not in SEVERITIES:
        raise UsageError(f"--fail-on takes {', '.join(SEVERITIES)}, not {fail_on!r}", code="severity-unknown")
    limits = Limits(
        full_pass_documents=documents,
        structure_documents=min(documents, Limits().structure_documents),
        sample_documents=sample,
        operation_seconds=seconds,
        collections=collections,
    )
    profile = read_workload(Path(workload)) if workload else None
    options = {"limits": limits, "workload": profile, "secondary": secondary, "show_values": show_values}
    report = scan_database(uri, uri_option, **options)
    _print(report, html, as_json, brief)
    if not report.scan.complete:
        raise typer.Exit(NO_CONNECTION if report.scan.lost else INTERRUPTED)
    if fail_on is not None and report.fails(fail_on):
        raise typer.Exit(FINDINGS)


def _print(report: Report, html: str | None, as_json: bool, brief: bool) -> None:
    from treadle.advisor.html import html as as_html
    from treadle.advisor.text import show

    if html is not None:
        write_html(Path(html), as_html(report))
        say(f"Wrote {html}.", err=True)
    if as_json:
        print_json(report.as_json(), ensure_ascii=False, allow_nan=False)
    else:
        show(report, stdout(), declarations=not brief)


def scan_database(uri: str | None, uri_option: str | None, **options: Any) -> Report:
    """The advisor's report on the database that the URI names."""
    from pymongo.errors import ConnectionFailure

    from treadle.advisor import scan
    from treadle.advisor.reading import Lost, Refused
    from treadle.cli.connection import connected_database
    from treadle.cli.record import restore_profiler_of

    with scan_bar() as report_step, connected_database(uri, uri_option) as database:
        restore_profiler_of(database)
        try:
            return scan(database, progress=report_step, **options)
        except Lost:
            raise ConnectionFailure from None
        except Refused as refused:
            raise DataError(
                f"The collections of {database.name} could not be listed: {refused.reason}; log in as a user "
                "with the role read on it.",
                code="scan-refused",
            ) from None


@contextmanager
def scan_bar(console: Console | None = None) -> Iterator[Callable[[Step], None]]:
    """A progress bar that names what is measured."""
    from treadle.model.text import escape_text

    with step_bar(console) as report:
        yield lambda step: report(
            escape_text(step.what)[:STEP_LENGTH].ljust(STEP_LENGTH), step.done, step.total
        )
