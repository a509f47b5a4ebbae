"""References by a unique field other than the id: `by="carrier", to="code"`, however it is maintained."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from tests.upkeep.followed import without_former_states
from treadle import (
    Average,
    Count,
    DataError,
    Document,
    ExtendedReference,
    Formula,
    Indexed,
    Max,
    Store,
    Subset,
    Sum,
    UsageError,
)

STEPS = 120
RACES = 12
IDS = [ObjectId() for _ in range(8)]


class Card(BaseModel):
    title: str | None = None


class ShipmentCard(BaseModel):
    weight: int | None = None


def models(maintain: Any, on_delete: Any = "keep") -> tuple[Any, Any]:
    """Carriers that shipments name by code, and that gather from them; all maintained in one way."""
    how: Any = {"maintain": maintain}
    if maintain == "schedule":
        how["every"] = timedelta(hours=1)

    class Carrier(Document, collection="carriers"):
        code: str | None = None
        title: str = ""
        count: Annotated[int, Count("Shipment", by="carrier", to="code", **how)] = 0
        total: Annotated[int, Sum("Shipment", "weight", by="carrier", to="code", **how)] = 0
        heavy: Annotated[
            int, Count("Shipment", by="carrier", to="code", where={"weight": {"$gte": 5}}, **how)
        ] = 0
        mean: Annotated[float | None, Average("Shipment", "weight", by="carrier", to="code", **how)] = None
        most: Annotated[int | None, Max("Shipment", "weight", by="carrier", to="code", **how)] = None
        top: Annotated[
            list[ShipmentCard],
            Subset("Shipment", by="carrier", to="code", sort="-weight", size=2, **how),
        ] = []
        doubled: Annotated[int | None, Formula({"$multiply": [2, "$total"]}, **how)] = None

    class Shipment(Document, collection="shipments"):
        carrier: str | None = None
        weight: int = 0
        card: Annotated[
            Card | None, ExtendedReference(Carrier, by="carrier", to="code", on_delete=on_delete, **how)
        ] = None

    return Carrier, Shipment


def expected(database: Any) -> dict[Any, Any]:
    """What every carrier should hold, in plain Python."""
    shipments = list(database["shipments"].find(sort=[("_id", 1)]))
    right = {}
    for carrier in database["carriers"].find():
        own = [each for each in shipments if carrier.get("code") is not None]
        own = [each for each in own if each.get("carrier") == carrier["code"]]
        weights = [each["weight"] for each in own]
        first = sorted(own, key=lambda each: (-each["weight"], each["_id"]))[:2]
        right[carrier["_id"]] = {
            "count": len(own),
            "total": sum(weights),
            "heavy": sum(weight >= 5 for weight in weights),
            "mean": sum(weights) / len(weights) if weights else None,
            "most": max(weights, default=None),
            "top": [{"_id": each["_id"], "weight": each["weight"]} for each in first],
            "doubled": 2 * sum(weights),
        }
    return right


def check(database: Any) -> None:
    for identity, right in expected(database).items():
        stored = database["carriers"].find_one({"_id": identity})
        assert right == {name: stored.get(name) for name in right}
    titles = {each["code"]: each["title"] for each in database["carriers"].find() if each.get("code")}
    for each in database["shipments"].find():
        if each.get("carrier") in titles:
            assert {"title": titles[each["carrier"]]} == each.get("card")


class Writes:
    """Random writes by way of a Store; what they do depends on the seed alone."""

    def __init__(self, store: Any, carrier: Any, shipment: Any, seed: int) -> None:
        self.store, self.carrier, self.shipment = store, carrier, shipment
        self.random = random.Random(seed)
        self.acts = [getattr(self, name) for name in sorted(dir(self)) if name.startswith("act_")]

    def write(self) -> None:
        try:
            self.random.choice(self.acts)()
        except UsageError as error:
            # Somebody has the code already.
            assert "duplicate-key" == error.code

    def _code(self) -> str | None:
        return self.random.choice(["a", "b", "c", "d", None])

    def _one(self, model: Any) -> Any:
        found = list(self.store.find(model))
        return self.random.choice(found) if found else None

    def act_insert_carrier(self) -> None:
        self.store.insert(self.carrier(code=self._code(), title=self.random.choice("xyz")))

    def act_insert_shipments(self) -> None:
        new = [self.shipment(carrier=self._code(), weight=self.random.randint(0, 9)) for _ in range(2)]
        self.store.insert_many(new)

    def act_rename(self) -> None:
        if (carrier := self._one(self.carrier)) is not None:
            after = self.store.update(self.carrier, carrier.id, {"$set": {"code": self._code()}})
            check(self.store.raw)
            assert self.store.get(self.carrier, carrier.id) == after

    def act_swap(self) -> None:
        found = [each for each in self.store.find(self.carrier) if each.code]
        if len(found) > 1:
            one, other = self.random.sample(found, 2)
            with self.store.transaction():
                self.store.update(self.carrier, one.id, {"$set": {"code": "swapping"}})
                self.store.update(self.carrier, other.id, {"$set": {"code": one.code}})
                self.store.update(self.carrier, one.id, {"$set": {"code": other.code}})

    def act_replace(self) -> None:
        if (carrier := self._one(self.carrier)) is not None:
            carrier.code, carrier.title = self._code(), self.random.choice("xyz")
            self.store.replace(carrier)

    def act_retitle(self) -> None:
        self.store.update_many(self.carrier, {"title": "x"}, {"$set": {"title": "y"}})

    def act_move(self) -> None:
        if (shipment := self._one(self.shipment)) is not None:
            self.store.update(self.shipment, shipment.id, {"$set": {"carrier": self._code()}})

    def act_weigh(self) -> None:
        if (shipment := self._one(self.shipment)) is not None:
            self.store.change(shipment, weight=self.random.randint(0, 9), carrier=self._code())

    def act_delete_carrier(self) -> None:
        if (carrier := self._one(self.carrier)) is not None and self.random.random() < 0.3:
            self.store.delete(self.carrier, carrier.id)

    def act_delete_shipment(self) -> None:
        if (shipment := self._one(self.shipment)) is not None:
            self.store.delete(self.shipment, shipment.id)


def test_values_follow_a_random_history(run, database):
    """Writes of both sides, renames and swaps, with names that nobody has for a while."""
    Carrier, Shipment = models("write")
    store = run.store([Carrier, Shipment])
    store.setup()
    store.raw = database
    writes = Writes(store, Carrier, Shipment, seed=7)
    for number in range(STEPS):
        writes.write()
        check(database)
        if number % 20 == 0:
            assert [] == store.verify()
    assert [] == store.verify()


@pytest.mark.parametrize("former", [True, False])
def test_the_worker_follows_raw_writers(run, database, former):
    """Renames too; with and without what the server keeps of former states."""
    Carrier, Shipment = models("stream")
    store = run.store([Carrier, Shipment])
    store.setup()
    if not former:
        for name in ("carriers", "shipments"):
            without_former_states(database, name)
    store.worker().run_until_idle()
    chance = random.Random(3)
    for number in range(40):
        code = chance.choice("abcd")
        shipment, carrier = {"_id": IDS[chance.randrange(8)]}, {"_id": IDS[chance.randrange(4)]}
        new = {"carrier": code, "weight": chance.randrange(9)}
        if number % 4 == 0:
            database["shipments"].replace_one(shipment, new, upsert=True)
        elif number % 4 == 1:
            database["shipments"].update_one(shipment, {"$set": {"carrier": code}})
        elif number % 4 == 2 and database["carriers"].find_one({"code": code}) is None:
            database["carriers"].update_one(carrier, {"$set": {"code": code, "title": code}}, upsert=True)
        else:
            database["shipments"].delete_one(shipment)
        if number % 8 == 7:
            store.worker().run_until_idle()
            check(database)
            assert [] == store.verify()


def test_schedules_repair_and_rebuild_go_by_name(run, database):
    Carrier, Shipment = models("schedule")
    store = run.store([Carrier, Shipment])
    store.setup()
    store.insert_many([Carrier(code="a", title="A"), Carrier(code="b"), Carrier()])
    store.insert_many([Shipment(carrier="a", weight=5), Shipment(carrier="b"), Shipment(carrier="z")])
    store.run_due()
    check(database)
    database["carriers"].update_one({"code": "a"}, {"$set": {"count": 9, "top": []}})
    assert {"count", "top"} == {finding.path for finding in store.verify(Carrier)}
    assert 1 == store.repair(Carrier)
    check(database)
    database["carriers"].update_many({}, {"$set": {"total": 7}})
    store.rebuild(Carrier)
    check(database)


def test_tampering_is_found_and_repaired(run, database):
    Carrier, Shipment = models("write")
    store = run.store([Carrier, Shipment])
    store.setup()
    store.insert(Carrier(code="a", title="A"))
    store.insert(Shipment(carrier="a", weight=5))
    database["carriers"].update_one({"code": "a"}, {"$set": {"code": "b"}})
    database["shipments"].update_one({}, {"$set": {"card": {"title": "wrong"}}})
    assert {"count", "total", "heavy", "mean", "most", "top"} <= {
        finding.path for finding in store.verify(Carrier)
    }
    store.repair()
    database["carriers"].update_one({"code": "b"}, {"$set": {"code": "a"}})
    store.repair()
    check(database)
    assert [] == store.verify()


def test_racing_writers_and_renames_miss_nobody(server, database):
    """A shipment that is inserted while its carrier takes, or gives up, the name."""
    Carrier, Shipment = models("write")
    stores = [
        Store.open(server.uri.replace("/?", f"/{database.name}?"), [Carrier, Shipment]) for _ in range(3)
    ]
    stores[0].setup()
    carrier = stores[0].insert(Carrier(code="a", title="A"))

    def rename() -> None:
        for number in range(RACES):
            change = {"code": "ab"[number % 2], "title": str(number)}
            stores[0].update(Carrier, carrier.id, {"$set": change})

    def ship(store: Store, code: str) -> None:
        for number in range(RACES):
            store.insert(Shipment(carrier=code, weight=number))

    threads = [
        threading.Thread(target=rename),
        threading.Thread(target=ship, args=(stores[1], "a")),
        threading.Thread(target=ship, args=(stores[2], "b")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(database)
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
