"""Patterns with poison among healthy documents: how it gets there, and what the neighbours must be.

Each poison has a source and a target of its own, so that nothing that the
neighbours hold depends on it. Ids of neighbours are text that begins with
"good"; those of poison end with the number of their value.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import BaseModel
from pymongo.database import Database

from tests.kit.tiers import IS_FULL
from tests.poison.values import VALUES, insert, replace
from treadle import (
    Average,
    Count,
    Day,
    Document,
    ExtendedReference,
    Formula,
    Max,
    Min,
    Rollup,
    Subset,
    Sum,
)

GOOD = [f"good {number}" for number in range(6)]
DAY = datetime(2026, 1, 1, tzinfo=UTC)


# The worlds of test_pairs.py have hostile values, too; `make test-all` tries each of them here.
FEW = dict(list(VALUES.items())[:: 1 if IS_FULL else 6])


def schedule(maintain: str) -> dict[str, Any]:
    every = {"every": timedelta(hours=1)} if maintain == "schedule" else {}
    return {"maintain": maintain, **every}


class Scenario:
    """One pattern: its models, the documents that are stored, and what the neighbours must hold."""

    sources = "sources"
    targets = "targets"
    values = FEW

    def models(self, maintain: str, **source: Any) -> list[type[Document]]:
        """The source, declared with further keywords, and the target."""
        raise NotImplementedError

    def good(self, number: int) -> dict[str, Any]:
        """The source of a neighbour, without its id and its target's."""
        raise NotImplementedError

    def poisoned(self, value: Any) -> list[dict[str, Any]]:
        """Sources with a value, one for each place where it can stand."""
        raise NotImplementedError

    def expected(self, number: int) -> dict[str, Any]:
        """What the target of a neighbour holds in the end."""
        raise NotImplementedError

    # -- storing ---------------------------------------------------------------------------------

    def stores_targets(self) -> bool:
        return True

    def poison(self) -> list[tuple[str, dict[str, Any]]]:
        """The ids of sources with poison, and the sources."""
        return [
            (f"bad {number} {place}", source)
            for number, value in enumerate(self.values.values())
            for place, source in enumerate(self.poisoned(value))
        ]

    def fill(self, database: Database[Any]) -> None:
        """Store everything as other clients would: poison first, and between the neighbours."""
        for key, source in self.poison():
            if self.stores_targets():
                insert(database, self.targets, self.target(key))
            insert(database, self.sources, self.source(key, source))
        for number, key in enumerate(GOOD):
            if self.stores_targets():
                insert(database, self.targets, self.target(key))
            insert(database, self.sources, self.source(key, self.good(number)))

    def source(self, key: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"_id": key, "target_id": key, **fields}

    def target(self, key: str) -> dict[str, Any]:
        return {"_id": key}

    def mend(self, database: Database[Any]) -> None:
        """Give every poison a value that is none."""
        for key, _ in self.poison():
            replace(database, self.sources, key, {**self.source(key, self.good(0))})

    def stored(self, database: Database[Any], number: int) -> dict[str, Any]:
        """What the target of a neighbour holds."""
        found = database[self.targets].find_one({"_id": GOOD[number]}, {"_treadle": 0, "_id": 0})
        return found or {}


class Copies(Scenario):
    """A card and a flat copy; indexes on the copies refuse some values."""

    sources, targets = "customers", "orders"

    def models(self, maintain: str, **source: Any) -> list[type[Document]]:
        class Customer(Document, collection="customers", validation="off", **source):
            id: Any = None
            name: Any = None
            place: Any = None

        class Card(BaseModel):
            name: Any = None
            place: Any = None

        class Order(Document, collection="orders", validation="off"):
            id: Any = None
            customer_id: Any = None
            customer: Annotated[
                Card | None, ExtendedReference(Customer, by="customer_id", maintain=maintain)
            ] = None
            customer_name: Annotated[
                Any, ExtendedReference(Customer, by="customer_id", field="name", maintain=maintain)
            ] = None

        return [Customer, Order]

    def fill(self, database: Database[Any]) -> None:
        database["orders"].create_index([("customer.place", "2dsphere")])
        database["orders"].create_index([("customer_name", "text")], default_language="english")
        super().fill(database)

    def source(self, key: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"_id": key, **fields}

    def target(self, key: str) -> dict[str, Any]:
        return {"_id": key, "customer_id": key}

    def good(self, number: int) -> dict[str, Any]:
        return {"name": f"name {number}", "place": [1.0, 2.0]}

    def poisoned(self, value: Any) -> list[dict[str, Any]]:
        return [{"name": value}, {"name": "n", "place": value}]

    def poison(self) -> list[tuple[str, dict[str, Any]]]:
        nowhere = {"name": "nowhere", "place": [999.0, 999.0]}
        return [*super().poison(), ("bad place", nowhere), ("bad reserved", {"name": "n", "_treadle": [1]})]

    def expected(self, number: int) -> dict[str, Any]:
        card = self.good(number)
        return {"customer_id": GOOD[number], "customer": card, "customer_name": card["name"]}


