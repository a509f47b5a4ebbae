"""`treadle demo`: a small shop on a private server, step by step.

Each step is one function that does its work and returns what to tell about
it; `STEPS` gives their order. To show more, write a function and add it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ValidationError
from pymongo.errors import OperationFailure

from treadle.bson_types import Id
from treadle.document import Document
from treadle.indexes import Indexed
from treadle.patterns.computed import Average, Count
from treadle.patterns.extended_reference import ExtendedReference
from treadle.patterns.subset import Subset
from treadle.shell import local_uri
from treadle.sync_api import Store

if TYPE_CHECKING:
    from rich.console import Console

DOCUMENT_FAILED_VALIDATION = 121


class Address(BaseModel):
    street: str
    city: str


class Customer(Document, collection="customers"):
    name: str
    email: Annotated[str, Indexed(unique=True)]
    address: Address


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    text: str
    date: datetime


class ReviewCard(BaseModel):
    rating: int
    text: str


class Product(Document, collection="products"):
    name: str
    price: Decimal
    stock: int
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    average_rating: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    recent_reviews: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=2)] = []  # noqa: RUF012 (Pydantic copies it)


class Line(BaseModel):
    product_id: Id
    name: str
    price: Decimal
    quantity: int


class CustomerCard(BaseModel):
    name: str
    email: str


class Order(Document, collection="orders", validation="strict"):
    customer_id: Id
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    lines: list[Line]
    total: Decimal
    status: Literal["open", "paid"] = "open"
    placed_at: datetime


MODELS = (Customer, Review, Product, Order)


@dataclass(slots=True)
class Shop:
    """What one step leaves for the next."""

    store: Store
    now: datetime
    customers: dict[str, Customer] = field(default_factory=dict)
    products: dict[str, Product] = field(default_factory=dict)
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that the demo did."""

    title: str
    told: tuple[str, ...]


