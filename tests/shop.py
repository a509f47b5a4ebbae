"""A small shop that uses every derived pattern, its naive oracle, and one scenario per public write.

Used by the crash tests: what the callers own is compared as it is, and
everything that Treadle maintains is recomputed here, in plain Python, from
what the callers own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel
from pymongo import DeleteMany, InsertOne
from pymongo.database import Database

from treadle import (
    Average,
    Count,
    Document,
    ExtendedReference,
    Formula,
    Limits,
    Max,
    Min,
    Rollup,
    Store,
    Subset,
    Sum,
)

Raw = dict[str, Any]


class ReviewCard(BaseModel):
    rating: int
    text: str


class CustomerCard(BaseModel):
    name: str
    tier: str


class ProductCard(BaseModel):
    name: str
    price: int


class Region(Document, collection="regions"):
    id: int
    name: str
    spent: Annotated[int, Sum("Customer", "spent", by="region_id")] = 0
    customer_count: Annotated[int, Count("Customer", by="region_id")] = 0


class Customer(Document, collection="customers"):
    id: int
    name: str
    tier: str = "silver"
    visits: int = 0
    region_id: int
    region: Annotated[
        str | None, ExtendedReference(Region, by="region_id", field="name", on_delete="restrict")
    ] = None
    order_count: Annotated[int, Count("Order", by="customer_id")] = 0
    spent: Annotated[int, Sum("Order", "amount", by="customer_id")] = 0


class Line(BaseModel):
    product_id: int
    # What the product cost when the line was made; `product.price` is a snapshot and must stay equal.
    paid: int
    product: Annotated[
        ProductCard | None,
        ExtendedReference("Product", by="product_id", snapshot=["price"], on_delete="cascade"),
    ] = None


class Order(Document, collection="orders"):
    id: int
    customer_id: int
    customer: Annotated[
        CustomerCard | None, ExtendedReference(Customer, by="customer_id", on_delete="cascade")
    ] = None
    amount: int
    n: int = 0
    lines: list[Line] = []


class Shipment(Document, collection="shipments"):
    id: int
    order_id: int | None
    customer_name: Annotated[
        str | None, ExtendedReference(Order, by="order_id", field="customer.name", on_delete="clear")
    ] = None


class Review(Document, collection="reviews"):
    product_id: int
    rating: int
    text: str


class Brand(Document, collection="brands"):
    id: int
    turnover: Annotated[int, Sum("Product", "turnover", by="brand_id")] = 0


class Product(Document, collection="products"):
    id: int
    name: str
    price: int
    brand_id: int = 1
    n: int = 0
    sold: Annotated[int, Count(Order, by="lines.product_id")] = 0
    turnover: Annotated[int, Sum(Order, "amount", by="lines.product_id")] = 0
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    rating_total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0
    average: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    good: Annotated[int, Count(Review, by="product_id", where={"rating": {"$gte": 4}})] = 0
    best: Annotated[int | None, Max(Review, "rating", by="product_id", where={"rating": {"$lte": 9}})] = None
    worst: Annotated[int | None, Min(Review, "rating", by="product_id")] = None
    recent: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-rating", size=2)] = []
    double: Annotated[int | None, Formula({"$multiply": ["$price", 2]})] = None
    score: Annotated[int | None, Formula({"$add": ["$rating_total", "$price"]})] = None


class RatingCount(
    Document,
    collection="rating_counts",
    rollup=Rollup(Review, keys={"product_id": "product_id", "rating": "rating"}),
):
    """One document per product and rating, made and removed by the reviews."""

    product_id: int
    rating: int
    count: Annotated[int, Count()] = 0
    long: Annotated[int, Count(where={"text": {"$regex": "^.{4}"}})] = 0
    twice: Annotated[int | None, Formula({"$multiply": ["$count", 2]})] = None


class RatingTotal(
    Document, collection="rating_totals", rollup=Rollup(RatingCount, keys={"id": "product_id"})
):
    """A rollup of the rollup, by its `_id`."""

    id: int
    ratings: Annotated[int, Count()] = 0
    reviews: Annotated[int, Sum("count")] = 0
    highest: Annotated[int | None, Max("rating")] = None


class Note(Document, collection="notes"):
    """Feeds nothing: its writes are one plain command."""

    id: int
    n: int = 0


MODELS: list[type[Document]] = [
    Region,
    Customer,
    Order,
    Shipment,
    Review,
    Brand,
    Product,
    Note,
    RatingCount,
    RatingTotal,
]
COLLECTIONS = [str(model.__treadle__.collection) for model in MODELS]
MAINTAINED: dict[str, list[str]] = {
    "regions": ["spent", "customer_count"],
    "customers": ["region", "order_count", "spent"],
    "orders": ["customer"],
    "shipments": ["customer_name"],
    "reviews": [],
    "brands": ["turnover"],
    "products": [
        *("sold", "turnover", "review_count", "rating_total", "average", "good"),
        *("best", "worst", "recent", "double", "score"),
    ],
    "notes": [],
    "rating_counts": [],
    "rating_totals": [],
}
# Whole documents that Treadle makes and removes, by the fields that tell them apart.
GROUPS = {"rating_counts": ("product_id", "rating"), "rating_totals": ("_id",)}


def seed(store: Store) -> None:
    """Two regions, three customers, orders with lines, shipments, products and reviews."""
    store.setup()
    store.insert_many([Region(id=1, name="North"), Region(id=2, name="South")])
    store.insert(Brand(id=1))
    store.insert_many([Product(id=1, name="Loom", price=100), Product(id=2, name="Reed", price=7)])
    store.insert_many(
        [
            Customer(id=1, name="Ann", region_id=1),
            Customer(id=2, name="Bob", region_id=1, tier="gold"),
            Customer(id=3, name="Cid", region_id=2),
        ]
    )
    loom, reed = Line(product_id=1, paid=100), Line(product_id=2, paid=7)
    store.insert_many(
        [
            Order(id=1, customer_id=1, amount=100, lines=[loom]),
            Order(id=2, customer_id=1, amount=107, lines=[loom, reed]),
            Order(id=3, customer_id=1, amount=7, lines=[reed]),
            Order(id=4, customer_id=2, amount=14, lines=[reed, reed]),
        ]
    )
    store.insert_many([Shipment(id=number, order_id=number) for number in (1, 2, 3, 4)])
    ratings = {1: [5, 3, 1, 4], 2: [2, 9], 3: [5, 4]}
    store.insert_many(
        [
            Review(product_id=product, rating=rating, text=f"{product}-{number}")
            for product, given in ratings.items()
            for number, rating in enumerate(given)
        ]
    )
    store.insert_many([Note(id=1), Note(id=2)])
    # So that a snapshot which was taken anew would show.
    store.update(Product, 1, {"$set": {"price": 120}})
    store.update(Product, 2, {"$set": {"price": 8}})


# -- what is stored ------------------------------------------------------------------------


def stored(database: Database[Any]) -> dict[str, list[Raw]]:
    """Every document of the shop, as it is, in one command."""
    first, *others = COLLECTIONS
    stages: list[Raw] = [{"$set": {"__of": first}}]
    stages += [{"$unionWith": {"coll": name, "pipeline": [{"$set": {"__of": name}}]}} for name in others]
    state: dict[str, list[Raw]] = {name: [] for name in COLLECTIONS}
    for document in database[first].aggregate([*stages, {"$sort": {"_id": 1}}], batchSize=1000):
        state[document.pop("__of")].append(document)
    return state


def owned(state: dict[str, list[Raw]]) -> dict[str, list[Raw]]:
    """What callers wrote, without what Treadle maintains and without generated ids."""
    result: dict[str, list[Raw]] = {}
    for name, documents in state.items():
        if name in GROUPS:
            continue
        kept = []
        for document in documents:
            dropped = {"_treadle", *MAINTAINED[name], *(["_id"] if name == "reviews" else [])}
            own = {key: value for key, value in document.items() if key not in dropped}
            if "lines" in own:
                own["lines"] = [{**line, "product": None} for line in own["lines"]]
            kept.append(own)
        result[name] = sorted(kept, key=repr)
    return result


# -- the oracle --------------------------------------------------------------------------------


def wrong(state: dict[str, list[Raw]]) -> list[tuple[str, Any, str, Any, Any]]:
    """Each maintained value that is not what naive recomputation gives: where, stored, expected."""
    expected = right(state)
    found: list[tuple[str, Any, str, Any, Any]] = []
    for name, documents in state.items():
        if name in GROUPS:
            found += wrong_groups(name, documents, state)
            continue
        for document in documents:
            wanted = expected[name][document["_id"]]
            for path, value in wanted.items():
                if document.get(path) != value:
                    found.append((name, document["_id"], path, document.get(path), value))
    return [*found, *orphans(state)]


def wrong_groups(
    name: str, documents: list[Raw], state: dict[str, list[Raw]]
) -> list[tuple[str, Any, str, Any, Any]]:
    """Documents of a rollup that are missing, too many or wrong, all in all."""
    reviews: dict[Any, list[Raw]] = {}
    for review in state["reviews"]:
        reviews.setdefault((review["product_id"], review["rating"]), []).append(review)
    wanted: dict[Any, Raw] = {
        key: {
            "count": len(group),
            "long": sum(len(each["text"]) >= 4 for each in group),
            "twice": 2 * len(group),
        }
        for key, group in reviews.items()
    }
    if name == "rating_totals":
        counts, wanted = wanted, {}
        for product, rating in counts:
            total = wanted.setdefault((product,), {"ratings": 0, "reviews": 0, "highest": rating})
            total["ratings"] += 1
            total["reviews"] += counts[product, rating]["count"]
            total["highest"] = max(total["highest"], rating)
    keys = GROUPS[name]
    dropped = {*keys, "_id", "_treadle"}
    stored = {
        tuple(document[key] for key in keys): {
            path: value for path, value in document.items() if path not in dropped
        }
        for document in documents
    }
    if stored == wanted and len(stored) == len(documents):
        return []
    return [(name, key, "", stored.get(key), wanted.get(key)) for key in {**stored, **wanted}]


def orphans(state: dict[str, list[Raw]]) -> list[tuple[str, Any, str, Any, Any]]:
    """References that `on_delete` should have removed."""
    keys = {name: {each["_id"] for each in documents} for name, documents in state.items()}
    found = []
    for order in state["orders"]:
        referred = [("customer_id", order["customer_id"], "customers")]
        referred += [("lines.product_id", line["product_id"], "products") for line in order["lines"]]
        found += [
            ("orders", order["_id"], path, key, None) for path, key, of in referred if key not in keys[of]
        ]
    for shipment in state["shipments"]:
        if shipment["order_id"] is not None and shipment["order_id"] not in keys["orders"]:
            found.append(("shipments", shipment["_id"], "order_id", shipment["order_id"], None))
    return found


def between(state: Any, before: Any, after: Any) -> list[Any]:
    """The documents in a state that are neither as before nor as after: halves, doubles and losses.

    All three are results of `owned`. A document that is both before and
    after must be there, and none may be there twice.
    """
    found: list[Any] = []
    for name, documents in state.items():
        for document in documents:
            if document not in before[name] and document not in after[name]:
                found.append(("neither", name, document))
            if documents.count(document) > max(before[name].count(document), after[name].count(document)):
                found.append(("twice", name, document))
        found += [
            ("lost", name, document)
            for document in before[name]
            if document in after[name] and document not in documents
        ]
    return found


def right(state: dict[str, list[Raw]]) -> dict[str, dict[Any, Raw]]:
    """The maintained values of every document, from the callers' fields only."""
    customers = {each["_id"]: each for each in state["customers"]}
    orders = {each["_id"]: each for each in state["orders"]}
    regions = {each["_id"]: each["name"] for each in state["regions"]}
    result: dict[str, dict[Any, Raw]] = {"reviews": {each["_id"]: {} for each in state["reviews"]}}
    result["notes"] = {each["_id"]: {} for each in state["notes"]}
    result["customers"] = {
        key: {
            "region": regions.get(each["region_id"]),
            "order_count": sum(1 for order in orders.values() if order["customer_id"] == key),
            "spent": sum(order["amount"] for order in orders.values() if order["customer_id"] == key),
        }
        for key, each in customers.items()
    }
    result["regions"] = {
        key: {
            "spent": sum(
                result["customers"][each["_id"]]["spent"]
                for each in customers.values()
                if each["region_id"] == key
            ),
            "customer_count": sum(1 for each in customers.values() if each["region_id"] == key),
        }
        for key in regions
    }
    products = {each["_id"]: each for each in state["products"]}
    result["orders"] = {key: right_order(each, customers, products) for key, each in orders.items()}
    names = {key: (card["customer"] or {}).get("name") for key, card in result["orders"].items()}
    result["shipments"] = {
        each["_id"]: {"customer_name": names.get(each["order_id"])} for each in state["shipments"]
    }
    result["products"] = {key: right_product(each, state) for key, each in products.items()}
    result["brands"] = {
        each["_id"]: {
            "turnover": sum(
                result["products"][key]["turnover"]
                for key, product in products.items()
                if product["brand_id"] == each["_id"]
            )
        }
        for each in state["brands"]
    }
    return result


