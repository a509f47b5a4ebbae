"""What the worker makes of raw writes: every pattern with `maintain="stream"`, whoever writes.

The writers here are plain PyMongo. After `run_until_idle()` nothing may be
left to find, neither for `verify` nor for the oracle in `tests/streamed.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from tests import streamed
from tests.streamed import KEYS, MODELS, Writer
from treadle import (
    Average,
    Count,
    Document,
    ExtendedReference,
    Formula,
    Id,
    Max,
    Subset,
    Sum,
    UsageError,
)

Raw = dict[str, Any]


def settled(store: Any) -> int:
    """Let the worker catch up; nothing is wrong then."""
    handled = store.worker().run_until_idle()
    assert [] == store.verify()
    return handled


def without_former_states(database: Any, *collections: str) -> None:
    for name in collections:
        database.command({"collMod": name, "changeStreamPreAndPostImages": {"enabled": False}})


# -- everything at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("way", ["former states", "ledger"])
def test_raw_writes_of_every_kind_are_followed(run, database, seed, way):
    """Inserts, updates, replacements, deletions and moves of sources and targets, by plain PyMongo."""
    store = run.store(MODELS)
    store.setup()
    if way == "ledger":
        without_former_states(database, "reviews", "articles")
    writer = Writer(database, seed)
    for _ in range(4):
        writer.write(40)
        settled(store)
        assert [] == streamed.wrong(database)
    assert (way == "ledger") == ("treadle.contributions" in database.list_collection_names())


def test_a_worker_that_was_never_run_begins_with_what_is_there(run, database):
    """Data from before the first start is gone over once, and not again."""
    store = run.store(MODELS)
    store.setup()
    Writer(database, 11).write(120)
    assert [] != store.verify()
    settled(store)
    assert [] == streamed.wrong(database)
    worker = store.worker()
    assert 0 == worker.run_until_idle()
    assert 0 == worker.totals.get("verified", 0)


# -- Computed --------------------------------------------------------------------------------------------


class Sale(Document, collection="sales"):
    shop_id: Id | None = None
    amount: int = 0
    open: bool = True


class Shop(Document, collection="shops"):
    name: str = "shop"
    sales: Annotated[int, Count(Sale, by="shop_id", maintain="stream", where={"open": True})] = 0
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0
    mean: Annotated[float | None, Average(Sale, "amount", by="shop_id", maintain="stream")] = None


def of(database: Any, collection: str, key: Any) -> Raw:
    found = database[collection].find_one({"_id": key})
    assert found is not None
    return {name: value for name, value in found.items() if name not in ("_id", "_treadle")}


@pytest.fixture
def shops(run, database) -> Any:
    store = run.store([Sale, Shop])
    store.setup()
    settled(store)
    keys = [ObjectId(), ObjectId(), ObjectId()]
    database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
    return store, keys


def test_a_target_inserted_after_its_sources_is_filled(shops, database):
    store, _ = shops
    key = ObjectId()
    database["sales"].insert_many([{"shop_id": key, "amount": each, "open": each > 1} for each in (1, 2, 3)])
    settled(store)
    database["shops"].insert_one({"_id": key, "name": "late"})
    settled(store)
    assert {"name": "late", "sales": 2, "total": 6, "mean": 2.0} == of(database, "shops", key)


@pytest.mark.parametrize("way", ["former states", "ledger"])
def test_a_source_that_moves_twice_between_two_looks_leaves_both(shops, database, way):
    """From A by way of B to C: none of the three may keep it but C."""
    store, (a, b, c) = shops
    if way == "ledger":
        without_former_states(database, "sales")
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
    """Neither the switch to the ledger nor the way back loses a deletion."""
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


@pytest.mark.parametrize("way", ["former states", "ledger"])
def test_a_source_may_name_its_target_by_its_own_id(run, database, way):
    """The id is in every event; nothing is gone over again for want of it."""
    store = run.store([Profile, User])
    store.setup()
    if way == "ledger":
        without_former_states(database, "profiles")
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


# -- Formula -----------------------------------------------------------------------------------------------


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


# -- Extended Reference --------------------------------------------------------------------------------


class Person(Document, collection="people"):
    id: int
    name: str
    price: int = 0


class PersonCard(BaseModel):
    name: str | None = None
    price: int | None = None


class Held(BaseModel):
    id: int
    name: str | None = None


class Item(BaseModel):
    person_id: int
    person: Annotated[
        PersonCard | None,
        ExtendedReference(Person, by="person_id", snapshot=["price"], maintain="stream"),
    ] = None


class Letter(Document, collection="letters"):
    id: int
    person_id: int | None = None
    synced: Annotated[PersonCard | None, ExtendedReference(Person, by="person_id", maintain="stream")] = None
    mixed: Annotated[
        PersonCard | None,
        ExtendedReference(Person, by="person_id", snapshot=["price"], maintain="stream"),
    ] = None
    frozen: Annotated[
        PersonCard | None,
        ExtendedReference(Person, by="person_id", policy="snapshot", maintain="stream"),
    ] = None
    name: Annotated[
        str | None, ExtendedReference(Person, by="person_id", field="name", maintain="stream")
    ] = None
    first_name: Annotated[
        str | None,
        ExtendedReference(Person, by="person_id", field="name", policy="snapshot", maintain="stream"),
    ] = None
    held: Annotated[Held | None, ExtendedReference(Person, by="held.id", maintain="stream")] = None
    items: list[Item] = []


def test_odd_references_of_cards_do_not_stop_the_worker(run, database):
    import re

    from bson.dbref import DBRef

    store = run.store([Person, Letter])
    store.setup()
    database.command({"collMod": "letters", "validator": {}})
    database["people"].insert_one({"_id": 1, "name": "Ann", "price": 10})
    odd = [re.compile("."), {"$a": 1}, DBRef("people", 1), [1, 2], 1.0]
    database["letters"].insert_many(
        [{"_id": number, "person_id": key, "items": []} for number, key in enumerate(odd)]
    )
    database["letters"].insert_one({"_id": 9, "person_id": 1, "items": []})
    store.worker().run_until_idle()
    # The references are of no shape that the model has; the cards are as they should be.
    assert {"validation"} == {each.pattern for each in store.verify()}
    assert ("Ann", "Ann") == (of(database, "letters", 9)["name"], of(database, "letters", 4)["name"])
    database["people"].update_one({"_id": 1}, {"$set": {"name": "Eve"}})
    store.worker().run_until_idle()
    assert "Eve" == of(database, "letters", 9)["name"]


@pytest.fixture
def letters(run, database) -> Any:
    store = run.store([Person, Letter])
    store.setup()
    database["people"].insert_many(
        [{"_id": 1, "name": "Ann", "price": 10}, {"_id": 2, "name": "Bob", "price": 20}]
    )
    database["letters"].insert_one(
        {
            "_id": 1,
            "person_id": 1,
            "held": {"id": 1},
            "items": [{"person_id": 1}, {"person_id": 2}, {"person_id": 1}],
        }
    )
    settled(store)
    return store


def cards(database: Any, key: int = 1) -> Raw:
    found = of(database, "letters", key)
    found["items"] = [each["person"] for each in found["items"]]
    return found


def card(name: str, price: int) -> Raw:
    return {"name": name, "price": price}


def test_cards_of_every_kind_are_filled_and_follow(letters, database):
    """What is synced follows a raw rename; what is a snapshot stays."""
    ann, bob = card("Ann", 10), card("Bob", 20)
    assert cards(database) == {
        "person_id": 1,
        "synced": ann,
        "mixed": ann,
        "frozen": ann,
        "name": "Ann",
        "first_name": "Ann",
        "held": {"id": 1, "name": "Ann"},
        "items": [ann, bob, ann],
    }
    database["people"].update_one({"_id": 1}, {"$set": {"name": "Eve", "price": 99}})
    settled(letters)
    assert cards(database) == {
        "person_id": 1,
        "synced": card("Eve", 99),
        "mixed": card("Eve", 10),
        "frozen": ann,
        "name": "Eve",
        "first_name": "Ann",
        "held": {"id": 1, "name": "Eve"},
        "items": [card("Eve", 10), bob, card("Eve", 10)],
    }


@pytest.mark.parametrize("replaced", [False, True])
def test_a_snapshot_outlives_the_replacement_of_its_source(letters, database, replaced):
    """Whether the source was replaced, or deleted and inserted anew: the moment has passed."""
    new = {"name": "Eve", "price": 99}
    if replaced:
        database["people"].replace_one({"_id": 1}, new)
    else:
        database["people"].delete_one({"_id": 1})
        settled(letters)
        database["people"].insert_one({"_id": 1, **new})
    settled(letters)
    found = cards(database)
    assert (card("Eve", 99), card("Eve", 10), card("Ann", 10), "Eve", "Ann") == tuple(
        found[name] for name in ("synced", "mixed", "frozen", "name", "first_name")
    )
    assert [card("Eve", 10), card("Bob", 20), card("Eve", 10)] == found["items"]


def test_a_new_reference_takes_the_values_of_its_moment(letters, database):
    """The card of another is not kept for want of looking."""
    database["people"].update_one({"_id": 2}, {"$set": {"price": 21}})
    database["letters"].update_one(
        {"_id": 1}, {"$set": {"person_id": 2, "held.id": 2, "items.0.person_id": 2}}
    )
    settled(letters)
    found = cards(database)
    new = card("Bob", 21)
    assert [new, new, new, "Bob", "Bob", {"id": 2, "name": "Bob"}] == [
        found[name] for name in ("synced", "mixed", "frozen", "name", "first_name", "held")
    ]
    assert [new, card("Bob", 20), card("Ann", 10)] == found["items"]


def test_a_new_reference_whose_source_changes_at_once_is_no_mixture(letters, database):
    """The name may follow before the worker sees that the reference is another."""
    database["letters"].update_one({"_id": 1}, {"$set": {"person_id": 2, "items.0.person_id": 2}})
    database["people"].update_one({"_id": 2}, {"$set": {"name": "Ben", "price": 22}})
    settled(letters)
    found = cards(database)
    assert (card("Ben", 22), card("Ben", 22)) == (found["mixed"], found["items"][0])


def test_a_replacement_that_drops_the_cards_brings_them_back(letters, database):
    """Snapshots as they were, where the server kept the former state; the rest as it is now."""
    database["people"].update_one({"_id": 1}, {"$set": {"name": "Eve", "price": 99}})
    settled(letters)
    bare = {"person_id": 1, "held": {"id": 1}, "items": [{"person_id": 1}, {"person_id": 2}]}
    database["letters"].replace_one({"_id": 1}, bare)
    settled(letters)
    found = cards(database)
    assert [card("Eve", 99), card("Eve", 10), card("Ann", 10), "Eve", "Ann"] == [
        found[name] for name in ("synced", "mixed", "frozen", "name", "first_name")
    ]
    assert [card("Eve", 10), card("Bob", 20)] == found["items"]


def test_a_source_that_comes_after_its_copies_fills_what_follows_it(letters, database):
    """And what was never filled takes the values of that moment."""
    database["letters"].insert_one({"_id": 2, "person_id": 3, "items": [{"person_id": 3}]})
    settled(letters)
    database["people"].insert_one({"_id": 3, "name": "Cid", "price": 30})
    settled(letters)
    found = cards(database, 2)
    assert (card("Cid", 30), card("Cid", 30), "Cid") == (found["synced"], found["mixed"], found["name"])
    assert (card("Cid", 30), "Cid") == (found["frozen"], found["first_name"])


class Frozen(Document, collection="frozen"):
    id: int
    person_id: int
    name: Annotated[
        str | None,
        ExtendedReference(Person, by="person_id", field="name", policy="snapshot", maintain="stream"),
    ] = None


def test_a_snapshot_alone_waits_for_its_source(run, database):
    store = run.store([Person, Frozen])
    store.setup()
    database["frozen"].insert_one({"_id": 1, "person_id": 1})
    settled(store)
    database["people"].insert_one({"_id": 1, **ANN})
    settled(store)
    database["people"].replace_one({"_id": 1}, {"name": "Eve", "price": 1})
    settled(store)
    database["people"].update_one({"_id": 1}, {"$set": {"name": "Zoe"}})
    settled(store)
    assert "Ann" == of(database, "frozen", 1)["name"]


def test_an_overwritten_copy_is_put_right(letters, database):
    database["letters"].update_one(
        {"_id": 1}, {"$set": {"synced.name": "forged", "name": "forged", "items.1.person.name": "forged"}}
    )
    settled(letters)
    found = cards(database)
    assert ("Ann", "Ann", "Bob") == (found["synced"]["name"], found["name"], found["items"][1]["name"])


def test_snapshots_of_other_elements_stay_without_former_states(letters, database):
    """A changed reference in one element says nothing of the others."""
    without_former_states(database, "letters", "people")
    settled(letters)
    database["people"].update_many({}, {"$set": {"price": 99}})
    database["letters"].update_one({"_id": 1}, {"$set": {"items.0.person_id": 2}})
    settled(letters)
    assert [99, 20, 10] == [each["price"] for each in cards(database)["items"]]


def on_delete_model(on_delete: str, within: str) -> type[Document]:
    reference = ExtendedReference(Person, by="person_id", maintain="stream", on_delete=on_delete)

    class Entry(BaseModel):
        person_id: int | None = None
        person: Annotated[PersonCard | None, reference] = None

    if within == "array":

        class Listed(Document, collection="referring"):
            id: int
            entries: list[Entry] = []

        return Listed

    class Plain(Document, collection="referring"):
        id: int
        person_id: int | None = None
        person: Annotated[PersonCard | None, reference] = None

    return Plain


ANN = {"name": "Ann", "price": 10}
AFTER_DELETION = {
    ("keep", "field"): [{"_id": 1, "person_id": 1, "person": ANN}],
    ("restrict", "field"): [{"_id": 1, "person_id": 1, "person": None}],
    ("clear", "field"): [{"_id": 1, "person_id": None, "person": None}],
    ("cascade", "field"): [],
    ("keep", "array"): [
        {"_id": 1, "entries": [{"person_id": 1, "person": ANN}, {"person_id": None, "person": None}]}
    ],
    ("restrict", "array"): [
        {"_id": 1, "entries": [{"person_id": 1, "person": None}, {"person_id": None, "person": None}]}
    ],
    ("clear", "array"): [
        {"_id": 1, "entries": [{"person_id": None, "person": None}, {"person_id": None, "person": None}]}
    ],
    ("cascade", "array"): [{"_id": 1, "entries": [{"person_id": None, "person": None}]}],
}


@pytest.mark.parametrize(("on_delete", "within"), list(AFTER_DELETION))
def test_a_raw_deletion_is_followed_as_declared(run, database, on_delete, within):
    model = on_delete_model(on_delete, within)
    store = run.store([Person, model])
    store.setup()
    database["people"].insert_one({"_id": 1, **ANN})
    if within == "array":
        database["referring"].insert_one({"_id": 1, "entries": [{"person_id": 1}, {"person_id": None}]})
    else:
        database["referring"].insert_one({"_id": 1, "person_id": 1})
    settled(store)
    database["people"].delete_one({"_id": 1})
    settled(store)
    found = [{k: v for k, v in each.items() if k != "_treadle"} for each in database["referring"].find()]
    assert AFTER_DELETION[on_delete, within] == found


@pytest.mark.parametrize("on_delete", ["clear", "restrict", "cascade"])
def test_more_copies_than_one_transaction_takes_follow_a_deletion(run, database, on_delete, monkeypatch):
    """Two transactions and a half."""
    monkeypatch.setattr("treadle.upkeep.apply.GONE_MAX", 100)
    store = run.store([Person, on_delete_model(on_delete, "field")])
    store.setup()
    database["people"].insert_one({"_id": 1, **ANN})
    database["referring"].insert_many([{"_id": number, "person_id": 1} for number in range(250)])
    settled(store)
    database["people"].delete_one({"_id": 1})
    settled(store)
    assert 0 == database["referring"].count_documents({"person": {"$ne": None}})
    assert {"clear": 0, "cascade": 0, "restrict": 250}[on_delete] == database["referring"].count_documents(
        {"person_id": 1}
    )


def test_a_rename_with_many_copies_reaches_them_all(run, database, monkeypatch):
    """In chunks, each a transaction."""
    monkeypatch.setattr("treadle.upkeep.apply.FAN_OUT_MAX", 100)
    monkeypatch.setattr("treadle.engine.intents.CHUNK", 100)
    store = run.store([Person, on_delete_model("keep", "field")])
    store.setup()
    database["people"].insert_one({"_id": 1, **ANN})
    database["referring"].insert_many([{"_id": number, "person_id": 1} for number in range(450)])
    settled(store)
    database["people"].update_one({"_id": 1}, {"$set": {"name": "Eve"}})
    settled(store)
    assert 450 == database["referring"].count_documents({"person.name": "Eve"})


# -- chains ------------------------------------------------------------------------------------------------


def chain(first: str, second: str) -> list[type[Document]]:
    class Leaf(Document, collection="leaves"):
        id: int
        branch_id: int
        weight: int = 1

    class Branch(Document, collection="branches"):
        id: int
        tree_id: int
        weight: Annotated[int, Sum(Leaf, "weight", by="branch_id", maintain=first)] = 0

    class Tree(Document, collection="trees"):
        id: int
        weight: Annotated[int, Sum(Branch, "weight", by="tree_id", maintain=second)] = 0
        heaviest: Annotated[int | None, Max(Branch, "weight", by="tree_id", maintain=second)] = None

    class Bird(Document, collection="birds"):
        id: int
        tree_id: int
        tree_weight: Annotated[
            int | None, ExtendedReference(Tree, by="tree_id", field="weight", maintain=second)
        ] = None

    return [Leaf, Branch, Tree, Bird]


@pytest.mark.parametrize("first", ["stream", "write"])
@pytest.mark.parametrize("second", ["stream", "write"])
def test_values_made_of_maintained_values_follow(run, database, first, second):
    """Stream over stream, write over stream, stream over write."""
    leaf, branch, tree, bird = chain(first, second)
    store = run.store([leaf, branch, tree, bird])
    store.setup()
    store.insert(tree(id=1))
    store.insert_many([branch(id=number, tree_id=1) for number in (1, 2)])
    store.insert(bird(id=1, tree_id=1))
    store.insert_many([leaf(id=number, branch_id=number % 2 + 1, weight=number) for number in range(6)])
    settled(store)
    assert (15, 9) == (of(database, "trees", 1)["weight"], of(database, "trees", 1)["heaviest"])
    assert 15 == of(database, "birds", 1)["tree_weight"]
    if first == "stream":
        database["leaves"].update_one({"_id": 5}, {"$set": {"weight": 50}})
        database["leaves"].delete_one({"_id": 4})
    else:
        store.update(leaf, 5, {"$set": {"weight": 50}})
        store.delete(leaf, 4)
    settled(store)
    assert (56, 54) == (of(database, "trees", 1)["weight"], of(database, "trees", 1)["heaviest"])
    assert 56 == of(database, "birds", 1)["tree_weight"]


# -- what it costs, and where it cannot be had ---------------------------------------------------------


class ReviewCard(BaseModel):
    amount: int


class Fair(Document, collection="fairs"):
    name: str = ""
    sales: Annotated[int, Count("Ticket", by="fair_id", maintain="stream")] = 0
    top: Annotated[
        list[ReviewCard], Subset("Ticket", by="fair_id", sort="-amount", size=2, maintain="stream")
    ] = []


class Ticket(Document, collection="tickets"):
    fair_id: Id
    amount: int = 1


def test_writes_of_what_the_worker_follows_stay_plain(heard):
    """One command each, and no transaction."""
    from treadle import Store

    database, listener = heard
    store = Store(database, [Fair, Ticket])
    store.setup()
    fair = store.insert(Fair(name="a"))
    ticket = store.insert(Ticket(fair_id=fair.id))
    listener.clear()
    store.insert(Ticket(fair_id=fair.id))
    store.insert(Fair(name="b"))
    store.update(Ticket, ticket.id, {"$set": {"amount": 3}})
    store.update(Fair, fair.id, {"$set": {"name": "c"}})
    store.delete(Ticket, ticket.id)
    assert ["insert", "insert", "findAndModify", "findAndModify", "findAndModify"] == listener.names
    assert not any("startTransaction" in command for _, command in listener.commands)


def test_lag_counts_what_the_worker_has_not_seen(shops, database):
    store, (a, *_) = shops
    settled(store)
    worker = store.worker()
    assert (0, 0.0) == (worker.lag().events, worker.lag().seconds)
    database["sales"].insert_many([{"shop_id": a, "amount": 1, "open": True} for _ in range(25)])
    assert 25 == worker.lag().events
    assert 0.0 <= worker.lag().seconds < 30.0
    settled(store)
    assert (0, 0.0) == (worker.lag().events, worker.lag().seconds)


def test_a_standalone_server_is_refused():
    from pymongo import MongoClient

    from treadle import Store
    from treadle.server.local import start

    with start(replica_set=False) as server, MongoClient(server.uri) as client:
        store = Store(client["alone"], [Sale, Shop])
        store.setup()
        for call in (store.worker().run, store.worker().run_until_idle, store.worker().lag):
            with pytest.raises(UsageError, match="standalone") as refused:
                call()
            assert "streams-unavailable" == refused.value.code


# -- declarations that come and change ------------------------------------------------------------------


def tally(**fields: Any) -> list[type[Document]]:
    class Vote(Document, collection="votes"):
        id: int
        poll_id: int
        weight: int = 1

    body = {"__annotations__": {"id": int, **fields}, "__module__": __name__}
    body |= {"count": 0} if "count" in fields else {}
    body |= {"total": 0} if "total" in fields else {}
    return [Vote, type(Document)("Poll", (Document,), body, collection="polls")]


def test_a_rule_that_is_added_later_is_built(run, database):
    count = Annotated[int, Count("Vote", by="poll_id", maintain="stream")]
    total = Annotated[int, Sum("Vote", "weight", by="poll_id", maintain="stream")]
    store = run.store(tally(count=count))
    store.setup()
    database["polls"].insert_one({"_id": 1})
    database["votes"].insert_many([{"_id": number, "poll_id": 1, "weight": number} for number in range(5)])
    settled(store)
    later = run.store(tally(count=count, total=total))
    later.setup()
    settled(later)
    assert (5, 10) == (of(database, "polls", 1)["count"], of(database, "polls", 1)["total"])
    worker = later.worker()
    worker.run_until_idle()
    assert 0 == worker.totals.get("verified", 0)


def test_a_declaration_that_changed_is_built_again(run, database):
    one = Annotated[int, Count("Vote", by="poll_id", maintain="stream")]
    other = Annotated[int, Count("Vote", by="poll_id", maintain="stream", where={"weight": {"$gte": 3}})]
    store = run.store(tally(count=one))
    store.setup()
    database["polls"].insert_one({"_id": 1})
    database["votes"].insert_many([{"_id": number, "poll_id": 1, "weight": number} for number in range(5)])
    settled(store)
    settled(run.store(tally(count=other)))
    assert 2 == of(database, "polls", 1)["count"]


def lettering(*names: str) -> list[type[Document]]:
    fields = {"__annotations__": dict.fromkeys(names, str | None), "__module__": __name__}
    small = type(BaseModel)("SmallCard", (BaseModel,), {**fields, **dict.fromkeys(names)})

    class Author(Document, collection="authors"):
        id: int
        name: str | None = None
        town: str | None = None

    class Book(Document, collection="books"):
        id: int
        author_id: int
        author: Annotated[small | None, ExtendedReference(Author, by="author_id", maintain="stream")] = None

    return [Author, Book]


def test_a_card_with_one_field_more_is_built_again(run, database):
    """The declaration's own words are the same; what it copies is not."""
    store = run.store(lettering("name"))
    store.setup()
    database["authors"].insert_one({"_id": 1, "name": "Ann", "town": "Ghent"})
    database["books"].insert_one({"_id": 1, "author_id": 1})
    settled(store)
    settled(run.store(lettering("name", "town")))
    assert {"name": "Ann", "town": "Ghent"} == of(database, "books", 1)["author"]


