"""Whether the server's time zones are those of today."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import pytest
from pymongo import MongoClient

from treadle import Count, Day, Document, Rollup, Store
from treadle.server.local import start
from treadle.upkeep.zones import WELL_KNOWN, declared_zones, wrong_zones


class Sale(Document, collection="sales"):
    at: dt.datetime


class Daily(
    Document,
    collection="daily",
    rollup=Rollup(Sale, keys={"day": Day("at", timezone="America/Mexico_City")}),
):
    day: dt.datetime
    count: Annotated[int, Count()] = 0


def test_a_server_with_the_systems_tables_agrees_with_python(run, caplog):
    store = run.store([Sale, Daily])
    assert ["America/Mexico_City"] == declared_zones(store.graph)
    assert {} == run(wrong_zones(WELL_KNOWN))
    assert {"Mars/Base": None} == run(wrong_zones(["Mars/Base"]))
    store.setup()
    assert [] == [each for each in caplog.records if "offset" in each.message]


@pytest.mark.server
def test_set_up_warns_of_a_zone_that_the_server_knows_otherwise(caplog, monkeypatch):
    """The tables inside mongod 6.0.5 are of before Mexico gave up summer time, in October 2022."""
    monkeypatch.setattr("treadle.server.local._zone_folder", lambda: None)
    with start() as server, MongoClient(server.uri) as client:
        store = Store(client["zones"], [Sale, Daily])
        store.setup()
        assert [] == store.setup()
    warned = [each.message for each in caplog.records if "offset" in each.message]
    assert 2 == len(warned)
    assert "another offset from 2023-04-02 on for America/Mexico_City" in warned[0]