def right_order(order: Raw, customers: dict[Any, Raw], products: dict[Any, Raw]) -> Raw:
    customer = customers.get(order["customer_id"])
    lines = []
    for line in order["lines"]:
        product = products.get(line["product_id"])
        card = None if product is None else {"name": product["name"], "price": line["paid"]}
        lines.append({**line, "product": card})
    card = None if customer is None else {"name": customer["name"], "tier": customer["tier"]}
    return {"customer": card, "lines": lines}


def right_product(product: Raw, state: dict[str, list[Raw]]) -> Raw:
    own = [each for each in state["reviews"] if each["product_id"] == product["_id"]]
    sold = [
        order
        for order in state["orders"]
        if product["_id"] in {line["product_id"] for line in order["lines"]}
    ]
    ratings = [each["rating"] for each in own]
    first = sorted(own, key=lambda each: (-each["rating"], each["_id"]))[:2]
    return {
        "sold": len(sold),
        "turnover": sum(order["amount"] for order in sold),
        "review_count": len(own),
        "rating_total": sum(ratings),
        "average": sum(ratings) / len(ratings) if ratings else None,
        "good": sum(1 for rating in ratings if rating >= 4),
        "best": max((rating for rating in ratings if rating <= 9), default=None),
        "worst": min(ratings, default=None),
        "recent": [{"_id": each["_id"], "rating": each["rating"], "text": each["text"]} for each in first],
        "double": product["price"] * 2,
        "score": sum(ratings) + product["price"],
    }


