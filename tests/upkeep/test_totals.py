"""Totals that the worker adds new sources to: each care that is taken, and what is wrong without it."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import Int64, ObjectId
from bson.decimal128 import Decimal128

from tests.upkeep.followed import leading, read
from treadle import Average, Count, Document, Id, Limits, Store, Sum
from treadle.graph.numbers import exact_sum
from treadle.plan import DatabaseCommand, Read
from treadle.upkeep import totals
from treadle.upkeep.totals import Total


class Sale(Document, collection="sales"):
    shop_id: Id | None = None
    amount: int = 1
    price: Decimal = Decimal(0)


class Shop(Document, collection="shops"):
    sales: Annotated[int, Count(Sale, by="shop_id", maintain="stream")] = 0
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0
    turnover: Annotated[Decimal, Sum(Sale, "price", by="shop_id", maintain="stream")] = Decimal(0)
    mean: Annotated[Decimal | None, Average(Sale, "price", by="shop_id", maintain="stream")] = None


class Following:
    """A worker that leads, stepped by hand."""

    def __init__(self, store: Store, follower: Any, run: Any) -> None:
        self.follower, self._run = follower, run
        self.database = store.runner.database
        self.keys = [ObjectId() for _ in range(2)]
        self.database["shops"].insert_many([{"_id": key} for key in self.keys])
        self.sell(0)
        self.step()
        assert self.known(0)

    def sell(self, shop: int, amount: Any = 1, **options: Any) -> Any:
        sale = {"shop_id": self.keys[shop], "amount": amount, "price": Decimal128("0.10")}
        return self.database["sales"].insert_one(sale, **options).inserted_id

    def read(self) -> list[Any]:
        return read(self.follower, self._run)

    def handle(self, events: list[Any]) -> None:
        self._run(self.follower._handle(events))

    def step(self) -> None:
        """Handle everything that is there."""
        while self._run(self.follower.step(0.05, linger=False)):
            pass

    def forget(self) -> None:
        self.follower._totals.forget()

    def known(self, shop: int) -> Total | None:
        return next((each for (_, key), each in self._totals.items() if key == self.keys[shop]), None)

    @property
    def _totals(self) -> dict[Any, Total]:
        remembered: dict[Any, Total] = self.follower._totals._totals
        return remembered

    def of(self, shop: int) -> tuple[int, int]:
        found = self.database["shops"].find_one({"_id": self.keys[shop]})
        assert found is not None
        return found["sales"], found["total"]


@pytest.fixture
def following(database: Any) -> Any:
    store = Store(database, [Sale, Shop], limits=Limits(worker_batch_max=3, worker_linger_below=1))
    store.setup()
    with leading(store) as (follower, run):
        made = Following(store, follower, run)
        made.store = store  # type: ignore[attr-defined]
        yield made
        assert [] == store.verify(Shop)


# -- what is counted ---------------------------------------------------------------------------------


def test_a_sale_that_was_counted_before_its_event_came_counts_once(following: Any) -> None:
    following.forget()
    following.sell(1)
    events = following.read()
    following.sell(1, 10)
    following.handle(events)
    assert (2, 11) == following.of(1)
    following.step()
    assert (2, 11) == following.of(1)


def test_events_that_are_read_again_count_once(following: Any) -> None:
    """The transaction has committed, and then the worker fails: its batch comes again."""
    following.sell(0, 10)
    real = following.follower._count

    def fail(name: str, number: int = 1) -> None:
        real(name, number)
        if name == "recomputed":
            raise OSError("no more")

    following.follower._count = fail
    with pytest.raises(OSError):
        following.handle(following.read())
    following.follower._count = real
    following.step()
    assert (2, 11) == following.of(0)


def test_a_transaction_that_comes_in_two_batches_is_counted_whole(following: Any) -> None:
    """All its events have one time."""
    client = following.database.client
    with client.start_session() as session, session.start_transaction():
        for _ in range(4):
            following.sell(0, 10, session=session)
    following.handle(following.read())
    following.step()
    assert (5, 41) == following.of(0)


def test_a_target_that_could_not_be_written_is_counted_again(following: Any) -> None:
    following.sell(1)
    following.step()
    database = following.database
    database.command({"collMod": "shops", "validator": {"total": {"$not": {"$gt": 100}}}})
    following.sell(0, 10)
    following.sell(1, 1000)
    following.step()
    assert [(2, 11), (1, 1)] == [following.of(0), following.of(1)]
    database.command({"collMod": "shops", "validator": {}})
    following.sell(1)
    following.step()
    assert (3, 1002) == following.of(1)
    database["treadle.set_aside"].delete_many({})


def test_what_somebody_else_wrote_is_counted_again(following: Any) -> None:
    """Whatever made a total wrong, repair mends it for good."""
    following.known(0).states[0]["count"] += 100
    following.sell(0)
    following.step()
    assert (2, 2) == following.of(0)


# -- what it is for --------------------------------------------------------------------------------


def test_sources_are_read_once_and_then_added(following):
    """Later inserts cost as much whether a shop has one sale or a million."""
    performed: list[Any] = []
    real = following.store.runner._perform

    def perform(command: Any, *rest: Any) -> Any:
        if isinstance(command, Read) and command.collection == "sales":
            performed.append(command)
        if isinstance(command, DatabaseCommand) and command.document.get("aggregate") == "sales":
            performed.append(command)
        return real(command, *rest)

    following.store.runner._perform = perform
    for amount in range(5):
        following.sell(0, amount)
        following.step()
    assert ((6, 11), []) == (following.of(0), performed)
    following.forget()
    following.sell(0)
    following.step()
    assert ((7, 12), 1) == (following.of(0), len(performed))
    following.store.runner.__dict__.pop("_perform")


def test_targets_that_have_most_sources_are_counted_without_the_index(following, monkeypatch):
    """Where a few have less, the index finds them."""
    monkeypatch.setattr(totals, "MANY", 1)
    hints = []
    real = following.store.runner._command

    def command(command: Any, session: Any) -> Any:
        if command.document.get("aggregate") == "sales":
            hints.append(command.document.get("hint"))
        return real(command, session)

    following.store.runner._command = command
    for shop in (0, 0, 0, 0, 1, 1):
        following.sell(shop)
    following.step()
    for shop in (0, 1):
        following.forget()
        following.sell(shop)
        following.step()
    assert [{"$natural": 1}, None] == hints
    assert [(6, 6), (3, 3)] == [following.of(0), following.of(1)]
    following.store.runner.__dict__.pop("_command")


def test_sources_that_name_their_targets_in_lists_do_not_count_and_hinder_nobody(following):
    odd = [{"shop_id": [following.keys[0], number]} for number in range(5)]
    following.database["sales"].insert_many(odd, bypass_document_validation=True)
    following.forget()
    following.sell(0)
    following.step()
    assert (2, 2) == following.of(0)
    assert following.known(0)


def test_a_router_has_no_totals(following):
    """Nobody can say which events of several shards a moment holds."""
    following.forget()
    following.follower.server = replace(following.follower.server, sharded=True)
    following.sell(0)
    following.step()
    assert ((2, 2), None) == (following.of(0), following.known(0))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], 0),
        ([1, Int64(2), -4], -1),
        ([2**62, 2**62], None),
        ([1, True], None),
        ([0.5, 0.5], None),
        ([1, Decimal128("0.10")], Decimal128("1.10")),
        ([Decimal128("1E+33"), Decimal128("0.1")], None),
        ([Decimal128("NaN")], None),
        ([Decimal128("sNaN"), 1], None),
        ([Decimal128("Infinity")], None),
        ([Decimal128("9E+6144"), Decimal128("9E+6144")], None),
        (["1"], None),
    ],
)
def test_sums_are_exact_or_left_to_the_server(numbers, expected):
    assert expected == exact_sum(numbers)


@pytest.mark.parametrize(
    ("before", "after", "known"),
    [
        # The server adds integers after decimals.
        ([-1208118397, Decimal128("4.6")], [Decimal128("1E+33")], False),
        # What is rounded may come to light when the large ones are gone.
        ([Decimal128("9E+33"), 5, Decimal128("9E+33")], [Decimal128("-9E+33")], False),
        ([Decimal128("1E+3"), Decimal128("-0.00")], [7, Int64(7)], True),
        ([], [Decimal128("0E+3"), 1], True),
        ([1, Int64(2)], [3, None], True),
        ([2**31 - 1, 1], [-5], True),
        ([Int64(2**40)], [Int64(5)], True),
        ([2**62], [2**62], False),
    ],
)
def test_what_is_added_is_what_the_server_gives_for_all(database, before, after, known):
    def served(values: list[Any]) -> Any:
        database["numbers"].delete_many({})
        database["numbers"].insert_many([{"value": each} for each in values])
        grouped = database["numbers"].aggregate([{"$group": {"_id": None, "sum": {"$sum": "$value"}}}])
        return next(grouped)["sum"]

    added = exact_sum([value for value in after if value is not None])
    whole = exact_sum([served(before), added]) if before else added
    assert known == (whole is not None)
    assert not known or str(whole) == str(served([*before, *after]))
