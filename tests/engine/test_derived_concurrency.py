"""Real threads on Store and real tasks on AsyncStore: exact totals, nothing stale, at the end of every race.

`together` starts all writers at one barrier and raises whatever one of them
raised. A race that can be held open is held open with two sessions or with
the batcher itself; the others are run for many rounds.

Covers: engine/guards
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from treadle import (
    Average,
    Count,
    DataError,
    Document,
    DuplicateKey,
    ExtendedReference,
    Id,
    Limits,
    Max,
    Subset,
    Sum,
)

WRITERS = 8
JOIN_SECONDS_MAX = 50


class Review(Document, collection="reviews"):
    product_id: Id | None
    rating: Annotated[int, Field(ge=0, le=1000)]
    price: Decimal = Decimal("0.10")


class ReviewCard(BaseModel):
    rating: int


class Product(Document, collection="products"):
    name: str = "p"
    count: Annotated[int, Count(Review, by="product_id")] = 0
    high: Annotated[int, Count(Review, by="product_id", where={"rating": {"$gte": 5}})] = 0
    total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0
    money: Annotated[Decimal, Sum(Review, "price", by="product_id")] = Decimal(0)
    average: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    best: Annotated[int | None, Max(Review, "rating", by="product_id")] = None
    top: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-rating", size=3)] = []


class Customer(Document, collection="customers"):
    name: str
    email: Annotated[str | None, "unique by an index of the test"] = None


class Order(Document, collection="orders"):
    customer_id: Id
    name: Annotated[str | None, ExtendedReference(Customer, by="customer_id", field="name")] = None


class Invoice(Document, collection="invoices"):
    customer_id: Id
    name: Annotated[
        str | None, ExtendedReference(Customer, by="customer_id", field="name", on_delete="restrict")
    ] = None


class Ticket(Document, collection="tickets"):
    customer_id: Id
    name: Annotated[
        str | None, ExtendedReference(Customer, by="customer_id", field="name", on_delete="cascade")
    ] = None


SHOP = [Review, Product]
DESK = [Customer, Order, Invoice, Ticket]


class Racers:
    """Writers at one time: threads on the blocking shell, tasks on the asyncio shell."""

    def __init__(self, run: Any, models: Sequence[type[Document]], **options: Any) -> None:
        self.run = run
        self.store = run.store(models, **options)
        self.store.setup()
        self.tasks = hasattr(run, "wait")

    def together(self, jobs: Sequence[Callable[[Caller], Coroutine[Any, Any, Any]]]) -> list[Any]:
        """The results of the jobs, or their errors, in their order."""
        if self.tasks:

            async def all_of_them() -> list[Any]:
                caller = Caller(self.store._inner, awaits=True)
                return await asyncio.gather(*(job(caller) for job in jobs), return_exceptions=True)

            return self.run.wait(all_of_them())
        return self._threads(jobs)

    def _threads(self, jobs: Sequence[Callable[[Caller], Coroutine[Any, Any, Any]]]) -> list[Any]:
        results: list[Any] = [None] * len(jobs)
        barrier = threading.Barrier(len(jobs))

        def perform(number: int) -> None:
            barrier.wait(JOIN_SECONDS_MAX)
            try:
                results[number] = finish(jobs[number](Caller(self.store, awaits=False)))
            except BaseException as error:
                results[number] = error

        threads = [
            threading.Thread(target=perform, args=(number,), daemon=True) for number in range(len(jobs))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_SECONDS_MAX)
        assert [] == [thread.name for thread in threads if thread.is_alive()]
        return results


class Caller:
    """A store whose calls are awaited, whether or not they need to be."""

    def __init__(self, store: Any, awaits: bool) -> None:
        self._store = store
        self._awaits = awaits

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._store, name)

        async def call(*arguments: Any) -> Any:
            result = method(*arguments)
            return await result if self._awaits else result

        return call


def finish(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never really waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a blocking job awaited something else")


def no_errors(results: Sequence[Any]) -> None:
    assert [] == [each for each in results if isinstance(each, BaseException)]


def expected_product(reviews: Sequence[dict[str, Any]], key: Any) -> dict[str, Any]:
    """What a product's maintained fields should be, from the raw reviews."""
    mine = [each for each in reviews if each["product_id"] == key]
    ratings = [each["rating"] for each in mine]
    ordered = sorted(mine, key=lambda each: (-each["rating"], each["_id"]))
    return {
        "count": len(mine),
        "high": len([each for each in ratings if each >= 5]),
        "total": sum(ratings),
        "money": sum((each["price"].to_decimal() for each in mine), Decimal(0)),
        "average": sum(ratings) / len(ratings) if ratings else None,
        "best": max(ratings, default=None),
        "top": [{"_id": each["_id"], "rating": each["rating"]} for each in ordered[:3]],
    }


