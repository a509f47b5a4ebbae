"""Random histories of writes: after each step every maintained value is what a naive recomputation says.

The oracle is plain Python over the raw collections, and shares nothing with
Treadle. Each machine runs on the blocking and on the asyncio shell, on one
database, which is emptied between examples.
"""

from __future__ import annotations

import copy
import datetime as dt
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, ClassVar

from bson import ObjectId
from bson.decimal128 import Decimal128
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from pydantic import BaseModel, ConfigDict, Field

from treadle import (
    Average,
    Count,
    DataError,
    Document,
    ExtendedReference,
    Formula,
    Id,
    Max,
    Min,
    Subset,
    Sum,
)

# A failing history is short as it is; shrinking it takes minutes, so it must be asked for.
PHASES = [Phase.generate, Phase.shrink] if os.environ.get("TREADLE_SHRINK") else [Phase.generate]
WIDE = os.environ.get("TREADLE_HYPOTHESIS") == "wide"


def bounds(examples: int) -> settings:
    """How far a machine looks: the same histories each time, unless TREADLE_HYPOTHESIS=wide."""
    return settings(
        phases=PHASES,
        derandomize=not WIDE,
        database=None,
        deadline=None,
        max_examples=300 if WIDE else examples,
        stateful_step_count=25,
        suppress_health_check=list(HealthCheck),
    )


POOL = [ObjectId(f"{number:024x}") for number in range(1, 6)]
Raw = dict[str, Any]
State = dict[str, dict[Any, Raw]]

ids = st.sampled_from(POOL[:3])
maybe_ids = st.sampled_from([*POOL[:4], None])
# The last two are values that a pipeline would take for a path and for code.
names = st.sampled_from(["ann", "bob", "", None, "$secret", {"$function": "x"}.__repr__()])


