"""Requests as clients may send them, refused ones included: none of them ends a recording or a trial.

Covers: advisor/loop/perform, advisor/loop/values
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
from typing import Any

from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp

from tests.advisor.drafts import draft_of
from tests.advisor.loop.test_children import MODELS, REWRITTEN
from tests.advisor.loop.test_rewrite import PATTERNS
from treadle.advisor.loop.families import touched
from treadle.advisor.loop.perform import perform
from treadle.advisor.loop.units import collect, reads_of
from treadle.advisor.loop.values import shape
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.loop.write_cost import WriteCounter, watched_fields
from treadle.advisor.reading import Refused
from treadle.advisor.workload import of_children, read

ROUNDS = 3_000
STARTED = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, float("nan"), "", "$", "$$ROOT", "$reviews", "$reviews.rating", "a.b", "x\x00y",
    [], {}, [None], [[]], {"$": 1}, {"$in": 5}, {"$eq": {}}, {"": ""}, {"$expr": "x"}, {"$match": 3},
    ObjectId(), Binary(b"12"), Code("f"), DBRef("a", 1), Decimal128("NaN"), Int64(5), MaxKey(), MinKey(),
    Regex("("), Timestamp(1, 1), STARTED, {"$lookup": None}, {"$group": {"_id": None, "n": None}},
)  # fmt: skip
NAMES = (
    "filter", "sort", "limit", "skip", "projection", "pipeline", "query", "key", "q", "u", "update", "upsert",
    "multi", "arrayFilters", "collation", "hint", "let", "document", "remove", "fields", "c",
)  # fmt: skip
OPERATIONS = ("find", "aggregate", "count", "distinct", "insert", "update", "delete", "modify")


def odd(chance: random.Random) -> Request:
    """A request that holds something odd somewhere."""
    operation, collection = (
        chance.choice(OPERATIONS),
        chance.choice(("reviews", "products", "orders")),
    )
    if operation == "aggregate":
        body: Any = {"pipeline": _bent(chance, chance.choice(list(REWRITTEN.values())))}
    else:
        good: dict[str, Any] = {
            "filter": {"product_id": 1}, "sort": {"date": -1}, "limit": 3, "q": {"_id": 1},
            "u": {"$set": {"rating": 1}}, "query": {"product_id": 1}, "update": [{"$set": {"a": "$b"}}],
        }  # fmt: skip
        body = _bent(chance, good)
    body = dict(body) if isinstance(body, dict) else {}
    body[chance.choice(NAMES)] = chance.choice(VALUES)
    return Request(operation, collection, body, at=chance.random(), session=chance.randrange(3))


def _bent(chance: random.Random, value: Any) -> Any:
    """A copy with one part of it replaced."""
    if chance.random() < 0.15:
        return chance.choice(VALUES)
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        return {name: _bent(chance, each) if name == key else each for name, each in value.items()}
    if isinstance(value, list) and value:
        place = chance.randrange(len(value))
        return [_bent(chance, each) if number == place else each for number, each in enumerate(value)]
    return value


def test_no_request_ends_what_looks_at_it(database):
    chance = random.Random(18)
    requests = [odd(chance) for _ in range(ROUNDS)]
    for patterns in (PATTERNS, draft_of(MODELS)):
        reads, writes = reads_of(patterns), WriteCounter(watched_fields(patterns))
        collect(requests, [reads, writes])
        assert reads.groups()
        assert writes.documents
        for group in reads.groups():
            with contextlib.suppress(Refused):
                perform(database, group.first)
    for request in requests:
        shape(request)
    touched(requests)
    workload = read((each.as_profile("shop", STARTED) for each in requests), "shop", "test", ROUNDS)
    list(of_children(workload.queries))
    assert workload.operations > ROUNDS / 2
