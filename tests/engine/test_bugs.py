"""A bug in our own code raises with its traceback; it is never recorded as a bad document."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import field_validator

from treadle import Count, DataError, Document, ExtendedReference, Max, migration

SET_ASIDE = "treadle.set_aside"


class Review(Document, collection="reviews"):
    id: int
    product_id: int
    stars: int = 0


class Product(Document, collection="products"):
    id: int
    name: str = ""
    reviews: Annotated[int, Count(Review, by="product_id")] = 0
    best: Annotated[int | None, Max(Review, "stars", by="product_id")] = None


class Shelf(Document, collection="shelves"):
    id: int
    product_id: int
    name: Annotated[str | None, ExtendedReference(Product, by="product_id", field="name")] = None


class Followed(Document, collection="followed"):
    id: int
    reviews: Annotated[int, Count(Review, by="product_id", maintain="stream")] = 0


@pytest.fixture
def store(run):
    store = run.store([Review, Product, Shelf, Followed])
    store.setup()
    store.insert_many([Product(id=1, name="lamp"), Product(id=2)])
    store.insert_many([Followed(id=1), Followed(id=2)])
    store.insert_many([Review(id=1, product_id=1, stars=3), Review(id=2, product_id=2, stars=5)])
    store.insert_many([Shelf(id=1, product_id=1), Shelf(id=2, product_id=1)])
    return store


def plant(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Let a function of ours raise as if it had a bug."""

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(name, broken)


BUGS = [KeyError("planted"), TypeError("planted"), AttributeError("planted"), ValueError("planted")]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: type(bug).__name__)
def test_a_bug_raises_out_of_a_write(store, database, monkeypatch, bug):
    plant(monkeypatch, "treadle.engine.copies.copy_to", bug)
    with pytest.raises(type(bug), match="planted"):
        store.update(Product, 1, {"$set": {"name": "desk lamp"}})
    assert "lamp" == database["products"].find_one({"_id": 1})["name"]
    assert [] == list(database[SET_ASIDE].find())


@pytest.mark.parametrize("call", ["verify", "repair", "rebuild"])
def test_a_bug_raises_out_of_sweeps(store, database, monkeypatch, call):
    plant(monkeypatch, "treadle.engine.derive.aggregate_values", KeyError("planted"))
    database["products"].update_one({"_id": 1}, {"$set": {"reviews": 7}})
    with pytest.raises(KeyError, match="planted"):
        getattr(store, call)()
    assert [] == list(database[SET_ASIDE].find())


def test_a_bug_raises_out_of_the_worker(store, database, monkeypatch):
    worker = store.worker()
    worker.run_until_idle()
    plant(monkeypatch, "treadle.engine.derive.aggregate_values", KeyError("planted"))
    plant(monkeypatch, "treadle.upkeep.totals.Counted._count", KeyError("planted"))
    store.insert(Review(id=3, product_id=1))
    for work in (worker.run_until_idle, worker.run):
        with pytest.raises(KeyError, match="planted"):
            work()
    assert [] == list(database[SET_ASIDE].find())
    monkeypatch.undo()
    worker.run_until_idle()
    assert 2 == store.get(Followed, 1).reviews


class Guarded(Document, collection="guarded"):
    id: int
    size: int

    @field_validator("size")
    @classmethod
    def check(cls, value: int) -> int:
        if value < 0:
            raise TypeError("a user's own mistake")
        return value


class Upgraded(Document, collection="upgraded", version=2):
    id: int
    product_id: int
    stars: int


@migration(Upgraded, from_version=1)
def up(document: dict[str, Any]) -> dict[str, Any]:
    document["stars"] = document.pop("points") + 1
    return document


class Rated(Document, collection="rated"):
    id: int
    total: Annotated[int, Count(Upgraded, by="product_id", where={"stars": {"$gt": 0}})] = 0


def test_what_a_users_function_raises_is_about_its_document(run, database):
    store = run.store([Guarded, Upgraded, Rated])
    store.setup()
    database["guarded"].insert_many([{"_id": 1, "size": 1}, {"_id": 2, "size": -1}])
    with pytest.raises(DataError, match="a validator of Guarded raises TypeError") as caught:
        store.get(Guarded, 2)
    assert isinstance(caught.value.__cause__, TypeError)
    assert [1] == [each.id for each in store.find(Guarded, invalid="skip")]
    store.insert(Rated(id=1))
    database["upgraded"].insert_many([{"_id": 1, "product_id": 1, "points": 2}, {"_id": 2, "product_id": 1}])
    migrated = store.migrate(Upgraded)
    assert (1, 1) == (migrated.migrated, len(migrated.set_aside))
