"""The command `treadle`: wiring only; what a verb does is in `treadle.commands`.

Exit codes: 0 clean, 1 findings, 2 usage, 3 cannot connect. Everything heavy is
imported inside the verbs, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from treadle.errors import TreadleError, UsageError

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError:
    # Only the installed command imports this module, and it can do nothing else.
    sys.stderr.write("The command line needs typer and rich; run pip install 'treadle[cli]'.\n")
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from treadle.commands.connection import Target

FINDINGS, USAGE, NO_CONNECTION = 1, 2, 3
BUG, INTERRUPTED = 70, 130


class _Group(TyperGroup):
    """Verbs whose help is quick: typer would import Pydantic to make sense of an absent `--help`."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    # Plain help needs no import of rich, and typer's own tracebacks would show
    # local variables, passwords among them.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

UriArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="URI",
        help="The database; else --uri, else MONGODB_URI, else a private local server.",
        show_default=False,
    ),
]
UriOption = Annotated[
    str | None, typer.Option("--uri", metavar="URI", help="The same, as an option.", show_default=False)
]


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


@app.command()
def doctor(
    uri: UriArgument = None,
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
    from treadle import server
    from treadle.commands.connection import Target

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


AppOption = Annotated[
    str, typer.Option("--app", metavar="MODULE:STORE", help="Your Store, such as shop.models:store.")
]
ModelsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]...", help="Only these models.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def setup(
    app_name: AppOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Create the collections, validators and indexes that the models declare.

    Nothing is dropped. To undo, drop the indexes that it lists and set
    validation="off".

    \b
    Example:
      treadle setup --app shop.models:store --dry-run
    """
    from treadle.commands import app, maintain

    actions = maintain.setup(app.load_store(app_name), dry_run)
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(action) for action in actions], indent=2))
        return
    for action in actions:
        typer.echo(f"{'would ' if dry_run else ''}{action}")
    if not actions:
        typer.echo("Everything is as declared.")


@app.command()
def verify(app_name: AppOption, models: ModelsArgument = None, as_json: JsonOption = False) -> None:
    """Name every stored value that is not what it should be. Changes no document.

    Exits with 1 when there are findings.

    \b
    Example:
      treadle verify --app shop.models:store
      treadle verify --app shop.models:store Product --json
    """
    from rich.console import Console

    from treadle.commands import app, maintain

    with maintain.progress_bar(Console(stderr=True)) as progress:
        findings = maintain.verify(app.load_store(app_name), models or [], progress)
    if as_json:
        typer.echo(maintain.findings_as_json(findings))
    else:
        maintain.show_findings(findings, Console())
    if findings:
        raise typer.Exit(FINDINGS)


@app.command()
def repair(
    app_name: AppOption,
    models: ModelsArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be mended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Mend what verify finds, while writers go on.

    What was wrong is overwritten; run with --dry-run --json first to keep it.

    \b
    Example:
      treadle repair --app shop.models:store
    """
    if dry_run:
        verify(app_name, models, as_json)
        return
    from rich.console import Console

    from treadle.commands import app, maintain

    with maintain.progress_bar(Console(stderr=True)) as progress:
        mended = maintain.repair(app.load_store(app_name), models or [], progress)
    typer.echo(f'{{"mended": {mended}}}' if as_json else f"Mended {mended} documents.")


@app.command()
def rebuild(
    app_name: AppOption,
    models: ModelsArgument = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="PATTERN", help="Fill this tree pattern from the one declared first."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would change.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Recompute every maintained value, as after declaring a pattern on old data.

    Only maintained fields change; remove them from the documents to undo.

    \b
    Example:
      treadle rebuild --app shop.models:store Product
      treadle rebuild --app shop.models:store Category --to ancestor-array
    """
    if to is not None:
        from treadle.commands import app, maintain

        models = maintain.models_with_tree(app.load_store(app_name), models or [], to)
    if dry_run:
        verify(app_name, models, as_json)
        return
    from rich.console import Console

    from treadle.commands import app, maintain

    with maintain.progress_bar(Console(stderr=True)) as progress:
        visited = maintain.rebuild(app.load_store(app_name), models or [], progress)
    typer.echo(f'{{"rebuilt": {visited}}}' if as_json else f"Rebuilt {visited} documents.")


@app.command()
def watch(
    app_name: AppOption,
    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", help="Serve Prometheus metrics on this port.", show_default=False),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", help="Its name, if several applications share a database.")
    ] = "worker",
) -> None:
    """Keep what is declared with maintain="stream" right, and run what is scheduled and due.

    Until SIGTERM or Ctrl-C.
    One worker per database is active; others stand by and take over.

    \b
    Example:
      treadle watch --app shop.models:store --metrics-port 9464
    """
    from treadle.commands import app, watch

    watch.watch(app.load_store(app_name), name, metrics_port, lambda line: typer.echo(line, err=True))


@app.command("run-due")
def run_due(
    app_name: AppOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compute what is declared with maintain="schedule" and due by now; for cron.

    Also packs the closed buckets of models with layout="packed". A run that
    is not due, or that another process is at, is left out. What it writes can
    be computed again at any time. Exits with 1 when a run failed.

    \b
    Example:
      treadle run-due --app shop.models:store
    """
    from rich.console import Console

    from treadle.commands import app, due

    ran = due.run_due(app.load_store(app_name), dry_run)
    if as_json:
        typer.echo(due.as_json(ran))
    else:
        due.show(ran, Console(), dry_run)
    if any(each.error for each in ran):
        raise typer.Exit(FINDINGS)


@app.command()
def status(app_name: AppOption, as_json: JsonOption = False) -> None:
    """Show per pattern how it is maintained, how far behind it is, and what verify found last.

    \b
    Example:
      treadle status --app shop.models:store
      treadle status --app shop.models:store --json
    """
    from rich.console import Console

    from treadle.commands import app, watch

    found = watch.status(app.load_store(app_name))
    if as_json:
        typer.echo(watch.as_json(found))
    else:
        watch.show(found, Console())


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

    from treadle.advisor import Limits
    from treadle.advisor.rule import SEVERITIES
    from treadle.commands import scan

    if fail_on is not None and fail_on not in SEVERITIES:
        raise UsageError(f"--fail-on takes {', '.join(SEVERITIES)}, not {fail_on!r}", code="severity-unknown")
    limits = Limits(
        full_pass_documents=documents,
        structure_documents=min(documents, Limits().structure_documents),
        sample_documents=sample,
        operation_seconds=seconds,
        collections=collections,
    )
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
    as_json: JsonOption = False,
) -> None:
    """Embed or reference? By questions, or from the relations of a live database.

    \b
    Example:
      treadle decide
      treadle decide mongodb://localhost:27017/shop
    """
    from rich.console import Console

    from treadle.commands import scan

    # Not from the environment: without a URI these are questions.
    if uri is None and uri_option is None:
        scan.ask(
            lambda question: str(typer.prompt(question, default="", show_default=False, err=True)), Console()
        )
        return
    from treadle.advisor import Limits

    with scan.progress_bar(Console(stderr=True)) as progress:
        report = scan.scan_target(_database_target(uri, uri_option), Limits(), None, False, False, progress)
    scan.show_decided(report, Console(), as_json)


@app.command()
def tree(
    app_name: AppOption,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model whose tree to draw.")],
    depth: Annotated[int, typer.Option("--depth", help="How many levels below a root.")] = 3,
    width: Annotated[int, typer.Option("--width", help="How many children of a node.")] = 10,
    root: Annotated[
        str | None, typer.Option("--root", metavar="ID", help="Only below this node.", show_default=False)
    ] = None,
    label: Annotated[
        str | None,
        typer.Option("--label", metavar="FIELD", help="What to call a node.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a tree, with counts of all nodes below each; the rest is folded. Writes nothing.

    \b
    Example:
      treadle tree --app shop.models:store Category --depth 2
    """
    from treadle.commands import app
    from treadle.commands import tree as drawing

    branches = drawing.tree(app.load_store(app_name), model, depth, width, label, root)
    if as_json:
        typer.echo(drawing.as_json(branches))
        return
    from rich.console import Console

    drawing.show(branches, model, Console())


migrate_app = typer.Typer(
    cls=_Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Documents of older versions: count, migrate, roll back.",
)
app.add_typer(migrate_app, name="migrate")
BatchOption = Annotated[int, typer.Option("--batch", help="Documents per batch.")]
ThrottleOption = Annotated[
    float | None, typer.Option("--throttle", help="At most so many documents per second.", show_default=False)
]
RetryOption = Annotated[bool, typer.Option("--retry", help="Try those again that were set aside.")]


@migrate_app.command("status")
def migrate_status(app_name: AppOption, models: ModelsArgument = None, as_json: JsonOption = False) -> None:
    """Count the documents of each version, and list those set aside. Writes nothing.

    \b
    Example:
      treadle migrate status --app shop.models:store
    """
    from rich.console import Console

    from treadle.commands import app, migrate

    rows = migrate.status(app.load_store(app_name), models or [])
    if as_json:
        typer.echo(migrate.as_json(rows))
    else:
        migrate.show_status(rows, Console(soft_wrap=True))


@migrate_app.command("run")
def migrate_run(
    app_name: AppOption,
    models: ModelsArgument = None,
    to: Annotated[int | None, typer.Option("--to", help="The version to reach.", show_default=False)] = None,
    batch: BatchOption = 1000,
    throttle: ThrottleOption = None,
    retry: RetryOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and show what becomes of some.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring documents to the current version, while readers and writers go on.

    Ctrl-C stops it after the batch at hand; the next run goes on from there.
    To undo, use rollback. Exits with 1 when documents were set aside.

    \b
    Example:
      treadle migrate run --app shop.models:store --dry-run
      treadle migrate run --app shop.models:store User --throttle 5000
    """
    options = {"to": to, "batch": batch, "throttle": throttle, "retry": retry, "dry_run": dry_run}
    _migrate(app_name, models, options, as_json)


@migrate_app.command("rollback")
def migrate_rollback(
    app_name: AppOption,
    to: Annotated[int, typer.Option("--to", help="The version to go back to.")],
    models: ModelsArgument = None,
    batch: BatchOption = 1000,
    throttle: ThrottleOption = None,
    retry: RetryOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and show what becomes of some.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring documents back to an older version. To undo, use run.

    \b
    Example:
      treadle migrate rollback --app shop.models:store User --to 1
    """
    options = {"to": to, "batch": batch, "throttle": throttle, "retry": retry, "dry_run": dry_run}
    _migrate(app_name, models, options, as_json)


def _migrate(app_name: str, models: list[str] | None, options: dict[str, Any], as_json: bool) -> None:
    from rich.console import Console

    from treadle.commands import app, migrate

    with migrate.progress(Console(stderr=True)) as report:
        results = migrate.run(app.load_store(app_name), models or [], progress=report, **options)
    if as_json:
        typer.echo(migrate.results_as_json(results))
    else:
        migrate.show_results(results, Console(soft_wrap=True), options["dry_run"])
    if not options["dry_run"] and not all(each.finished for each in results):
        raise typer.Exit(INTERRUPTED)
    if any(each.set_aside for each in results):
        raise typer.Exit(FINDINGS)


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
