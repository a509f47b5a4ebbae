"""What stopped every process, as it was reported: each once, as small as it can be."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from tests.poison.values import VALUES, insert, replace
from treadle import Document, ExtendedReference, Limits
from treadle.errors import DataError

BROKEN = VALUES["bytes that are no UTF-8"]


class Place(Document, collection="places", validation="off"):
    id: int
    name: str = ""
    loc: Any = None


class PlaceCard(BaseModel):
    loc: Any = None


class Visit(Document, collection="visits", validation="off"):
    id: int
    place_id: int
    place: Annotated[PlaceCard | None, ExtendedReference(Place, by="place_id")] = None


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "treadle")


@pytest.mark.parametrize("fan_out_max", [2, 100])
def test_coordinates_that_no_index_takes_stop_no_process(run, database, fan_out_max):
    """With more copies than one transaction makes, and with fewer."""
    limits = Limits(fan_out_max=fan_out_max, fan_out_chunk=2)
    store = run.store([Place, Visit], limits=limits)
    store.setup()
    database["visits"].create_index([("place.loc", "2dsphere")])
    store.insert_many([Place(id=1, loc=[0, 0]), Place(id=2, loc=[0, 0])])
    store.insert_many([Visit(id=number, place_id=1 + number % 2) for number in range(10)])
    store.update(Place, 1, {"$set": {"loc": [999, 999]}})
    assert 0 == database["treadle.intents"].count_documents({})
    again = run.store([Place, Visit], limits=limits)
    again.recover()
    again.repair()
    again.rebuild()
    again.update(Place, 2, {"$set": {"loc": [1, 1]}})
    assert {(1, 1)} == {tuple(each["place"]["loc"]) for each in database["visits"].find({"place_id": 2})}
    aside = again.status().aside
    assert {0, 2, 4, 6, 8} == {each.document_id for each in aside}
    assert {16755} == {each.code for each in aside}
    again.update(Place, 1, {"$set": {"loc": [3, 3]}})
    again.recover()
    assert 0 == again.status().set_aside
    assert {(3, 3)} == {tuple(each["place"]["loc"]) for each in database["visits"].find({"place_id": 1})}
    assert [] == again.verify()


def test_a_document_that_cannot_be_decoded_is_named_by_its_id(run, database):
    """By every read, wherever it stands; those before it are read."""
    store = run.store([Place, Visit])
    store.setup()
    store.insert_many([Place(id=number) for number in range(150)])
    replace(database, "places", 120, {"name": BROKEN})
    results = iter(store.find(Place, sort="_id"))
    with pytest.raises(DataError, match="places 120 cannot be decoded") as refused:
        for number in range(150):
            assert number == next(results).id
    assert "document-unreadable" == refused.value.code
    for read in (lambda: store.get(Place, 120), lambda: store.find_one(Place, {"_id": 120})):
        with pytest.raises(DataError, match="places 120 cannot be decoded"):
            read()
    with pytest.raises(DataError, match="places 120 cannot be decoded"):
        store.insert(Visit(id=1, place_id=120))
    assert 5 == store.require(Place, 5).id
    replace(database, "places", 120, {"name": "mended"})
    assert 150 == len(list(store.find(Place)))


def test_an_id_that_cannot_be_decoded_is_passed_by(run, database):
    """Going over a collection neither stops at it nor turns in circles."""
    store = run.store([Place, Visit], limits=Limits(verify_page=2, rebuild_page=2))
    store.setup()
    store.insert(Place(id=1))
    store.insert_many([Visit(id=number, place_id=1) for number in range(5)])
    for number, value in enumerate((BROKEN, VALUES["a UUID of three bytes"], VALUES["an empty UUID"])):
        insert(database, "visits", {"_id": value, "place_id": 1, "number": number})
    database["visits"].update_many({"_id": {"$lt": 5}}, {"$set": {"place": None}})
    findings = store.verify()
    assert [0, 1, 2, 3, 4] == sorted(each.document_id for each in findings if each.pattern != "set-aside")
    assert 3 == len([each for each in findings if each.pattern == "set-aside"])
    store.repair()
    store.rebuild()
    assert 3 == len([each for each in store.verify() if each.pattern == "set-aside"])
    assert 3 == store.status().set_aside
    database["visits"].delete_many({"number": {"$exists": True}})
    store.repair()
    assert [] == store.verify()
    assert 0 == store.status().set_aside