def simple(value: Any) -> Any:
    """A stored value in Python's types; null and missing are one."""
    if isinstance(value, Decimal128):
        return value.to_decimal()
    if isinstance(value, dict):
        return {key: simple(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [simple(item) for item in value]
    return value


@dataclass(frozen=True)
class World:
    """Where a machine runs. Hypothesis looks at a machine's attributes, and a database has them all."""

    store: Any
    database: Any


class Machine(RuleBasedStateMachine):
    """What all machines share: a store, the raw state, and the two checks after each step."""

    models: ClassVar[list[type[Document]]] = []
    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.store, self.database = self.world.store, self.world.database
        for model in self.models:
            self.database[model.__treadle__.collection].delete_many({})
        self.kept: list[Document] = []
        self.state: State = self.read()

    def read(self) -> State:
        return {
            model.__treadle__.collection: {
                each["_id"]: each for each in self.database[model.__treadle__.collection].find()
            }
            for model in self.models
        }

    def has(self, model: type[Document], identity: Any) -> bool:
        return identity in self.state[model.__treadle__.collection]

    def add(self, document: Document) -> None:
        """Insert, under another id where it is taken; what is returned is what is stored."""
        if self.has(type(document), document.id):
            document = document.model_copy(update={"id": ObjectId()})
        returned = self.store.insert(document)
        assert self.store.get(type(document), document.id) == returned

    def keep(self, model: type[Document], identity: Any) -> None:
        found = self.store.get(model, identity)
        if found is not None:
            self.kept = [*self.kept[-3:], found]

    def replace_kept(self, model: type[Document], which: int, **changes: Any) -> None:
        """Write back a document that was read some steps ago."""
        stale = [each for each in self.kept if type(each) is model]
        if not stale:
            return
        document = copy.deepcopy(stale[which % len(stale)])
        for name, value in changes.items():
            setattr(document, name, value)
        try:
            self.store.replace(document)
        except DataError as error:
            assert "document-gone" == error.code

    @invariant()
    def all_is_right(self) -> None:
        self.check()
        assert [] == self.store.verify()

    def check(self) -> None:
        raise NotImplementedError


def play(machine: type[Machine], run: Any, database: Any, examples: int) -> None:
    """Run a machine on one shell and one database."""
    store = run.store(machine.models)
    store.setup()
    bound = type(machine.__name__, (machine,), {"world": World(store, database)})
    run_state_machine_as_test(bound, settings=bounds(examples))


# -- Extended Reference -----------------------------------------------------------------


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


@dataclass(frozen=True)
class Copy:
    """One copying declaration, said again in the oracle's own words."""

    target: str
    arrays: tuple[str, ...]
    reference: tuple[str, ...]
    card: str
    source: str
    fields: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    flat: bool = False
    on_delete: str = "keep"

    def places(self, raw: Raw) -> Iterator[tuple[Any, Raw]]:
        """Each sub-document that holds a reference, under a name that survives reordering."""
        level: list[tuple[Any, Raw]] = [((), raw)]
        for array in self.arrays:
            level = [
                ((*name, array, element.get("number", index)), element)
                for name, holder in level
                for index, element in enumerate(holder.get(array) or [])
            ]
        yield from level

    def referred(self, holder: Raw) -> Any:
        for part in self.reference:
            holder = (holder or {}).get(part)  # type: ignore[assignment]
        return holder

    def stored(self, holder: Raw) -> Any:
        """The card as stored, without the reference that it may hold."""
        card = holder.get(self.card)
        if self.flat or card is None:
            return card
        parts = {key: value for key, value in simple(card).items() if key in (*self.fields, *self.frozen)}
        return self.filled(parts)

    def filled(self, parts: Raw) -> Raw | None:
        """A card that holds its reference is there with nothing in it too; that is no card."""
        return None if not parts and len(self.reference) > 1 else parts

    def fresh(self, source: Raw, previous: Any) -> Any:
        if self.flat:
            return source.get(self.fields[0])
        card = {name: source.get(name) for name in self.fields}
        old = previous if previous is not None else source
        return self.filled(simple({**card, **{name: old.get(name) for name in self.frozen}}))


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


def check_copies(copies: list[Copy], before: State, after: State) -> None:
    """Each card is what the step from one state to the next should have made of it."""
    for copied in copies:
        for identity, raw in after[copied.target].items():
            check_cards(copied, before, after, before[copied.target].get(identity), raw)
        check_deletions(copied, before, after)


def check_cards(copied: Copy, before: State, after: State, old: Raw | None, raw: Raw) -> None:
    held = dict(copied.places(old)) if old else {}
    here = dict(copied.places(raw))
    was = {name: copied.referred(holder) for name, holder in held.items()}
    now = {name: copied.referred(holder) for name, holder in here.items()}
    left = {reference for name, reference in was.items() if now.get(name) != reference}
    came = {reference for name, reference in now.items() if was.get(name) != reference}
    for name, holder in here.items():
        reference = now[name]
        previous = [copied.stored(held[name]) if name in was and was[name] == reference else None]
        if reference in left & came:
            # One element went and another came with the same reference: which is which, nobody can
            # tell but this test, so any of the old cards will do.
            previous += [copied.stored(other) for at, other in held.items() if was[at] == reference]
        source = after[copied.source].get(reference)
        allowed = []
        for card in previous:
            if reference is None:
                allowed.append(None)
            elif source is not None:
                allowed.append(copied.fresh(source, card))
            else:
                allowed.append(card if copied.on_delete == "keep" else None)
        actual = copied.stored(holder)
        expected = actual if actual in allowed else allowed[0]
        assert (copied.target, copied.card, name, expected) == (copied.target, copied.card, name, actual)


def check_deletions(copied: Copy, before: State, after: State) -> None:
    gone = before[copied.source].keys() - after[copied.source].keys()
    for raw in after[copied.target].values():
        left = [copied.referred(holder) for _, holder in copied.places(raw)]
        old = before[copied.target].get(raw["_id"])
        referred = {copied.referred(holder) for _, holder in copied.places(old)} if old else set()
        if copied.on_delete != "keep":
            assert [] == [each for each in left if each in gone and each in referred]


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


def test_references_follow_their_sources(run, database):
    play(ReferenceMachine, run, database, examples=6)


# -- Computed ---------------------------------------------------------------------------------


class Town(Document, collection="towns"):
    name: str = "town"
    shops: Annotated[int, Count("Shop", by="town_id")] = 0
    busy: Annotated[int, Count("Shop", by="town_id", where={"sales.count": {"$gte": 2}})] = 0
    total: Annotated[int, Sum("Shop", "total", by="town_id")] = 0
    best: Annotated[float | None, Max("Shop", "average", by="town_id")] = None
    score: Annotated[int, Sum("Shop", "score", by="town_id")] = 0


class Item(BaseModel):
    shop_id: Id | None = None
    quantity: int | None = None
    price: Decimal | None = None


class Sale(Document, collection="sales"):
    shop_id: Id | None = None
    tag_ids: list[Id] | None = None
    rating: int | None = None
    amount: Decimal | None = None
    weight: float | None = None
    state: str | None = "open"
    items: list[Item] = []


OPEN = {"state": "open", "rating": {"$gte": 2}}


class Sales(BaseModel):
    count: Annotated[int, Count(Sale, by="shop_id")] = 0
    open: Annotated[int, Count(Sale, by="shop_id", where=OPEN)] = 0
    note: str | None = None


class Shop(Document, collection="shops"):
    base: int = 1
    town_id: Id | None = None
    sales: Sales = Sales()
    total: Annotated[int, Sum(Sale, "rating", by="shop_id")] = 0
    money: Annotated[Decimal, Sum(Sale, "amount", by="shop_id")] = Decimal(0)
    mass: Annotated[float, Sum(Sale, "weight", by="shop_id")] = 0.0
    average: Annotated[float | None, Average(Sale, "rating", by="shop_id", computed_at="computed")] = None
    average_open: Annotated[Decimal | None, Average(Sale, "amount", by="shop_id", where=OPEN)] = None
    lowest: Annotated[int | None, Min(Sale, "rating", by="shop_id")] = None
    highest: Annotated[Decimal | None, Max(Sale, "amount", by="shop_id", where=OPEN)] = None
    worth: Annotated[Decimal, Sum(Sale, {"$multiply": ["$rating", "$amount"]}, by="shop_id")] = Decimal(0)
    tagged: Annotated[int, Count(Sale, by="tag_ids")] = 0
    tagged_total: Annotated[int, Sum(Sale, "rating", by="tag_ids")] = 0
    tagged_worst: Annotated[int | None, Min(Sale, "rating", by="tag_ids", where={"state": "open"})] = None
    listed: Annotated[int, Count(Sale, by="items.shop_id")] = 0
    sold: Annotated[int, Sum(Sale, "items.quantity", by="items.shop_id")] = 0
    sold_open: Annotated[int, Sum(Sale, "items.quantity", by="items.shop_id", where=OPEN)] = 0
    dearest: Annotated[Decimal | None, Max(Sale, "items.price", by="items.shop_id")] = None
    score: Annotated[int | None, Formula({"$add": ["$base", {"$multiply": ["$sales.count", 10]}]})] = None
    grade: Annotated[int | None, Formula({"$add": ["$score", "$total"]})] = None
    computed: dt.datetime | None = None


def is_open(sale: Raw) -> bool:
    return sale.get("state") == "open" and (sale.get("rating") is not None and sale["rating"] >= 2)


def known(values: Any) -> list[Any]:
    return [value for value in values if value is not None]


def expected_shop(shop: Raw, sales: list[Raw]) -> Raw:
    """All maintained fields of a shop, the naive way."""
    key = shop["_id"]
    mine = [sale for sale in sales if sale.get("shop_id") == key]
    opened = [sale for sale in mine if is_open(sale)]
    tagged = [sale for sale in sales if key in (sale.get("tag_ids") or [])]
    listed = [sale for sale in sales if any(item.get("shop_id") == key for item in sale.get("items") or [])]
    items = [(sale, item) for sale in listed for item in sale["items"] if item.get("shop_id") == key]
    ratings = known(sale.get("rating") for sale in mine)
    amounts = known(sale.get("amount") for sale in opened)
    total = sum(ratings)
    score = shop["base"] + 10 * len(mine)
    return {
        "sales.count": len(mine),
        "sales.open": len(opened),
        "total": total,
        "money": sum(known(sale.get("amount") for sale in mine), Decimal(0)),
        "mass": math.fsum(known(sale.get("weight") for sale in mine)),
        "average": total / len(ratings) if ratings else None,
        "average_open": sum(amounts, Decimal(0)) / len(amounts) if amounts else None,
        "lowest": min(ratings, default=None),
        "highest": max(amounts, default=None),
        "worth": sum(
            (
                sale["rating"] * sale["amount"]
                for sale in mine
                if sale.get("rating") is not None and sale.get("amount") is not None
            ),
            Decimal(0),
        ),
        "tagged": len(tagged),
        "tagged_total": sum(known(sale.get("rating") for sale in tagged)),
        "tagged_worst": min(
            known(sale.get("rating") for sale in tagged if sale.get("state") == "open"), default=None
        ),
        "listed": len(listed),
        "sold": sum(known(item.get("quantity") for _, item in items)),
        "sold_open": sum(known(item.get("quantity") for sale, item in items if is_open(sale))),
        "dearest": max(known(item.get("price") for _, item in items), default=None),
        "score": score,
        "grade": score + total,
    }


def expected_town(town: Raw, shops: list[Raw]) -> Raw:
    mine = [shop for shop in shops if shop.get("town_id") == town["_id"]]
    return {
        "shops": len(mine),
        "busy": len([shop for shop in mine if shop["sales"]["count"] >= 2]),
        "total": sum(shop["total"] for shop in mine),
        "best": max(known(shop.get("average") for shop in mine), default=None),
        "score": sum(shop["score"] for shop in mine),
    }


def near(expected: Any, actual: Any) -> Any:
    """The actual value, if it differs from the expected one by no more than rounding."""
    if isinstance(expected, float) and isinstance(actual, (int, float)):
        return actual if math.isclose(expected, actual, rel_tol=1e-9, abs_tol=1e-9) else expected
    if isinstance(expected, Decimal) and isinstance(actual, Decimal):
        return actual if abs(expected - actual) <= Decimal("1e-24") else expected
    return expected


def check_values(expected: Raw, stored: Raw) -> None:
    actual = {path: at(stored, path) for path in expected}
    assert {path: near(value, actual[path]) for path, value in expected.items()} == actual


def at(raw: Any, path: str) -> Any:
    for part in path.split("."):
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


ratings = st.sampled_from([None, -1, 0, 2, 2, 3, 5])
amounts = st.sampled_from(
    [None, Decimal("0.10"), Decimal("0.2"), Decimal("19.99"), Decimal("-3"), Decimal("1E+3")]
)
weights = st.sampled_from([None, 0.1, 0.2, 1e8, -0.3])
states = st.sampled_from(["open", "open", "shut", None])
items = st.lists(st.builds(Item, shop_id=maybe_ids, quantity=ratings, price=amounts), max_size=3)
sales = st.builds(
    dict,
    shop_id=maybe_ids,
    tag_ids=st.one_of(st.none(), st.lists(ids, max_size=3)),
    rating=ratings,
    amount=amounts,
    weight=weights,
    state=states,
    items=items,
)


class ComputedMachine(Machine):
    """Counts, sums, averages, extremes and formulas, also of maintained fields."""

    models: ClassVar = [Town, Shop, Sale]

    def check(self) -> None:
        self.state = self.read()
        sold = [simple(each) for each in self.state["sales"].values()]
        shops = [simple(each) for each in self.state["shops"].values()]
        for shop in shops:
            check_values(expected_shop(shop, sold), shop)
        for town in self.state["towns"].values():
            check_values(expected_town(town, shops), simple(town))

    @initialize()
    def begin(self):
        self.store.insert(Town(id=POOL[0]))
        self.store.insert_many([Shop(id=key, town_id=POOL[0]) for key in POOL[:3]])
        for at, key in enumerate(POOL[:4]):
            line = Item(shop_id=POOL[at % 2], quantity=at, price=Decimal(at))
            self.store.insert(
                Sale(
                    id=key,
                    shop_id=POOL[at % 2],
                    tag_ids=[POOL[0], POOL[1]],
                    rating=at,
                    amount=Decimal(at),
                    items=[line, line],
                )
            )

    @rule(id=ids, base=st.integers(0, 3), town=maybe_ids)
    def insert_shop(self, id, base, town):
        """Also after its sales, and with values that the caller made up."""
        self.add(Shop(id=id, base=base, town_id=town, total=99, sales=Sales(count=99, note="n")))

    @rule(chosen=st.sets(ids, max_size=3), town=maybe_ids)
    def insert_shops(self, chosen, town):
        new = [Shop(id=each, town_id=town) for each in sorted(chosen) if not self.has(Shop, each)]
        assert new == [] or len(new) == len(self.store.insert_many(new))

    @rule(id=ids)
    def insert_town(self, id):
        self.add(Town(id=id))

    @rule(model=st.sampled_from([Town, Shop]), id=ids)
    def delete_target(self, model, id):
        self.store.delete(model, id)

    @rule(id=ids, base=st.integers(0, 3), town=maybe_ids)
    def update_shop(self, id, base, town):
        self.store.update(Shop, id, {"$set": {"base": base, "town_id": town, "sales.note": "x"}})

    @rule(id=ids, sale=sales)
    def insert_sale(self, id, sale):
        self.add(Sale(id=id, **sale))

    @rule(chosen=st.lists(sales, max_size=4))
    def insert_sales(self, chosen):
        self.store.insert_many([Sale(**sale) for sale in chosen])

    @rule(id=ids, shop=maybe_ids, rating=ratings, amount=amounts, weight=weights, state=states)
    def set_sale(self, id, shop, rating, amount, weight, state):
        change = {"shop_id": shop, "rating": rating, "amount": amount, "weight": weight, "state": state}
        self.store.update(Sale, id, {"$set": change})

    @rule(id=ids, tag=ids, shop=maybe_ids, value=ratings, how=st.integers(0, 9))
    def alter_sale(self, id, tag, shop, value, how):
        sale = self.state["sales"].get(id)
        if sale is None:
            return
        item = {"shop_id": shop, "quantity": value, "price": Decimal("2.5")}
        updates: list[Any] = [
            {"$inc": {"rating": 2}},
            {"$inc": {"amount": Decimal("0.01")}},
            {"$push": {"tag_ids": tag}},
            {"$pull": {"tag_ids": tag}},
            {"$unset": {"rating": "", "tag_ids": ""}},
            {"$push": {"items": item}},
            {"$pull": {"items": {"shop_id": shop}}},
            [{"$set": {"rating": {"$add": [{"$ifNull": ["$rating", 0]}, 1]}, "shop_id": shop}}],
            [{"$unset": ["weight", "state"]}],
            {"$unset": {"shop_id": "", "items": ""}},
        ]
        needs = {0: "rating", 1: "amount", 2: "tag_ids", 3: "tag_ids", 5: "items", 6: "items"}
        if how in needs and sale.get(needs[how]) is None:
            return
        self.store.update(Sale, id, updates[how])

    @rule(old=maybe_ids, new=maybe_ids)
    def move_sales(self, old, new):
        count = len([each for each in self.state["sales"].values() if each.get("shop_id") == old])
        assert count == self.store.update_many(Sale, {"shop_id": old}, {"$set": {"shop_id": new}})

    @rule(state=states)
    def shut_sales(self, state):
        self.store.update_many(
            Sale, {"rating": {"$gte": 2}}, {"$set": {"state": state}, "$inc": {"rating": -1}}
        )

    @rule(id=ids)
    def delete_sale(self, id):
        self.store.delete(Sale, id)

    @rule(shop=maybe_ids)
    def delete_sales(self, shop):
        count = len([each for each in self.state["sales"].values() if each.get("shop_id") == shop])
        assert count == self.store.delete_many(Sale, {"shop_id": shop})

    @rule(model=st.sampled_from([Shop, Sale]), id=ids)
    def remember(self, model, id):
        self.keep(model, id)

    @rule(which=st.integers(0, 3), base=st.integers(0, 3), rating=ratings, shop=maybe_ids)
    def replace(self, which, base, rating, shop):
        self.replace_kept(Shop, which, base=base)
        self.replace_kept(Sale, which, rating=rating, shop_id=shop)


def test_computed_values_equal_a_recomputation(run, database):
    play(ComputedMachine, run, database, examples=6)


# -- Subset -----------------------------------------------------------------------------------------


class Comment(Document, collection="comments"):
    post_id: Id | None = None
    also: list[Id] = []
    likes: int | None = None
    day: int | None = None
    text: str | None = "t"
    state: str | None = None


class LikesCard(BaseModel):
    likes: int | None = None
    day: int | None = None
    text: str | None = None


class TextCard(BaseModel):
    text: str | None = None


class Post(Document, collection="posts"):
    title: str = "post"
    liked: Annotated[list[LikesCard], Subset(Comment, by="post_id", sort=["-likes", "day"], size=3)] = []
    texts: Annotated[list[TextCard], Subset(Comment, by="post_id", sort="-day", size=2)] = []
    opened: Annotated[
        list[LikesCard],
        Subset(
            Comment,
            by="post_id",
            sort=[("likes", 1)],
            size=2,
            where={"state": "open", "likes": {"$ne": None}},
        ),
    ] = []
    also: Annotated[list[LikesCard], Subset(Comment, by="also", sort=["day"], size=2)] = []


def rank(value: int | None, direction: int) -> tuple[int, int]:
    """MongoDB's order: null before all numbers, or after them when descending."""
    if value is None:
        return (0, 0) if direction > 0 else (1, 0)
    return (1, value) if direction > 0 else (0, -value)


def first(comments: list[Raw], keys: list[tuple[str, int]], size: int, fields: list[str]) -> list[Raw]:
    ordered = sorted(
        comments, key=lambda each: (*(rank(each.get(name), way) for name, way in keys), each["_id"])
    )
    return [simple({name: each.get(name) for name in ["_id", *fields]}) for each in ordered[:size]]


def expected_post(key: Any, comments: list[Raw]) -> Raw:
    mine = [each for each in comments if each.get("post_id") == key]
    opened = [each for each in mine if each.get("state") == "open" and each.get("likes") is not None]
    named = [each for each in comments if key in (each.get("also") or [])]
    card = ["likes", "day", "text"]
    return {
        "liked": first(mine, [("likes", -1), ("day", 1)], 3, card),
        "texts": first(mine, [("day", -1)], 2, ["text"]),
        "opened": first(opened, [("likes", 1)], 2, card),
        "also": first(named, [("day", 1)], 2, card),
    }


few = st.sampled_from([None, 0, 1, 1, 2])
comments = st.builds(
    dict,
    post_id=maybe_ids,
    also=st.lists(ids, max_size=2),
    likes=few,
    day=few,
    text=st.sampled_from(["t", None, "$day"]),
    state=st.sampled_from(["open", None]),
)


class SubsetMachine(Machine):
    """The first N, with several keys, ties, conditions and cards that lack the sort key."""

    models: ClassVar = [Post, Comment]

    def check(self) -> None:
        self.state = self.read()
        written = list(self.state["comments"].values())
        for key, post in self.state["posts"].items():
            expected = expected_post(key, written)
            assert expected == {name: simple(post[name]) for name in expected}

    @initialize()
    def begin(self):
        self.store.insert_many([Post(id=key) for key in POOL[:3]])
        for at, key in enumerate(POOL[:4]):
            self.store.insert(
                Comment(id=key, post_id=POOL[0], also=POOL[:2], likes=at // 2, day=at, state="open")
            )
            self.keep(Comment, key)

    @rule(chosen=st.sets(ids, min_size=1, max_size=3), many=st.booleans())
    def insert_posts(self, chosen, many):
        new = [Post(id=each) for each in sorted(chosen) if not self.has(Post, each)]
        if many:
            self.store.insert_many(new)
        else:
            for post in new:
                self.add(post)

    @rule(id=ids)
    def delete_post(self, id):
        self.store.delete(Post, id)

    @rule(id=ids, comment=comments)
    def insert_comment(self, id, comment):
        self.add(Comment(id=id, **comment))

    @rule(chosen=st.lists(comments, max_size=4))
    def insert_comments(self, chosen):
        self.store.insert_many([Comment(**each) for each in chosen])

    @rule(id=ids, value=few, post=maybe_ids, how=st.integers(0, 8))
    def update_comment(self, id, value, post, how):
        updates: list[Any] = [
            {"$set": {"day": value}},
            {"$set": {"likes": value}},
            {"$set": {"post_id": post}},
            {"$set": {"text": "edited"}},
            {"$unset": {"likes": "", "text": ""}},
            {"$set": {"state": "open"}},
            {"$set": {"state": None, "likes": value}},
            {"$push": {"also": post}} if post else {"$set": {"also": []}},
            [{"$set": {"day": {"$add": [{"$ifNull": ["$day", 0]}, 1]}}}],
        ]
        self.store.update(Comment, id, updates[how])

    @rule(old=maybe_ids, new=maybe_ids)
    def move_comments(self, old, new):
        self.store.update_many(Comment, {"post_id": old}, {"$set": {"post_id": new}})

    @rule(value=few)
    def like_all(self, value):
        self.store.update_many(Comment, {"likes": value}, [{"$set": {"likes": 1, "day": value}}])

    @rule(model=st.sampled_from([Comment, Post]), id=ids)
    def remember(self, model, id):
        self.keep(model, id)

    @rule(which=st.integers(0, 3), day=few, post=maybe_ids)
    def replace(self, which, day, post):
        self.replace_kept(Comment, which, day=day, post_id=post)
        self.replace_kept(Post, which, title="again")

    @rule(id=ids)
    def delete_comment(self, id):
        self.store.delete(Comment, id)

    @rule(post=maybe_ids)
    def delete_comments(self, post):
        self.store.delete_many(Comment, {"post_id": post, "likes": {"$gte": 1}})


def test_subsets_are_the_first_ones(run, database):
    play(SubsetMachine, run, database, examples=8)


# -- all three together ----------------------------------------------------------------------------------


class Person(Document, collection="persons"):
    name: str | None = "p"
    notes: Annotated[int, Count("Note", by="author_id")] = 0
    spent: Annotated[Decimal, Sum("Purchase", "total", by="person_id")] = Decimal(0)


class Note(Document, collection="notes"):
    thing_id: Id | None = None
    author_id: Id | None = None
    author: Annotated[
        str | None, ExtendedReference(Person, by="author_id", field="name", on_delete="cascade")
    ] = None
    rating: int | None = None


class NoteCard(BaseModel):
    rating: int | None = None
    author: str | None = None


class Thing(Document, collection="things"):
    name: str | None = "t"
    price: Decimal = Decimal(1)
    notes: Annotated[int, Count(Note, by="thing_id")] = 0
    average: Annotated[float | None, Average(Note, "rating", by="thing_id")] = None
    best: Annotated[int | None, Max(Note, "rating", by="thing_id", where={"author": {"$ne": None}})] = None
    recent: Annotated[list[NoteCard], Subset(Note, by="thing_id", sort="-rating", size=2)] = []
    taxed: Annotated[Decimal | None, Formula({"$multiply": ["$price", Decimal("1.2")]})] = None


class ThingCard(BaseModel):
    name: str | None = None
    average: float | None = None
    taxed: Decimal | None = None


class PurchaseLine(BaseModel):
    number: int
    thing_id: Id | None = None
    thing: Annotated[ThingCard | None, ExtendedReference(Thing, by="thing_id", snapshot=["taxed"])] = None


class PersonCard(BaseModel):
    name: str | None = None
    spent: Decimal | None = None


class Purchase(Document, collection="purchases"):
    person_id: Id | None = None
    # Shows the sum that this very purchase is a part of.
    person: Annotated[PersonCard | None, ExtendedReference(Person, by="person_id")] = None
    lines: list[PurchaseLine] = []
    net: Decimal = Decimal(0)
    total: Annotated[Decimal | None, Formula({"$multiply": ["$net", Decimal("1.1")]})] = None


TOGETHER = [
    Copy("notes", (), ("author_id",), "author", "persons", ("name",), flat=True, on_delete="cascade"),
    Copy("purchases", ("lines",), ("thing_id",), "thing", "things", ("name", "average"), ("taxed",)),
    Copy("purchases", (), ("person_id",), "person", "persons", ("name", "spent")),
]


class TogetherMachine(Machine):
    """A rename reaches a note, through it a thing's subset, and through that a purchase."""

    models: ClassVar = [Person, Note, Thing, Purchase]

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def check(self) -> None:
        after = {name: {key: simple(raw) for key, raw in each.items()} for name, each in self.read().items()}
        before = {name: {key: simple(raw) for key, raw in each.items()} for name, each in self.state.items()}
        check_copies(TOGETHER, before, after)
        notes, purchases = list(after["notes"].values()), list(after["purchases"].values())
        for key, person in after["persons"].items():
            totals = [each.get("total") for each in purchases if each.get("person_id") == key]
            expected = {
                "notes": len([each for each in notes if each.get("author_id") == key]),
                "spent": sum(known(totals), Decimal(0)),
            }
            check_values(expected, person)
        for key, thing in after["things"].items():
            mine = [each for each in notes if each.get("thing_id") == key]
            given = known(each.get("rating") for each in mine)
            expected = {
                "notes": len(mine),
                "average": sum(given) / len(given) if given else None,
                "best": max(
                    known(each.get("rating") for each in mine if each.get("author") is not None), default=None
                ),
                "recent": first(mine, [("rating", -1)], 2, ["rating", "author"]),
                "taxed": thing["price"] * Decimal("1.2"),
            }
            check_values(expected, thing)
        for purchase in purchases:
            check_values({"total": purchase["net"] * Decimal("1.1")}, purchase)
        self.state = self.read()

    @initialize()
    def begin(self):
        for at, key in enumerate(POOL[:3]):
            self.store.insert(Person(id=key, name=f"person {at}"))
            self.store.insert(Thing(id=key, name=f"thing {at}", price=Decimal(at)))
        for at, key in enumerate(POOL[:3]):
            self.store.insert(Note(id=key, thing_id=POOL[0], author_id=POOL[at], rating=at))
            self.count += 1
            line = PurchaseLine(number=self.count, thing_id=POOL[at % 2])
            self.add(Purchase(id=key, person_id=POOL[0], lines=[line], net=Decimal(at)))

    @rule(model=st.sampled_from([Person, Thing]), id=ids, name=names)
    def insert_source(self, model, id, name):
        self.add(model(id=id, name=name))

    @rule(model=st.sampled_from([Person, Thing]), id=ids, name=names, many=st.booleans())
    def rename(self, model, id, name, many):
        if many:
            self.store.update_many(model, {"name": {"$ne": name}}, {"$set": {"name": name}})
        else:
            self.store.update(model, id, [{"$set": {"name": {"$literal": name}}}])

    @rule(id=ids, price=st.sampled_from([Decimal("0.1"), Decimal(5)]))
    def price(self, id, price):
        self.store.update(Thing, id, {"$set": {"price": price}})

    @rule(id=ids, thing=maybe_ids, author=maybe_ids, rating=ratings)
    def insert_note(self, id, thing, author, rating):
        self.add(Note(id=id, thing_id=thing, author_id=author, rating=rating))

    @rule(chosen=st.lists(st.tuples(maybe_ids, maybe_ids, ratings), max_size=3))
    def insert_notes(self, chosen):
        self.store.insert_many([Note(thing_id=t, author_id=a, rating=r) for t, a, r in chosen])

    @rule(id=ids, thing=maybe_ids, author=maybe_ids, rating=ratings, how=st.integers(0, 4))
    def update_note(self, id, thing, author, rating, how):
        updates: list[Any] = [
            {"$set": {"thing_id": thing}},
            {"$set": {"author_id": author}},
            {"$set": {"rating": rating}},
            {"$set": {"thing_id": thing, "author_id": author, "rating": rating}},
            [{"$set": {"rating": {"$add": [{"$ifNull": ["$rating", 0]}, 1]}}}, {"$unset": "author_id"}],
        ]
        self.store.update(Note, id, updates[how])

    @rule(old=maybe_ids, new=maybe_ids)
    def move_notes(self, old, new):
        self.store.update_many(Note, {"thing_id": old}, {"$set": {"thing_id": new, "author_id": new}})

    @rule(
        id=ids,
        person=maybe_ids,
        things=st.lists(maybe_ids, max_size=2),
        net=st.sampled_from([Decimal("0.1"), Decimal(7)]),
    )
    def insert_purchase(self, id, person, things, net):
        self.count += len(things)
        lines = [PurchaseLine(number=self.count - at, thing_id=each) for at, each in enumerate(things)]
        self.add(Purchase(id=id, person_id=person, lines=lines, net=net))

    @rule(id=ids, person=maybe_ids, thing=maybe_ids, how=st.integers(0, 4))
    def update_purchase(self, id, person, thing, how):
        self.count += 1
        updates: list[Any] = [
            {"$set": {"person_id": person}},
            {"$inc": {"net": Decimal("0.5")}},
            {"$push": {"lines": {"number": self.count, "thing_id": thing}}},
            {"$pull": {"lines": {"thing_id": thing}}},
            {"$push": {"lines": {"$each": [{"number": self.count, "thing_id": thing}], "$position": 0}}},
        ]
        self.store.update(Purchase, id, updates[how])

    @rule(model=st.sampled_from([Person, Thing, Note, Purchase]), id=ids, many=st.booleans())
    def delete(self, model, id, many):
        if many:
            self.store.delete_many(model, {"_id": {"$in": [id, POOL[0]]}})
        else:
            self.store.delete(model, id)

    @rule(model=st.sampled_from([Person, Thing, Note, Purchase]), id=ids)
    def remember(self, model, id):
        self.keep(model, id)

    @rule(which=st.integers(0, 3), name=names, other=maybe_ids, rating=ratings)
    def replace(self, which, name, other, rating):
        self.replace_kept(Person, which, name=name)
        self.replace_kept(Thing, which, name=name)
        self.replace_kept(Note, which, thing_id=other, rating=rating)
        self.replace_kept(Purchase, which, person_id=other)


def test_all_three_patterns_together(run, database):
    play(TogetherMachine, run, database, examples=6)
