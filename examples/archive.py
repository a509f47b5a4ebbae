"""Archive: five years of sales at hand, and the older ones out of the way.

The old ones move to a collection of their own, in transactions, so that nobody
sees one twice or not at all. What is counted stays counted. Who asks for an
archived sale gets it, and who wants to change one brings it back first.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from examples.story import show, step, tell, verified

from treadle import Archive, Count, Document, Store, Sum


class Sale(
    Document, collection="sales", archive=Archive(by="date", after=timedelta(days=1825), into="sales_archive")
):
    id: int
    customer_name: str
    price: int
    date: datetime


class Customer(Document, collection="customers"):
    id: str
    purchases: Annotated[int, Count(Sale, by="customer_name")] = 0
    spent: Annotated[int, Sum(Sale, "price", by="customer_name")] = 0


MODELS = [Sale, Customer]

TODAY = datetime(2026, 6, 1, tzinfo=UTC)


def story(store: Store) -> None:
    store.setup()
    sales, archive = store.collection(Sale), store.database["sales_archive"]

    step("Ten years of sales")
    store.insert(Customer(id="Ada"))
    store.insert_many(
        Sale(id=number, customer_name="Ada", price=10 + number, date=TODAY - timedelta(days=365 * number))
        for number in range(10)
    )
    show("customers", store.collection(Customer).find_one({}, {"_treadle": 0}))

    step("Those of five years and more move")
    moved = store.archive(Sale, now=TODAY)
    print(f"  {moved} moved")
    show("sales_archive, the newest", archive.find_one({"_id": 5}))
    assert (5, 5, 5) == (moved, sales.count_documents({}), archive.count_documents({}))
    assert (10, 145) == (store.require(Customer, "Ada").purchases, store.require(Customer, "Ada").spent)

    step("Both places, in order, and a single one")
    found = list(store.find(Sale, sort="date", limit=7, archived=True))
    print(f"  the first seven: {[sale.id for sale in found]}")
    assert [9, 8, 7, 6, 5, 4, 3] == [sale.id for sale in found]
    assert 19 == store.require(Sale, 9).price

    step("One is brought back, and changed")
    store.restore(Sale, 9)
    store.update(Sale, 9, {"$set": {"price": 20}})
    assert 146 == store.require(Customer, "Ada").spent

    step("Somebody copies by hand and forgets to delete")
    archive.insert_one(sales.find_one({"_id": 0}))
    assert verified(store)
    store.repair()
    assert 0 == verified(store)
    assert (10, 146) == (store.require(Customer, "Ada").purchases, store.require(Customer, "Ada").spent)


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
