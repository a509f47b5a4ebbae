"""One family of results as an SVG picture that needs nothing else and suits light and dark pages.

Each work is a panel, each contender a row: a dot at the median, a line
between the quartiles, the figures as text. Costs lie factors apart, so the
scale is logarithmic, from the least to the most of the panel. Where there is
a goal, a thin mark shows it, and the dot's shape says whether it is met, so
that nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from benchmarks.harness import Result, time_text
from benchmarks.stored import Entry

WIDTH = 960
LEFT, RIGHT = 310, 660
ROW, PANEL_HEAD, PANEL_GAP, HEAD = 22, 34, 20, 70
NAME_LENGTH_MAX = 44
STYLE = """
svg { background: #ffffff; font: 13px system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif; }
.paper { fill: #ffffff; }
text { fill: #1f2328; }
.soft { fill: #59636e; }
.title { font-size: 18px; font-weight: 600; }
.work { font-weight: 600; }
.grid { stroke: #d1d9e0; stroke-width: 1; }
.plain { fill: #7d8590; stroke: #7d8590; }
.met { fill: #0b62c4; stroke: #0b62c4; }
.missed { fill: #c93c1f; stroke: #c93c1f; }
.spread { stroke-width: 3; stroke-linecap: round; opacity: 0.45; }
.goal { stroke: #1f2328; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; }
  .paper { fill: #0d1117; }
  text { fill: #e6edf3; }
  .soft { fill: #9aa4af; }
  .grid { stroke: #30363d; }
  .plain { fill: #8b949e; stroke: #8b949e; }
  .met { fill: #58a6ff; stroke: #58a6ff; }
  .missed { fill: #ff8a6b; stroke: #ff8a6b; }
  .goal { stroke: #e6edf3; }
}
"""


def svg(name: str, entries: Sequence[Entry]) -> str | None:
    """The picture of a family; None where nothing was measured that could be drawn."""
    # Figures of a script are of different kinds, one each.
    panels = [entry for entry in entries if entry.results and not entry.lines]
    if not panels:
        return None
    drawn: list[str] = []
    top = HEAD
    for entry in panels:
        lines, height = _panel(entry, top)
        drawn += lines
        top += height + PANEL_GAP
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        f'role="img" aria-label="{escape(name)}: medians and quartiles">',
        f"<title>{escape(name)}: medians and quartiles</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{top}"/>',
        _text(20, 30, name, "title"),
        *_legend(),
    ]
    return "\n".join([*head, *drawn, "</svg>"]) + "\n"


def _legend() -> list[str]:
    """What the marks mean, in one line below the title."""
    y = 52
    return [
        _mark(26, y - 4, "plain"),
        _text(36, y, "no goal", "soft"),
        _mark(102, y - 4, "met"),
        _text(112, y, "goal met", "soft"),
        _mark(184, y - 4, "missed"),
        _text(194, y, "goal missed", "soft"),
        f'<line class="goal" x1="286" x2="286" y1="{y - 12}" y2="{y + 3}"/>',
        _text(294, y, "the goal", "soft"),
        _text(
            WIDTH - 20,
            y,
            "logarithmic, less is better; line: quartiles; in brackets: ratio to its baseline",
            "soft",
            "end",
        ),
    ]


def _panel(entry: Entry, top: int) -> tuple[list[str], int]:
    results = entry.results
    scale = _scale(results)
    bottom = top + PANEL_HEAD + ROW * len(results)
    lines = [_text(20, top + 16, entry.work, "work")]
    for x, label in _ticks(results, scale):
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 26}" y2="{bottom}"/>')
        lines.append(_text(x, bottom + 13, label, "soft", "middle"))
    for number, result in enumerate(results):
        lines += _row(result, results, scale, top + PANEL_HEAD + ROW * number + ROW // 2)
    return lines, bottom - top + 16


def _row(result: Result, results: Sequence[Result], scale: _Scale, y: int) -> list[str]:
    kind = {True: "met", False: "missed", None: "plain"}[result.met]
    amounts = result.microseconds
    low, middle, high = scale.x(amounts.low), scale.x(amounts.median), scale.x(amounts.high)
    shown = result.contender
    if len(shown) > NAME_LENGTH_MAX:
        shown = shown[: NAME_LENGTH_MAX - 1] + "…"
    figures = _amount(amounts.median, result)
    if result.ratio is not None:
        figures += f" ({result.ratio:.2f}×)" if result.ratio >= 0.1 else f" ({result.ratio:.2g}×)"
    lines = [
        _text(LEFT - 14, y + 4, shown, "", "end"),
        f'<line class="{kind} spread" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>',
        _mark(middle, y, kind),
        _text(RIGHT + 20, y + 4, figures, ""),
    ]
    goal = _goal(result, results)
    if goal is not None:
        x = scale.x(goal)
        lines.append(f'<line class="goal" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 9}" y2="{y + 9}"/>')
        lines.append(_text(WIDTH - 20, y + 4, f"goal {result.goal}", "soft", "end"))
    return lines


def _mark(x: float, y: float, kind: str) -> str:
    """A ring, a disc or a diamond."""
    if kind == "missed":
        return f'<path class="missed" d="M{x:.1f} {y - 6} l6 6 l-6 6 l-6 -6 z"/>'
    hollow = ' style="fill: none; stroke-width: 2"' if kind == "plain" else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="{4 if hollow else 5}"{hollow}/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    kinds = f' class="{kind}"' if kind else ""
    return f'<text{kinds} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _amount(value: float, result: Result) -> str:
    return f"{value:,.3g} {result.unit}" if result.unit else time_text(value)


def _goal(result: Result, results: Sequence[Result]) -> float | None:
    """The goal on the panel's scale."""
    if result.goal is None:
        return None
    if result.goal.kind != "ratio":
        return result.goal.maximum
    base = next((each for each in results if each.contender == result.baseline), None)
    return None if base is None else base.microseconds.median * result.goal.maximum


# -- the scale ----------------------------------------------------------------------


class _Scale:
    """From amounts to places, logarithmically."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = math.log10(low), math.log10(high)

    def x(self, value: float) -> float:
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, part))


def _scale(results: Sequence[Result]) -> _Scale:
    """Everything that is drawn, with some room, and never less than a factor of two from end to end."""
    values = [value for each in results for value in (each.microseconds.low, each.microseconds.high)]
    values += [goal for each in results if (goal := _goal(each, results)) is not None]
    low, high = min(values), max(values)
    if low <= 0:
        low = min((value for value in values if value > 0), default=1.0)
    high = max(high, low)
    room = max(1.15, math.sqrt(max(1.0, 2 * low / high)))
    return _Scale(low / room, high * room)


def _ticks(results: Sequence[Result], scale: _Scale) -> list[tuple[float, str]]:
    """Round values within the scale, few enough to be read."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        powers = range(math.floor(scale.low), math.ceil(scale.high) + 1)
        values = [step * 10**power for power in powers for step in steps]
        inside = [value for value in values if scale.low <= math.log10(value) <= scale.high]
        if len(inside) >= 2 or steps == (1, 1.5, 2, 3, 5, 7):
            every = math.ceil(len(inside) / 6) or 1
            return [(scale.x(value), _tick(value, results[0])) for value in inside[::every]]
    return []


def _tick(value: float, result: Result) -> str:
    if result.unit:
        return f"{value:g} {result.unit}"
    for limit, factor, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if value < limit * 0.999:
            return f"{value / factor:g} {unit}"
    return f"{value / 1e6:g} s"
