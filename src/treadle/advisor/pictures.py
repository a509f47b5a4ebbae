"""Pictures of a report as SVG: histograms with their tail, and the graph of collections.

Each has a title and a description for screen readers, and comes with a table
of the same data. Every name is escaped; none becomes an id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import log10
from typing import NamedTuple

from treadle.advisor.facts import Bin, Distribution, Relation, Scan
from treadle.advisor.report import rebin
from treadle.advisor.wording import cut, number
from treadle.model.text import escape_text

WIDTH, HEIGHT = 460, 150
LEFT, BOTTOM, TOP = 8, 34, 18
NODE_WIDTH, NODE_HEIGHT = 168, 44
COLUMN, ROW = 240, 66
# Scaled down further, names could not be read; then the picture is scrolled.
SCALE_MIN = 0.75
SWEEPS = 4
NODES_MAX = 40
LABEL_LENGTH_MAX = 19
BAR_GAP = 3
BAR_WIDTH_MAX = 60

Show = Callable[[float], str]


def text(value: str) -> str:
    """Escaped text, safe inside attributes too."""
    return escape(escape_text(value), quote=True)


def histogram(number_: int, title: str, distribution: Distribution, show: Show) -> str:
    """Numbers of documents on a logarithmic scale; what lies beyond the 99th percentile is marked."""
    bins = rebin(distribution)
    if not bins:
        return ""
    tail = distribution.p99
    highest = max(log10(each.count + 1) for each in bins)
    width = min(BAR_WIDTH_MAX, (WIDTH - 2 * LEFT) / len(bins))
    room = HEIGHT - BOTTOM - TOP
    parts = [
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'aria-labelledby="t{number_} d{number_}">',
        f'<title id="t{number_}">{text(title)}</title>',
        f'<desc id="d{number_}">{text(_description(distribution, show))}</desc>',
    ]
    for place, each in enumerate(bins):
        height = max(2.0, room * log10(each.count + 1) / highest)
        left = LEFT + place * width
        kind = "tail" if each.low > tail else "bar"
        parts.append(
            f'<rect class="{kind}" x="{left + BAR_GAP / 2:.1f}" y="{TOP + room - height:.1f}" '
            f'width="{max(1.0, width - BAR_GAP):.1f}" height="{height:.1f}" rx="2">'
            f"<title>{text(_range(each, show))}: {each.count:,} documents</title></rect>"
        )
        if len(bins) <= 9 or place % (len(bins) // 6 + 1) == 0:
            parts.append(
                f'<text class="tick" x="{left + width / 2:.1f}" y="{HEIGHT - BOTTOM + 14}">'
                f"{text(show(each.low))}</text>"
            )
    median, p99, maximum = (show(each) for each in (distribution.median, tail, distribution.maximum))
    parts += [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - LEFT}" y1="{TOP + room + 1}" y2="{TOP + room + 1}"/>',
        f'<text class="mark" x="{WIDTH - LEFT}" y="{HEIGHT - 4}">',
        text(f"median {median} · p99 {p99} · max {maximum}") + "</text></svg>",
    ]
    rows = [(_range(each, show), f"{each.count:,}") for each in bins]
    return "".join(parts) + table(("from – to", "documents"), rows)


def _description(distribution: Distribution, show: Show) -> str:
    p99 = distribution.p99
    return (
        f"{distribution.count:,} in all; from {show(distribution.minimum)} to {show(distribution.maximum)}, "
        f"median {show(distribution.median)}, 99th percentile {show(p99)}; {distribution.above(p99):,} "
        "beyond it. The height of bars is logarithmic."
    )


def _range(each: Bin, show: Show) -> str:
    return show(each.low) if each.low == each.high else f"{show(each.low)} – {show(each.high)}"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], summary: str = "Data") -> str:
    """A table, folded away."""
    cells = "".join(f"<th>{text(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<details class='data'><summary>{text(summary)}</summary><table><thead><tr>{cells}</tr></thead>"
        f"<tbody>{body}</tbody></table></details>"
    )


# -- the graph ---------------------------------------------------------------------------


class Place(NamedTuple):
    x: float
    y: float


def graph(scan: Scan, worst: Mapping[str, str]) -> str:
    """Collections in columns, parents to the left of their children; lines are references."""
    degrees = Counter(name for each in scan.relations for name in {each.child, each.parent})
    # Where not all can be drawn, those with the most references matter most.
    names = sorted(scan.collections, key=lambda name: (-degrees[name], -scan.collections[name].count, name))
    if not names:
        return ""
    nodes = names[:NODES_MAX]
    places = _places(scan, nodes)
    width = max(place.x for place in places.values()) + NODE_WIDTH + 12
    height = max(place.y for place in places.values()) + NODE_HEIGHT + 12
    lines = [each for each in scan.relations if each.child in places and each.parent in places]
    parts = [
        f'<svg class="graph" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px;min-width:{width * SCALE_MIN:.0f}px" '
        'aria-labelledby="tg dg"><title id="tg">Collections and their references</title>'
        f'<desc id="dg">{len(nodes)} collections and {len(lines)} references; an arrow leads from '
        "the document that holds an id to the one that it names.</desc>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
    ]
    parts += [_line(each, places) for each in lines]
    parts += [_node(scan, name, places[name], worst.get(name, "")) for name in nodes]
    rows = [
        (each.child, each.path, f"{each.parent}.{each.key}", number(each.children.median),
         number(each.children.p99), number(each.children.maximum),
         f"{each.orphans:,} of {each.checked:,}")
        for each in scan.relations
    ]  # fmt: skip
    head = ("holds the id", "in", "of", "children: median", "p99", "max", "orphans")
    more = len(names) - len(nodes)
    note = f"<p class='quiet'>{more:,} more are not drawn.</p>" if more else ""
    return "".join(parts) + "</svg>" + note + table(head, rows, "References as a table")


def _places(scan: Scan, nodes: list[str]) -> dict[str, Place]:
    """Related collections in columns by level; the others in rows below."""
    levels = _levels(scan, nodes)
    columns: dict[int, list[str]] = {}
    for name, level in levels.items():
        columns.setdefault(level, []).append(name)
    _sort_columns(scan, columns)
    places: dict[str, Place] = {}
    tallest = max((len(column) for column in columns.values()), default=0)
    for place, level in enumerate(sorted(columns)):
        offset = (tallest - len(columns[level])) / 2
        for row, name in enumerate(columns[level]):
            places[name] = Place(8 + place * COLUMN, 8 + (row + offset) * ROW)
    width = max(3, len(columns))
    top = 8 + tallest * ROW + (14 if tallest else 0)
    for place, name in enumerate(name for name in nodes if name not in levels):
        places[name] = Place(8 + place % width * (NODE_WIDTH + 24), top + place // width * ROW)
    return places


def _levels(scan: Scan, nodes: list[str]) -> dict[str, int]:
    """How many references lead from a collection to one that refers to nothing; cycles are cut."""
    parents: dict[str, set[str]] = {}
    for each in scan.relations:
        parents.setdefault(each.child, set()).add(each.parent)
        parents.setdefault(each.parent, set())
    levels: dict[str, int] = {}
    path: set[str] = set()

    def level(name: str) -> int:
        if name not in levels:
            path.add(name)
            above = [level(each) for each in sorted(parents[name]) if each in nodes and each not in path]
            path.discard(name)
            levels[name] = 1 + max(above, default=-1)
        return levels[name]

    for name in nodes:
        if name in parents:
            level(name)
    return levels


def _sort_columns(scan: Scan, columns: dict[int, list[str]]) -> None:
    """Put each collection near its relations, so that fewer lines cross."""
    neighbours: dict[str, set[str]] = {}
    for each in scan.relations:
        neighbours.setdefault(each.child, set()).add(each.parent)
        neighbours.setdefault(each.parent, set()).add(each.child)
    rows: dict[str, float] = {}

    def number_rows(column: list[str]) -> None:
        rows.update({name: row - len(column) / 2 for row, name in enumerate(column)})

    def centre(name: str) -> tuple[float, float]:
        around = [rows[each] for each in neighbours.get(name, ()) if each in rows and each != name]
        return (sum(around) / len(around) if around else rows[name], rows[name])

    for column in columns.values():
        number_rows(column)
    for sweep in range(SWEEPS):
        for level in sorted(columns, reverse=bool(sweep % 2)):
            columns[level].sort(key=centre)
            number_rows(columns[level])


def _line(each: Relation, places: Mapping[str, Place]) -> str:
    start, end = places[each.child], places[each.parent]
    x1, y1 = start.x, start.y + NODE_HEIGHT / 2
    x2, y2 = end.x + NODE_WIDTH, end.y + NODE_HEIGHT / 2
    if each.child == each.parent:
        right = start.x + NODE_WIDTH
        path = f"M{right} {y1 - 10} C{right + 44} {y1 - 26} {right + 44} {y1 + 26} {right + 2} {y1 + 10}"
    elif x2 <= x1:
        middle = (x1 + x2) / 2
        path = f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2 + 2} {y2}"
    else:
        x1, x2, y2 = x1 + NODE_WIDTH / 2, end.x + NODE_WIDTH / 2, end.y + NODE_HEIGHT
        path = f"M{x1} {start.y} C{x1} {start.y - 30} {x2} {y2 + 30} {x2} {y2 + 2}"
    kind = "broken" if each.orphans else "line"
    most = number(each.children.maximum)
    title = text(f"{each.child}.{each.path} names {each.parent}.{each.key}; up to {most} to one")
    return f'<path class="{kind}" d="{path}" marker-end="url(#tip)"><title>{title}</title></path>'


def _node(scan: Scan, name: str, place: Place, worst: str) -> str:
    facts = scan.collections[name]
    about = facts.skipped or (f"{facts.count:,} documents" if facts.kind == "collection" else facts.kind)
    return (
        f'<g class="node {worst}"><title>{text(name)}: {text(about)}</title>'
        f'<rect x="{place.x}" y="{place.y}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="8"/>'
        f'<text class="name" x="{place.x + 12}" y="{place.y + 19}">{text(cut(name, LABEL_LENGTH_MAX))}</text>'
        f'<text class="about" x="{place.x + 12}" y="{place.y + 35}">{text(cut(about, 26))}</text></g>'
    )
