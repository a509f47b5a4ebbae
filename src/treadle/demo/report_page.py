"""The demo's part of the HTML report: before and after, and what was broken and repaired."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.advisor.pictures import text
from treadle.advisor.wording import cut, size
from treadle.demo.measure import milliseconds
from treadle.demo.story import Comparison, Repair

BAR_PIXELS = 220
BAR_PIXELS_MIN = 2
# Figures are not wrapped; a narrow screen scrolls.
FIGURE = "<td style='white-space:nowrap'>"


def section(comparisons: Sequence[Comparison], repair: Repair) -> str:
    """HTML for the top of the advisor's report; everything in it is escaped."""
    parts = [
        "<h2>Before and after</h2>",
        "<p class='quiet'>The same request on the same data, first as a naive program does it, then with the "
        "pattern that the advisor named. Medians, measured on this machine by this run of "
        "<code>treadle demo</code>; documents and bytes are those of one request, by the server's "
        "profiler.</p>",
        *(_comparison(each) for each in comparisons),
        "<h2>Broken on purpose, found and repaired</h2>",
        _repair(repair),
    ]
    return "".join(parts)


def _comparison(each: Comparison) -> str:
    request = each.request
    most = max(each.before.seconds, each.after.seconds)
    rows = "".join(
        f"<tr>{FIGURE}{text(name)}</td><td class='path' style='width:40%'>{text(how)}</td>"
        f"{FIGURE}{text(milliseconds(cost.seconds))}</td>{FIGURE}{_bar(cost.seconds / most, kind)}</td>"
        f"{FIGURE}{cost.documents_read:,}</td>{FIGURE}{text(size(cost.bytes_answered))}</td>"
        f"{FIGURE}{cost.commands:,}</td></tr>"
        for name, how, cost, kind in (
            ("before", request.how_before, each.before, "tail"),
            ("after", request.how_after, each.after, "bar"),
        )
    )
    return (
        f"<article><header><h3>{text(request.pattern)}</h3>"
        f"<span class='badge well'>{text(each.speed)}</span></header>"
        f"<p>{text(each.title[0].upper() + each.title[1:])}.</p>"
        "<div style='overflow-x:auto'><table style='overflow-wrap:normal'><tr><th></th><th>how</th>"
        "<th>time</th><th></th><th>documents read</th><th>answer</th><th>commands</th></tr>"
        f"{rows}</table></div>"
        f"<pre><code>{text(each.declared)}</code></pre></article>"
    )


def _bar(part: float, kind: str) -> str:
    width = max(BAR_PIXELS_MIN, round(BAR_PIXELS * part))
    return (
        f"<svg viewBox='0 0 {BAR_PIXELS} 12' style='width:{BAR_PIXELS // 2}px;margin-top:.5em' "
        f"aria-hidden='true'><rect class='{kind}' width='{width}' height='12' rx='2'/></svg>"
    )


def _repair(repair: Repair) -> str:
    writes = "".join(f"<li>{text(each)}</li>" for each in repair.writes)
    rows = "".join(
        f"<tr><td>{text(each.pattern)}</td><td class='path'>{text(each.model)}.{text(each.path)}</td>"
        f"<td>{text(cut(str(each.stored), 60))}</td><td>{text(cut(str(each.expected), 60))}</td></tr>"
        for each in repair.examples
    )
    more = len(repair.findings) - len(repair.examples)
    rest = f"<p class='quiet'>and {more:,} more</p>" if more else ""
    return (
        f"<p>Written behind Treadle's back, with plain PyMongo:</p><ul>{writes}</ul>"
        f"<p><code>store.verify()</code> found {len(repair.findings):,} stored values that are wrong:</p>"
        "<table><tr><th>pattern</th><th>where</th><th>stored</th><th>expected</th></tr>"
        f"{rows}</table>{rest}<p class='well'><code>store.repair()</code> corrected "
        f"{repair.documents:,} documents; <code>store.verify()</code> then found {repair.remaining:,}.</p>"
    )
