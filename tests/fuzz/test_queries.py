"""Random filters and updates: each is answered or refused with a reason, and what is maintained stays right."""

from __future__ import annotations

import random
from typing import Annotated, Any

from bson import ObjectId
from pymongo.errors import OperationFailure

from tests.fuzz import rounds
from tests.poison.values import VALUES, Element
from treadle import Count, Document, Id, Store, Sum
from treadle.errors import TreadleError

ODD: list[Any] = [value for value in VALUES.values() if not isinstance(value, Element)]
ODD += [2**70, "\ud800", {1, 2}, object(), b"x", {"$where": "1"}, {"$function": {}}]
NAMES = [
    "rating",
    "product_id",
    "_id",
    "count",
    "_treadle",
    "_treadle.n",
    "a.b",
    "$rating",
    "",
    "rating.$",
    "note",
]
FILTERS = [
    "$eq",
    "$ne",
    "$gt",
    "$in",
    "$nin",
    "$exists",
    "$type",
    "$not",
    "$regex",
    "$elemMatch",
    "$expr",
    "$mod",
]
JOINS = ["$and", "$or", "$nor", "$where", "$jsonSchema", "$comment"]
UPDATES = [
    "$set",
    "$inc",
    "$unset",
    "$push",
    "$rename",
    "$mul",
    "$min",
    "$max",
    "$currentDate",
    "$bit",
    "$nonsense",
]


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    note: str | None = None


class Product(Document, collection="products"):
    count: Annotated[int, Count(Review, by="product_id")] = 0
    total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0


def value(chance: random.Random, depth: int = 2) -> Any:
    kind = chance.randrange(8)
    if kind < 3:
        return chance.choice(ODD)
    if kind < 5 or not depth:
        return chance.choice([0, 1, -5, "x", None, 2.5, True, ObjectId()])
    if kind == 5:
        return [value(chance, depth - 1) for _ in range(chance.randrange(3))]
    return {name(chance): value(chance, depth - 1) for _ in range(chance.randrange(3))}


def name(chance: random.Random) -> Any:
    return chance.choice([*NAMES, *FILTERS, *JOINS])


def filter_of(chance: random.Random, depth: int = 2) -> Any:
    if depth and chance.random() < 0.3:
        return {chance.choice(JOINS): [filter_of(chance, depth - 1) for _ in range(chance.randrange(3))]}
    condition = value(chance)
    if chance.random() < 0.6:
        condition = {chance.choice(FILTERS): value(chance)}
    return {chance.choice(NAMES): condition}


def update_of(chance: random.Random) -> Any:
    if chance.random() < 0.1:
        return value(chance)
    return {
        chance.choice(UPDATES): {
            chance.choice(NAMES): value(chance, 1) for _ in range(1 + chance.randrange(2))
        }
        for _ in range(1 + chance.randrange(2))
    }


def test_every_filter_and_update_is_answered_or_refused(database):
    store = Store(database, [Review, Product])
    store.setup()
    products = store.insert_many([Product() for _ in range(3)])
    store.insert_many([Review(product_id=each.id, rating=3) for each in products for _ in range(4)])
    answered = refused = 0
    for chance in rounds(250):
        calls = [
            lambda chance=chance: list(store.find(Review, filter_of(chance), limit=5)),
            lambda chance=chance: store.count(Review, filter_of(chance)),
            lambda chance=chance: store.update(Review, filter_of(chance), update_of(chance)),
            lambda chance=chance: store.update_many(Review, filter_of(chance), update_of(chance)),
        ]
        try:
            chance.choice(calls)()
            answered += 1
        except (TreadleError, OperationFailure) as error:
            refused += 1
            assert str(error)
    assert answered
    assert refused
    assert [] == store.verify()
    assert 12 == len(list(store.find(Review)))
