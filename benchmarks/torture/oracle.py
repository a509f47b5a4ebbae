"""What is stored, against what the writers were told and against what follows from the sources.

In plain PyMongo and plain Python: nothing of Treadle is asked. Lost is what was
acknowledged and is not there, doubled what is there twice, untrue what is
there although its writer was told that it was not written. Drift is a derived
value that is not what its sources make it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from benchmarks.torture.journal import ABSENT, Journal

EXAMPLES_MAX = 20


@dataclass
class Account:
    """What became of the writes."""

    lost: int = 0
    doubled: int = 0
    untrue: int = 0
    drift: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.untrue or self.drift)

    def note(self, kind: str, what: str, number: int = 1) -> None:
        setattr(self, kind, getattr(self, kind) + number)
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"{kind}: {what}")


def check(database: Any, journal: Journal) -> Account:
    """The account of a database after its load has come to rest."""
    account = Account()
    documents = {
        name: list(database[name].find())
        for name in database.list_collection_names()
        if not name.startswith(("system.", "treadle."))
    }
    _check_cells(documents, journal, account)
    _check_counters(documents, journal, account)
    for derived in (_products, _customers, _sales, _tree, _clubs, _buckets, _users):
        for what in derived(documents):
            account.note("drift", what)
    return account


# -- what was written ------------------------------------------------------------------------------


def _stored(documents: dict[str, list[Any]]) -> Iterable[tuple[Any, Any]]:
    """Each cell that is stored, with its state."""
    for each in documents["orders"]:
        yield ("orders", each["_id"]), (each["customer_id"], each["amount"], each["status"])
    for each in documents["customers"]:
        yield ("customers", each["_id"]), each["name"]
    for each in documents["reviews"]:
        yield ("reviews", each["_id"]), (each["product_id"], each["rating"])
    for each in documents["sales"]:
        yield ("sales", each["_id"]), (each["shop"], each["at"], each["amount"])
    for each in documents["categories"]:
        yield ("categories", each["_id"]), (each.get("parent_id"),)
    for each in documents["items"]:
        yield ("items", each["_id"]), (each["type"], each["title"])
    for each in documents["users"]:
        yield ("users", each["_id"]), each["name"]
    for each in documents["notes"]:
        yield ("notes", each["_id"]), each["edits"]
    for each in documents["clubs"]:
        for member in _members(documents, each):
            yield ("members", (each["_id"], member)), True
    for each in documents["readings"]:
        for reading in each["readings"]:
            yield ("readings", (each["sensor"], reading["at"])), reading["value"]


def _members(documents: dict[str, list[Any]], club: Any) -> list[Any]:
    pages = [each for each in documents.get("club_overflow", []) if each["club_id"] == club["_id"]]
    pages.sort(key=lambda page: page["page"])
    return [*club["members"], *(member for page in pages for member in page["members"])]


def _check_cells(documents: dict[str, list[Any]], journal: Journal, account: Account) -> None:
    states: dict[Any, list[Any]] = defaultdict(list)
    for cell, state in _stored(documents):
        states[cell].append(state)
    for cell in states.keys() | journal.states.keys():
        stored, allowed = states.get(cell, [ABSENT]), journal.states.get(cell, {ABSENT})
        if len(stored) > 1:
            account.note("doubled", f"{cell} is stored as {stored}")
        elif stored[0] not in allowed:
            kind = "untrue" if allowed == {ABSENT} else "lost"
            account.note(kind, f"{cell} is {stored[0]}, and may be {allowed}")


def _check_counters(documents: dict[str, list[Any]], journal: Journal, account: Account) -> None:
    stored: dict[Any, int] = {("tallies", each["_id"]): each["total"] for each in documents["tallies"]}
    for product in documents["products"]:
        stored |= {(name, product["_id"]): product[name] for name in ("likes", "views")}
    for cell, amount in stored.items():
        least, greatest = journal.least[cell], journal.greatest[cell]
        if amount < least:
            account.note("lost", f"{cell}: {amount} of {least}", least - amount)
        if amount > greatest:
            account.note("doubled", f"{cell}: {amount} of at most {greatest}", amount - greatest)


# -- what follows from it --------------------------------------------------------------------------


def _products(documents: dict[str, list[Any]]) -> Iterable[str]:
    for product in documents["products"]:
        own = [each for each in documents["reviews"] if each["product_id"] == product["_id"]]
        ratings = sorted((each["rating"] for each in own), reverse=True)
        expected = (len(own), len(own), sum(ratings), max(ratings, default=None), ratings[:3])
        top = [each["rating"] for each in product["top"]]
        stored = (
            product["review_count"],
            product["streamed"],
            product["rating_total"],
            product["best"],
            top,
        )
        if stored != expected:
            yield f"product {product['_id']}: {stored}, and should be {expected}"


def _customers(documents: dict[str, list[Any]]) -> Iterable[str]:
    names = {each["_id"]: each["name"] for each in documents["customers"]}
    for order in documents["orders"]:
        if order["customer"] != {"name": names[order["customer_id"]]}:
            yield f"order {order['_id']}: {order['customer']} of {names[order['customer_id']]}"
    for customer in documents["customers"]:
        amounts = [e["amount"] for e in documents["orders"] if e["customer_id"] == customer["_id"]]
        stored, expected = (customer["order_count"], customer["spent"]), (len(amounts), sum(amounts))
        if stored != expected:
            yield f"customer {customer['_id']}: {stored}, and should be {expected}"


def _sales(documents: dict[str, list[Any]]) -> Iterable[str]:
    expected: Counter[Any] = Counter()
    for sale in documents["sales"]:
        expected[sale["shop"], sale["at"].replace(hour=0)] += sale["amount"]
    for name in ("daily_sales", "scheduled_sales"):
        stored = {(each["shop"], each["day"]): each["amount"] for each in documents[name]}
        if stored != expected or len(stored) != len(documents[name]):
            yield f"{name}: {stored}, and should be {dict(expected)}"


def _tree(documents: dict[str, list[Any]]) -> Iterable[str]:
    parents = {each["_id"]: each.get("parent_id") for each in documents["categories"]}
    for node in documents["categories"]:
        above: list[Any] = []
        parent = parents[node["_id"]]
        while parent is not None and parent not in above:
            above.insert(0, parent)
            parent = parents.get(parent)
        if node["above"] != above:
            yield f"category {node['_id']}: {node['above']}, and should be {above}"


def _clubs(documents: dict[str, list[Any]]) -> Iterable[str]:
    overflowing = {each["club_id"] for each in documents.get("club_overflow", [])}
    for club in documents["clubs"]:
        stored = (club["member_count"], club["has_overflow"])
        expected = (len(_members(documents, club)), club["_id"] in overflowing)
        if stored != expected:
            yield f"club {club['_id']}: {stored}, and should be {expected}"


def _buckets(documents: dict[str, list[Any]]) -> Iterable[str]:
    for bucket in documents["readings"]:
        values = [each["value"] for each in bucket["readings"]]
        stored = (bucket["count"], bucket["stats"]["value"]["sum"])
        if stored != (len(values), sum(values)) or not isinstance(bucket["start"], datetime):
            yield f"bucket {bucket['_id']}: {stored}, and holds {values}"


def _users(documents: dict[str, list[Any]]) -> Iterable[str]:
    for user in documents["users"]:
        if user.get("schema_version") != 2:
            yield f"user {user['_id']} is of version {user.get('schema_version')}"
