"""A trial's report as one inert HTML file, for whoever decides: the verdicts first, then their numbers.

It holds names and numbers, and no value of a document or a request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from treadle.advisor.html import code, page
from treadle.advisor.pictures import text
from treadle.advisor.trials.results import Measured, RequestResult, Side, TrialReport, TrialResult
from treadle.advisor.trials.verdict import times
from treadle.advisor.wording import duration, number, plural, size

PICTURE_WIDTH = 640
ROW_HEIGHT = 26
LABEL_WIDTH = 260
LABEL_LENGTH_MAX = 40
STYLE = """
.do { color: var(--well); } .donot { color: var(--problem); } .none { color: var(--quiet); }
td.number, th.number { text-align: right; } td.number { white-space: nowrap; }
th.number { overflow-wrap: normal; } .badge { white-space: nowrap; }
.scroll td:first-child { min-width: 13rem; }
.overview td:first-child { min-width: 0; }
.scroll { overflow-x: auto; } .scroll table { min-width: 46rem; } .scroll td { overflow-wrap: normal; }
svg .even { stroke: var(--quiet); stroke-dasharray: 3 3; } svg .reach { stroke: var(--bar); stroke-width: 6; }
svg .value { fill: var(--accent); } svg .label { fill: var(--ink); }
@media print { .scroll { overflow: visible; } .scroll table { min-width: 0; font-size: .72rem; }
  th.number { white-space: normal; } .scroll td:first-child { min-width: 0; } }