class Values(Scenario):
    """Counts, sums, averages, extremes and a formula."""

    sources, targets = "reviews", "products"

    def models(self, maintain: str, **source: Any) -> list[type[Document]]:
        class Review(Document, collection="reviews", validation="off", **source):
            id: Any = None
            target_id: Any = None
            rating: Any = None

        how = schedule(maintain)

        class Product(Document, collection="products", validation="off"):
            id: Any = None
            count: Annotated[int, Count(Review, by="target_id", **how)] = 0
            total: Annotated[int, Sum(Review, "rating", by="target_id", **how)] = 0
            average: Annotated[float | None, Average(Review, "rating", by="target_id", **how)] = None
            best: Annotated[Any, Max(Review, "rating", by="target_id", **how)] = None
            worst: Annotated[Any, Min(Review, "rating", by="target_id", **how)] = None
            many: Annotated[int, Count(Review, by="target_id", where={"rating": {"$gte": 2}}, **how)] = 0
            half: Annotated[float | None, Formula({"$divide": ["$best", 2]})] = None

        return [Review, Product]

    def good(self, number: int) -> dict[str, Any]:
        return {"rating": number + 1}

    def poisoned(self, value: Any) -> list[dict[str, Any]]:
        # As a value, and as the key of a target that cannot be there.
        return [{"rating": value}, {"rating": 1, "target_id": value}]

    def expected(self, number: int) -> dict[str, Any]:
        rating = number + 1
        return {
            "count": 1,
            "total": rating,
            "average": rating,
            "best": rating,
            "worst": rating,
            "many": int(rating >= 2),
            "half": rating / 2,
        }


class Newest(Scenario):
    """The newest children embedded in their parent."""

    sources, targets = "notes", "shelves"

    def models(self, maintain: str, **source: Any) -> list[type[Document]]:
        class Note(Document, collection="notes", validation="off", **source):
            id: Any = None
            target_id: Any = None
            text: Any = None
            rank: Any = None

        class Card(BaseModel):
            text: Any = None
            rank: Any = None

        class Shelf(Document, collection="shelves", validation="off"):
            id: Any = None
            newest: Annotated[
                list[Card], Subset(Note, by="target_id", sort="-rank", size=2, **schedule(maintain))
            ] = []

        return [Note, Shelf]

    def good(self, number: int) -> dict[str, Any]:
        return {"text": f"text {number}", "rank": number}

    def poisoned(self, value: Any) -> list[dict[str, Any]]:
        return [{"text": value, "rank": 1}, {"text": "t", "rank": value}, {"text": "t", "target_id": value}]

    def expected(self, number: int) -> dict[str, Any]:
        return {"newest": [{"_id": GOOD[number], **self.good(number)}]}


class Groups(Scenario):
    """A rollup by a value and a day."""

    sources, targets = "sales", "days"

    def models(self, maintain: str, **source: Any) -> list[type[Document]]:
        class Sale(Document, collection="sales", validation="off", **source):
            id: Any = None
            shop: Any = None
            at: Any = None
            amount: Any = None

        how = schedule(maintain)
        keys = {"shop": "shop", "day": Day("at", timezone="UTC")}

        class SalesDay(Document, collection="days", validation="off", rollup=Rollup(Sale, keys=keys, **how)):
            shop: Any = None
            day: Any = None
            number: Annotated[int, Count()] = 0
            total: Annotated[float, Sum("amount")] = 0

        return [Sale, SalesDay]

    def stores_targets(self) -> bool:
        return False

    def source(self, key: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"_id": key, "shop": key, "at": DAY, "amount": 1, **fields}

    def good(self, number: int) -> dict[str, Any]:
        return {"amount": number + 1}

    def poisoned(self, value: Any) -> list[dict[str, Any]]:
        return [{"shop": value}, {"at": value}, {"amount": value}]

    def stored(self, database: Database[Any], number: int) -> dict[str, Any]:
        found = database[self.targets].find_one({"shop": GOOD[number]}, {"_treadle": 0, "_id": 0})
        return found or {}

    def expected(self, number: int) -> dict[str, Any]:
        return {"shop": GOOD[number], "day": DAY.replace(tzinfo=None), "number": 1, "total": number + 1}


SCENARIOS = {"extended-reference": Copies(), "computed": Values(), "subset": Newest(), "rollup": Groups()}
