"""What the shop asks of its database: each request without and with the pattern for it.

Both give the same answer, which the demo checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pymongo.database import Database

from treadle.demo.data import Shop
from treadle.store.blocking.store import Store

ORDERS_SHOWN = 50
REVIEWS_SHOWN = 5
FOLLOWERS_SHOWN = 20
DAY = timedelta(days=1)
# The advisor considers requests that occur ten times.
TIMES_SEEN = 12


@dataclass(frozen=True, slots=True)
class Request:
    """One thing that the shop does, and the code of the finding that it leads to."""

    code: str
    pattern: str
    asks: str
    # The name by which a declaration says so.
    call: str
    before: Callable[[Database[Any], Shop], Any]
    after: Callable[[Store, Shop], Any]
    how_before: str
    how_after: str
    profiled_runs: int = TIMES_SEEN
    timed_runs: int = 15
    # For a request that only counts: reads the count so far.
    read_count: Callable[[Database[Any], Shop], int] | None = None

    def title(self, shop: Shop) -> str:
        """What it asks, in this shop."""
        return self.asks.format(views=shop.views)


def _lookup_orders(database: Database[Any], shop: Shop) -> Any:
    join = {"from": "customers", "localField": "customer_id", "foreignField": "_id", "as": "customer"}
    pipeline: list[Any] = [
        {"$sort": {"placed_at": -1, "_id": 1}},
        {"$limit": ORDERS_SHOWN},
        {"$lookup": join},
    ]
    orders = database["orders"].aggregate(pipeline)
    return [(order["_id"], order["customer"][0]["name"]) for order in orders]


def model_named(store: Store, name: str) -> Any:
    """A model of the Store, by its name."""
    return next(model for model in store.graph.entries if model.__name__ == name)


def _find_orders(store: Store, shop: Shop) -> Any:
    orders = store.find(model_named(store, "Order"), sort="-placed_at", limit=ORDERS_SHOWN).to_list()
    return [(order.id, order.customer.name if order.customer else None) for order in orders]


def _group_reviews(database: Database[Any], shop: Shop) -> Any:
    sums = {"_id": None, "count": {"$sum": 1}, "average": {"$avg": "$rating"}}
    pipeline: list[Any] = [{"$match": {"product_id": shop.popular}}, {"$group": sums}]
    (group,) = database["reviews"].aggregate(pipeline)
    return group["count"], round(group["average"], 6)


def _get_popular(store: Store, shop: Shop) -> Any:
    product = store.get(model_named(store, "Product"), shop.popular)
    assert product is not None
    return product


def _get_rating(store: Store, shop: Shop) -> Any:
    product = _get_popular(store, shop)
    assert product.rating_average is not None
    return product.review_count, round(product.rating_average, 6)


def _find_newest(database: Database[Any], shop: Shop) -> Any:
    newest = database["reviews"].find({"product_id": shop.popular}).sort([("date", -1), ("_id", 1)])
    return [(review["date"], review["rating"]) for review in newest.limit(REVIEWS_SHOWN)]


def _get_newest(store: Store, shop: Shop) -> Any:
    return [(review.date, review.rating) for review in _get_popular(store, shop).recent_reviews]


def _read_whole(database: Database[Any], shop: Shop) -> Any:
    seller = database["sellers"].find_one({"_id": shop.celebrity})
    assert seller is not None
    return seller["name"], len(seller["followers"]), seller["followers"][:FOLLOWERS_SHOWN]


def _read_embedded(store: Store, shop: Shop) -> Any:
    seller = store.get(model_named(store, "Seller"), shop.celebrity)
    assert seller is not None
    return seller.name, seller.follower_count, seller.followers[:FOLLOWERS_SHOWN]


def _group_readings(database: Database[Any], shop: Shop) -> Any:
    hour = {"$dateTrunc": {"date": "$ts", "unit": "hour"}}
    window = {"$gte": shop.day, "$lt": shop.day + DAY}
    pipeline: list[Any] = [
        {"$match": {"sensor_id": shop.sensor, "ts": window}},
        {"$group": {"_id": hour, "average": {"$avg": "$temp"}}},
        {"$sort": {"_id": 1}},
    ]
    hours = database["readings"].aggregate(pipeline)
    return [(each["_id"], round(each["average"], 4)) for each in hours]


def _get_summary(store: Store, shop: Shop) -> Any:
    entries = store.summary(model_named(store, "Reading"), shop.sensor, shop.day, shop.day + DAY)
    return [(each.start, round(each.stats["temp"].sum / each.count, 4)) for each in entries]


def _count_each_view(database: Database[Any], shop: Shop) -> Any:
    for _ in range(shop.views):
        database["products"].update_one({"_id": shop.popular}, {"$inc": {"views": 1}})
    return shop.views


def _add_to_counter(store: Store, shop: Shop) -> Any:
    counter = store.counter(model_named(store, "Product"), "views")
    for _ in range(shop.views):
        counter.add(shop.popular)
    counter.flush()
    return shop.views


def _views(database: Database[Any], shop: Shop) -> int:
    product = database["products"].find_one({"_id": shop.popular})
    assert product is not None
    return int(product["views"])


REQUESTS = (
    Request(
        "extended-reference",
        "Extended Reference",
        f"the {ORDERS_SHOWN} newest orders, each with its customer's name",
        "ExtendedReference",
        _lookup_orders,
        _find_orders,
        "orders.aggregate, with $lookup",
        "store.find(Order)",
    ),
    Request(
        "computed",
        "Computed",
        "how many reviews a product has, and how good they are",
        "Average",
        _group_reviews,
        _get_rating,
        "reviews.aggregate, with $group",
        "store.get(Product, id)",
    ),
    Request(
        "subset",
        "Subset",
        f"the {REVIEWS_SHOWN} newest reviews of a product",
        "Subset",
        _find_newest,
        _get_newest,
        "reviews.find, sorted",
        "store.get(Product, id)",
    ),
    Request(
        "outlier",
        "Outlier",
        "the page of the seller with the most followers",
        "Outlier",
        _read_whole,
        _read_embedded,
        "sellers.find_one",
        "store.get(Seller, id)",
    ),
    Request(
        "bucket",
        "Bucket",
        "the average temperature of each hour of a day",
        "Bucket",
        _group_readings,
        _get_summary,
        "readings.aggregate, with $group",
        "store.summary(Reading, sensor, start, end)",
    ),
    Request(
        "approximation",
        "Approximation",
        "{views:,} page views, counted",
        "Approximate",
        _count_each_view,
        _add_to_counter,
        "products.update_one with $inc, for each",
        'store.counter(Product, "views").add(id), for each',
        profiled_runs=1,
        timed_runs=1,
        read_count=_views,
    ),
)
