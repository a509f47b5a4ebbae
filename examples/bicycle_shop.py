"""A bicycle shop: several patterns at once, in camelCase documents.

Products carry the names of their category and tags. Customers and their orders
share a collection, told apart by `type`, so that one indexed query gives a
customer together with all orders; and the customer counts them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated

from examples.story import only, show, step, tell, verified
from pydantic import BaseModel

from treadle import Count, Document, ExtendedReference, Indexed, Store


class Category(Document, collection="productCategory"):
    id: str
    name: str


class Tag(Document, collection="productTag"):
    id: str
    name: str


class TagCard(BaseModel):
    id: str
    name: Annotated[str | None, ExtendedReference(Tag, by="id", field="name")] = None


class Product(Document, collection="product", naming="camel"):
    sku: Annotated[str, Indexed(unique=True)]
    name: str
    price: Decimal
    category_id: str
    category_name: Annotated[str | None, ExtendedReference(Category, by="category_id", field="name")] = None
    tags: list[TagCard] = []


class Account(Document, collection="customer", discriminator="type", naming="camel"):
    """What there is about a customer: the customer, and each order."""

    id: str
    customer_id: Annotated[str, Indexed()]


class Customer(Account, kind="customer"):
    first_name: str
    last_name: str
    email_address: Annotated[str, Indexed(unique=True)]
    sales_order_count: Annotated[int, Count("SalesOrder", by="customer_id")] = 0


class Detail(BaseModel):
    sku: str
    name: str
    price: Decimal
    quantity: int


class SalesOrder(Account, kind="salesOrder"):
    order_date: datetime
    ship_date: datetime | None = None
    details: list[Detail]


MODELS = [Category, Tag, Product, Account, Customer, SalesOrder]


def story(store: Store) -> None:
    store.setup()

    step("The catalogue: a product names its category and its tags by id, and carries their names")
    store.insert_many(
        [Category(id="road", name="Bikes, Road Bikes"), Category(id="gloves", name="Clothing, Gloves")]
    )
    store.insert_many([Tag(id="t1", name="Tag-61"), Tag(id="t2", name="Tag-122")])
    bike, gloves = store.insert_many(
        [
            Product(
                sku="BK-R50R-60",
                name="Road-650 Red, 60",
                price=Decimal("782.99"),
                category_id="road",
                tags=[TagCard(id="t1"), TagCard(id="t2")],
            ),
            Product(
                sku="GL-F110-L", name="Full-Finger Gloves, L", price=Decimal("37.99"), category_id="gloves"
            ),
        ]
    )
    show("product", store.collection(Product).find())

    step("A category and a tag are renamed: every product follows")
    store.update(Category, "road", {"$set": {"name": "Bikes, Racing Bikes"}})
    store.update(Tag, "t2", {"$set": {"name": "for commuters"}})
    raw = only(store.collection(Product), {"sku": "BK-R50R-60"})
    assert "Bikes, Racing Bikes" == raw["categoryName"]
    assert [{"id": "t1", "name": "Tag-61"}, {"id": "t2", "name": "for commuters"}] == raw["tags"]

    step("A customer and her orders, in one collection")
    store.insert(
        Customer(
            id="c1", customer_id="c1", first_name="Franca", last_name="Roth", email_address="fr@example.org"
        )
    )
    for number, bought in enumerate([bike, gloves], start=1):
        store.insert(
            SalesOrder(
                id=f"o{number}",
                customer_id="c1",
                order_date=datetime(2014, 2, number, tzinfo=UTC),
                details=[Detail(sku=bought.sku, name=bought.name, price=bought.price, quantity=1)],
            )
        )
    show("customer, with one query by customerId", store.collection(Account).find({"customerId": "c1"}))
    assert ["Customer", "SalesOrder", "SalesOrder"] == [
        type(found).__name__ for found in store.find(Account, {"customerId": "c1"}, sort="_id")
    ]
    assert 2 == store.require(Customer, "c1").sales_order_count

    step("The best customers; one order is cancelled")
    store.delete(SalesOrder, "o2")
    (best,) = store.find(Customer, sort=[("salesOrderCount", -1)], limit=10)
    assert ("Franca", 1) == (best.first_name, best.sales_order_count)

    step("An import script copies a product with an old category name, and an order")
    store.collection(Product).update_one(
        {"sku": "BK-R50R-60"}, {"$set": {"categoryName": "Bikes, Road Bikes"}}
    )
    store.collection(Account).insert_one(
        {"_id": "o3", "type": "salesOrder", "customerId": "c1", "orderDate": datetime.now(UTC), "details": []}
    )
    assert 2 == verified(store)
    store.repair()
    assert 0 == verified(store)
    assert 2 == store.require(Customer, "c1").sales_order_count


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
