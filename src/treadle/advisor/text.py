"""A report as text on a console."""

from __future__ import annotations

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from treadle.advisor.facts import Scan
from treadle.advisor.interface import Finding
from treadle.advisor.report import Report
from treadle.advisor.wording import duration, number, plural, share
from treadle.model.text import escape_text

_STYLES = {"info": "cyan", "warning": "yellow", "problem": "bold red"}


def show(report: Report, console: Console, declarations: bool = True) -> None:
    """Print the report."""
    scan = report.scan
    documents = sum(facts.count for facts in scan.collections.values())
    console.print(
        Text(
            f"{escape_text(scan.database)}: {plural(len(scan.names), 'collection')}, "
            f"{plural(documents, 'document')}, "
            f"{plural(len(scan.relations), 'relation')}, workload {_workload(scan)}"
        )
    )
    for note in (*scan.notes, *report.failures):
        console.print(Text(note, style="yellow"))
    if report.findings:
        table = Table("finding", "where", "severity", "confidence", "evidence")
        for each in report.findings:
            table.add_row(
                each.code,
                Text(escape_text(each.where)),
                Text(each.severity, style=_STYLES[each.severity]),
                each.confidence,
                Text(escape_text(each.summary)),
            )
        console.print(table)
    for place, each in enumerate(report.findings if declarations else (), 1):
        console.print()
        console.rule(Text(f"{place}. {each.rule.title}: {escape_text(each.where)}"), align="left")
        _show_finding(each, console)
    _show_rest(report, console)


def _workload(scan: Scan) -> str:
    if scan.workload is None:
        return "not seen (turn on the profiler, or give --workload)"
    return f"of {plural(scan.workload.operations, 'operation')} over {duration(scan.workload.seconds)}"


def _show_finding(each: Finding, console: Console) -> None:
    lines = [
        each.summary,
        *(
            f"  {name}: {number(value) if isinstance(value, (int, float)) else value}"
            for name, value in each.evidence.items()
        ),
        f"Do: {each.rule.remedy}",
        f"Costs: {each.rule.costs} Gains: {each.rule.gains}",
        f"When not: {each.rule.when_not}",
        *(f"Then: {step}" for step in each.steps),
    ]
    for line in lines:
        console.print(Text(escape_text(line)))
    # Not wrapped, so that what is copied from the terminal is still Python.
    code = Syntax(each.declaration, "python", theme="ansi_light").highlight(each.declaration)
    console.print(code, soft_wrap=True)


def _show_rest(report: Report, console: Console) -> None:
    if not report.findings:
        console.print("Nothing to change was found.")
    if report.healthy:
        console.print(Text("Healthy: " + ", ".join(escape_text(facts.name) for facts in report.healthy)))
    for facts in report.scan.collections.values():
        notes = [facts.skipped] if facts.skipped else facts.notes
        if notes:
            console.print(Text(escape_text(f"{facts.name}: {'; '.join(notes)}"), style="dim"))


def show_decisions(report: Report, console: Console) -> None:
    """Embed or reference for each relation that was measured, with the questions that led there."""
    if not report.decisions:
        console.print("No relation between two collections was found.")
    for relation, decision in report.decisions:
        children = relation.children
        where = escape_text(f"{relation.child}.{relation.path} to {relation.parent}")
        console.print(Text(f"{where}: {decision.advice}", style="bold"))
        for answer in decision.path:
            console.print(Text(f"  {answer.question} {answer.answer}"))
        for factor in (
            *decision.factors,
            f"children per parent: {number(children.minimum)} to {number(children.maximum)}, median "
            f"{number(children.median)}; orphans {share(relation.orphans, relation.checked)}; "
            f"{share(relation.childless, relation.parents)} of the parents have none",
        ):
            console.print(Text(f"  {factor}", style="dim"))