def check_products(racers: Racers, database: Any) -> None:
    reviews = list(database.reviews.find())
    for product in database.products.find():
        product["money"] = product["money"].to_decimal()
        expected = expected_product(reviews, product["_id"])
        assert expected == {name: product[name] for name in expected}
    assert [] == racers.store.verify()


def shopper(number: int, keys: Sequence[Any], rounds: int) -> Callable[[Caller], Coroutine[Any, Any, int]]:
    """A writer that inserts, updates, moves and deletes reviews; how many it leaves."""

    async def work(store: Caller) -> int:
        mine: list[Any] = []
        for at in range(rounds):
            key = keys[(number * 7 + at) % len(keys)]
            other = keys[(number * 7 + at + 1) % len(keys)]
            stored = await store.insert(Review(product_id=key, rating=(number + at) % 10))
            mine.append(stored.id)
            if at % 3 == 1:
                await store.update(Review, mine[len(mine) // 2], {"$inc": {"rating": 3}})
            if at % 4 == 2:
                await store.update(Review, mine[-1], {"$set": {"product_id": other}})
            if at % 5 == 4:
                await store.delete(Review, mine.pop(0))
        return len(mine)

    return work


@pytest.mark.parametrize(("parents", "rounds"), [(1, 12), (100, 12)])
def test_eight_writers_leave_exact_totals(run, database, parents, rounds):
    """Inserts, updates, moves and deletes of 8 writers, on one hot parent and on a hundred."""
    racers = Racers(run, SHOP)
    keys = [each.id for each in racers.store.insert_many([Product() for _ in range(parents)])]
    results = racers.together([shopper(number, keys, rounds) for number in range(WRITERS)])
    no_errors(results)
    assert sum(results) == database.reviews.count_documents({})
    check_products(racers, database)


def test_bulk_writes_race_with_single_ones(run, database):
    """update_many and delete_many over the same parents as single inserts."""
    racers = Racers(run, SHOP)
    one, other = (each.id for each in racers.store.insert_many([Product(), Product()]))

    async def in_bulk(store: Caller) -> None:
        for at in range(4):
            await store.insert_many([Review(product_id=one, rating=each) for each in range(5)])
            await store.update_many(Review, {"rating": at}, {"$set": {"product_id": other, "rating": 9}})
            await store.delete_many(Review, {"product_id": other, "rating": {"$lt": 9}})

    no_errors(racers.together([in_bulk, in_bulk, *(shopper(each, [one, other], 6) for each in range(4))]))
    check_products(racers, database)


@pytest.mark.parametrize("limits", [Limits(), Limits(fan_out_max=10, fan_out_chunk=7)])
def test_racing_renames_leave_no_stale_copy(run, database, limits):
    """Every copy shows the rename that won, also where copies are made after the commit, in chunks."""
    racers = Racers(run, DESK, limits=limits)
    customer = racers.store.insert(Customer(name="first"))
    racers.store.insert_many([Order(customer_id=customer.id) for _ in range(60)])

    def rename(number: int) -> Callable[[Caller], Coroutine[Any, Any, None]]:
        async def work(store: Caller) -> None:
            for at in range(2):
                await store.update(Customer, customer.id, {"$set": {"name": f"{number}.{at}"}})
                await store.insert(Order(customer_id=customer.id))

        return work

    no_errors(racers.together([rename(number) for number in range(4)]))
    racers.store.recover()
    name = database.customers.find_one()["name"]
    assert [name] == database.orders.distinct("name")
    assert 68 == database.orders.count_documents({})
    assert 0 == database["treadle.intents"].count_documents({})
    assert [] == racers.store.verify()


@pytest.mark.parametrize("call", ["repair", "rebuild"])
def test_repair_and_rebuild_race_with_writers(run, database, call):
    """What was wrong is right afterwards, and what the writers did meanwhile is counted once."""
    racers = Racers(run, SHOP)
    keys = [each.id for each in racers.store.insert_many([Product() for _ in range(5)])]
    racers.store.insert_many([Review(product_id=key, rating=4) for key in keys])
    wrong = {
        "count": 40,
        "total": -1,
        "top": [],
        "average": 0.5,
        "_treadle.state.average": {"sum": 9, "count": 7},
    }
    database.products.update_many({}, {"$set": wrong})

    async def mend(store: Caller) -> None:
        for _ in range(3):
            await getattr(store, call)()

    no_errors(racers.together([mend, *(shopper(number, keys, 10) for number in range(6))]))
    check_products(racers, database)


@pytest.mark.parametrize("model", [Invoice, Ticket])
def test_a_deletion_races_with_inserts_under_it(run, database, model):
    """restrict: never a filled card of a deleted customer; cascade: never a survivor of it."""
    racers = Racers(run, DESK)
    for at in range(10):
        key = racers.store.insert(Customer(name="there")).id

        async def delete(store: Caller, key: Any = key) -> Any:
            try:
                return await store.delete(Customer, key)
            except DataError as error:
                return error.code

        async def under(store: Caller, key: Any = key) -> None:
            await store.insert(model(customer_id=key))

        jobs = [under, under]
        jobs.insert(at % 3, delete)
        results = racers.together(jobs)
        no_errors(results)
        left = list(database[model.__treadle__.collection].find({"customer_id": key}))
        if results[at % 3] == "reference-restricted":
            assert {"there"} == {each["name"] for each in left}
            assert 1 == database.customers.count_documents({"_id": key})
        else:
            # Those that came after the deletion found no customer, so their card is empty.
            assert [] == [each for each in left if each["name"] is not None]
            assert 0 == database.customers.count_documents({"_id": key})
    assert [] == racers.store.verify()


def test_one_bad_write_fails_alone(run, database):
    """Duplicate keys and refused values in a group; the neighbours get their own results."""
    racers = Racers(run, SHOP)
    product = racers.store.insert(Product())
    taken = racers.store.insert(Review(product_id=product.id, rating=1))

    def insert(review: Review) -> Callable[[Caller], Coroutine[Any, Any, Any]]:
        async def work(store: Caller) -> Any:
            return await store.insert(review)

        return work

    async def too_much(store: Caller) -> Any:
        return await store.update(Review, taken.id, {"$inc": {"rating": 5000}})

    async def update(store: Caller) -> Any:
        return await store.update(Review, taken.id, {"$inc": {"rating": 2}})

    good = [Review(product_id=product.id, rating=each) for each in range(10, 16)]
    jobs = [insert(each) for each in good]
    jobs[1:1] = [insert(Review(id=taken.id, product_id=product.id, rating=7)), too_much]
    results = racers.together([*jobs, update])
    duplicate, refused = results[1:3]
    assert (DuplicateKey, DataError) == (type(duplicate), type(refused))
    fine = [results[0], *results[3:-1]]
    assert [each.id for each in good] == [each.id for each in fine]
    assert [each.rating for each in good] == [each.rating for each in fine]
    assert (taken.id, 3) == (results[-1].id, results[-1].rating)
    assert 7 == database.reviews.count_documents({})
    check_products(racers, database)