# -- one scenario per public write -----------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A public write; `refused` says that it raises and changes nothing."""

    name: str
    act: Callable[[Store], Any]
    refused: bool = False
    # Long ones that resemble another are struck at each n-th command only, unless all are asked for.
    step: int = 1


def lines(*pairs: tuple[int, int]) -> list[Line]:
    return [Line(product_id=product, paid=paid) for product, paid in pairs]


def replace_order(store: Store) -> None:
    """Over the stored order, from a caller who knows no card, and with one line more."""
    new = Order(id=2, customer_id=3, amount=50, n=9, lines=lines((1, 100), (2, 7), (1, 120)))
    store.replace(new)


def in_own_transaction(store: Store) -> None:
    with store.transaction() as session:
        store.insert(Review(product_id=1, rating=8, text="session"), session=session)
        store.update(Customer, 1, {"$set": {"name": "Anna"}, "$inc": {"visits": 1}}, session=session)


def in_with_transaction(store: Store) -> None:
    def body(session: Any) -> None:
        store.insert(Order(id=9, customer_id=2, amount=5, lines=lines((2, 8))), session=session)
        store.delete(Review, {"text": "1-0"}, session=session)

    store.with_transaction(body)


def new_reviews() -> list[Review]:
    return [Review(product_id=number % 2 + 1, rating=number, text=f"new-{number}") for number in range(5)]