def test_the_same_declaration_is_the_same_in_every_process():
    """Else each start would go over everything: nothing in it may depend on where objects lie in memory."""
    import subprocess
    import sys

    program = (
        f"from {__name__} import validated\n"
        "from treadle.graph.graph import Graph\n"
        "from treadle.upkeep.position import signature\n"
        "print([signature(rule) for rule in Graph(validated()).rules])\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert 1 == len(said)


def validated() -> list[type[Document]]:
    from pydantic import AfterValidator

    def checked(value: int) -> int:
        return value

    one = Annotated[
        int,
        AfterValidator(checked),
        Count("Vote", by="poll_id", maintain="stream", where={"weight": {"$in": [1, 2]}}),
    ]
    return tally(count=one)


# -- rebuild and handover -----------------------------------------------------------------------------------


def test_rebuild_hands_over_to_the_worker_without_a_gap(run, database):
    """What is written during and after the rebuild is the worker's; nothing is gone over twice."""
    store = run.store([Sale, Shop])
    store.setup()
    shop = database["shops"].insert_one({"name": "a"}).inserted_id
    database["sales"].insert_many([{"shop_id": shop, "amount": 1, "open": True} for _ in range(10)])
    seen = []

    def meanwhile(progress: Any) -> None:
        seen.append(progress)
        database["sales"].insert_one({"shop_id": shop, "amount": 100, "open": True})

    store.rebuild(Shop, progress=meanwhile)
    database["sales"].insert_one({"shop_id": shop, "amount": 1000, "open": True})
    worker = store.worker()
    worker.run_until_idle()
    assert [] == store.verify()
    assert 10 + 100 * len(seen) + 1000 == of(database, "shops", shop)["total"]
    assert 0 == worker.totals.get("verified", 0)


def test_a_rebuild_beside_a_worker_that_does_not_know_the_rule_leaves_no_gap(run, database):
    """The old version's worker reads on past what it does not know; the new one has to look again."""
    count = Annotated[int, Count("Vote", by="poll_id", maintain="stream")]
    total = Annotated[int, Sum("Vote", "weight", by="poll_id", maintain="stream")]
    old, new = run.store(tally(count=count)), run.store(tally(count=count, total=total))
    new.setup()
    database["polls"].insert_one({"_id": 1})
    database["votes"].insert_one({"_id": 1, "poll_id": 1, "weight": 5})
    settled(old)
    new.rebuild()
    database["votes"].insert_one({"_id": 2, "poll_id": 1, "weight": 7})
    old.worker().run_until_idle()
    settled(new)
    assert 12 == of(database, "polls", 1)["total"]


def test_keys_of_the_shop_are_subdocuments():
    """What the big tests rely on."""
    assert all(isinstance(key, dict) for key in KEYS)
