"""Migrations and counters with poison among their documents and ids."""

from __future__ import annotations

import copy
import logging
import types
from typing import Annotated, Any, get_type_hints

import pytest
from bson import ObjectId

from tests.poison.scenarios import GOOD as SOURCES
from tests.poison.scenarios import SCENARIOS
from tests.poison.test_derived import mended, settled
from tests.poison.test_every_pattern import spoilt, stored_anyway
from tests.poison.test_every_write import NEIGHBOURS
from tests.poison.values import VALUES, Element, insert, replace
from treadle import Approximate, Document, Store, migration
from treadle.errors import TreadleError
from treadle.model.codec import codec_of

GOOD = [f"good {number}" for number in range(5)]
BAD = {f"bad {number}": value for number, value in enumerate(VALUES.values())}


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "treadle")


def user(**steps: Any) -> type[Document]:
    class User(Document, collection="users", version=2, validation="off"):
        id: str
        phone: list[str]

    if steps:
        migration(User, from_version=1, **steps)
        return User

    @migration(User, from_version=1)
    def split(document: dict[str, Any]) -> dict[str, Any]:
        document["phone"] = [each.strip() for each in document["phone"].split(",")]
        return document

    return User


PIPELINE = [{"$set": {"phone": {"$split": ["$phone", ","]}}}]


@pytest.mark.parametrize(
    "steps", [{}, {"up": PIPELINE, "down": [{"$set": {"phone": ""}}]}], ids=["function", "pipeline"]
)
def test_a_migration_goes_on(database, steps):
    model = user(**steps)
    store = Store(database, [model])
    store.setup()
    for key, value in BAD.items():
        insert(database, "users", {"_id": key, "phone": value})
    insert(database, "users", *({"_id": key, "phone": "1,2"} for key in GOOD))
    result = store.migrate(model)
    migrated = {each["_id"]: each for each in database["users"].find({"_id": {"$in": GOOD}})}
    assert [["1", "2"]] * len(GOOD) == [migrated[key]["phone"] for key in GOOD]
    aside = {each.document_id for each in result.set_aside}
    assert aside <= set(BAD)
    assert {"bad 10", "bad 20"} <= aside
    assert aside == {each.document_id for each in store.status().aside}
    assert all(each.reason for each in store.status().aside)
    for key in aside:
        replace(database, "users", key, {"phone": "1,2"})
    assert () == store.migrate(model, retry=True).set_aside
    assert 0 == store.status().set_aside
    assert {2: len(BAD) + len(GOOD)} == store.migration_status(model)


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_a_migration_of_sources_goes_on(database, name):
    """What follows from them stays right, and what could not be migrated is listed until it is."""
    scenario = copy.copy(SCENARIOS[name])
    # Each recomputation reads all sources that are not migrated yet.
    scenario.values = dict(list(VALUES.items())[::4])
    models = scenario.models("write", version=2)
    source = models[0]
    migration(source, from_version=1)(lambda document: {**document, "seen": True})
    store = Store(database, models)
    store.setup()
    scenario.fill(database)
    store.repair()
    result = store.migrate(source)
    keys = [key for key, _ in scenario.poison()]
    healthy = {"_id": {"$nin": keys}}
    assert {2} == {each.get("schema_version") for each in database[scenario.sources].find(healthy)}
    aside = {each.document_id for each in result.set_aside}
    assert aside <= set(keys)
    assert "bad 0 0" in aside
    listed = {each.document_id: each.reason for each in store.status().aside}
    assert all(listed[key] for key in aside)
    settled(store, scenario, database)
    scenario.mend(database)
    assert () == store.migrate(source, retry=True).set_aside
    assert {2: len(keys) + len(SOURCES)} == store.migration_status(source)
    store.repair()
    mended(store, scenario, database)


def versioned(model: type[Document]) -> type[Document]:
    """The same model in its second version."""
    settings = model.__treadle__
    hints = get_type_hints(model, include_extras=True)
    own = {name: hints[name] for name in model.model_fields if name != "id"}
    defaults = {name: info.default for name, info in model.model_fields.items() if not info.is_required()}
    body = {
        "__annotations__": own,
        "__module__": __name__,
        **{key: defaults[key] for key in own if key in defaults},
    }
    keywords = {"collection": settings.collection, "version": 2, **settings.patterns}
    return types.new_class(model.__name__, (Document,), keywords, lambda namespace: namespace.update(body))


# Readings have no versions; the sources of derived values are above.
ALONE = sorted(
    set(NEIGHBOURS) - {"bucket", "time_series", "computed", "rollup", "subset", "extended_reference"}
)


@pytest.mark.parametrize("name", ALONE)
def test_a_migration_goes_on_whatever_the_pattern(database, name):
    model = versioned(NEIGHBOURS[name][0])
    migration(model, from_version=1)(lambda document: document)
    store = Store(database, [model])
    store.setup()
    fields, collection = NEIGHBOURS[name][1], model.__treadle__.collection
    made = codec_of(model).dump_all([model(**fields(number)) for number in range(4)], [])
    good = [{key: value for key, value in each.items() if key != "path"} for each in made]
    assert len(good) == stored_anyway(database, collection, good)
    stored_anyway(database, collection, spoilt({"_id": 0, **good[0]}))
    result = store.migrate(model)
    keys = {"_id": {"$in": [each["_id"] for each in good]}}
    assert [2] * len(good) == [each["schema_version"] for each in database[collection].find(keys)]
    listed = {repr(each.document_id): each.reason for each in store.status().aside}
    assert all(listed[repr(each.document_id)] for each in result.set_aside)
    database[collection].delete_many({"_id": {"$regex": "^bad "}})
    assert () == store.migrate(model, retry=True).set_aside
    store.repair()
    store.repair()
    assert [] == [each for each in store.verify() if each.pattern != "validation"]
    assert [] == store.set_aside()


@pytest.mark.parametrize("buffer", ["memory", "durable", "sampled"])
def test_a_counter_goes_on(database, buffer):
    """An id that cannot be stored is refused or reported; the others are counted, now and later."""

    class Article(Document, collection="articles", validation="off"):
        id: str
        # Of the sampled ones, each is worth itself.
        views: Annotated[int, Approximate(every=1 if buffer == "sampled" else 1000, buffer=buffer)] = 0

    store = Store(database, [Article])
    store.setup()
    store.insert_many([Article(id=key) for key in GOOD])
    odd = [value for value in VALUES.values() if not isinstance(value, Element)]
    odd += ["\ud800", 2**70, "x" * 17_000_000, ObjectId()]
    counter = store.counter(Article, "views")
    for number in (1, 2):
        for value in odd:
            try:
                counter.add(value)
            except TreadleError:
                continue
            except TypeError as error:
                # A dict or a list is no key of a buffer either.
                assert "unhashable" in str(error)
        for key in GOOD:
            counter.add(key)
        try:
            counter.flush()
        except TreadleError as error:
            assert str(error)
        counter.flush()
        assert [number] * len(GOOD) == [
            each["views"] for each in database["articles"].find(sort=[("_id", 1)])
        ]
    store.close()
