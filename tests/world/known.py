"""The worlds: which there are, which are refused, and which derived values are wrong in them today."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
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
SOME_MAX = 165


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
        found += chosen(SOME_MAX - len(found))
    else:
        found += [
            World(features, mode)
            for features in pairs()
            for number, mode in enumerate(MODES)
            if tier == "all" or mode == "write" or digest(features) % 3 == number
        ]
    return [world for world in found if refusal(world) is None]


def chosen(number: int) -> list[World]:
    """A fixed choice of pairs: first those of features that change the scope, two thirds in mode write."""
    names = {f"{side}.{name}" for side in SIDES for name in SCOPE}
    ordered = sorted(pairs(), key=lambda features: (-len(features & names), digest(features)))
    found = [World(features, MODES[max(0, index % 4 - 1)]) for index, features in enumerate(ordered)]
    found = [world for world in found if refusal(world) is None]
    strong = [world for world in found if len(world.features & names) == 2][: number * 2 // 3]
    return strong + [world for world in found if len(world.features & names) < 2][: number - len(strong)]


# -- defects of today ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defect:
    """Values that are wrong in some worlds.

    `must` are wrong in every world of `where`, and the test fails when they
    no longer are. `may` follow from them in some histories. A defect that
    only some histories show has its `proof`, the world in which it must.
    """

    name: str
    where: Callable[[World], bool]
    must: tuple[str, ...]
    may: tuple[str, ...] = ()
    proof: str | None = None

    def demands(self, world: World) -> tuple[str, ...]:
        return self.must if self.proof in (None, world.label) else ()


DEFECTS: list[Defect] = []


def allowed(world: World) -> dict[str, str]:
    """The values that may be wrong, with the defects."""
    return {
        value: defect.name
        for defect in DEFECTS
        if defect.where(world)
        for value in (*defect.must, *defect.may)
    }


def demanded(world: World) -> dict[str, str]:
    """The values that must be wrong, with the defects."""
    return {
        value: defect.name for defect in DEFECTS if defect.where(world) for value in defect.demands(world)
    }
