"""The plan of the house: which room may import what.

A room imports from itself and from the rooms before it; `docs/draw_rooms.py`
knows their order and reads the imports. Imports for type checkers count too.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "treadle"


def _script(name: str) -> object:
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    script = importlib.util.module_from_spec(specification)
    sys.modules[name] = script
    specification.loader.exec_module(script)
    return script


house = _script("draw_rooms")
MODULES = house.modules()
IMPORTS = [each for each in house.imports() if house.room(each.importer) not in house.FACADE]
INNER = [each for each in IMPORTS if each.imported in MODULES]
PURE = set(house.ROOMS[: house.ROOMS.index("store")])
CORE = set(house.ROOMS[: house.ROOMS.index("advisor")])
# Imports at the moment of a call: the command line's, so that --help is quick, and Store.local()'s of the server.
LATE = [
    each
    for each in IMPORTS
    if each.in_function
    and (
        house.room(each.importer) == "cli"
        or (house.room(each.importer), each.imported) == ("store", "treadle.server.local")
    )
]
IMPURE = {"asyncio", "time", "random", "threading", "socket", "secrets"}
# Of threading a lock alone is pure: it starts no thread, knows no time and decides nothing. It keeps two threads from
# making one thing twice (an id, a codec), and a plan yields the same commands with it as without.
LOCKS = {"Lock", "RLock"}
PYMONGO_MODULES = {"errors", "results", "operations", "read_concern", "write_concern"}
PYMONGO_NAMES = {
    "ReturnDocument", "IndexModel", "InsertOne", "UpdateOne", "UpdateMany", "ReplaceOne", "DeleteOne", "DeleteMany",
    "ASCENDING", "DESCENDING", "ReadConcern", "WriteConcern",
}  # fmt: skip
CORE_DEPENDENCIES = {
    "pymongo",
    "bson",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "treadle",
}


def short(module: str) -> str:
    return module.removeprefix("treadle.")


def pairs(imports: list[object]) -> set[object]:
    return {(short(each.importer), short(each.imported)) for each in imports}


def test_every_module_stands_in_a_room():
    assert {house.room(each) for each in MODULES} <= {*house.ROOMS, *house.FACADE}


def test_a_room_imports_from_itself_and_from_the_rooms_before_it():
    places = {name: place for place, name in enumerate(house.ROOMS)}
    # The façade stands behind all rooms: none imports it, but for the version that it holds.
    wrong = [
        each
        for each in INNER
        if each not in LATE
        and places[house.room(each.importer)] < places.get(house.room(each.imported), len(places))
        and each.name != "__version__"
    ]
    assert set() == pairs(wrong)


def test_no_modules_import_each_other_in_a_cycle():
    ahead: dict[str, set[str]] = {module: set() for module in MODULES}
    for each in INNER:
        ahead[each.importer].add(each.imported)
    # A module that imports none of the rest is in no cycle, nor is one that none of the rest imports.
    rest = set(ahead)
    while outside := {
        each for each in rest if not ahead[each] & rest or not any(each in ahead[other] for other in rest)
    }:
        rest -= outside
    assert set() == {short(each) for each in rest}


def test_no_import_stands_inside_a_function():
    assert set() == pairs([each for each in IMPORTS if each.in_function and each not in LATE])


def test_plans_import_no_client_clock_or_chance():
    """Ids, clocks and chances are arguments or commands; the shells alone do I/O."""

    def allowed(module: str, name: str) -> bool:
        top, _, rest = module.partition(".")
        if top == "pymongo":
            return rest in PYMONGO_MODULES or (not rest and name in PYMONGO_NAMES)
        return top not in IMPURE or (top == "threading" and name in LOCKS)

    pure = [each for each in IMPORTS if house.room(each.importer) in PURE]
    assert set() == pairs([each for each in pure if not allowed(each.imported, each.name)])


def test_no_pattern_imports_another():
    def pattern(module: str) -> str | None:
        return module.split(".")[2] if module.startswith("treadle.patterns.") else None

    wrong = [
        each
        for each in INNER
        if pattern(each.importer)
        and pattern(each.imported)
        and pattern(each.importer) != pattern(each.imported)
    ]
    assert set() == pairs(wrong)


def test_patterns_are_reached_through_their_interface():
    """No room below names a pattern: graph/rule.py is all that it knows. Handles of the Store may."""
    below = [each for each in INNER if house.room(each.importer) in ("graph", "engine", "upkeep")]
    assert set() == pairs([each for each in below if house.room(each.imported) == "patterns"])


def test_the_core_imports_pymongo_and_pydantic_only():
    core = {each for each in IMPORTS if house.room(each.importer) in CORE}
    known = CORE_DEPENDENCIES | set(sys.stdlib_module_names)
    assert set() == pairs([each for each in core if each.imported.split(".")[0] not in known])


def test_importing_treadle_loads_nothing_that_an_extra_installs():
    code = "import sys, treadle; treadle.Store; print('\\n'.join(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"typer", "rich", "jinja2", "starlette", "uvicorn", "pytest", "hypothesis", "click"}
    assert {"pymongo", "pydantic"} <= loaded


def test_the_picture_shows_the_rooms_as_they_are():
    assert house.picture() == house.PICTURE.read_text(), "out of date; run python docs/draw_rooms.py"
