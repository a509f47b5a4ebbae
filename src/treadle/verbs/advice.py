"""Verbs that need no models: doctor, demo, scan, explain, decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from treadle.errors import UsageError
from treadle.verbs.shared import (
    FINDINGS,
    INTERRUPTED,
    NO_CONNECTION,
    JsonOption,
    UriArgument,
    UriOption,
    app,
)

if TYPE_CHECKING:
    from treadle.advisor import Limits
    from treadle.commands.connection import Target


@app.command()
def doctor(
    uri: Annotated[
        str | None,
        typer.Argument(
            metavar="URI",
            help="The database; else --uri, else MONGODB_URI, else a private local server.",
            show_default=False,
        ),
    ] = None,
    uri_option: UriOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what a server can do, and what Treadle will miss there. Writes nothing.

    Exits with 1 when there is a problem, with 3 when nothing answers.

    \b
    Example:
      treadle doctor mongodb://localhost:27017/shop
      MONGODB_URI=mongodb://localhost:27017/shop treadle doctor --json
    """
    import os

    from treadle.commands.connection import choose_target

    target = choose_target(uri, uri_option, os.environ)
    if target is not None:
        _report(target, as_json)
        return
    from treadle.commands.connection import Target
    from treadle.server import local as server

    typer.echo("No URI was given, so a private local server is started and looked at.", err=True)
    with server.start() as running:
        _report(Target(running.uri, "local"), as_json)


def _report(target: Target, as_json: bool) -> None:
    from treadle.commands import doctor

    report = doctor.doctor(target)
    if as_json:
        import json

        typer.echo(json.dumps(report.as_json(), indent=2, default=str))
    else:
        from rich.console import Console

        doctor.show(report, Console())
    if report.status == "problem":
        raise typer.Exit(FINDINGS)


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    html: Annotated[
        str, typer.Option("--html", metavar="FILE", help="Where the report goes.")
    ] = "treadle-demo.html",
    scale: Annotated[
        float, typer.Option("--scale", min=0.01, max=20, help="How much data; 1 is some 45,000 documents.")
    ] = 1.0,
) -> None:
    """Show the advisor, six patterns, verify and repair on a naive shop, on a private server.

    Takes less than a minute. Leaves an HTML report, and nothing else.

    \b
    Example:
      treadle demo
      treadle demo --keep
    """
    from pathlib import Path

    from rich.console import Console

    from treadle.commands import demo

    wait = _until_interrupted if keep else None
    demo.demo(Console(), Console(stderr=True), Path(html), scale, wait)


def _until_interrupted() -> None:
    import threading

    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo()


@app.command()
def scan(
    uri: UriArgument = None,
    uri_option: UriOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
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
        typer.Option("--fail-on", metavar="SEVERITY", help="Exit with 1 from info, warning or problem on."),
    ] = None,
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Show the values that tell kinds and versions apart.")
    ] = False,
    secondary: Annotated[bool, typer.Option("--secondary", help="Prefer a secondary member.")] = False,
    documents: Annotated[
        int, typer.Option("--documents", min=1, help="Larger collections are measured by a uniform sample.")
    ] = 20_000_000,
    sample: Annotated[int, typer.Option("--sample", min=100, help="How large such a sample is.")] = 4_000,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.001, help="The most for one operation.")
    ] = 60.0,
    collections: Annotated[
        int, typer.Option("--collections", min=1, help="Look into so many collections, the largest.")
    ] = 200,
) -> None:
    """Say which patterns a database asks for, with the evidence. Writes nothing.

    Exits with 0 unless --fail-on asks otherwise, with 3 when nothing answers.
    Ctrl-C prints what is known by then.

    \b
    Example:
      treadle scan mongodb://localhost:27017/shop --html report.html
      treadle scan mongodb://localhost:27017/shop --json --fail-on warning
    """
    from pathlib import Path

    from rich.console import Console

    from treadle.advisor.rule import SEVERITIES
    from treadle.commands import scan

    if fail_on is not None and fail_on not in SEVERITIES:
        raise UsageError(f"--fail-on takes {', '.join(SEVERITIES)}, not {fail_on!r}", code="severity-unknown")
    limits = _limits(documents, sample, seconds, collections)
    target = _database_target(uri, uri_option)
    with scan.progress_bar(Console(stderr=True)) as progress:
        report = scan.scan_target(
            target, limits, Path(workload) if workload else None, secondary, show_values, progress
        )
    if html is not None:
        scan.write_html(report, Path(html))
        typer.echo(f"Wrote {html}.", err=True)
    if as_json:
        typer.echo(scan.as_json(report))
    else:
        scan.shown(report, Console(), brief)
    if not report.scan.complete:
        raise typer.Exit(NO_CONNECTION if report.scan.lost else INTERRUPTED)
    if fail_on is not None and report.fails(fail_on):
        raise typer.Exit(FINDINGS)


