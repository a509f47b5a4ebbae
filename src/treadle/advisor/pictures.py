"""Pictures of a report as SVG: histograms with their tail, and the graph of collections.

Each has a title and a description for those who do not see it, and comes with
a table of the same data. Every name is escaped; none becomes an id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from treadle.advisor.facts import Bin, Distribution, Relation, Scan
from treadle.advisor.report import printable, rebinned
from treadle.advisor.wording import number

WIDTH, HEIGHT = 460, 150
LEFT, BOTTOM, TOP = 8, 34, 18
NODE_WIDTH, NODE_HEIGHT = 168, 44
COLUMN, ROW = 240, 66
# Smaller than this, names could not be read; then the picture is scrolled.
SHRUNK_MIN = 0.75
SWEEPS = 4
NODES_MAX = 40
LABEL_LENGTH_MAX = 19
BAR_GAP = 3
BAR_WIDTH_MAX = 60

Show = Callable[[float], str]


def text(value: str) -> str:
    """Escaped text, also safe inside attributes."""
    return escape(printable(value), quote=True)


def cut(value: str, length: int = LABEL_LENGTH_MAX) -> str:
    shown = printable(value)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def histogram(number_: int, title: str, found: Distribution, show: Show, what: str) -> str:
    """Bars on a logarithmic scale; what lies beyond the 99th percentile is marked."""
    bins = rebinned(found)
    if not bins:
        return ""
    tail = found.p99
    highest = max(log10(each.count + 1) for each in bins)
    width = min(BAR_WIDTH_MAX, (WIDTH - 2 * LEFT) / len(bins))
    room = HEIGHT - BOTTOM - TOP
    parts = [
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'aria-labelledby="t{number_} d{number_}">',
        f'<title id="t{number_}">{text(title)}</title>',
        f'<desc id="d{number_}">{text(_described(found, show))}</desc>',
    ]
    for place, each in enumerate(bins):
        height = max(2.0, room * log10(each.count + 1) / highest)
        left = LEFT + place * width
        kind = "tail" if each.low > tail else "bar"
        parts.append(
            f'<rect class="{kind}" x="{left + BAR_GAP / 2:.1f}" y="{TOP + room - height:.1f}" '
            f'width="{max(1.0, width - BAR_GAP):.1f}" height="{height:.1f}" rx="2">'
            f"<title>{text(_range(each, show))}: {each.count:,} {text(what)}</title></rect>"
        )
        if len(bins) <= 9 or place % (len(bins) // 6 + 1) == 0:
            parts.append(
                f'<text class="tick" x="{left + width / 2:.1f}" y="{HEIGHT - BOTTOM + 14}">'
                f"{text(show(each.low))}</text>"
            )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - LEFT}" y1="{TOP + room + 1}" y2="{TOP + room + 1}"/>'
    )
    parts.append(
        f'<text class="mark" x="{WIDTH - LEFT}" y="{HEIGHT - 4}">median {text(show(found.median))} · '
        f"p99 {text(show(found.p99))} · max {text(show(found.maximum))}</text></svg>"
    )
    rows = [(_range(each, show), f"{each.count:,}") for each in bins]
    return "".join(parts) + table(("from – to", what), rows)


def _described(found: Distribution, show: Show) -> str:
    return (
        f"{found.count:,} in all; from {show(found.minimum)} to {show(found.maximum)}, median "
        f"{show(found.median)}, "
        f"99th percentile {show(found.p99)}; {found.above(found.p99):,} beyond it. The height of bars "
        "is logarithmic."
    )


def _range(each: Bin, show: Show) -> str:
    return show(each.low) if each.low == each.high else f"{show(each.low)} – {show(each.high)}"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], summary: str = "Data") -> str:
    """The same as numbers, folded away."""
    cells = "".join(f"<th>{text(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<details class='data'><summary>{text(summary)}</summary><table><thead><tr>{cells}</tr></thead>"
        f"<tbody>{body}</tbody></table></details>"
    )


# -- the graph ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    x: float
    y: float


def graph(scan: Scan, worst: Mapping[str, str]) -> str:
    """Collections in columns, what is referred to on the left; lines are references."""
    related = {name for each in scan.relations for name in (each.child, each.parent)}
    joined = Counter(name for each in scan.relations for name in {each.child, each.parent})
    # Where not all can be drawn, those with the most references tell most.
    names = sorted(scan.collections, key=lambda name: (-joined[name], -scan.collections[name].count, name))
    chosen = names[:NODES_MAX]
    if not chosen:
        return ""
    places = _places(scan, chosen, related)
    width = max(place.x for place in places.values()) + NODE_WIDTH + 12
    height = max(place.y for place in places.values()) + NODE_HEIGHT + 12
    lines = [each for each in scan.relations if each.child in places and each.parent in places]
    parts = [
        f'<svg class="graph" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px;min-width:{width * SHRUNK_MIN:.0f}px" '
        'aria-labelledby="tg dg"><title id="tg">Collections and their references</title>'
        f'<desc id="dg">{len(chosen)} collections and {len(lines)} references; an arrow leads from '
        "the document that holds an id to the one that it names.</desc>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
    ]
    parts += [_line(each, places) for each in lines]
    parts += [_node(scan, name, places[name], worst.get(name, "")) for name in chosen]
    rows = [
        (each.child, each.path, f"{each.parent}.{each.key}", number(each.children.median),
         number(each.children.p99), number(each.children.maximum),
         f"{each.orphans:,} of {each.checked:,}")
        for each in scan.relations
    ]  # fmt: skip
    head = ("holds the id", "in", "of", "children: median", "p99", "max", "orphans")
    note = (
        ""
        if len(names) <= NODES_MAX
        else f"<p class='quiet'>{len(names) - NODES_MAX:,} more are not drawn.</p>"
    )
    return "".join(parts) + "</svg>" + note + table(head, rows, "References as a table")


def _places(scan: Scan, chosen: list[str], related: set[str]) -> dict[str, Place]:
    levels = _levels(scan, [name for name in chosen if name in related])
    columns: dict[int, list[str]] = {}
    for name, level in levels.items():
        columns.setdefault(level, []).append(name)
    _ordered(scan, columns)
    places: dict[str, Place] = {}
    tallest = max((len(column) for column in columns.values()), default=0)
    for number_, level in enumerate(sorted(columns)):
        column = columns[level]
        offset = (tallest - len(column)) / 2
        for row, name in enumerate(column):
            places[name] = Place(8 + number_ * COLUMN, 8 + (row + offset) * ROW)
    lonely = [name for name in chosen if name not in levels]
    wide = max(3, len(columns))
    for row, name in enumerate(lonely):
        places[name] = Place(
            8 + row % wide * (NODE_WIDTH + 24), 8 + (tallest + row // wide) * ROW + (14 if tallest else 0)
        )
    return places


def _levels(scan: Scan, names: list[str]) -> dict[str, int]:
    """How many references lead from a collection to one that refers to nothing; cycles are cut."""
    above = {
        name: {each.parent for each in scan.relations if each.child == name and each.parent != name}
        & set(names)
        for name in names
    }
    levels: dict[str, int] = {}
    underway: set[str] = set()

    def level(name: str) -> int:
        if name not in levels:
            underway.add(name)
            found = [level(each) for each in sorted(above[name]) if each not in underway]
            underway.discard(name)
            levels[name] = 1 + max(found, default=-1)
        return levels[name]

    for name in names:
        level(name)
    return levels


def _ordered(scan: Scan, columns: dict[int, list[str]]) -> None:
    """Put each collection near those that it is joined with, so that fewer lines cross."""
    near: dict[str, set[str]] = {}
    for each in scan.relations:
        near.setdefault(each.child, set()).add(each.parent)
        near.setdefault(each.parent, set()).add(each.child)
    rows: dict[str, float] = {}

    def note(column: list[str]) -> None:
        rows.update({name: row - len(column) / 2 for row, name in enumerate(column)})

    for column in columns.values():
        note(column)
    for sweep in range(SWEEPS):
        for level in sorted(columns, reverse=bool(sweep % 2)):

            def wanted(name: str) -> tuple[float, float]:
                around = [rows[each] for each in near.get(name, ()) if each in rows and each != name]
                return (sum(around) / len(around) if around else rows[name], rows[name])

            columns[level].sort(key=wanted)
            note(columns[level])


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
    told = f"{each.child}.{each.path} names {each.parent}.{each.key}; up to {most} to one"
    return f'<path class="{kind}" d="{path}" marker-end="url(#tip)"><title>{text(told)}</title></path>'


def _node(scan: Scan, name: str, place: Place, worst: str) -> str:
    facts = scan.collections[name]
    about = facts.skipped or (f"{facts.count:,} documents" if facts.kind == "collection" else facts.kind)
    return (
        f'<g class="node {worst}"><title>{text(name)}: {text(about)}</title>'
        f'<rect x="{place.x}" y="{place.y}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="8"/>'
        f'<text class="name" x="{place.x + 12}" y="{place.y + 19}">{text(cut(name))}</text>'
        f'<text class="about" x="{place.x + 12}" y="{place.y + 35}">{text(cut(about, 26))}</text></g>'
    )