def new_orders() -> list[Order]:
    return [
        Order(id=10 + number, customer_id=number + 1, amount=1, lines=lines((1, 120))) for number in (0, 1)
    ]


SCENARIOS = [
    Scenario("insert-review", lambda s: s.insert(Review(product_id=1, rating=6, text="new"))),
    Scenario(
        "insert-order",
        lambda s: s.insert(Order(id=8, customer_id=2, amount=9, lines=lines((1, 120), (2, 8)))),
    ),
    Scenario("insert-product-after-its-reviews", lambda s: s.insert(Product(id=3, name="Heddle", price=1))),
    Scenario("insert-customer", lambda s: s.insert(Customer(id=4, name="Dan", region_id=2))),
    Scenario("insert-many-reviews", lambda s: s.insert_many(new_reviews())),
    Scenario("insert-many-orders", lambda s: s.insert_many(new_orders())),
    Scenario("update-extreme", lambda s: s.update(Review, {"text": "1-0"}, {"$inc": {"rating": -3}})),
    Scenario("update-move", lambda s: s.update(Review, {"text": "1-3"}, {"$set": {"product_id": 2}})),
    Scenario(
        "update-product",
        lambda s: s.update(Product, 1, {"$set": {"name": "Great Loom"}, "$inc": {"price": 5, "n": 1}}),
    ),
    Scenario(
        "update-customer", lambda s: s.update(Customer, 1, {"$set": {"name": "Anna"}, "$inc": {"visits": 1}})
    ),
    Scenario("update-unwatched", lambda s: s.update(Customer, 1, {"$inc": {"visits": 1}})),
    Scenario(
        "update-order-move",
        lambda s: s.update(Order, 1, {"$set": {"customer_id": 3}, "$inc": {"n": 1, "amount": 1}}),
    ),
    Scenario("update-region-of-customer", lambda s: s.update(Customer, 1, {"$set": {"region_id": 2}})),
    Scenario("update-region", lambda s: s.update(Region, 1, {"$set": {"name": "Nord"}})),
    Scenario(
        "update-many-reviews", lambda s: s.update_many(Review, {"product_id": 1}, {"$inc": {"rating": 1}})
    ),
    Scenario(
        "update-many-customers",
        lambda s: s.update_many(Customer, {}, {"$set": {"tier": "iron"}, "$inc": {"visits": 1}}),
    ),
    Scenario("update-many-orders", lambda s: s.update_many(Order, {}, {"$inc": {"amount": 1, "n": 1}})),
    Scenario("replace-order", replace_order),
    Scenario("replace-product", lambda s: s.replace(Product(id=1, name="New Loom", price=99, n=3))),
    Scenario("delete-review", lambda s: s.delete(Review, {"text": "1-0"})),
    Scenario("delete-order", lambda s: s.delete(Order, 2)),
    Scenario("delete-customer-cascades", lambda s: s.delete(Customer, 1)),
    Scenario("delete-product-cuts-lines", lambda s: s.delete(Product, 2)),
    Scenario("delete-many-reviews", lambda s: s.delete_many(Review, {"product_id": 1})),
    Scenario("delete-many-customers", lambda s: s.delete_many(Customer, {"region_id": 1})),
    Scenario("delete-restricted", lambda s: s.delete(Region, 1), refused=True),
    Scenario("plain-insert", lambda s: s.insert(Note(id=3))),
    Scenario("plain-update", lambda s: s.update(Note, 1, {"$inc": {"n": 1}})),
    Scenario("plain-update-many", lambda s: s.update_many(Note, {}, {"$inc": {"n": 1}})),
    Scenario("plain-delete-many", lambda s: s.delete_many(Note, {})),
]
SESSIONS = [
    Scenario("own-transaction", in_own_transaction),
    Scenario("with-transaction", in_with_transaction),
]
# Run with bounds so small that the copies are made after the transaction, in chunks, under an intent.
FAN_OUTS = [
    Scenario(
        "fan-out-customer", lambda s: s.update(Customer, 1, {"$set": {"name": "Zoe"}, "$inc": {"visits": 1}})
    ),
    Scenario("fan-out-product", lambda s: s.update(Product, 1, {"$set": {"name": "Zoom"}, "$inc": {"n": 1}})),
    Scenario(
        "fan-out-many",
        lambda s: s.update_many(Customer, {}, {"$set": {"tier": "x"}, "$inc": {"visits": 1}}),
        step=3,
    ),
    Scenario("fan-out-replace", lambda s: s.replace(Product(id=2, name="Zeed", price=3, n=1)), step=3),
]
BY_NAME = {scenario.name: scenario for scenario in [*SCENARIOS, *SESSIONS, *FAN_OUTS]}


# Every fan-out goes beyond the bound, and every chunk holds one document.
SMALL = Limits(fan_out_max=1, fan_out_chunk=1)


class Shop:
    """A seeded database that can be put back to its beginning, cheaply and often."""

    def __init__(self, database: Database[Any], maker: Database[Any] | None = None) -> None:
        self.database = database
        seed(Store(maker if maker is not None else database, MODELS))
        self.beginning = stored(database)
        assert [] == wrong(self.beginning)

    def reset(self) -> None:
        """Put every document back, and forget who held what."""
        self.database["treadle.leases"].delete_many({})
        now = stored(self.database)
        if now == self.beginning:
            return
        for name, documents in self.beginning.items():
            if now[name] != documents:
                collection = self.database[name]
                collection.bulk_write([DeleteMany({}), *(InsertOne(document) for document in documents)])

    def intents(self) -> list[Raw]:
        return list(self.database["treadle.intents"].find())
