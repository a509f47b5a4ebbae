"""Pictures for the pages, as data that a template draws: the graph of models and rules, and lag over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from treadle.graph.graph import Graph
from treadle.upkeep.status import RuleStatus
from treadle.web.figures import HOUR_SECONDS, Sample

BOX_WIDTH, HEAD_HEIGHT, ROW_HEIGHT = 230, 34, 26
COLUMN_GAP, ROW_GAP, MARGIN = 90, 22, 12
NAME_LENGTH_MAX = 30
CHART_WIDTH, CHART_HEIGHT, CHART_LEFT, CHART_BOTTOM = 640, 200, 48, 22
# What it shows at least, so that the first minute is no vertical line.
SPAN_SECONDS_MIN = 60.0
TICKS = ((1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (86_400, "1 d"))
# The worst first.
LEVELS = ("bad", "warning", "paused", "building", "well")


def level_of(rule: RuleStatus) -> str:
    """How a rule fares: the worst of its state, its lag against the headroom, findings and set-aside."""
    if rule.state == "failed" or rule.headroom_low:
        return "bad"
    if rule.findings or rule.set_aside or rule.state == "behind":
        return "warning"
    return rule.state if rule.state in ("paused", "building") else "well"


@dataclass(slots=True)
class Row:
    """A rule in the box of its model."""

    rule: str
    name: str
    level: str
    x: int
    y: int


@dataclass(slots=True)
class Box:
    """A model."""

    model: str
    collection: str
    level: str
    x: int = 0
    y: int = 0
    rows: list[Row] = field(default_factory=list)

    @property
    def height(self) -> int:
        return HEAD_HEIGHT + ROW_HEIGHT * len(self.rows)


@dataclass(frozen=True, slots=True)
class Picture:
    """The graph of a Store."""

    boxes: list[Box]
    edges: list[tuple[str, str]]
    width: int
    height: int
    box_width: int = BOX_WIDTH
    row_height: int = ROW_HEIGHT


def draw_graph(graph: Graph, rules: Sequence[RuleStatus]) -> Picture:
    """Models from left to right in the order in which they feed each other, with their rules."""
    statuses = {each.rule: each for each in rules}
    bound = [rule for rule in graph.rules if rule.place.label in statuses]
    feeds = {(rule.source.model.__name__, rule.target.model.__name__) for rule in bound}
    names = {entry.model.__name__: entry.collection for entry in graph.entries.values()}
    columns = _columns(names, {pair for pair in feeds if pair[0] != pair[1]})
    boxes: dict[str, Box] = {}
    heights: dict[int, int] = {}
    for name, collection in sorted(names.items(), key=lambda item: (columns[item[0]], item[0])):
        own = [rule for rule in bound if rule.target.model.__name__ == name]
        levels = [level_of(statuses[rule.place.label]) for rule in own]
        box = Box(name, collection, min(levels, key=LEVELS.index, default="well"))
        box.x = MARGIN + columns[name] * (BOX_WIDTH + COLUMN_GAP)
        box.y = heights.get(columns[name], MARGIN)
        for number, (rule, level) in enumerate(zip(own, levels, strict=True)):
            label = rule.place.label
            y = box.y + HEAD_HEIGHT + number * ROW_HEIGHT
            box.rows.append(Row(label, shortened(label.removeprefix(f"{name}.")), level, box.x, y))
        heights[columns[name]] = box.y + box.height + ROW_GAP
        boxes[name] = box
    edges = []
    for rule in bound:
        source, target = rule.source.model.__name__, rule.target.model.__name__
        row = next(row for row in boxes[target].rows if row.rule == rule.place.label)
        if source != target:
            edges.append((_edge(boxes[source], row), row.level))
    width = MARGIN + (max(columns.values(), default=0) + 1) * (BOX_WIDTH + COLUMN_GAP) - COLUMN_GAP + MARGIN
    return Picture(list(boxes.values()), edges, width, max(heights.values(), default=MARGIN))


def _columns(names: Iterable[str], feeds: set[tuple[str, str]]) -> dict[str, int]:
    """How many steps each model is from those that nothing feeds; models may feed each other."""
    columns = dict.fromkeys(names, 0)
    for _ in range(len(columns)):
        for source, target in sorted(feeds):
            if columns[target] <= columns[source] < len(columns) - 1 and (target, source) not in feeds:
                columns[target] = columns[source] + 1
    for name in columns:
        fed = [columns[target] for source, target in feeds if source == name]
        if fed and name not in {target for _, target in feeds}:
            # Beside what it feeds, so that no line runs behind a box.
            columns[name] = max(0, min(fed) - 1)
    return columns


def _edge(source: Box, row: Row) -> str:
    start_y, end_y = source.y + HEAD_HEIGHT // 2, row.y + ROW_HEIGHT // 2
    forward = source.x < row.x
    start_x, end_x = source.x + (BOX_WIDTH if forward else 0), row.x
    bend = COLUMN_GAP // 2 * (1 if forward else -1)
    return (
        f"M{start_x} {start_y}C{start_x + bend} {start_y} {end_x - COLUMN_GAP // 2} {end_y} {end_x} {end_y}"
    )


def shortened(text: str) -> str:
    return text if len(text) <= NAME_LENGTH_MAX else text[: NAME_LENGTH_MAX - 1] + "…"


# -- lag over the last hour ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chart:
    """A line for the lag and one for the headroom, on a scale that shows both."""

    lag: str
    headroom: str
    ticks: list[tuple[int, str]]
    latest_lag: float | None
    latest_headroom: float | None
    # How far back it begins.
    span: float
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT
    left: int = CHART_LEFT
    bottom: int = CHART_HEIGHT - CHART_BOTTOM


def draw_lag(history: Iterable[Sample], now: float, rule: str | None = None) -> Chart:
    """The last hour of one rule, or of the one that is furthest behind, against what history is left."""
    lags: list[tuple[float, float]] = []
    rooms: list[tuple[float, float]] = []
    for sample in history:
        values = [sample.lags[rule]] if rule in sample.lags else [] if rule else [*sample.lags.values()]
        left = [sample.headrooms[rule]] if rule in sample.headrooms else []
        left = left if rule else [*sample.headrooms.values()]
        lags += [(sample.at, max(values))] if values else []
        rooms += [(sample.at, min(left))] if left else []
    began = min([at for at, _ in [*lags, *rooms]], default=now)
    span = min(HOUR_SECONDS, max(SPAN_SECONDS_MIN, now - began))
    most = max([10.0, *(value for _, value in [*lags, *rooms])])

    def y(value: float) -> int:
        share = math.log1p(value) / math.log1p(most)
        return round((CHART_HEIGHT - CHART_BOTTOM) - share * (CHART_HEIGHT - CHART_BOTTOM - 10))

    def x(at: float) -> int:
        share = max(0.0, 1 - (now - at) / span)
        return round(CHART_LEFT + share * (CHART_WIDTH - CHART_LEFT - 8))

    def line(points: list[tuple[float, float]]) -> str:
        return " ".join(f"{x(at)},{y(value)}" for at, value in points)

    return Chart(
        line(lags),
        line(rooms),
        [(y(seconds), name) for seconds, name in TICKS if seconds <= most],
        lags[-1][1] if lags else None,
        rooms[-1][1] if rooms else None,
        span,
    )
