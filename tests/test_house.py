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
PURE = set(house.ROOMS[: house.ROOMS.index("server")])
CORE = set(house.ROOMS[: house.ROOMS.index("advisor")])
# Store.local() alone needs the private server, which takes long to import.
LOCAL_SERVER = {("store.async_store", "server.local"), ("store.blocking_store", "server.local")}
IMPURE = {"asyncio", "time", "random", "threading", "socket", "secrets"}
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
# What does not follow the plan yet: each line goes with what it names, and nothing is added.
STILL: dict[str, set[object]] = {
    "from a later room": {
        ("engine.deletes", "patterns.extended_reference"),
        ("engine.deletes", "patterns.tree.placing"),
        ("engine.fill", "patterns.extended_reference"),
        ("engine.groups", "patterns.rollup"),
        ("engine.kept", "patterns.outlier.intents"),
        ("engine.kept", "patterns.outlier.rule"),
        ("engine.lazy", "patterns.schema_versioning.migration"),
        ("engine.react", "patterns.extended_reference"),
        ("engine.recompute", "patterns.computed"),
        ("engine.recompute", "patterns.subset"),
        ("engine.standalone", "patterns.extended_reference"),
        ("engine.writes", "patterns.extended_reference"),
        ("engine.writes", "patterns.tree.placing"),
        ("graph.graph", "patterns.approximation.rule"),
        ("graph.graph", "patterns.computed"),
        ("graph.graph", "patterns.extended_reference"),
        ("graph.graph", "patterns.outlier.rule"),
        ("graph.graph", "patterns.rollup"),
        ("graph.graph", "patterns.tree.fields"),
        ("graph.layout", "patterns.bucket.reading"),
        ("graph.layout", "upkeep.set_up"),
        ("graph.layout", "upkeep.verify"),
        ("graph.layouts", "patterns.bucket.rule"),
        ("graph.layouts", "patterns.bucket.time_series"),
        ("model.document", "patterns.bucket.rule"),
        ("model.document", "patterns.bucket.time_series"),
        ("model.document", "patterns.rollup"),
        ("patterns.bucket.adoption", "upkeep.verify"),
        ("patterns.bucket.layout", "upkeep.set_up"),
        ("patterns.bucket.layout", "upkeep.verify"),
        ("patterns.bucket.native", "upkeep.set_up"),
        ("patterns.bucket.native", "upkeep.verify"),
        ("patterns.bucket.prepare", "upkeep.set_up"),
        ("patterns.bucket.upkeep", "upkeep.verify"),
        ("patterns.polymorphic", "upkeep.set_up"),
        ("patterns.schema_versioning.migrate", "upkeep.verify"),
        ("patterns.schema_versioning.migration", "upkeep.verify"),
        ("patterns.tree.inspection", "upkeep.verify"),
        ("query.keys", "plan"),
        ("query.safety", "plan"),
    },
    "in a cycle": {
        "engine.commit",
        "engine.convert",
        "engine.crud",
        "engine.deletes",
        "engine.fill",
        "engine.follow",
        "engine.groups",
        "engine.guards",
        "engine.intents",
        "engine.kept",
        "engine.lazy",
        "engine.ledger",
        "engine.pipelines",
        "engine.react",
        "engine.recompute",
        "engine.standalone",
        "engine.writes",
        "graph.gather",
        "graph.graph",
        "graph.kinds",
        "graph.layout",
        "graph.layouts",
        "graph.migrations",
        "graph.pattern",
        "graph.store_codec",
        "graph.versions",
        "model.adapt",
        "model.bson_types",
        "model.codec",
        "model.constraints",
        "model.document",
        "model.json_schema",
        "model.keywords",
        "model.storable",
        "patterns.approximation.events",
        "patterns.approximation.flush",
        "patterns.approximation.inspection",
        "patterns.approximation.rule",
        "patterns.bucket.adoption",
        "patterns.bucket.changing",
        "patterns.bucket.contents",
        "patterns.bucket.grouping",
        "patterns.bucket.layout",
        "patterns.bucket.matching",
        "patterns.bucket.native",
        "patterns.bucket.packing",
        "patterns.bucket.placing",
        "patterns.bucket.prepare",
        "patterns.bucket.reading",
        "patterns.bucket.rule",
        "patterns.bucket.spec",
        "patterns.bucket.time_series",
        "patterns.bucket.upkeep",
        "patterns.bucket.writing",
        "patterns.computed",
        "patterns.extended_reference",
        "patterns.outlier.inspection",
        "patterns.outlier.intents",
        "patterns.outlier.item_bytes",
        "patterns.outlier.move",
        "patterns.outlier.order",
        "patterns.outlier.reads",
        "patterns.outlier.rule",
        "patterns.outlier.writes",
        "patterns.polymorphic",
        "patterns.rollup",
        "patterns.schema_versioning.migrate",
        "patterns.schema_versioning.migration",
        "patterns.schema_versioning.ranges",
        "patterns.subset",
        "patterns.tree.bulk",
        "patterns.tree.fields",
        "patterns.tree.inspection",
        "patterns.tree.lifts",
        "patterns.tree.moves",
        "patterns.tree.pace",
        "patterns.tree.placing",
        "patterns.tree.reads",
        "patterns.tree.recovery",
        "patterns.tree.removes",
        "patterns.tree.state",
        "query.keys",
        "query.paths",
        "query.safety",
        "store.array",
        "store.async_store",
        "store.blocking_store",
        "store.combine",
        "store.counter",
        "store.counter_handle",
        "store.due",
        "store.shell",
        "store.tree",
        "store.worker",
        "upkeep.apply",
        "upkeep.changes",
        "upkeep.closed",
        "upkeep.collection_schema",
        "upkeep.contributions",
        "upkeep.events",
        "upkeep.merging",
        "upkeep.position",
        "upkeep.rebuild",
        "upkeep.schedule",
        "upkeep.set_up",
        "upkeep.status",
        "upkeep.stream",
        "upkeep.validation",
        "upkeep.verify",
    },
    "in a function": {
        ("graph.store_codec", "query.paths"),
        ("model.bson_types", "model.codec"),
        ("patterns.approximation.inspection", "engine.react"),
        ("patterns.approximation.inspection", "engine.standalone"),
        ("patterns.approximation.inspection", "patterns.approximation.events"),
        ("patterns.approximation.inspection", "patterns.approximation.flush"),
        ("patterns.approximation.rule", "model.document"),
        ("patterns.bucket.native", "upkeep.set_up"),
        ("patterns.bucket.native", "upkeep.verify"),
        ("patterns.bucket.prepare", "upkeep.set_up"),
        ("patterns.bucket.rule", "patterns.bucket.layout"),
        ("patterns.bucket.rule", "patterns.bucket.spec"),
        ("patterns.bucket.time_series", "patterns.bucket.native"),
        ("patterns.bucket.upkeep", "patterns.bucket.layout"),
        ("patterns.outlier.inspection", "engine.react"),
        ("patterns.outlier.inspection", "engine.standalone"),
        ("patterns.outlier.inspection", "patterns.outlier.writes"),
        ("patterns.outlier.intents", "engine.standalone"),
        ("patterns.outlier.intents", "patterns.outlier.move"),
        ("patterns.outlier.move", "patterns.outlier.intents"),
        ("patterns.outlier.rule", "bson.decimal128"),
        ("patterns.outlier.writes", "patterns.outlier.intents"),
        ("patterns.polymorphic", "upkeep.set_up"),
        ("patterns.tree.inspection", "engine.standalone"),
        ("patterns.tree.inspection", "patterns.tree.moves"),
        ("patterns.tree.moves", "patterns.tree.lifts"),
        ("patterns.tree.moves", "patterns.tree.removes"),
        ("patterns.tree.placing", "engine.writes"),
        ("patterns.tree.placing", "patterns.tree.moves"),
        ("query.windows", "zoneinfo"),
        ("upkeep.verify", "patterns.tree.inspection"),
    },
    "not pure": {
        ("model.codec", "threading"),
        ("patterns.approximation.buffer", "threading"),
    },
    "from another pattern": {
        ("patterns.approximation.inspection", "patterns.outlier.inspection"),
        ("patterns.polymorphic", "patterns.extended_reference"),
    },
    "names a pattern": {
        ("engine.deletes", "patterns.extended_reference"),
        ("engine.deletes", "patterns.tree.placing"),
        ("engine.fill", "patterns.extended_reference"),
        ("engine.groups", "patterns.rollup"),
        ("engine.kept", "patterns.outlier.intents"),
        ("engine.kept", "patterns.outlier.rule"),
        ("engine.lazy", "patterns.schema_versioning.migration"),
        ("engine.react", "patterns.extended_reference"),
        ("engine.recompute", "patterns.computed"),
        ("engine.recompute", "patterns.subset"),
        ("engine.standalone", "patterns.extended_reference"),
        ("engine.writes", "patterns.extended_reference"),
        ("engine.writes", "patterns.tree.placing"),
        ("graph.graph", "patterns.approximation.rule"),
        ("graph.graph", "patterns.computed"),
        ("graph.graph", "patterns.extended_reference"),
        ("graph.graph", "patterns.outlier.rule"),
        ("graph.graph", "patterns.rollup"),
        ("graph.graph", "patterns.tree.fields"),
        ("graph.layout", "patterns.bucket.reading"),
        ("graph.layouts", "patterns.bucket.rule"),
        ("graph.layouts", "patterns.bucket.time_series"),
        ("store.array", "patterns.outlier.item_bytes"),
        ("store.array", "patterns.outlier.reads"),
        ("store.array", "patterns.outlier.writes"),
        ("store.async_store", "patterns.bucket.reading"),
        ("store.async_store", "patterns.polymorphic"),
        ("store.async_store", "patterns.schema_versioning.migrate"),
        ("store.async_store", "patterns.schema_versioning.migration"),
        ("store.async_store", "patterns.tree.bulk"),
        ("store.async_store", "patterns.tree.moves"),
        ("store.async_store", "patterns.tree.state"),
        ("store.blocking_store", "patterns.bucket.reading"),
        ("store.blocking_store", "patterns.polymorphic"),
        ("store.blocking_store", "patterns.schema_versioning.migrate"),
        ("store.blocking_store", "patterns.schema_versioning.migration"),
        ("store.blocking_store", "patterns.tree.bulk"),
        ("store.blocking_store", "patterns.tree.moves"),
        ("store.blocking_store", "patterns.tree.state"),
        ("store.counter", "patterns.approximation.buffer"),
        ("store.counter", "patterns.approximation.events"),
        ("store.counter", "patterns.approximation.flush"),
        ("store.counter_handle", "patterns.approximation.buffer"),
        ("store.counter_handle", "patterns.approximation.events"),
        ("store.counter_handle", "patterns.approximation.flush"),
        ("store.counter_handle", "patterns.approximation.rule"),
        ("store.due", "patterns.bucket.upkeep"),
        ("store.shell", "patterns.outlier.intents"),
        ("store.shell", "patterns.tree.recovery"),
        ("store.tree", "patterns.tree.fields"),
        ("store.tree", "patterns.tree.moves"),
        ("store.tree", "patterns.tree.placing"),
        ("store.tree", "patterns.tree.reads"),
        ("store.tree", "patterns.tree.removes"),
        ("store.tree", "patterns.tree.state"),
        ("upkeep.apply", "patterns.extended_reference"),
        ("upkeep.changes", "patterns.rollup"),
        ("upkeep.closed", "patterns.rollup"),
        ("upkeep.events", "patterns.computed"),
        ("upkeep.events", "patterns.extended_reference"),
        ("upkeep.rebuild", "patterns.approximation.inspection"),
        ("upkeep.rebuild", "patterns.outlier.inspection"),
        ("upkeep.rebuild", "patterns.tree.inspection"),
        ("upkeep.schedule", "patterns.bucket.upkeep"),
        ("upkeep.schedule", "patterns.computed"),
        ("upkeep.set_up", "patterns.outlier.inspection"),
        ("upkeep.validation", "patterns.schema_versioning.migration"),
        ("upkeep.verify", "patterns.approximation.inspection"),
        ("upkeep.verify", "patterns.outlier.inspection"),
        ("upkeep.verify", "patterns.tree.inspection"),
    },
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
        if places[house.room(each.importer)] < places.get(house.room(each.imported), len(places))
        and each.name != "__version__"
    ]
    assert STILL["from a later room"] == pairs(wrong)


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
    assert STILL["in a cycle"] == {short(each) for each in rest}


def test_no_import_stands_inside_a_function():
    """The command line alone imports late, so that --help is quick."""
    late = [each for each in IMPORTS if each.in_function and house.room(each.importer) != "cli"]
    assert STILL["in a function"] == pairs(late) - LOCAL_SERVER


def test_plans_import_no_client_clock_or_chance():
    """Ids, clocks and chances are arguments or commands; the shells alone do I/O."""

    def allowed(module: str, name: str) -> bool:
        top, _, rest = module.partition(".")
        if top == "pymongo":
            return rest in PYMONGO_MODULES or (not rest and name in PYMONGO_NAMES)
        return top not in IMPURE

    pure = [each for each in IMPORTS if house.room(each.importer) in PURE]
    assert STILL["not pure"] == pairs([each for each in pure if not allowed(each.imported, each.name)])


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
    assert STILL["from another pattern"] == pairs(wrong)


def test_patterns_are_reached_through_their_interface():
    """No room below names a pattern: graph/pattern.py is all that it knows."""
    below = [each for each in INNER if house.room(each.importer) in ("graph", "engine", "upkeep", "store")]
    assert STILL["names a pattern"] == pairs(
        [each for each in below if house.room(each.imported) == "patterns"]
    )


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
