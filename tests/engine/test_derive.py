"""The worker and repair store what a document derives, rule by rule."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from treadle import Count, Document, Store, Subset


class Review(Document, collection="reviews", validation="off"):
    id: int
    shop_id: int
    stars: int = 0


class Card(BaseModel):
    stars: int


class Shop(Document, collection="shops"):
    id: int
    reviews: Annotated[int, Count(Review, by="shop_id", maintain="stream")] = 0
    best: Annotated[list[Card], Subset(Review, by="shop_id", sort="-stars", size=3, maintain="stream")] = []


@pytest.fixture
def store(database: Any) -> Any:
    with Store(database, [Review, Shop]) as opened:
        opened.setup()
        opened.insert(Shop(id=1))
        opened.insert(Review(id=1, shop_id=1, stars=4))
        opened.worker().run_until_idle()
        database.reviews.insert_one({"_id": 2, "shop_id": 1, "stars": "many"})
        yield opened


@pytest.mark.parametrize("way", ["worker", "repair"])
def test_a_value_that_its_field_cannot_hold_stops_no_other_rule(store: Any, database: Any, way: str) -> None:
    if way == "worker":
        store.worker().run_until_idle()
    else:
        store.repair()
    shop = database.shops.find_one({"_id": 1})
    assert (2, [4]) == (shop["reviews"], [each["stars"] for each in shop["best"]])
    assert ["Shop.best"] == [each["_id"]["rule"] for each in database["treadle.set_aside"].find()]
    assert ["best"] == [finding.path for finding in store.verify()]
    database.reviews.update_one({"_id": 2}, {"$set": {"stars": 5}})
    store.worker().run_until_idle()
    assert [5, 4] == [each.stars for each in store.get(Shop, 1).best]
    assert [] == store.verify()
