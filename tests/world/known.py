"""The worlds: which there are, which are refused, and which derived values are wrong in them today."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.world.models import EXCLUSIVE, MODES, NAMES, SIDES, World

# -- refused pairs, on one side, with the code ---------------------------------------------------------

REFUSED: list[tuple[str, str, str]] = [
    *(
        (archive, other, "links-declaration" if other == "links" else "archive-declaration")
        for archive in ("archive", "uncounted")
        for other in ("tree", "outlier", "counter", "links")
    ),
    ("uncounted", "history", "archive-declaration"),
    ("counter", "nested_id", "counter-key"),
]


def refusal(world: World) -> str | None:
    """The code by which a Store of this world is refused."""
    for side in SIDES:
        for one, other, code in REFUSED:
            if world.has(side, one) and world.has(side, other):
                return code
    return None


# -- the worlds of each tier ------------------------------------------------------------------------------

# Where features meet most: these change which documents there are, and what they say.
SCOPE = ("kinds", "python_version", "pipeline_version", "soft_delete", "archive", "uncounted", "history")
SOME_MAX = 130
# Scheduled runs share their recomputation with `rebuild`, so that `make test` schedules only these.
SCHEDULED = (*SCOPE, "camel", "hostile", "alternate_key")


def world_named(label: str) -> World:
    features, mode = label.rsplit("-", 1)
    return World(frozenset(features.split("+")) - {"plain"}, mode)


def pairs() -> Iterator[frozenset[str]]:
    for pair in itertools.combinations(NAMES, 2):
        features = frozenset(pair)
        sides = [
            {name for name in EXCLUSIVE[0] | EXCLUSIVE[1] if f"{side}.{name}" in features} for side in SIDES
        ]
        if not any(exclusive <= names for names in sides for exclusive in EXCLUSIVE):
            yield features


def digest(features: frozenset[str]) -> int:
    return zlib.crc32("+".join(sorted(features)).encode())


def worlds(tier: str) -> list[World]:
    """The worlds of "some", "most" or "all", without those that are refused."""
    singles = [frozenset[str](), *(frozenset([name]) for name in NAMES)]
    found = [World(features, mode) for features in singles for mode in MODES]
    if tier == "some":
        scheduled = {f"{side}.{name}" for side in SIDES for name in SCHEDULED}
        found = [world for world in found if world.mode != "schedule" or world.features <= scheduled]
        found += chosen(SOME_MAX - len(found))
    else:
        found += [
            World(features, mode)
            for features in pairs()
            for number, mode in enumerate(MODES)
            if tier == "all" or mode == "write" or digest(features) % 3 == number
        ]
    return [world for world in found if refusal(world) is None]


# Cells that known defects need, or needed.
CELLS = (
    *("item.python_version+item.archive-write", "owner.python_version+owner.archive-write"),
    *("item.pipeline_version+item.links-write", "item.pipeline_version+item.outlier-stream"),
    *("item.revision+owner.uncounted-write", "item.auto_fields+owner.soft_delete-stream"),
    *("item.python_version+item.links-write", "item.python_version+item.attributes-write"),
)


def chosen(number: int) -> list[World]:
    """A fixed choice of pairs: first those of features that change the scope, half of them in mode write."""
    cells = [world_named(label) for label in CELLS]
    number -= len(cells)
    names = {f"{side}.{name}" for side in SIDES for name in SCOPE}
    ordered = sorted(pairs(), key=lambda features: (-len(features & names), digest(features)))
    found = [World(features, MODES[max(0, index % 4 - 1)]) for index, features in enumerate(ordered)]
    found = [world for world in found if refusal(world) is None]
    strong = [world for world in found if len(world.features & names) == 2][: number * 2 // 3]
    weak = [world for world in found if len(world.features & names) < 2][: number - len(strong)]
    return list(dict.fromkeys([*cells, *strong, *weak]))


# -- defects of today ----------------------------------------------------------------------------------------


AGGREGATES = (
    *("items", "high_items", "line_items", "line_amount", "points", "price", "worth", "scores"),
    *("average", "lowest", "highest", "first_tag", "top_items", "tags", "all_views"),
)
COPIES = ("owner", "name_then", "lines.name")
CALLS = tuple(
    f"call {name}"
    for name in (
        *("insert_items", "insert_owner", "upsert", "upsert_new", "replace", "replace_owner", "change"),
        *("change_owner", "set_price", "transaction", "rollback", "return_later", "restore"),
        *("change_kind", "revert", "stale_replace"),
    )
)
ROLLUPS = ("daily", "daily.points", "daily.scores")


@dataclass(frozen=True)
class Defect:
    """Values that are wrong where these features meet, in these modes.

    In the world that has exactly these features, `must` are wrong: the test
    of that world fails when they no longer are, and the entry goes. In a
    world with another feature they may be, and so may `may`, which follow
    from them in some histories.
    """

    name: str
    features: frozenset[str]
    must: tuple[str, ...]
    may: tuple[str, ...] = ()
    modes: tuple[str, ...] = MODES

    def concerns(self, world: World) -> bool:
        return self.features <= world.features and world.mode in self.modes

    def demands(self, world: World) -> tuple[str, ...]:
        return self.must if self.features == world.features and world.mode in self.modes else ()


def defect(name: str, features: str, *must: str, may: tuple[str, ...] = (), modes: str = "") -> Defect:
    chosen = tuple(modes.split()) or MODES
    return Defect(name, frozenset(features.split()), must, may, chosen)


DEFECTS: list[Defect] = []


def allowed(world: World) -> dict[str, str]:
    """The values that may be wrong, with the defects."""
    return {value: each.name for each in DEFECTS if each.concerns(world) for value in (*each.must, *each.may)}


def demanded(world: World) -> dict[str, str]:
    """The values that must be wrong, with the defects."""
    return {value: each.name for each in DEFECTS for value in each.demands(world)}
