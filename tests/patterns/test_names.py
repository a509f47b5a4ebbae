"""References by a unique field other than the id: `by="carrier", to="code"`.

The worlds of test_pairs.py with an alternate key play histories of them, in every mode.
"""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from tests.support import race
from treadle import (
    Count,
    DataError,
    Document,
    ExtendedReference,
    Indexed,
    Store,
    Sum,
    UsageError,
)

RACES = 12


class Card(BaseModel):
    title: str | None = None


def models(maintain: Any, on_delete: Any = "keep") -> tuple[Any, Any]:
    """Carriers that shipments name by code, and that gather from them."""

    class Carrier(Document, collection="carriers"):
        code: str | None = None
        title: str = ""
        count: Annotated[int, Count("Shipment", by="carrier", to="code", maintain=maintain)] = 0
        total: Annotated[int, Sum("Shipment", "weight", by="carrier", to="code", maintain=maintain)] = 0

    class Shipment(Document, collection="shipments"):
        carrier: str | None = None
        weight: int = 0
        card: Annotated[
            Card | None,
            ExtendedReference(Carrier, by="carrier", to="code", on_delete=on_delete, maintain=maintain),
        ] = None

    return Carrier, Shipment


def test_two_sources_swap_their_names_in_a_transaction(run, database):
    Carrier, Shipment = models("write")
    store = run.store([Carrier, Shipment])
    store.setup()
    one, other = store.insert_many([Carrier(code="a", title="A"), Carrier(code="b", title="B")])
    store.insert_many([Shipment(carrier="a", weight=2), Shipment(carrier="b", weight=7)])
    with store.transaction():
        for carrier, code in ((one, "swapping"), (other, "a"), (one, "b")):
            store.update(Carrier, carrier.id, {"$set": {"code": code}})
    assert [7, 2] == [store.get(Carrier, each.id).total for each in (one, other)]
    assert {"a": "B", "b": "A"} == {
        each["carrier"]: each["card"]["title"] for each in database["shipments"].find()
    }
    assert [] == store.verify()


def test_racing_writers_and_renames_miss_nobody(server, database):
    """A shipment that is inserted while its carrier takes, or gives up, the name."""
    Carrier, Shipment = models("write")
    uri = server.uri.replace("/?", f"/{database.name}?")
    stores = [Store.open(uri, [Carrier, Shipment]) for _ in range(3)]
    stores[0].setup()
    carrier = stores[0].insert(Carrier(code="a", title="A"))

    def rename() -> None:
        for number in range(RACES):
            change = {"code": "ab"[number % 2], "title": str(number)}
            stores[0].update(Carrier, carrier.id, {"$set": change})

    def ship(store: Store, code: str) -> None:
        for number in range(RACES):
            store.insert(Shipment(carrier=code, weight=number))

    race(rename, lambda: ship(stores[1], "a"), lambda: ship(stores[2], "b"))
    after = stores[0].get(Carrier, carrier.id)
    assert (RACES, sum(range(RACES))) == (after.count, after.total)
    cards = [each["card"] for each in database["shipments"].find({"carrier": after.code})]
    assert [{"title": after.title}] * RACES == cards
    assert [] == stores[0].verify()
    for store in stores:
        store.close()


def test_what_a_lost_name_means_is_said_by_on_delete(run, database):
    for on_delete, left in (("keep", {"title": "A"}), ("clear", None)):
        Carrier, Shipment = models("write", on_delete)
        store = run.store([Carrier, Shipment])
        store.setup()
        carrier = store.insert(Carrier(code="a", title="A"))
        shipment = store.insert(Shipment(carrier="a"))
        store.update(Carrier, carrier.id, {"$set": {"code": "b"}})
        stored = database["shipments"].find_one({"_id": shipment.id})
        assert left == stored["card"]
        assert (None if on_delete == "clear" else "a") == stored["carrier"]
        assert [] == store.verify()
        database["carriers"].delete_many({})
        database["shipments"].delete_many({})


@pytest.mark.parametrize("on_delete", ["restrict", "cascade"])
def test_a_name_that_others_depend_on_is_not_given_up(run, database, on_delete):
    Carrier, Shipment = models("write", on_delete)
    store = run.store([Carrier, Shipment])
    store.setup()
    carrier = store.insert(Carrier(code="a", title="A"))
    store.insert(Shipment(carrier="a"))
    with pytest.raises(DataError, match="reference-restricted"):
        store.update(Carrier, carrier.id, {"$set": {"code": "b"}})
    carrier.code = "b"
    with pytest.raises(DataError, match="reference-restricted"):
        store.replace(carrier)
    assert "a" == database["carriers"].find_one()["code"]
    store.update(Carrier, carrier.id, {"$set": {"code": "a", "title": "new"}})
    assert {"title": "new"} == database["shipments"].find_one()["card"]
    if on_delete == "cascade":
        store.delete(Carrier, carrier.id)
        assert 0 == database["shipments"].count_documents({})


def test_a_deleted_source_is_followed_by_name(run, database):
    Carrier, Shipment = models("stream", "cascade")
    store = run.store([Carrier, Shipment])
    store.setup()
    store.worker().run_until_idle()
    database["carriers"].insert_one({"code": "a", "title": "A"})
    database["shipments"].insert_one({"carrier": "a", "weight": 1})
    store.worker().run_until_idle()
    database["carriers"].delete_one({})
    store.worker().run_until_idle()
    assert 0 == database["shipments"].count_documents({})


def test_set_up_makes_the_unique_index(run, database):
    Carrier, Shipment = models("write")
    store = run.store([Carrier, Shipment])
    with pytest.raises(UsageError, match="index-missing"):
        store.insert(Shipment(carrier="a"))
    store.setup()
    assert [] == store.setup()
    index = database["carriers"].index_information()["code_1"]
    assert index["unique"]
    assert {"code": {"$type": ["string"]}} == index["partialFilterExpression"]
    store.insert_many([Carrier(), Carrier(), Carrier(code="a")])
    with pytest.raises(UsageError, match="duplicate-key"):
        store.insert(Carrier(code="a"))


def test_an_index_that_is_declared_is_enough(run, database):
    class Country(Document, collection="countries"):
        code: Annotated[str, Indexed(unique=True)]
        towns: Annotated[int, Count("Town", by="country", to="code")] = 0

    class Town(Document, collection="towns"):
        country: str

    store = run.store([Country, Town])
    store.setup()
    assert {"_id_", "code_1"} == set(database["countries"].index_information())
    store.insert(Town(country="pt"))
    assert 1 == store.insert(Country(code="pt")).towns
