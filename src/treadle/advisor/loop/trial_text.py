"""A trial's report as text on a console; names and numbers, and no value of a document or a request."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from treadle.advisor.loop.results import RequestResult, TrialReport, TrialResult
from treadle.advisor.loop.verdict import digits, times
from treadle.advisor.wording import duration, number, plural, size
from treadle.model.text import escape_text

_STYLES = {"do": "green", "do not": "red", "no evidence": "dim"}


def show(report: TrialReport, console: Console) -> None:
    """Print the report."""
    copied = f"{plural(report.documents, 'document')} of {number(sum(each.of for each in report.copied))}"
    console.print(
        Text(
            f"{escape_text(report.database)}: {plural(report.workload.operations, 'request')} over "
            f"{duration(report.workload.seconds)}, tried on a copy of {copied}"
        )
    )
    if report.results:
        _show_results(report, console)
    else:
        console.print("The scan found nothing to try.")
    for note in report.notes:
        console.print(Text(escape_text(note), style="dim"))


def _show_results(report: TrialReport, console: Console) -> None:
    # Over several lines rather than cut, as --only takes it whole.
    finding = Column("finding", overflow="fold", ratio=1)
    figures = [
        Column(head, justify="right", no_wrap=True)
        for head in ("faster", "saved/day", "cost/day", "pays after")
    ]
    table = Table(Column("verdict", no_wrap=True), finding, *figures, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for each in report.results:
        table.add_row(*_row(each))
    console.print(table)
    for each in report.results:
        console.print()
        console.print(Text(escape_text(f"{each.key}: {each.verdict}. {each.reason}")))
        for request in each.requests:
            _show_request(request, console)
        if each.storage is not None:
            stored = each.storage
            _line(
                f"stored: {_both(size(stored.data_before), size(stored.data_after))}, indexes "
                f"{_both(size(stored.index_before), size(stored.index_after))}; the change takes "
                f"{duration(each.change_seconds)} of work",
                1,
                console,
            )


def _line(line: str, level: int, console: Console) -> None:
    """A line whose later parts, where it is too long, begin where it does."""
    console.print(Padding(Text(escape_text(line)), (0, 0, 0, 2 * level), expand=False))


def _row(each: TrialResult) -> list[Text]:
    cells = [each.verdict, escape_text(each.key)]
    if each.ratio is not None:
        cells += [
            f"{digits(each.ratio.value)}×",
            f"{each.gain_seconds_per_day:,.1f} s",
            f"{each.cost_seconds_per_day:,.1f} s",
        ]
        cells.append("" if each.break_even_days is None else _days(each.break_even_days))
    cells += [""] * (6 - len(cells))
    return [Text(cells[0], style=_STYLES[each.verdict]), *map(Text, cells[1:])]


def _days(value: float) -> str:
    """When a change has paid: "at once" for less than a minute."""
    seconds = value * 86_400
    return "at once" if seconds < 60 else duration(seconds)


def _show_request(each: RequestResult, console: Console) -> None:
    one, other = each.costs_before, each.costs_after
    compared = f", {each.different:,} of {each.compared:,} answers differ" if each.compared else ""
    _line(f"{each.kind}: {each.request} ({each.recorded:,} recorded)", 1, console)
    _line(f"after: {each.instead}; {times(each.ratio)} as fast{compared}", 2, console)
    figures = [
        f"p50 {_both(f'{one.p50_ms.value:.2f}', f'{other.p50_ms.value:.2f}')} ms",
        f"p99 {_both(f'{one.p99_ms.value:.2f}', f'{other.p99_ms.value:.2f}')} ms",
        f"documents examined {_both(*_figures(one.documents_examined, other.documents_examined))}",
        f"bytes {_both(*_figures(one.bytes, other.bytes))}",
    ]
    _line(", ".join(figures), 2, console)
    if each.note:
        _line(each.note, 2, console)


def _both(before: str, after: str) -> str:
    """Before and after, between which no line is broken."""
    return f"{before}→{after}"


def _figures(one: float, other: float) -> tuple[str, str]:
    return number(round(one, 1)), number(round(other, 1))
