"""Migrations and counters with poison among their documents and ids."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import pytest
from bson import ObjectId

from tests.poison.values import VALUES, Element, insert, replace
from treadle import Approximate, Document, Store, migration
from treadle.errors import TreadleError

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


class Article(Document, collection="articles", validation="off"):
    id: str
    views: Annotated[int, Approximate(every=1000)] = 0


def test_a_counter_goes_on(database):
    """An id that cannot be stored is refused or reported; the others are counted, now and later."""
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
