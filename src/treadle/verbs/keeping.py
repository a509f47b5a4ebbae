"""Verbs that need an application's models: setup, verify, repair, rebuild, watch, run-due, status, tree."""

from __future__ import annotations

from typing import Annotated

import typer

from treadle.verbs.shared import FINDINGS, AppOption, JsonOption, ModelsArgument, app


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
    typer.echo(f'{{"mended": {mended}}}' if as_json else f"Mended {maintain.counted(mended, 'document')}.")


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
    typer.echo(
        f'{{"rebuilt": {visited}}}' if as_json else f"Rebuilt {maintain.counted(visited, 'document')}."
    )


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
