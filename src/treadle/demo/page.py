"""The demo's part of the HTML report: before and after, and what was broken and repaired."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.advisor.pictures import text
from treadle.advisor.wording import cut, size
from treadle.demo.story import Compared, Mended
from treadle.demo.words import faster, milliseconds

BAR_PIXELS = 220
BAR_PIXELS_MIN = 2
# Figures are not wrapped; a narrow screen scrolls.
FIGURE = "<td style='white-space:nowrap'>"


def section(compared: Sequence[Compared], mended: Mended) -> str:
    """HTML for the top of the advisor's report; everything in it is escaped."""
    parts = [
        "<h2>Before and after</h2>",
        "<p class='quiet'>The same request on the same data, first as a naive program does it, then with the "
        "pattern that the advisor named. Medians, measured on this machine by this run of "
        "<code>treadle demo</code>; documents and bytes are those of one request, by the server's "
        "profiler.</p>",
        *(_compared(each) for each in compared),
        "<h2>Broken on purpose, found and mended</h2>",
        _mended(mended),
    ]
    return "".join(parts)


def _compared(each: Compared) -> str:
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
        f"<span class='badge well'>{text(faster(each))}</span></header>"
        f"<p>{text(each.title[0].upper() + each.title[1:])}.</p>"
        "<div style='overflow-x:auto'><table style='overflow-wrap:normal'><tr><th></th><th>how</th>"
        "<th>time</th><th></th><th>documents read</th><th>answer</th><th>commands</th></tr>"
        f"{rows}</table></div>"
        f"<pre><code>{text(request.declared)}</code></pre></article>"
    )


def _bar(part: float, kind: str) -> str:
    width = max(BAR_PIXELS_MIN, round(BAR_PIXELS * part))
    return (
        f"<svg viewBox='0 0 {BAR_PIXELS} 12' style='width:{BAR_PIXELS // 2}px;margin-top:.5em' "
        f"aria-hidden='true'><rect class='{kind}' width='{width}' height='12' rx='2'/></svg>"
    )


def _mended(mended: Mended) -> str:
    written = "".join(f"<li>{text(each)}</li>" for each in mended.written)
    rows = "".join(
        f"<tr><td>{text(each.pattern)}</td><td class='path'>{text(each.model)}.{text(each.path)}</td>"
        f"<td>{text(cut(str(each.stored), 60))}</td><td>{text(cut(str(each.expected), 60))}</td></tr>"
        for each in mended.shown
    )
    more = len(mended.found) - len(mended.shown)
    rest = f"<p class='quiet'>and {more:,} more</p>" if more else ""
    return (
        f"<p>Written behind Treadle's back, with plain PyMongo:</p><ul>{written}</ul>"
        f"<p><code>store.verify()</code> named {len(mended.found):,} stored values that were wrong:</p>"
        "<table><tr><th>pattern</th><th>where</th><th>stored</th><th>expected</th></tr>"
        f"{rows}</table>{rest}<p class='well'><code>store.repair()</code> mended "
        f"{mended.documents:,} documents; <code>store.verify()</code> then named {mended.left:,}.</p>"
    )