def demo(
    console: Console,
    wait: Callable[[], None] | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> list[Step]:
    """Run the shop on a server of its own, which is gone afterwards.

    `wait` is called with the server still running, after its address was
    printed; the server stays until it returns.
    """
    from treadle import server

    done: list[Step] = []
    with server.start() as running:
        uri = local_uri(running.uri)
        with Store.open(uri, MODELS) as store:
            version = store.database.client.server_info()["version"]
            told = f"MongoDB {version} on port {running.port}"
            _tell(console, done, Step("Started a private server", (told,)))
            shop = Shop(store, now())
            for title, step in STEPS:
                _tell(console, done, Step(title, tuple(step(shop))))
        if wait is not None:
            console.print("\nThe server runs until Ctrl-C. Look around with:", markup=False)
            console.print(f'  mongosh "{uri}"', markup=False, highlight=False, soft_wrap=True)
            wait()
    _tell(console, done, Step("Stopped the server", ("its folder is removed; nothing stays behind",)))
    return done


def _tell(console: Console, done: list[Step], step: Step) -> None:
    from rich.text import Text

    done.append(step)
    console.print(Text(f"{len(done)}. {step.title}", style="bold"))
    for line in step.told:
        console.print(f"   {line}", markup=False, highlight=False, soft_wrap=True)


# -- the steps ------------------------------------------------------------------


def set_up(shop: Shop) -> list[str]:
    actions = shop.store.setup()
    again = shop.store.setup()
    return [*map(str, actions), f"a second setup() finds {len(again)} things to do"]


def insert(shop: Shop) -> list[str]:
    customers = shop.store.insert_many(
        [
            Customer(name="Ada", email="ada@example.org", address=Address(street="Mill Lane", city="Leeds")),
            Customer(name="Ben", email="ben@example.org", address=Address(street="Rue Foch", city="Lyon")),
        ]
    )
    products = shop.store.insert_many(
        [
            Product(name="Shuttle", price=Decimal("12.50"), stock=5),
            Product(name="Yarn", price=Decimal("3.95"), stock=100),
        ]
    )
    shop.customers = {customer.name: customer for customer in customers}
    shop.products = {product.name: product for product in products}
    return [
        f"{len(customers)} customers, {len(products)} products",
        "a price is a Decimal here and a Decimal128 in the database",
    ]


def order_in_a_transaction(shop: Shop) -> list[str]:
    """The order and the stock change together."""
    shop.order = place(shop, "Ada", {"Shuttle": 2, "Yarn": 10})
    left = {name: stock(shop, name) for name in shop.products}
    return [
        f"Ada's order over {shop.order.total}, and the stock that it takes",
        "left: " + ", ".join(f"{name} {count}" for name, count in left.items()),
    ]


def order_too_much(shop: Shop) -> list[str]:
    """An order that the stock cannot fill leaves no trace."""
    try:
        place(shop, "Ben", {"Yarn": 20, "Shuttle": 99})
    except OutOfStock as refusal:
        return [
            f"Ben wanted 20 Yarn and 99 Shuttles: {refusal}",
            f"nothing was written: Yarn {stock(shop, 'Yarn')}, orders {shop.store.count(Order)}",
        ]
    raise AssertionError("an order beyond the stock went through")


def find_and_update(shop: Shop) -> list[str]:
    assert shop.order is not None
    cheap = shop.store.find(Product, {"price": {"$lt": Decimal(10)}}, sort="name").to_list()
    paid = shop.store.update(Order, shop.order.id, {"$set": {"status": "paid"}})
    assert paid is not None
    return [
        "products below 10: " + ", ".join(f"{product.name} at {product.price}" for product in cheap),
        f"update gives the order after: status {paid.status!r}",
    ]


def refuse_bad_documents(shop: Shop) -> list[str]:
    told = []
    try:
        Product(name="Loom", price="dear", stock=1)
    except ValidationError as error:
        told.append(f"in Python, by Pydantic: price: {error.errors()[0]['msg']}")
    try:
        # Past the model, as another program would write.
        shop.store.collection(Product).insert_one({"name": "Loom", "price": "dear", "stock": 1})
    except OperationFailure as error:
        if error.code != DOCUMENT_FAILED_VALIDATION:
            raise
        told.append("in the database, by its validator: Document failed validation")
    return told


def read_back(shop: Shop) -> list[str]:
    told = []
    for order in shop.store.find(Order, sort="placed_at"):
        customer = shop.store.get(Customer, order.customer_id)
        assert customer is not None
        told.append(f"{customer.name}, {customer.address.city}, {order.placed_at:%Y-%m-%d}: {order.status}")
        told += [f"  {line.quantity} x {line.name} at {line.price}" for line in order.lines]
        told.append(f"  total {order.total}")
    return told


def copy_and_rename(shop: Shop) -> list[str]:
    """Extended Reference: the order carries its customer's card."""
    assert shop.order is not None
    shop.store.update(Customer, shop.customers["Ada"].id, {"$set": {"name": "Ada Byron"}})
    order = shop.store.get(Order, shop.order.id)
    assert order is not None
    assert order.customer is not None
    return [f"the order's own copy now says {order.customer.name!r}; no second query to show it"]


def review(shop: Shop) -> list[str]:
    """Computed and Subset: the product carries what its page shows."""
    yarn = shop.products["Yarn"]
    words = ["thin", "strong", "soft", "too red", "lovely"]
    shop.store.insert_many(
        [
            Review(product_id=yarn.id, rating=1 + number, text=text, date=shop.now + timedelta(hours=number))
            for number, text in enumerate(words)
        ]
    )
    return [f"{len(words)} reviews, one update of the product", shown(shop, "Yarn")]


def verify_and_repair(shop: Shop) -> list[str]:
    """Somebody writes behind Treadle's back."""
    shop.store.collection(Product).update_one({"name": "Yarn"}, {"$set": {"review_count": 99}})
    shop.store.collection(Order).update_one({}, {"$set": {"customer.name": "Nobody"}})
    told = ["a raw write set the count to 99 and the copied name to 'Nobody'; verify() finds:"]
    for finding in shop.store.verify():
        told.append(f"  {finding.model} {finding.path}: {finding.stored!r}, expected {finding.expected!r}")
    mended = shop.store.repair()
    told.append(f"repair() mended {mended} documents; verify() now finds {len(shop.store.verify())}")
    return told


STEPS: tuple[tuple[str, Callable[[Shop], list[str]]], ...] = (
    ("Set up collections, validators and indexes", set_up),
    ("Inserted customers and products", insert),
    ("Placed an order in a transaction", order_in_a_transaction),
    ("Refused an order beyond the stock", order_too_much),
    ("Found and updated", find_and_update),
    ("Refused a product without a proper price, twice", refuse_bad_documents),
    ("Read the orders back", read_back),
    ("Renamed a customer, and every copy followed (Extended Reference)", copy_and_rename),
    ("Reviewed a product (Computed, Subset)", review),
    ("Broke something on purpose, found it, mended it", verify_and_repair),
)


# -- what the shop does ---------------------------------------------------------


class OutOfStock(Exception):
    """There is less of a product than an order wants."""


def place(shop: Shop, customer: str, wanted: dict[str, int]) -> Order:
    """Store an order and take its products from the stock, both or neither."""
    with shop.store.transaction() as session:
        lines = []
        for name, quantity in wanted.items():
            enough = {"name": name, "stock": {"$gte": quantity}}
            product = shop.store.update(Product, enough, {"$inc": {"stock": -quantity}}, session=session)
            if product is None:
                raise OutOfStock(f"there are not {quantity} of {name}")
            lines.append(Line(product_id=product.id, name=name, price=product.price, quantity=quantity))
        order = Order(
            customer_id=shop.customers[customer].id,
            lines=lines,
            total=sum((line.price * line.quantity for line in lines), Decimal(0)),
            placed_at=shop.now,
        )
        return shop.store.insert(order, session=session)


def shown(shop: Shop, name: str) -> str:
    product = shop.store.find_one(Product, {"name": name})
    assert product is not None
    newest = ", ".join(f"{card.text!r} ({card.rating})" for card in product.recent_reviews)
    return f"{product.review_count} reviews, {product.average_rating} on average; newest: {newest}"


def stock(shop: Shop, name: str) -> int:
    product = shop.store.find_one(Product, {"name": name})
    assert product is not None
    return product.stock