def _limits(documents: int, sample: int, seconds: float, collections: int) -> Limits:
    from treadle.advisor import Limits

    return Limits(
        full_pass_documents=documents,
        structure_documents=min(documents, Limits().structure_documents),
        sample_documents=sample,
        operation_seconds=seconds,
        collections=collections,
    )


def _database_target(uri: str | None, uri_option: str | None) -> Target:
    """The database to look at; a private server of one's own would hold nothing."""
    import os

    from treadle.commands.connection import choose_target

    target = choose_target(uri, uri_option, os.environ)
    if target is None:
        raise UsageError(
            "Name a database, as in mongodb://localhost:27017/shop, or set MONGODB_URI.", code="uri-missing"
        )
    return target


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a finding of scan means, what it costs and when it does not matter.

    \b
    Example:
      treadle explain outlier
      treadle explain
    """
    from rich.console import Console

    from treadle.commands import scan

    if as_json:
        typer.echo(scan.explained_as_json(code))
    elif code is None:
        scan.list_codes(Console())
    else:
        scan.explain(code, Console())


@app.command()
def decide(
    uri: UriArgument = None,
    uri_option: UriOption = None,
    children_max: Annotated[
        int | None, typer.Option("--children-max", min=0, help="Children of the largest parent.")
    ] = None,
    children_typical: Annotated[
        int | None, typer.Option("--children-typical", min=0, help="Children of a usual parent.")
    ] = None,
    child_bytes: Annotated[
        int | None, typer.Option("--child-bytes", min=0, help="Bytes of a child, about.")
    ] = None,
    many_to_many: Annotated[
        bool, typer.Option("--many-to-many", help="A child belongs to several parents.")
    ] = False,
    read_together: Annotated[
        bool | None,
        typer.Option("--read-together/--read-apart", help="Are children always read with their parent?"),
    ] = None,
    atomic: Annotated[
        bool, typer.Option("--atomic", help="Children change together with their parent, in one write.")
    ] = False,
    change_often: Annotated[
        bool | None, typer.Option("--change-often/--change-seldom", help="Do children change often?")
    ] = None,
    grows: Annotated[bool, typer.Option("--grows", help="Children keep coming.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Embed or reference? By questions, by options, or from the relations of a live database.

    \b
    Example:
      treadle decide
      treadle decide --children-max 500 --child-bytes 300 --read-apart --grows
      treadle decide mongodb://localhost:27017/shop
    """
    from rich.console import Console

    from treadle.commands import scan

    relationship = {
        "children_max": children_max,
        "children_typical": children_typical,
        "child_bytes": child_bytes,
        "many_to_many": many_to_many,
        "read_together": read_together,
        "atomic": atomic,
        "children_change_often": change_often,
        "grows": grows or None,
    }
    told = (children_max, children_typical, child_bytes, read_together, change_often)
    if many_to_many or atomic or grows or any(each is not None for each in told):
        if uri is not None or uri_option is not None:
            raise UsageError(
                "decide takes a URI or options about one relationship, not both", code="relationship-invalid"
            )
        scan.answer(relationship, Console(), as_json)
        return
    # Not from the environment: without a URI these are questions.
    if uri is None and uri_option is None:
        scan.ask(
            lambda question: str(typer.prompt(question, default="", show_default=False, err=True)),
            Console(),
            as_json,
        )
        return
    _decide_for(_database_target(uri, uri_option), as_json)


def _decide_for(target: Target, as_json: bool) -> None:
    """The decision for each relation that a live database has."""
    from rich.console import Console

    from treadle.advisor import Limits
    from treadle.commands import scan

    with scan.progress_bar(Console(stderr=True)) as progress:
        report = scan.scan_target(target, Limits(), None, False, False, progress)
    scan.show_decided(report, Console(), as_json)
