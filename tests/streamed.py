"""A shop whose derived values are all maintained by the worker, raw writers for it, and its oracle.

Nobody here writes through Treadle: the writers are plain PyMongo, as mongosh,
a bulk load or another service would be. What the worker should have made of
it is recomputed in plain Python.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BaseModel
from pymongo.database import Database

from treadle import (
    Average,
    Count,
    Document,
    ExtendedReference,
    Formula,
    Max,
    Min,
    Rollup,
    Subset,
    Sum,
)

Raw = dict[str, Any]


class Key(BaseModel):
    """An id that is a sub-document."""

    site: str
    number: int


class Customer(Document, collection="customers", naming="camel"):
    id: int
    full_name: str
    tier: str | None = None


class CustomerCard(BaseModel):
    full_name: str | None = None
    tier: str | None = None


class Review(Document, collection="reviews", naming="camel"):
    id: int
    product_key: Key | None = None
    star_rating: int | None = None
    body: str = ""


class ReviewCard(BaseModel):
    star_rating: int | None = None
    body: str | None = None


class Tag(BaseModel):
    product_key: Key
    weight: int = 1


class Article(Document, collection="articles"):
    """A source that names many targets, in an array."""

    id: int
    tags: list[Tag] = []


class Summary(BaseModel):
    review_count: Annotated[int, Count(Review, by="product_key", maintain="stream")] = 0
    rating_total: Annotated[int, Sum(Review, "star_rating", by="product_key", maintain="stream")] = 0


class Product(Document, collection="products", naming="camel"):
    id: Key
    unit_price: int
    blob: str = ""
    summary: Summary = Summary()
    mean: Annotated[float | None, Average(Review, "star_rating", by="product_key", maintain="stream")] = None
    best: Annotated[int | None, Max(Review, "star_rating", by="product_key", maintain="stream")] = None
    worst: Annotated[
        int | None,
        Min(
            Review,
            "star_rating",
            by="product_key",
            where={"starRating": {"$gte": 2}},
            maintain="stream",
        ),
    ] = None
    doubled: Annotated[
        int, Sum(Review, {"$multiply": ["$starRating", 2]}, by="product_key", maintain="stream")
    ] = 0
    article_count: Annotated[int, Count(Article, by="tags.product_key", maintain="stream")] = 0
    article_weight: Annotated[int, Sum(Article, "tags.weight", by="tags.product_key", maintain="stream")] = 0
    top: Annotated[
        list[ReviewCard],
        Subset(Review, by="product_key", sort="-star_rating", size=2, maintain="stream"),
    ] = []
    with_tax: Annotated[int | None, Formula({"$multiply": ["$unitPrice", 3]}, maintain="stream")] = None
    score: Annotated[
        int | None, Formula({"$add": ["$summary.rating_total", "$unitPrice"]}, maintain="stream")
    ] = None


class Line(BaseModel):
    customer_id: int | None = None
    customer: Annotated[
        CustomerCard | None, ExtendedReference(Customer, by="customer_id", maintain="stream")
    ] = None
    note: str = ""


class Inner(BaseModel):
    customer_id: int | None = None
    customer_name: Annotated[
        str | None,
        ExtendedReference(Customer, by="customer_id", field="full_name", maintain="stream"),
    ] = None


class HeldCard(BaseModel):
    id: int
    full_name: str | None = None


class Order(Document, collection="orders", naming="camel"):
    id: int
    customer_id: int | None = None
    customer: Annotated[
        CustomerCard | None, ExtendedReference(Customer, by="customer_id", maintain="stream")
    ] = None
    inner: Inner = Inner()
    lines: list[Line] = []


MODELS: list[type[Document]] = [Customer, Review, Article, Product, Order]


class BySite(
    Document,
    collection="by_site",
    rollup=Rollup(Review, keys={"id": "product_key.site"}, maintain="stream"),
):
    id: str
    review_count: Annotated[int, Count()]
    rating_total: Annotated[int, Sum("star_rating")]


class ByNumber(
    Document,
    collection="by_number",
    rollup=Rollup(
        Review, keys={"number": "product_key.number"}, maintain="schedule", every=timedelta(hours=1)
    ),
):
    number: int
    review_count: Annotated[int, Count()]
    rating_total: Annotated[int, Sum("star_rating")]


# With documents that come and go with their groups, by the worker and on a schedule.
ROLLED = [*MODELS, BySite, ByNumber]
COLLECTIONS = ["customers", "reviews", "articles", "products", "orders"]
KEYS = [{"site": site, "number": number} for site in ("north", "south") for number in (1, 2, 3)]
CUSTOMERS = [1, 2, 3, 4]


# -- raw writers -------------------------------------------------------------------------------------


def product(key: Raw, price: int) -> Raw:
    return {"_id": dict(key), "unitPrice": price, "blob": "", "summary": {}}


def order(number: int, customer: int | None, lines: list[int]) -> Raw:
    return {
        "_id": number,
        "customerId": customer,
        "inner": {"customer_id": customer},
        "lines": [{"customer_id": each, "note": ""} for each in lines],
    }


class Writer:
    """Random raw writes; what it does depends on the seed alone."""

    def __init__(self, database: Database[Any], seed: int, numbers: int = 12, offset: int = 0) -> None:
        self.database = database
        self.random = random.Random(seed)
        self.numbers = [offset + number for number in range(numbers)]
        self.acts = [getattr(self, name) for name in dir(self) if name.startswith("act_")]

    def write(self, times: int = 1) -> None:
        for _ in range(times):
            self.random.choice(self.acts)()

    def _number(self) -> Raw:
        return {"_id": self.random.choice(self.numbers)}

    def _key(self) -> Raw:
        return dict(self.random.choice(KEYS))

    def _rating(self) -> int | None:
        return self.random.choice([None, 0, 1, 2, 3, 4, 5])

    def act_put_review(self) -> None:
        new = {"productKey": self._key(), "starRating": self._rating(), "body": self.random.choice("abc")}
        self.database["reviews"].replace_one(self._number(), new, upsert=True)

    def act_rate(self) -> None:
        self.database["reviews"].update_one(self._number(), {"$set": {"starRating": self._rating()}})

    def act_rate_many(self) -> None:
        self.database["reviews"].update_many({"productKey": self._key()}, {"$inc": {"n": 1}})
        self.database["reviews"].update_many({"starRating": 4}, {"$set": {"starRating": 5}})

    def act_move(self) -> None:
        self.database["reviews"].update_one(self._number(), {"$set": {"productKey": self._key()}})

    def act_move_part_of_the_key(self) -> None:
        found = {**self._number(), "productKey": {"$type": "object"}}
        self.database["reviews"].update_one(
            found, {"$set": {"productKey.number": self.random.choice([1, 2, 3])}}
        )

    def act_orphan(self) -> None:
        self.database["reviews"].update_one(self._number(), {"$unset": {"productKey": ""}})

    def act_delete_review(self) -> None:
        self.database["reviews"].delete_one(self._number())

    def act_delete_reviews(self) -> None:
        self.database["reviews"].delete_many({"productKey": self._key()})

    def act_put_article(self) -> None:
        tags = [{"product_key": self._key(), "weight": self.random.randint(0, 3)} for _ in range(3)]
        self.database["articles"].replace_one(self._number(), {"tags": tags}, upsert=True)

    def act_tag(self) -> None:
        tag = {"product_key": self._key(), "weight": self.random.randint(0, 3)}
        self.database["articles"].update_one(self._number(), {"$push": {"tags": tag}})

    def act_change_tag(self) -> None:
        change = {"tags.0.product_key": self._key(), "tags.0.weight": 2}
        self.database["articles"].update_one(
            {**self._number(), "tags.0": {"$exists": True}}, {"$set": change}
        )

    def act_cut_tags(self) -> None:
        self.database["articles"].update_one(self._number(), {"$pop": {"tags": 1}})

    def act_delete_article(self) -> None:
        self.database["articles"].delete_one(self._number())

    def act_put_product(self) -> None:
        key = self._key()
        self.database["products"].replace_one(
            {"_id": key}, product(key, self.random.randint(1, 9)), upsert=True
        )

    def act_reprice(self) -> None:
        self.database["products"].update_one(
            {"_id": self._key()}, {"$set": {"unitPrice": self.random.randint(1, 9)}}
        )

    def act_meddle(self) -> None:
        wrong = self.random.choice(["summary.review_count", "mean", "best", "doubled", "withTax", "top"])
        value = [] if wrong == "top" else 77
        self.database["products"].update_one({"_id": self._key()}, {"$set": {wrong: value}})

    def act_unset_summary(self) -> None:
        self.database["products"].update_one({"_id": self._key()}, {"$unset": {"summary": "", "mean": ""}})

    def act_delete_product(self) -> None:
        self.database["products"].delete_one({"_id": self._key()})

    def act_put_customer(self) -> None:
        new = {
            "fullName": self.random.choice(["Ann", "Bob", "$name", ""]),
            "tier": self.random.choice(["a", "b"]),
        }
        self.database["customers"].replace_one({"_id": self.random.choice(CUSTOMERS)}, new, upsert=True)

    def act_rename(self) -> None:
        self.database["customers"].update_one(
            {"_id": self.random.choice(CUSTOMERS)}, {"$set": {"fullName": self.random.choice(["Cid", "Dee"])}}
        )

    def act_remove_tier(self) -> None:
        self.database["customers"].update_one(
            {"_id": self.random.choice(CUSTOMERS)}, {"$unset": {"tier": ""}}
        )

    def act_put_order(self) -> None:
        new = order(
            self.random.choice(self.numbers),
            self.random.choice(CUSTOMERS),
            [self.random.choice(CUSTOMERS) for _ in range(2)],
        )
        self.database["orders"].replace_one({"_id": new["_id"]}, new, upsert=True)

    def act_reassign(self) -> None:
        customer = self.random.choice([*CUSTOMERS, None])
        change = self.random.choice(["customerId", "inner.customer_id"])
        self.database["orders"].update_one(self._number(), {"$set": {change: customer}})

    def act_reassign_line(self) -> None:
        found = {**self._number(), "lines.0": {"$exists": True}}
        change = {"lines.0.customer_id": self.random.choice(CUSTOMERS)}
        self.database["orders"].update_one(found, {"$set": change})

    def act_add_line(self) -> None:
        line = {"customer_id": self.random.choice(CUSTOMERS), "note": "new"}
        self.database["orders"].update_one(self._number(), {"$push": {"lines": line}})

    def act_meddle_order(self) -> None:
        self.database["orders"].update_one(
            self._number(), {"$set": {"customer": {"full_name": "nobody"}, "inner.customer_name": "x"}}
        )

    def act_delete_order(self) -> None:
        self.database["orders"].delete_one(self._number())


# -- the oracle ----------------------------------------------------------------------------------------


def wrong(database: Database[Any]) -> list[tuple[str, Any, str, Any, Any]]:
    """Each maintained value that is not what naive recomputation gives: where, stored, expected."""
    state = {name: list(database[name].find()) for name in COLLECTIONS}
    found = []
    for each in state["products"]:
        for path, expected in right_product(each, state).items():
            stored: Any = each
            for part in path.split("."):
                stored = stored.get(part) if isinstance(stored, dict) else None
            if stored != expected:
                found.append(("products", each["_id"], path, stored, expected))
    cards = {
        each["_id"]: {
            **({"full_name": each["fullName"]} if "fullName" in each else {}),
            **({"tier": each["tier"]} if "tier" in each else {}),
        }
        for each in state["customers"]
    }
    for each in state["orders"]:
        copies = [
            ("customer", each["customerId"], each.get("customer"), None),
            ("inner", each["inner"].get("customer_id"), each["inner"].get("customer_name"), "full_name"),
        ]
        copies += [("lines", line["customer_id"], line.get("customer"), None) for line in each["lines"]]
        for path, reference, stored, only in copies:
            if reference is not None and reference not in cards:
                # The source is gone: whatever the copy was is kept.
                continue
            expected: Any = cards.get(reference)
            if only is not None and expected is not None:
                expected = expected.get(only)
            if stored != expected:
                found.append(("orders", each["_id"], path, stored, expected))
    return found


def right_product(each: Raw, state: dict[str, list[Raw]]) -> Raw:
    own = [review for review in state["reviews"] if review.get("productKey") == each["_id"]]
    ratings = [review["starRating"] for review in own if review.get("starRating") is not None]
    tags = [
        (article["_id"], tag)
        for article in state["articles"]
        for tag in article["tags"]
        if tag["product_key"] == each["_id"]
    ]
    # In the order of MongoDB a missing rating comes before every number.
    best = {review["_id"]: review.get("starRating") for review in own}
    order = sorted(
        own, key=lambda each: (-(-1 if best[each["_id"]] is None else best[each["_id"]]), each["_id"])
    )
    cards = [
        {"_id": review["_id"], "star_rating": review["starRating"], "body": review["body"]}
        for review in order[:2]
    ]
    return {
        "summary.review_count": len(own),
        "summary.rating_total": sum(ratings),
        "mean": sum(ratings) / len(ratings) if ratings else None,
        "best": max(ratings, default=None),
        "worst": min((rating for rating in ratings if rating >= 2), default=None),
        "doubled": 2 * sum(ratings),
        "articleCount": len({number for number, _ in tags}),
        "articleWeight": sum(tag["weight"] for _, tag in tags),
        "top": cards,
        "withTax": each["unitPrice"] * 3,
        "score": sum(ratings) + each["unitPrice"],
    }
