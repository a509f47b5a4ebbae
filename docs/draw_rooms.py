"""Draw `docs/images/rooms.svg`: which room of the source imports from which.

Example: python docs/draw_rooms.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "treadle"
PICTURE = Path(__file__).parent / "images" / "rooms.svg"
# A room imports from itself and from the rooms before it. Two import later ones, when they are called:
# Store.local() starts the private server, and the command line starts the dashboard and the demonstration.
ROOMS = [
    "errors", "model", "query", "plan", "graph", "engine", "patterns", "upkeep",
    "store", "server", "advisor", "cli", "web", "demo",
]  # fmt: skip
# These import from every room, and no room imports them: the package itself, and what stands beside it.
FACADE = ["treadle", "testing", "fastapi"]


@dataclass(frozen=True)
class Import:
    """One module imports another, of Treadle or not; `name` is what it takes from it."""

    importer: str
    imported: str
    name: str
    in_function: bool


def modules() -> dict[str, Path]:
    """The files of Treadle's modules."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """The room of one of Treadle's modules."""
    return module.split(".")[1] if "." in module else module


def imports() -> list[Import]:
    """Every import statement of the source, those for type checkers included."""
    known = modules()
    return [
        each
        for module, path in known.items()
        for node, in_function in _statements(ast.parse(path.read_text()), False)
        for each in _imports(module, node, in_function, known)
    ]


def _statements(node: ast.AST, in_function: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for below in ast.iter_child_nodes(node):
        if isinstance(below, ast.Import | ast.ImportFrom):
            yield below, in_function
        yield from _statements(
            below, in_function or isinstance(below, ast.FunctionDef | ast.AsyncFunctionDef)
        )


def _imports(
    module: str, node: ast.Import | ast.ImportFrom, in_function: bool, known: dict[str, Path]
) -> Iterator[Import]:
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield Import(module, alias.name, "", in_function)
        # `from treadle.plan import dry_run` imports the module treadle.plan.dry_run.
        elif f"{node.module}.{alias.name}" in known:
            yield Import(module, f"{node.module}.{alias.name}", "", in_function)
        else:
            yield Import(module, node.module or "", alias.name, in_function)


def edges() -> dict[tuple[str, str], bool]:
    """The rooms that import from other rooms, without the façade; whether at the top of a file."""
    known = modules()
    drawn: dict[tuple[str, str], bool] = {}
    for each in imports():
        pair = room(each.importer), room(each.imported)
        if each.imported in known and pair[0] != pair[1] and not {*pair} & {*FACADE}:
            drawn[pair] = drawn.get(pair, False) or not each.in_function
    return dict(sorted(drawn.items()))


# -- the picture: rooms down the diagonal, and a dot where a row's room imports from a column's ------

WIDTH, HEIGHT, STEP_X, STEP_Y, MARGIN = 84, 26, 52, 40, 20
STYLE = """
    .paper { fill: #ffffff; stroke: #d5d9de }
    .room { fill: #e3f0e6; stroke: #3f8f55 }
    .way { stroke: #98a2ac; fill: none }
    .dot, .tip { fill: #3d4650 }
    .late { fill: #ffffff; stroke: #3d4650 }
    text { fill: #1c2228; font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #15191d; stroke: #333b43 }
      .room { fill: #17341f; stroke: #55a86c }
      .way { stroke: #66707b }
      .dot, .tip { fill: #c3ccd4 }
      .late { fill: #15191d; stroke: #c3ccd4 }
      text { fill: #e8ecf0 }
    }
"""


def picture() -> str:
    """The SVG, which also says in words what it shows."""
    drawn = edges()
    rooms = [each for each in ROOMS if any(each in edge for edge in drawn)]
    box = {each: (MARGIN + STEP_X * place, MARGIN + STEP_Y * place) for place, each in enumerate(rooms)}
    width, height = (2 * MARGIN + step * (len(rooms) - 1) for step in (STEP_X, STEP_Y))
    width, height = width + WIDTH, height + HEIGHT
    words = [
        f"{each.capitalize()} imports from {', '.join(earlier)}."
        for each in rooms
        if (earlier := [other for other in ROOMS if (each, other) in drawn])
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" aria-labelledby="title description"'
        ' font-family="system-ui, sans-serif" font-size="14">',
        '  <title id="title">Which room imports from which</title>',
        f'  <desc id="description">{" ".join(words)}</desc>',
        f"  <style>{STYLE}  </style>",
        f'  <rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
    ]
    for each in rooms:
        lines += _ways(each, box, drawn)
    for (importer, imported), at_top in drawn.items():
        x, y = box[imported][0] + WIDTH / 2, box[importer][1] + HEIGHT / 2
        lines.append(f'  <circle class="{"dot" if at_top else "late"}" cx="{x:g}" cy="{y:g}" r="4"/>')
    for each, (x, y) in box.items():
        lines.append(f'  <rect class="room" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        lines.append(f'  <text x="{x + WIDTH / 2:g}" y="{y + 18}" text-anchor="middle">{each}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _ways(each: str, box: dict[str, tuple[int, int]], drawn: dict[tuple[str, str], bool]) -> list[str]:
    """The line along a room's row to what it imports, and along its column to what imports it."""
    x, y = box[each][0] + WIDTH / 2, box[each][1] + HEIGHT / 2
    across = [box[other][0] + WIDTH / 2 for one, other in drawn if one == each]
    down = [box[one][1] + HEIGHT / 2 for one, other in drawn if other == each]
    lines = []
    if across:
        lines.append(f'  <path class="way" d="M{min(across):g} {y:g} H{max(*across, x):g}"/>')
    if down:
        lines.append(f'  <path class="way" d="M{x:g} {min(*down, y):g} V{max(*down, y):g}"/>')
    for side in sorted({1 if end > y else -1 for end in down}):
        tip = y + side * HEIGHT / 2
        base = tip + side * 7
        lines.append(f'  <polygon class="tip" points="{x:g},{tip:g} {x - 4:g},{base:g} {x + 4:g},{base:g}"/>')
    return lines


if __name__ == "__main__":
    PICTURE.write_text(picture())
