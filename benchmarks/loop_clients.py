"""What the clients of the demo's shop and of the examples' databases ask: each page as a program would send it.

A page is a function of a database and a chance. Half of the requests are
about what is popular, as everywhere.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from bson import ObjectId
from examples.databases.maker import START
from pymongo import MongoClient
from pymongo.database import Database

from treadle.demo.data import Shop
from treadle.demo.requests import REQUESTS

# Between two pages of one client: a recording on two cores shall keep up.
PAUSE_SECONDS = 0.004
KNOWN_MAX = 300
POPULAR_SHARE = 0.5

Page = Callable[[Database[Any], random.Random], object]


class Known:
    """Ids that clients know, read once; the first is the popular one."""

    def __init__(self, database: Database[Any], *collections: str) -> None:
        self.ids = {
            name: [
                each["_id"] for each in database[name].find({}, {"_id": 1}).sort("_id", 1).limit(KNOWN_MAX)
            ]
            for name in collections
        }

    def one(self, collection: str, chance: random.Random) -> Any:
        ids = self.ids[collection]
        return ids[0] if chance.random() < POPULAR_SHARE else chance.choice(ids)


def _join(source: str, by: str, into: str) -> dict[str, Any]:
    return {"$lookup": {"from": source, "localField": by, "foreignField": "_id", "as": into}}


def shop(database: Database[Any], made: Shop) -> list[Page]:
    """The demo's requests, a page of an order with its customer, and writes."""
    known = Known(database, "products", "orders")

    def asked(request: Any) -> Page:
        def page(database: Database[Any], chance: random.Random) -> None:
            # Nobody looks at everybody who follows the celebrity all the time.
            if request.code != "outlier" or chance.random() < 0.2:
                request.before(database, replace(made, popular=known.one("products", chance), views=5))

        return page

    def order(database: Database[Any], chance: random.Random) -> None:
        found = database["orders"].find_one({"_id": known.one("orders", chance)})
        assert found is not None
        database["customers"].find_one({"_id": found["customer_id"]})
        if chance.random() < 0.03:
            database["customers"].update_one(
                {"_id": found["customer_id"]}, {"$set": {"tier": chance.choice(["gold", "silver"])}}
            )

    def review(database: Database[Any], chance: random.Random) -> None:
        if chance.random() < 0.1:
            identity, product = ObjectId(), known.one("products", chance)
            row = {"_id": identity, "product_id": product, "rating": 3, "text": "fine", "date": made.day}
            database["reviews"].insert_one(row)

    return [*map(asked, REQUESTS), order, review]


def music_shop(database: Database[Any]) -> list[Page]:
    known = Known(database, "albums", "customers", "invoices", "tracks")

    def album(database: Database[Any], chance: random.Random) -> None:
        database["tracks"].count_documents({"album_id": known.one("albums", chance)})

    def customer(database: Database[Any], chance: random.Random) -> None:
        of = {"customer_id": known.one("customers", chance)}
        list(database["invoices"].find(of).sort([("date", -1), ("_id", 1)]).limit(3))

    def invoices(database: Database[Any], chance: random.Random) -> None:
        match = {"$match": {"_id": {"$lt": known.one("invoices", chance) + 20}}}
        stages = [
            match,
            {"$sort": {"_id": -1}},
            {"$limit": 20},
            _join("customers", "customer_id", "customer"),
        ]
        list(database["invoices"].aggregate(stages))

    def track(database: Database[Any], chance: random.Random) -> None:
        found = database["tracks"].find_one({"_id": known.one("tracks", chance)})
        assert found is not None
        database["albums"].find_one({"_id": found["album_id"]})

    def lines(database: Database[Any], chance: random.Random) -> None:
        list(database["invoice_lines"].find({"invoice_id": known.one("invoices", chance)}))

    return [album, customer, invoices, track, lines]


