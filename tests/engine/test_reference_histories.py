"""Random histories of writes: every card equals its source after each step."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from pydantic import BaseModel, ConfigDict, Field

from tests.engine.histories import POOL, Copy, Machine, Raw, check_copies, ids, maybe_ids, names, play
from treadle import DataError, Document, ExtendedReference, Id


class Region(Document, collection="regions"):
    name: str | None = None


class Customer(Document, collection="customers"):
    name: str | None = None
    tier: str = "silver"
    secret: str = "hidden"
    region_id: Id | None = None
    region: Annotated[
        str | None, ExtendedReference(Region, by="region_id", field="name", on_delete="clear")
    ] = None


class CustomerCard(BaseModel):
    name: str | None = None
    tier: str | None = None
    region: str | None = None


class Category(Document, collection="categories"):
    name: str | None = None


class CategoryCard(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    id: Id | None = Field(default=None, alias="_id")
    name: str | None = None


class Product(Document, collection="products"):
    name: str | None = None
    price: int = 1


class ProductCard(BaseModel):
    name: str | None = None
    price: int | None = None


class Line(BaseModel):
    number: int
    product_id: Id | None = None
    product: Annotated[
        ProductCard | None, ExtendedReference(Product, by="product_id", snapshot=["price"])
    ] = None


class Wanted(BaseModel):
    number: int
    product_id: Id | None = None
    name: Annotated[
        str | None, ExtendedReference(Product, by="product_id", field="name", on_delete="cascade")
    ] = None


class Parcel(BaseModel):
    lines: list[Line] = []
    wanted: list[Wanted] = []


class Order(Document, collection="orders"):
    customer_id: Id | None = None
    customer: Annotated[
        CustomerCard | None, ExtendedReference(Customer, by="customer_id", snapshot=["tier"])
    ] = None
    customer_name: Annotated[str | None, ExtendedReference("Customer", by="customer_id", field="name")] = None
    category: Annotated[
        CategoryCard | None, ExtendedReference(Category, by="category.id", on_delete="clear")
    ] = None
    lines: list[Line] = []
    parcels: list[Parcel] = []
    secret: str = "of the order"
    note: str | None = None


class Shipment(Document, collection="shipments"):
    order_id: Id | None = None
    who: Annotated[str | None, ExtendedReference(Order, by="order_id", field="customer_name")] = None


class Ticket(Document, collection="tickets"):
    customer_id: Id | None = None
    tier: Annotated[
        str | None, ExtendedReference(Customer, by="customer_id", field="tier", on_delete="cascade")
    ] = None


class Badge(Document, collection="badges"):
    customer_id: Id
    card: Annotated[CustomerCard, ExtendedReference(Customer, by="customer_id", on_delete="restrict")] = (
        CustomerCard()
    )


COPIES = [
    Copy("customers", (), ("region_id",), "region", "regions", ("name",), flat=True, on_delete="clear"),
    Copy("orders", (), ("customer_id",), "customer", "customers", ("name", "region"), ("tier",)),
    Copy("orders", (), ("customer_id",), "customer_name", "customers", ("name",), flat=True),
    Copy("orders", (), ("category", "_id"), "category", "categories", ("name",), on_delete="clear"),
    Copy("orders", ("lines",), ("product_id",), "product", "products", ("name",), ("price",)),
    Copy("orders", ("parcels", "lines"), ("product_id",), "product", "products", ("name",), ("price",)),
    Copy(
        "orders",
        ("parcels", "wanted"),
        ("product_id",),
        "name",
        "products",
        ("name",),
        flat=True,
        on_delete="cascade",
    ),
    Copy("shipments", (), ("order_id",), "who", "orders", ("customer_name",), flat=True),
    Copy("tickets", (), ("customer_id",), "tier", "customers", ("tier",), flat=True, on_delete="cascade"),
    Copy(
        "badges", (), ("customer_id",), "card", "customers", ("name", "tier", "region"), on_delete="restrict"
    ),
]


class ReferenceMachine(Machine):
    """Cards, flat copies, held references, arrays, nested arrays, chains and deletions."""

    models: ClassVar = [Region, Customer, Category, Product, Order, Shipment, Ticket, Badge]

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def check(self) -> None:
        after = self.read()
        check_copies(COPIES, self.state, after)
        for customer in after["customers"].values():
            assert "hidden" == customer["secret"]
        self.state = after

    @initialize()
    def begin(self):
        """In the middle, so that few steps find nothing to do."""
        for at, key in enumerate(POOL[:3]):
            for model in (Region, Customer, Category, Product):
                self.store.insert(model(id=key, name=f"{model.__name__} {at}"))
            self.store.update(Customer, key, {"$set": {"region_id": POOL[0]}})
        for at, key in enumerate(POOL[:3]):
            wanted = self.lines([POOL[at], POOL[2]])
            lines = self.lines([POOL[2], POOL[at], POOL[2]])
            parcels = [{"lines": self.lines([POOL[at]]), "wanted": wanted}]
            self.add(
                Order(
                    id=key,
                    customer_id=POOL[at],
                    category=CategoryCard(id=POOL[1]),
                    lines=[Line(**each) for each in lines],
                    parcels=[Parcel.model_validate(each) for each in parcels],
                )
            )
            self.store.insert(Shipment(id=key, order_id=POOL[at]))
            self.store.insert(Ticket(id=key, customer_id=POOL[at]))
            self.keep(Order, key)
        self.store.insert(Badge(id=POOL[0], customer_id=POOL[2]))
        self.store.update_many(Product, {}, {"$inc": {"price": 1}})
        for key in POOL[:3]:
            (line,) = self.lines([POOL[2]])
            self.store.update(Order, key, {"$push": {"lines": line}})
        self.state = self.read()

    def lines(self, products: list[Any]) -> list[Raw]:
        self.count += len(products)
        return [{"number": self.count - at, "product_id": each} for at, each in enumerate(products)]

    # -- sources --------------------------------------------------------------------

    @rule(model=st.sampled_from([Region, Customer, Category, Product]), id=ids, name=names)
    def insert_source(self, model, id, name):
        self.add(model(id=id, name=name))

    @rule(
        model=st.sampled_from([Region, Customer, Category, Product]),
        id=ids,
        name=names,
        how=st.integers(0, 4),
    )
    def rename(self, model, id, name, how):
        update: Any = [
            {"$set": {"name": name}},
            {"$unset": {"name": ""}},
            [{"$set": {"name": {"$concat": ["x", {"$ifNull": ["$name", "-"]}]}}}],
            {"$set": {"name": name}},
            {"$set": {"name": name}},
        ][how]
        if how == 3:
            self.store.update_many(model, {}, update)
        elif how == 4 and model is Product:
            self.store.update(Product, id, {"$inc": {"price": 1}, "$set": {"name": name}})
        else:
            self.store.update(model, id, update)

    @rule(id=ids, tier=st.sampled_from(["gold", "silver"]), region=maybe_ids)
    def change_customer(self, id, tier, region):
        self.store.update(Customer, id, {"$set": {"tier": tier, "region_id": region}})

    @rule(model=st.sampled_from([Region, Category, Product]), id=ids, many=st.booleans())
    def delete_source(self, model, id, many):
        if many:
            self.store.delete_many(model, {"_id": {"$in": [id, POOL[0]]}})
        else:
            self.store.delete(model, id)

    @rule(id=ids, many=st.booleans())
    def delete_customer(self, id, many):
        """Refused as a whole where a badge refers to one of them."""
        chosen = [id, POOL[1]] if many else [id]
        chosen = [each for each in chosen if self.has(Customer, each)]
        refused = any(each["customer_id"] in chosen for each in self.state["badges"].values())
        try:
            if many:
                assert len(set(chosen)) == self.store.delete_many(Customer, {"_id": {"$in": chosen}})
            else:
                self.store.delete(Customer, id)
        except DataError as error:
            assert (True, "reference-restricted") == (refused, error.code)
            assert self.state == self.read()
        else:
            assert not refused

    # -- targets -----------------------------------------------------------------------

    @rule(
        id=ids,
        customer=maybe_ids,
        category=maybe_ids,
        lines=st.lists(maybe_ids, max_size=3),
        parcels=st.lists(st.lists(ids, max_size=2), max_size=2),
    )
    def insert_order(self, id, customer, category, lines, parcels):
        self.add(
            Order(
                id=id,
                customer_id=customer,
                customer=CustomerCard(name="a caller's own"),
                category=CategoryCard(id=category, name="a caller's own") if category else None,
                lines=[Line(**each) for each in self.lines(lines)],
                parcels=[
                    Parcel(
                        lines=[Line(**each) for each in self.lines(inner)],
                        wanted=[Wanted(**each) for each in self.lines(inner)],
                    )
                    for inner in parcels
                ],
            )
        )

    @rule(
        orders=st.lists(maybe_ids, max_size=3),
        tickets=st.lists(maybe_ids, max_size=2),
        shipments=st.lists(maybe_ids, max_size=2),
    )
    def insert_many(self, orders, tickets, shipments):
        self.store.insert_many([Order(customer_id=each) for each in orders])
        self.store.insert_many([Ticket(customer_id=each) for each in tickets])
        self.store.insert_many([Shipment(order_id=each) for each in shipments])

    @rule(id=ids, customer=ids)
    def insert_badge(self, id, customer):
        """A required card without its source is an error."""
        if self.has(Badge, id):
            return
        try:
            self.store.insert(Badge(id=id, customer_id=customer))
        except DataError as error:
            assert ("reference-missing", False) == (error.code, self.has(Customer, customer))
        else:
            assert self.has(Customer, customer)

    @rule(model=st.sampled_from([Badge, Ticket, Shipment]), id=ids)
    def delete_target(self, model, id):
        self.store.delete(model, id)

    @rule(id=ids, customer=maybe_ids, how=st.integers(0, 3))
    def move_order(self, id, customer, how):
        if how == 0:
            self.store.update(Order, id, {"$set": {"customer_id": customer, "note": "moved"}})
        elif how == 1:
            self.store.update(Order, id, {"$unset": {"customer_id": ""}})
        elif how == 2:
            pipeline = [{"$set": {"customer_id": customer, "note": {"$ifNull": ["$customer_name", "?"]}}}]
            self.store.update(Order, id, pipeline)
        else:
            self.store.update_many(
                Order, {"customer_id": {"$ne": customer}}, {"$set": {"customer_id": customer}}
            )

    @rule(id=ids, category=maybe_ids)
    def recategorise(self, id, category):
        value = {"_id": category, "name": "a caller's own"} if category else None
        self.store.update(Order, id, {"$set": {"category": value}})

    @rule(id=ids, product=maybe_ids, how=st.integers(0, 7))
    def change_lines(self, id, product, how):
        (line,) = self.lines([product])
        order = self.state["orders"].get(id) or {}
        first = (order.get("lines") or [{}])[0].get("number")
        updates: list[Any] = [
            {"$push": {"lines": line}},
            {"$push": {"lines": {"$each": [line], "$position": 0}}},
            {"$pull": {"lines": {"number": first}}},
            {"$pull": {"lines": {"product_id": product}}},
            {"$pop": {"lines": -1}},
            {"$push": {"lines": {"$each": [], "$sort": {"number": -1}}}},
            {"$set": {"parcels": [{"lines": [line], "wanted": self.lines([product])}]}},
            {"$set": {"lines.0.product_id": product}},
        ]
        if how == 7 and first is None:
            return
        self.store.update(Order, id, updates[how])

    @rule(model=st.sampled_from([Order, Customer, Product]), id=ids)
    def remember(self, model, id):
        self.keep(model, id)

    @rule(which=st.integers(0, 3), customer=maybe_ids)
    def replace_order(self, which, customer):
        self.replace_kept(Order, which, customer_id=customer)

    @rule(which=st.integers(0, 3), name=names)
    def replace_source(self, which, name):
        self.replace_kept(Customer, which, name=name)
        self.replace_kept(Product, which, name=name)

    @rule(id=ids)
    def delete_order(self, id):
        self.store.delete(Order, id)


@pytest.mark.heavy
def test_references_follow_their_sources(run, database):
    play(ReferenceMachine, run, database, examples=6)