"""
_CLASSES = {"do": "do", "do not": "donot", "no evidence": "none"}


def html(report: TrialReport) -> str:
    """The whole file."""
    return page(f"{report.database} – Treadle trial", _parts(report), STYLE)


def _parts(report: TrialReport) -> Iterator[str]:
    paying = report.supported
    yield f"<h1>{text(report.database)}</h1><p class='quiet'>What the advisor's findings bring, tried with "
    yield "recorded requests on a copy of the data.</p>"
    yield _numbers(report)
    yield "<h2>In short</h2>"
    if report.results:
        yield f"<p>{text(_summary(report, paying))}</p>"
        yield _overview(report)
    else:
        yield "<p class='well'>The scan found nothing to try.</p>"
    measured = [each for each in (*report.results, report.together) if each is not None and each.ratio]
    if measured:
        yield "<figure><figcaption>How many times as fast requests are; the bar is the interval in which "
        yield f"another run is expected. The scale is logarithmic.</figcaption>{_picture(measured)}</figure>"
    yield "<h2>One by one</h2>" if report.results else ""
    for each in report.results:
        yield _result(each)
    if report.together is not None:
        yield "<h2>All that pay, together</h2>"
        yield _result(report.together)
    if report.declared:
        yield "<h2>What is declared already</h2>"
        yield from map(_result, report.declared)
    if report.notes:
        items = "".join(f"<li>{text(note)}</li>" for note in report.notes)
        yield f"<h2>What else to know</h2><ul class='quiet advice'>{items}</ul>"


def _numbers(report: TrialReport) -> str:
    total = sum(each.of for each in report.copied)
    rows = [
        (number(report.workload.operations), f"requests in {duration(report.workload.seconds)}"),
        (number(report.workload.reads), "reads"),
        (number(report.workload.writes), "writes"),
        (number(report.documents), f"documents of {number(total)} on the copy"),
        (number(len(report.supported)), f"of {plural(len(report.results), 'finding')} pay"),
    ]
    items = "".join(f"<li><b>{text(value)}</b><span>{text(name)}</span></li>" for value, name in rows)
    return f"<ul class='numbers'>{items}</ul>"


def _summary(report: TrialReport, paying: Sequence[TrialResult]) -> str:
    if not paying:
        return "None of the findings pays with this workload."
    names = ", ".join(each.key for each in paying)
    others = (
        " All others are advised against, or were not proven." if len(paying) < len(report.results) else ""
    )
    return f"Worth doing with this workload: {names}.{others}"


def _overview(report: TrialReport) -> str:
    rows = []
    for each in (*report.results, *([report.together] if report.together else [])):
        cells = [
            f"<td><span class='badge {_CLASSES[each.verdict]}'>{text(each.verdict)}</span></td>",
            f"<td class='path'>{text('together' if each is report.together else each.key)}</td>",
            _cell(times(each.ratio) if each.ratio else ""),
            _cell(_per_day(each.gain_seconds_per_day) if each.ratio else ""),
            _cell(_per_day(each.cost_seconds_per_day) if each.ratio else ""),
            _cell("" if each.break_even_days is None else days(each.break_even_days)),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = ("times as fast", "saved by reads", "cost of writes", "pays after")
    head = "<th></th><th>finding</th>" + "".join(f"<th class='number'>{each}</th>" for each in heads)
    return f"<div class='scroll overview'><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def _cell(value: str) -> str:
    return f"<td class='number'>{text(value)}</td>"


def _per_day(seconds: float) -> str:
    return f"{seconds:,.0f} s/day" if abs(seconds) >= 10 else f"{seconds:.1f} s/day"


def days(value: float) -> str:
    """When a change has paid: "at once" for less than a minute."""
    seconds = value * 86_400
    return "at once" if seconds < 60 else duration(seconds)


def _result(result: TrialResult) -> str:
    parts = [
        f"<article><header><span class='badge {_CLASSES[result.verdict]}'>{text(result.verdict)}</span>"
        f"<h3>{text(result.code)}</h3><span class='path'>{text(result.place)}</span></header>"
        f"<p>{text(result.reason)}</p>"
    ]
    if result.requests:
        parts.append(_requests(result.requests))
    notes = dict.fromkeys(each.note for each in result.requests if each.note)
    parts += [f"<p class='quiet advice'>{text(note)}</p>" for note in notes]
    if result.storage is not None:
        stored = result.storage
        facts = [
            ("documents", f"{size(stored.data_before)} before, {size(stored.data_after)} after"),
            ("indexes", f"{size(stored.index_before)} before, {size(stored.index_after)} after"),
            ("indexes added", ", ".join(stored.indexes_added) or "none"),
            ("the change itself", f"{duration(result.change_seconds)} of work, for the whole database"),
            ("score", f"{result.score:,.1f} s/day: gain − cost − the change, spread over a year"),
        ]
        cells = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in facts)
        parts.append(f"<dl>{cells}</dl>")
    if result.declaration:
        parts.append(
            f"<details><summary>Declaration that was tried</summary><div class='code'><button hidden "
            f"type='button'>Copy</button><pre><code>{code(result.declaration)}</code></pre></div></details>"
        )
    return "".join(parts) + "</article>"


def _requests(requests: Sequence[RequestResult]) -> str:
    heads = ("recorded", "p50, ms", "p99, ms", "documents examined", "bytes", "answers that differ")
    head = "<th>request, and what takes its place</th>" + "".join(
        f"<th class='number'>{each}</th>" for each in heads
    )
    rows = []
    for each in requests:
        one, other = each.costs_before, each.costs_after
        compared = f"{each.different:,} of {each.compared:,}" if each.compared else "a write"
        cells = [
            f"<td>{text(each.request)}<br><span class='quiet'>{text(each.instead)}, "
            f"{text(times(each.ratio))} as fast</span></td>",
            _cell(f"{each.recorded:,}"),
            _cell(_both(_time(one.p50_ms), _time(other.p50_ms))),
            _cell(_both(_time(one.p99_ms), _time(other.p99_ms))),
            _cell(_both(*_figures(one, other, "documents_examined"))),
            _cell(_both(*_figures(one, other, "bytes"))),
            _cell(compared),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class='scroll'><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def _both(before: str, after: str) -> str:
    return f"{before} → {after}"


def _time(value: Measured) -> str:
    return f"{value.value:.2f}" if value.value < 10 else f"{value.value:,.0f}"


def _figures(one: Side, other: Side, name: str) -> tuple[str, str]:
    return number(round(getattr(one, name), 1)), number(round(getattr(other, name), 1))


def _picture(results: Sequence[TrialResult]) -> str:
    """Ratios with their intervals, on a logarithmic scale; the dashed line is as fast as before."""
    ratios = [each.ratio for each in results if each.ratio is not None]
    low = min(0.8, *(each.low for each in ratios)) if ratios else 0.8
    high = max(1.25, *(each.high for each in ratios)) if ratios else 1.25
    span = math.log(high) - math.log(low)

    def place(value: float) -> float:
        room = PICTURE_WIDTH - LABEL_WIDTH - 60
        return LABEL_WIDTH + room * (math.log(max(value, low)) - math.log(low)) / span

    height = ROW_HEIGHT * len(ratios) + 24
    described = "; ".join(f"{_label(each)}: {times(each.ratio)}" for each in results if each.ratio)
    parts = [
        f'<svg role="img" viewBox="0 0 {PICTURE_WIDTH} {height}" aria-labelledby="ratios-t ratios-d">'
        f'<title id="ratios-t">Times as fast</title><desc id="ratios-d">{text(described)}</desc>'
        f'<line class="even" x1="{place(1):.1f}" x2="{place(1):.1f}" y1="0" y2="{height - 18}"/>'
        f'<text class="tick" x="{place(1):.1f}" y="{height - 4}">as fast as before</text>'
    ]
    for row, each in enumerate(results):
        ratio = each.ratio
        if ratio is None:
            continue
        middle = ROW_HEIGHT * row + ROW_HEIGHT / 2
        parts.append(
            f'<text class="label" x="0" y="{middle + 4:.1f}">{text(_label(each))}</text>'
            f'<line class="reach" x1="{place(ratio.low):.1f}" x2="{place(ratio.high):.1f}" '
            f'y1="{middle:.1f}" y2="{middle:.1f}"/>'
            f'<circle class="value" cx="{place(ratio.value):.1f}" cy="{middle:.1f}" r="5"/>'
            f'<text x="{place(ratio.high) + 8:.1f}" y="{middle + 4:.1f}">'
            f"{number(round(ratio.value, 1))}×</text>"
        )
    return "".join(parts) + "</svg>"


def _label(result: TrialResult) -> str:
    name = "together" if result.code == "together" else result.key
    return name if len(name) <= LABEL_LENGTH_MAX else name[: LABEL_LENGTH_MAX - 1] + "…"