def sensors(database: Database[Any]) -> list[Page]:
    known = Known(database, "sensors")

    def hours(database: Database[Any], chance: random.Random) -> None:
        window = {"$gte": START, "$lt": START + timedelta(days=1)}
        stages: list[Mapping[str, Any]] = [
            {"$match": {"sensor_id": known.one("sensors", chance), "ts": window}},
            {
                "$group": {
                    "_id": {"$dateTrunc": {"date": "$ts", "unit": "hour"}},
                    "average": {"$avg": "$temperature"},
                }
            },
            {"$sort": {"_id": 1}},
        ]
        list(database["readings"].aggregate(stages))

    def newest(database: Database[Any], chance: random.Random) -> None:
        of = {"sensor_id": known.one("sensors", chance)}
        list(database["readings"].find(of).sort([("ts", -1)]).limit(10))

    def number(database: Database[Any], chance: random.Random) -> None:
        database["readings"].count_documents({"sensor_id": known.one("sensors", chance)})

    return [hours, newest, number]


def social(database: Database[Any]) -> list[Page]:
    known = Known(database, "people", "posts")

    def wall(database: Database[Any], chance: random.Random) -> None:
        of = {"author_id": known.one("people", chance)}
        list(database["posts"].find(of).sort([("_id", -1)]).limit(5))

    def number(database: Database[Any], chance: random.Random) -> None:
        database["posts"].count_documents({"author_id": known.one("people", chance)})

    def likes(database: Database[Any], chance: random.Random) -> None:
        sums = {"_id": None, "likes": {"$sum": "$likes"}, "most": {"$max": "$likes"}}
        match = {"$match": {"author_id": known.one("people", chance)}}
        list(database["posts"].aggregate([match, {"$group": sums}]))

    def timeline(database: Database[Any], chance: random.Random) -> None:
        found = list(
            database["posts"].find({"_id": {"$lte": known.one("posts", chance)}}).sort("_id", -1).limit(8)
        )
        for post in found:
            database["people"].find_one({"_id": post["author_id"]}, {"name": 1})

    def like(database: Database[Any], chance: random.Random) -> None:
        database["posts"].update_one({"_id": known.one("posts", chance)}, {"$inc": {"likes": 1}})

    return [wall, number, likes, timeline, like]


def comments(database: Database[Any]) -> list[Page]:
    known = Known(database, "articles", "comments")

    def number(database: Database[Any], chance: random.Random) -> None:
        database["comments"].count_documents({"article_id": known.one("articles", chance)})

    def newest(database: Database[Any], chance: random.Random) -> None:
        of = {"article_id": known.one("articles", chance)}
        list(database["comments"].find(of).sort([("at", -1), ("_id", 1)]).limit(3))

    def latest(database: Database[Any], chance: random.Random) -> None:
        match = {"$match": {"_id": {"$gte": known.one("comments", chance)}}}
        stages = [match, {"$sort": {"_id": 1}}, {"$limit": 30}, _join("articles", "article_id", "article")]
        list(database["comments"].aggregate(stages))

    return [number, newest, latest]


def catalogue(database: Database[Any]) -> list[Page]:
    titles = [each["title"] for each in database["products"].find({}, {"title": 1}).limit(KNOWN_MAX)]
    suppliers = [each["name"] for each in database["suppliers"].find({}, {"name": 1}).limit(KNOWN_MAX)]

    def product(database: Database[Any], chance: random.Random) -> None:
        list(database["products"].find({"title": chance.choice(titles)}))

    def supplier(database: Database[Any], chance: random.Random) -> None:
        list(database["suppliers"].find({"name": chance.choice(suppliers)}))

    return [product, supplier]


def good_shop(database: Database[Any]) -> list[Page]:
    known = Known(database, "products", "customers", "orders")

    def product(database: Database[Any], chance: random.Random) -> None:
        database["products"].find_one({"_id": known.one("products", chance)})

    def orders(database: Database[Any], chance: random.Random) -> None:
        of = {"customer_id": known.one("customers", chance)}
        list(database["orders"].find(of).sort([("date", -1)]).limit(10))

    return [product, orders]


EXAMPLES: Mapping[str, Callable[[Database[Any]], list[Page]]] = {
    each.__name__: each for each in (music_shop, sensors, social, catalogue, comments, good_shop)
}


@contextmanager
def at_work(uri: str, name: str, pages: Sequence[Page]) -> Iterator[None]:
    """One client that asks for these pages, in turn, until the block ends; what it raises is raised here."""
    ended = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        chance = random.Random(1)
        try:
            with MongoClient[Any](uri) as client:
                while not ended.is_set():
                    for page in pages:
                        page(client[name], chance)
                        ended.wait(PAUSE_SECONDS)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    for failure in failures:
        raise failure
