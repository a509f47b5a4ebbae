"""Scheduled rollups beside the same `$group` and `$merge` by hand, and late data beside a whole run."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from itertools import count
from typing import Annotated, Any

from bson.decimal128 import Decimal128
from pymongo import MongoClient

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Average, Count, Day, Document, Rollup, Store, Sum

SALES = 1_000_000
SALES_QUICK = 20_000
PRODUCTS = 50
DAYS = 365
BATCH = 20_000
LATE_PART = 100
LATE_DAYS = (3, 50, 200)
FIRST = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
AFTER = FIRST + dt.timedelta(days=DAYS + 1)
HOUR = dt.timedelta(hours=1)
DAYS_ALONE = "bare $group and $merge of 3 days, which somebody named"
BY_HAND = "the same after reading the days of all changes in the stream, by hand"


class Sale(Document, collection="sales"):
    product_id: int
    amount: Decimal
    created_at: dt.datetime


class DailySales(
    Document,
    collection="daily_sales",
    rollup=Rollup(
        Sale, keys={"product_id": "product_id", "day": Day("created_at")}, maintain="schedule", every=HOUR
    ),
):
    product_id: int
    day: dt.datetime
    total_amount: Annotated[Decimal, Sum("amount")] = Decimal(0)
    order_count: Annotated[int, Count()] = 0
    average_order_value: Annotated[Decimal | None, Average("amount")] = None


def groups() -> list[Group]:
    """One group: the bare pipeline, the first run, and a run with 1 % late data."""
    return [Group("schedule", "roll up 1,000,000 sales into days per product", _roll_up, rounds=5)]


def _sales(chance: random.Random, number: int, days: Any) -> list[dict[str, Any]]:
    return [
        {
            "product_id": chance.randrange(PRODUCTS),
            "amount": Decimal128(str(chance.randrange(1, 10_000) / 100)),
            "created_at": FIRST + dt.timedelta(days=chance.choice(days), seconds=chance.randrange(86_400)),
        }
        for _ in range(number)
    ]


def _roll_up(context: Context) -> list[Contender]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    name = "bench_schedule"
    client.drop_database(name)
    context.stack.callback(client.drop_database, name)
    database = client[name]
    store = Store(database, [Sale, DailySales])
    store.setup()
    total = context.scale(SALES, SALES_QUICK)
    chance = random.Random(1)
    for start in range(0, total, BATCH):
        database.sales.insert_many(_sales(chance, min(BATCH, total - start), range(DAYS)), ordered=False)
    database.by_hand.create_index([("product_id", 1), ("day", 1)], unique=True)
    day = {"$dateTrunc": {"date": "$created_at", "unit": "day"}}
    sums = {"total": {"$sum": "$amount"}, "count": {"$sum": 1}, "average": {"$avg": "$amount"}}
    group = {"$group": {"_id": {"product": "$product_id", "day": day}, **sums}}
    shown = {"_id": 0, "product_id": "$_id.product", "day": "$_id.day", "total": 1, "count": 1, "average": 1}
    into = {"into": "by_hand", "on": ["product_id", "day"], "whenMatched": "replace"}
    hours = count(1)
    places: list[Any] = []

    def empty() -> None:
        database.by_hand.delete_many({})
        database.daily_sales.delete_many({})
        database["treadle.schedules"].delete_many({})

    def grouped(_: None) -> int:
        rows = database.sales.aggregate([group, {"$count": "groups"}], allowDiskUse=True)
        return int(next(iter(rows))["groups"])

    def by_hand(_: None) -> int:
        database.sales.aggregate([group, {"$project": shown}, {"$merge": into}], allowDiskUse=True)
        return database.by_hand.estimated_document_count()

    def some_days(named: Any) -> None:
        starts = named or [FIRST + dt.timedelta(days=day) for day in LATE_DAYS]
        within = [{"created_at": {"$gte": start, "$lt": start + dt.timedelta(days=1)}} for start in starts]
        stages = [{"$match": {"$or": within}}, group, {"$project": shown}, {"$merge": into}]
        database.sales.aggregate(stages)

    def from_stream(start: Any) -> None:
        """Nobody who finds late data in the stream can do less, but read fewer of the changes."""
        shown = {
            "operationType": 1,
            "day": {"$dateTrunc": {"date": "$fullDocument.created_at", "unit": "day"}},
        }
        days: set[Any] = set()
        with database.sales.watch(
            [{"$match": {"operationType": "insert"}}, {"$project": shown}],
            start_at_operation_time=start,
            batch_size=BATCH,
        ) as changes:
            for _ in range(total // LATE_PART):
                days.add(changes.next()["day"])
        assert len(LATE_DAYS) == len(days)
        # These hold the late data too, and so twice as much as those that somebody named.
        some_days(sorted(days))

    def first(_: None) -> int:
        (ran,) = store.run_due(now=AFTER)
        assert ran.whole
        return database.daily_sales.estimated_document_count()

    def last_late() -> Any:
        """The place before the late data of the last run, which is read again."""
        if not places:
            second(late())
        return places[-1]

    def late() -> dt.datetime:
        if database["treadle.schedules"].find_one() is None:
            store.run_due(now=AFTER)
        # Other days each time, or these few would grow with every round.
        hour = next(hours)
        days = [day + hour for day in LATE_DAYS]
        places.append(client.admin.command("ping")["operationTime"])
        database.sales.insert_many(_sales(chance, total // LATE_PART, days), ordered=False)
        return AFTER + HOUR * hour

    def second(now: dt.datetime) -> int:
        (ran,) = store.run_due(now=now)
        assert not ran.whole
        return ran.written

    def check(number: int) -> None:
        assert number == len(list(database.sales.aggregate([group])))

    return [
        Contender("bare $group and $merge", empty, by_hand, check=check),
        Contender("bare $group alone", lambda: None, grouped),
        Contender(DAYS_ALONE, lambda: None, some_days, baseline="Treadle, first run"),
        Contender(BY_HAND, last_late, from_stream, baseline="Treadle, first run"),
        Contender("Treadle, first run", empty, first, goal=Goal(1.15), check=check),
        Contender(
            "Treadle, run with 1 % late data in 3 days",
            late,
            second,
            baseline="Treadle, first run",
            goal=Goal(1 / 20, limit=BY_HAND),
        ),
    ]
