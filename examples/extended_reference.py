"""Extended Reference: an order carries its customer's card and what its products cost.

The page of an order shows the customer's name, where to ship, and what was
bought at which price, with one read and no $lookup. The name follows the
customer. The address and the prices are those of the day of the order.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated

from examples.story import only, show, step, tell, verified
from pydantic import BaseModel

from treadle import Document, ExtendedReference, Id, Store


class Customer(Document, collection="customers"):
    id: int
    name: str
    email: str
    tier: str = "silver"
    street: str
    city: str
    country: str


class CustomerCard(BaseModel):
    name: str
    email: str
    tier: str


class Address(BaseModel):
    street: str
    city: str
    country: str


class Product(Document, collection="products"):
    name: str
    price: Decimal


class Line(BaseModel):
    product_id: Id
    name: Annotated[str | None, ExtendedReference(Product, by="product_id", field="name")] = None
    price: Annotated[
        Decimal | None, ExtendedReference(Product, by="product_id", field="price", policy="snapshot")
    ] = None
    quantity: int


class Order(Document, collection="orders"):
    date: datetime
    customer_id: int
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    shipping_address: Annotated[
        Address | None, ExtendedReference(Customer, by="customer_id", policy="snapshot")
    ] = None
    items: list[Line]


MODELS = [Customer, Product, Order]


def story(store: Store) -> None:
    step("Collections, validators, and an index on each reference")
    for action in store.setup():
        print(f"  {action}")

    step("A customer, two products, and an order that only names them")
    katrina = store.insert(
        Customer(
            id=123,
            name="Katrina Pope",
            email="katrina@example.org",
            street="123 Main St",
            city="Somewhere",
            country="Someplace",
        )
    )
    widget = store.insert(Product(name="Widget", price=Decimal("11.99")))
    gadget = store.insert(Product(name="Gadget", price=Decimal("40.00")))
    order = store.insert(
        Order(
            date=datetime(2019, 2, 18, tzinfo=UTC),
            customer_id=katrina.id,
            items=[Line(product_id=widget.id, quantity=5), Line(product_id=gadget.id, quantity=1)],
        )
    )
    assert order.customer
    assert "Katrina Pope" == order.customer.name
    show("orders", store.collection(Order).find_one())

    step("She marries, moves and becomes a gold customer; the widget becomes dearer")
    store.update(Customer, 123, {"$set": {"name": "Katrina Bell", "tier": "gold", "street": "9 Mill Lane"}})
    store.update(Product, widget.id, {"$set": {"name": "Super Widget", "price": Decimal("14.99")}})
    raw = only(store.collection(Order))
    show("orders", raw)
    assert {"name": "Katrina Bell", "email": "katrina@example.org", "tier": "gold"} == raw["customer"]
    assert "123 Main St" == raw["shipping_address"]["street"], "the parcel went to the old address"
    line = store.require(Order, order.id).items[0]
    assert ("Super Widget", Decimal("11.99")) == (line.name, line.price), "the price of that day"

    step("Somebody renames her copy in mongosh, behind Treadle's back")
    store.collection(Order).update_one({}, {"$set": {"customer.name": "Katrina Pope"}})
    assert 1 == verified(store)
    store.repair()
    assert 0 == verified(store)
    assert "Katrina Bell" == only(store.collection(Order))["customer"]["name"]


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
