"""Rollup: sales per product and day, kept with each sale; and per month, computed on a schedule.

A report of daily sales reads few small documents instead of all sales. The day
that has no sale any more has no document. The month is computed when it is
over, and again when something arrives late.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated

from bson import Decimal128
from examples.story import only, show, step, tell, verified

from treadle import Average, Count, Day, Document, Month, Rollup, Store, Sum, UsageError


class Sale(Document, collection="sales"):
    product_id: str
    amount: Decimal
    created_at: datetime


class DailySales(
    Document,
    collection="daily_summaries",
    rollup=Rollup(Sale, keys={"product_id": "product_id", "day": Day("created_at", timezone="Europe/Paris")}),
):
    product_id: str
    day: datetime
    total_amount: Annotated[Decimal, Sum("amount")]
    order_count: Annotated[int, Count()]
    average_order_value: Annotated[Decimal | None, Average("amount")]


class MonthlySales(
    Document,
    collection="monthly_summaries",
    rollup=Rollup(Sale, keys={"id": Month("created_at")}, maintain="schedule", every=timedelta(days=1)),
):
    id: datetime
    total_amount: Annotated[Decimal, Sum("amount")]
    order_count: Annotated[int, Count()]


MODELS = [Sale, DailySales, MonthlySales]


def at(day: int, hour: int, month: int = 3) -> datetime:
    return datetime(2026, month, day, hour, 30, tzinfo=UTC)


def story(store: Store) -> None:
    store.setup()
    daily, monthly = store.collection(DailySales), store.collection(MonthlySales)

    step("Five sales; half past midnight in Paris belongs to the next day there")
    sales = store.insert_many(
        [
            Sale(product_id="loom", amount=Decimal("90.00"), created_at=at(1, 9)),
            Sale(product_id="loom", amount=Decimal("110.00"), created_at=at(1, 22)),
            Sale(product_id="loom", amount=Decimal("50.00"), created_at=at(1, 23)),
            Sale(product_id="yarn", amount=Decimal("4.95"), created_at=at(2, 12)),
            Sale(product_id="yarn", amount=Decimal("4.95"), created_at=at(2, 13)),
        ]
    )
    show("daily_summaries", daily.find().sort([("product_id", 1), ("day", 1)]))
    first = store.find(DailySales, {"product_id": "loom"}, sort="day").to_list()[0]
    assert (2, Decimal("200.00"), Decimal("100.00")) == (
        first.order_count,
        first.total_amount,
        first.average_order_value,
    )
    assert datetime(2026, 2, 28, 23, tzinfo=UTC) == first.day, "midnight in Paris"

    step("A sale is booked on another day, and one is cancelled; an empty day goes")
    store.update(Sale, sales[1].id, {"$set": {"created_at": at(3, 10)}})
    store.delete(Sale, sales[2].id)
    assert [1, 1] == [each.order_count for each in store.find(DailySales, {"product_id": "loom"}, sort="day")]
    try:
        store.insert(
            DailySales(
                product_id="loom",
                day=at(9, 0),
                total_amount=Decimal(1),
                order_count=1,
                average_order_value=None,
            )
        )
    except UsageError as error:
        print(f"  no made-up days: {error}")
    else:
        raise AssertionError("a summary without sales was stored")

    step("The month is computed when it is over: `treadle run-due`, from cron")
    assert [] == [ran for ran in store.run_due(now=at(31, 12)) if ran.written], "March is not over"
    for ran in store.run_due(now=at(1, 12, month=4)):
        print(f"  {ran.name}: {ran.written} written")
    show("monthly_summaries", monthly.find())
    march = store.require(MonthlySales, datetime(2026, 3, 1, tzinfo=UTC))
    assert (4, Decimal("209.90")) == (march.order_count, march.total_amount)

    step("A shop was offline and its sale of March comes in April, written by another program")
    store.collection(Sale).insert_one(
        {"product_id": "yarn", "amount": Decimal128("10"), "created_at": at(30, 9)}
    )
    store.run_due(now=at(2, 12, month=4))
    assert 5 == only(monthly)["order_count"], "only March was computed again"

    step("The daily summaries follow Treadle's own writes, so verify finds that sale, and repair books it")
    assert 1 == verified(store, DailySales)
    store.repair()
    assert 0 == verified(store)
    assert 4 == store.count(DailySales)


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
