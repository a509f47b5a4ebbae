"""`treadle setup`, `verify`, `repair` and `rebuild`: the Store's own calls, with a progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bson import json_util
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from treadle.commands.app import Reporter, call, models_named
from treadle.errors import UsageError
from treadle.graph.reports import Action, Finding, Progress
from treadle.store.async_store import AsyncStore
from treadle.store.blocking.store import Store

SHOWN_MAX = 50


def verify(store: Store | AsyncStore, names: list[str], progress: Reporter | None = None) -> list[Finding]:
    """What is stored and should be otherwise."""
    found: list[Finding] = call(store, "verify", *models_named(store, names), progress=progress)
    return found


def repair(store: Store | AsyncStore, names: list[str], progress: Reporter | None = None) -> int:
    """Mend what `verify` finds; how many documents were mended."""
    mended: int = call(store, "repair", *models_named(store, names), progress=progress)
    return mended


def rebuild(store: Store | AsyncStore, names: list[str], progress: Reporter | None = None) -> int:
    """Recompute everything; how many documents were visited."""
    visited: int = call(store, "rebuild", *models_named(store, names), progress=progress)
    return visited


def models_with_tree(store: Store | AsyncStore, names: list[str], pattern: str) -> list[str]:
    """The names of the models that declare this tree pattern, among those named."""
    entries = [store.graph.entry(model) for model in models_named(store, names)]
    chosen = [
        entry.model.__name__
        for entry in entries or store.graph.entries.values()
        if any(rule.pattern == pattern for rule in entry.rules)
    ]
    if not chosen or (names and len(chosen) < len(names)):
        whose = " and ".join(names) or "the store"
        raise UsageError(
            f"--to {pattern!r}: that is not among the trees that {whose} declares; declare the present "
            'pattern first and the new one after it, such as tree=[ChildReferences(children="children"), '
            'AncestorArray(parent="parent_id", ancestors="ancestors")], deploy that, and run this again',
            code="tree-declaration",
        )
    return chosen


def setup(store: Store | AsyncStore, dry_run: bool) -> list[Action]:
    """Make the database as the models declare, or say what would be done."""
    actions: list[Action] = call(store, "setup", dry_run=dry_run)
    return actions


def findings_as_json(findings: list[Finding]) -> str:
    """Relaxed Extended JSON, one object per finding."""
    rows: list[dict[str, Any]] = [
        {
            "pattern": each.pattern,
            "model": each.model,
            "document_id": each.document_id,
            "path": each.path,
            "stored": each.stored,
            "expected": each.expected,
        }
        for each in findings
    ]
    return json_util.dumps(rows, json_options=json_util.RELAXED_JSON_OPTIONS, indent=2)


def show_findings(findings: list[Finding], console: Console) -> None:
    """A table of the first findings, and how many there are."""
    if not findings:
        console.print("Every maintained value is right.")
        return
    table = Table("pattern", "document", "path", "stored", "expected")
    for each in findings[:SHOWN_MAX]:
        # As text: what is stored may look like the console's own markup.
        stored, expected = _short(each.stored), _short(each.expected)
        told = (each.pattern, f"{each.model} {each.document_id}", each.path, stored, expected)
        table.add_row(*map(Text, told))
    console.print(table)
    more = len(findings) - SHOWN_MAX
    total = counted(len(findings), "finding")
    console.print(total + (f", {more} of them not shown" if more > 0 else "") + ".")


def counted(number: int, noun: str) -> str:
    """1 document, 2 documents."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


@contextmanager
def progress_bar(console: Console) -> Iterator[Reporter]:
    """A bar per model, on the console given (which should be standard error)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def report(progress: Progress) -> None:
            if progress.model not in tasks:
                tasks[progress.model] = bar.add_task(progress.model, total=progress.total)
            bar.update(tasks[progress.model], completed=progress.done, total=progress.total)

        yield report
