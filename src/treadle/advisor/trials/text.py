"""A trial's report as text on a console; names and numbers, and no value of a document or a request."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from treadle.advisor.trials.page import days
from treadle.advisor.trials.results import RequestResult, TrialReport, TrialResult
from treadle.advisor.trials.verdict import times
from treadle.advisor.wording import duration, number, plural, size
from treadle.model.shown import shown

_STYLES = {"do": "green", "do not": "red", "no evidence": "dim"}


def show(report: TrialReport, console: Console) -> None:
    """Print the report."""
    copied = f"{plural(report.documents, 'document')} of {number(sum(each.of for each in report.copied))}"
    console.print(
        Text(
            f"{shown(report.database)}: {plural(report.workload.operations, 'request')} over "
            f"{duration(report.workload.seconds)}, tried on a copy of {copied}"
        )
    )
    for note in report.notes:
        console.print(Text(shown(note), style="dim"))
    for each in report.declared:
        console.print(Text(shown(f"declared already, {each.key}: {each.reason}")))
    if not report.results:
        console.print("The scan found nothing to try.")
        return
    shown_results = [*report.results, *([report.together] if report.together else [])]
    # Over several lines rather than cut, as --only takes it whole.
    finding = Column("finding", overflow="fold")
    table = Table("verdict", finding, "times as fast", "saved per day", "writes cost per day", "pays after")
    for each in shown_results:
        table.add_row(*_row(each, each is report.together))
    console.print(table)
    for each in shown_results:
        console.print()
        console.print(Text(shown(f"{_name(each, each is report.together)}: {each.verdict}. {each.reason}")))
        for request in each.requests:
            _show_request(request, console)
        if each.storage is not None:
            stored = each.storage
            console.print(
                Text(
                    f"  stored: {size(stored.data_before)} → {size(stored.data_after)}, indexes "
                    f"{size(stored.index_before)} → {size(stored.index_after)}; the change takes "
                    f"{duration(each.change_seconds)} of work"
                )
            )


def _name(each: TrialResult, together: bool) -> str:
    return "together" if together else each.key


def _row(each: TrialResult, together: bool) -> list[Text]:
    cells = [each.verdict, shown(_name(each, together))]
    if each.ratio is not None:
        cells += [
            times(each.ratio),
            f"{each.gain_seconds_per_day:,.1f} s",
            f"{each.cost_seconds_per_day:,.1f} s",
        ]
        cells.append("" if each.break_even_days is None else days(each.break_even_days))
    cells += [""] * (6 - len(cells))
    return [Text(cells[0], style=_STYLES[each.verdict]), *map(Text, cells[1:])]


def _show_request(each: RequestResult, console: Console) -> None:
    one, other = each.costs_before, each.costs_after
    compared = f", {each.different:,} of {each.compared:,} answers differ" if each.compared else ""
    lines = [
        f"  {each.kind}: {each.request} ({each.recorded:,} recorded)",
        f"    after: {each.instead}; {times(each.ratio)} as fast{compared}",
        f"    p50 {one.p50_ms.value:.2f} → {other.p50_ms.value:.2f} ms, p99 {one.p99_ms.value:.2f} → "
        f"{other.p99_ms.value:.2f} ms, documents examined {number(round(one.documents_examined, 1))} → "
        f"{number(round(other.documents_examined, 1))}, bytes {number(round(one.bytes))} → "
        f"{number(round(other.bytes))}",
    ]
    lines += [f"    {each.note}"] if each.note else []
    for line in lines:
        console.print(Text(shown(line)))
