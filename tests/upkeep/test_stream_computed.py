"""Computed values and formulas that the worker maintains."""

from __future__ import annotations

from typing import Annotated

from tests.upkeep.followed import of, settled, without_former_states
from treadle import Count, Document, Id, Sum

# -- Computed ----------------------------------------------------------------------------------------


def test_a_source_that_moves_twice_between_two_looks_leaves_both(shops, database):
    """From A by way of B to C: none of the three may keep it but C."""
    store, (a, b, c) = shops
    sale = database["sales"].insert_one({"shop_id": a, "amount": 5, "open": True}).inserted_id
    settled(store)
    database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": b}})
    database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": c}})
    settled(store)
    assert [0, 0, 5] == [of(database, "shops", key)["total"] for key in (a, b, c)]
    database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": a}})
    database["sales"].delete_one({"_id": sale})
    settled(store)
    assert [0, 0, 0] == [of(database, "shops", key)["total"] for key in (a, b, c)]


def test_former_states_switched_off_and_on_again(shops, database):
    """No deletion is lost while the server keeps none."""
    store, (a, *_) = shops
    sales = [
        database["sales"].insert_one({"shop_id": a, "amount": 2**n, "open": True}).inserted_id
        for n in range(6)
    ]
    settled(store)
    without_former_states(database, "sales")
    database["sales"].delete_one({"_id": sales[0]})
    settled(store)
    database["sales"].delete_one({"_id": sales[1]})
    settled(store)
    store.setup()
    database["sales"].delete_one({"_id": sales[2]})
    settled(store)
    database["sales"].delete_one({"_id": sales[3]})
    settled(store)
    assert 48 == of(database, "shops", a)["total"]


def test_an_event_without_its_former_state_makes_the_worker_go_over_everything(shops, database, caplog):
    """The server expired or lost it: nobody can say which target the document had fed."""
    store, (a, b, _) = shops
    sales = [
        database["sales"].insert_one({"shop_id": key, "amount": 1, "open": True}).inserted_id
        for key in (a, b)
    ]
    settled(store)
    without_former_states(database, "sales")
    database["sales"].delete_one({"_id": sales[0]})
    store.setup()
    worker = store.worker()
    worker.run_until_idle()
    assert [] == store.verify()
    assert [0, 1] == [of(database, "shops", key)["total"] for key in (a, b)]
    assert 1 == worker.totals["blind"]
    assert 1 == sum("former state" in each.message for each in caplog.records)


class Profile(Document, collection="profiles"):
    """Its id is that of its user."""

    points: int = 0


class User(Document, collection="users"):
    name: str = ""
    points: Annotated[int, Sum(Profile, "points", by="id", maintain="stream")] = 0


def test_a_source_may_name_its_target_by_its_own_id(run, database):
    """The id is in every event; nothing is verified again for want of it."""
    store = run.store([Profile, User])
    store.setup()
    user = database["users"].insert_one({"name": "Ann"}).inserted_id
    settled(store)
    worker = store.worker()
    database["profiles"].insert_one({"_id": user, "points": 3})
    worker.run_until_idle()
    assert 3 == of(database, "users", user)["points"]
    database["profiles"].replace_one({"_id": user}, {"points": 4})
    worker.run_until_idle()
    assert 4 == of(database, "users", user)["points"]
    database["profiles"].delete_one({"_id": user})
    worker.run_until_idle()
    assert 0 == of(database, "users", user)["points"]
    assert 0 == worker.totals.get("verified", 0) + worker.totals.get("blind", 0)


class Review(Document, collection="reviews"):
    item_id: Id
    stars: int = 1


class Item(Document, collection="items", discriminator="type"):
    title: str
    reviews: Annotated[int, Count(Review, by="item_id", maintain="stream")] = 0


class Book(Item, kind="book"):
    stars: Annotated[int, Sum(Review, "stars", by="item_id", maintain="stream")] = 0


class Gadget(Item, kind="gadget"):
    pass


def test_a_document_that_becomes_another_kind_is_filled_as_such(run, database):
    store = run.store([Review, Item, Book, Gadget])
    store.setup()
    worker = store.worker()
    worker.run_until_idle()
    item = database["items"].insert_one({"type": "gadget", "title": "loom"}).inserted_id
    database["reviews"].insert_many([{"item_id": item, "stars": stars} for stars in (2, 3)])
    worker.run_until_idle()
    database["items"].update_one({"_id": item}, {"$set": {"type": "book"}})
    worker.run_until_idle()
    assert 5 == store.get(Book, item).stars
    assert [] == store.verify()
