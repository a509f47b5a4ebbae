"""Computed values and formulas that the worker maintains."""

from __future__ import annotations

from typing import Annotated

import pytest
from bson import ObjectId

from tests.upkeep.followed import of, settled, without_former_states
from treadle import Count, Document, Formula, Sum

# -- Computed ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_target_inserted_after_its_sources_is_filled(shops, database):
    store, _ = shops
    key = ObjectId()
    database["sales"].insert_many([{"shop_id": key, "amount": each, "open": each > 1} for each in (1, 2, 3)])
    settled(store)
    database["shops"].insert_one({"_id": key, "name": "late"})
    settled(store)
    assert {"name": "late", "sales": 2, "total": 6, "mean": 2.0} == of(database, "shops", key)


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


def test_a_source_that_stops_meeting_the_condition_no_longer_counts(shops, database):
    store, (a, *_) = shops
    sale = database["sales"].insert_one({"shop_id": a, "amount": 5, "open": True}).inserted_id
    settled(store)
    database["sales"].update_one({"_id": sale}, {"$set": {"open": False}})
    settled(store)
    assert (0, 5) == (of(database, "shops", a)["sales"], of(database, "shops", a)["total"])


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


def test_odd_references_do_not_stop_the_worker(shops, database):
    """Values that no application writes, but any client may."""
    import re

    from bson import Code, Decimal128, Int64, MaxKey
    from bson.dbref import DBRef

    store, (a, *_) = shops
    database.command({"collMod": "sales", "validator": {}})
    odd = [
        re.compile("."),
        Code("f"),
        DBRef("x", {"a": 1}),
        MaxKey(),
        [a, a],
        {"$a": 1},
        Decimal128("1"),
        1.5,
        True,
    ]
    database["sales"].insert_many([{"shop_id": value, "amount": 1, "open": True} for value in odd])
    database["sales"].insert_one({"shop_id": a, "amount": Int64(7), "open": True})
    store.worker().run_until_idle()
    assert 7 == of(database, "shops", a)["total"]
    database["sales"].delete_many({})
    store.worker().run_until_idle()
    assert 0 == of(database, "shops", a)["total"]


class Numbered(Document, collection="numbered"):
    id: int
    count: Annotated[int, Count("Naming", by="number", maintain="stream")] = 0


class Naming(Document, collection="naming"):
    number: int


def test_a_reference_of_another_numeric_type_does_not_stop_the_worker(run, database):
    """mongosh may write a double or a decimal; the server finds the same target by it."""
    from bson import Decimal128, Int64

    store = run.store([Numbered, Naming])
    store.setup()
    database.command({"collMod": "naming", "validator": {}})
    database["numbered"].insert_many([{"_id": 1}, {"_id": 2}])
    settled(store)
    for value in (1, Int64(1), 1.0, Decimal128("1"), Decimal128("1.0")):
        database["naming"].insert_one({"number": value})
        store.worker().run_until_idle()
    assert 5 == of(database, "numbered", 1)["count"]


# -- Formula -----------------------------------------------------------------------------------------


class Box(Document, collection="boxes"):
    width: int
    height: int
    area: Annotated[int | None, Formula({"$multiply": ["$width", "$height"]}, maintain="stream")] = None
    double: Annotated[int | None, Formula({"$multiply": ["$area", 2]}, maintain="stream")] = None


def test_a_formula_follows_raw_writes_and_meddling(run, database):
    store = run.store([Box])
    store.setup()
    key = database["boxes"].insert_one({"width": 2, "height": 3}).inserted_id
    settled(store)
    assert (6, 12) == (of(database, "boxes", key)["area"], of(database, "boxes", key)["double"])
    database["boxes"].update_one({"_id": key}, {"$set": {"width": 5}})
    settled(store)
    assert (15, 30) == (of(database, "boxes", key)["area"], of(database, "boxes", key)["double"])
    database["boxes"].update_one({"_id": key}, {"$set": {"area": 1}, "$unset": {"double": ""}})
    settled(store)
    assert (15, 30) == (of(database, "boxes", key)["area"], of(database, "boxes", key)["double"])
