"""What a writer does: a generator of steps, which is told how each of them ended.

The steps are the same for both shells. A call on an AsyncStore gives something
to be awaited; whoever performs the steps knows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from benchmarks.torture.journal import ABSENT, Cell, Journal, Outcome
from benchmarks.torture.models import (
    CLUBS,
    CUSTOMERS,
    PRODUCTS,
    SHOPS,
    START,
    TALLIES,
    Book,
    Category,
    Club,
    Customer,
    Note,
    Order,
    Product,
    Reading,
    Review,
    Sale,
    Tally,
    Tool,
    User,
)
from treadle import Store

BATCH = 4
# How many of the calls have a deadline, and how many tasks are cancelled.
HASTY = 0.1
CANCELLED = 0.05
# Seconds until then.
HURRY_SECONDS_MIN = 0.01
HURRY_SECONDS_MAX = 2.0


@dataclass(frozen=True)
class Step:
    """One call, and what it makes of which cells."""

    call: Callable[[Any], Any]
    changes: dict[Cell, Any] = field(default_factory=dict)
    counts: tuple[Cell, int] | None = None
    # The deadline of a caller in a hurry.
    seconds: float | None = None
    # When its task is cancelled, where there are tasks.
    cancelled_after: float | None = None


class Writer:
    """One writer with cells of its own; `number` keeps those of several apart."""

    def __init__(self, number: int, seed: int, journal: Journal) -> None:
        self.number = number
        self.random = random.Random(seed * 1000 + number)
        self.journal = journal
        self.serial = 0
        self.kinds = [
            self.order, self.reviews, self.review_again, self.gone, self.rename, self.sale, self.category,
            self.move, self.member, self.reading, self.like, self.view, self.item, self.user, self.paid,
            self.pair, self.note, self.edit, self.tally,
        ]  # fmt: skip

    def steps(self) -> Generator[Step, Outcome]:
        """Steps without an end; each is answered with its outcome."""
        while True:
            step = self.random.choice(self.kinds)()
            if step is None:
                continue
            if self.random.random() < HASTY:
                step = replace(step, seconds=self.hurry())
            if self.random.random() < CANCELLED:
                step = replace(step, cancelled_after=self.hurry())
            outcome = yield step
            self.journal.write(outcome, step.changes)
            if step.counts is not None:
                self.journal.count(outcome, *step.counts)

    def hurry(self) -> float:
        """So many seconds as a caller waits; short ones are as frequent as long ones."""
        return math.exp(self.random.uniform(math.log(HURRY_SECONDS_MIN), math.log(HURRY_SECONDS_MAX)))

    # -- cells -------------------------------------------------------------------------------------

    def fresh(self) -> str:
        self.serial += 1
        return f"{self.number}-{self.serial}"

    def mine(self, kind: str) -> tuple[Any, Any] | None:
        """One of this writer's documents that is certainly there, and its state."""
        for _ in range(5):
            if not self.serial:
                return None
            key = f"{self.number}-{self.random.randint(1, self.serial)}"
            try:
                state = self.journal.settled((kind, key))
            except KeyError:
                continue
            if state is not ABSENT:
                return key, state
        return None

    # -- plain and derived data -----------------------------------------------------------------------

    def order(self) -> Step:
        key, customer = self.fresh(), self.random.randrange(CUSTOMERS)
        amount = self.random.randint(1, 100)
        order = Order(id=key, customer_id=customer, amount=amount)
        return Step(lambda store: store.insert(order), {("orders", key): (customer, amount, "open")})

    def paid(self) -> Step | None:
        found = self.mine("orders")
        if found is None:
            return None
        key, (customer, amount, _) = found
        amount += 1
        update = {"$set": {"status": "paid"}, "$inc": {"amount": 1}}
        state = {("orders", key): (customer, amount, "paid")}
        return Step(lambda store: store.update(Order, key, update), state)

    def rename(self) -> Step | None:
        if self.number >= CUSTOMERS:
            return None
        name = f"name {self.fresh()}"
        update = {"$set": {"name": name}}
        return Step(
            lambda store: store.update(Customer, self.number, update), {("customers", self.number): name}
        )

    def reviews(self) -> Step:
        made = [
            Review(
                id=self.fresh(), product_id=self.random.randrange(PRODUCTS), rating=self.random.randint(1, 5)
            )
            for _ in range(self.random.choice((1, 1, BATCH)))
        ]
        changes = {("reviews", each.id): (each.product_id, each.rating) for each in made}
        if len(made) == 1:
            return Step(lambda store: store.insert(made[0]), changes)
        return Step(lambda store: store.insert_many(made), changes)

    def pair(self) -> Step:
        """Two documents of two models in one transaction."""
        review = Review(id=self.fresh(), product_id=0, rating=3)
        sale = Sale(id=self.fresh(), shop=0, at=START, amount=1)
        changes = {("reviews", review.id): (0, 3), ("sales", sale.id): (0, START, 1)}

        def both(store: Any) -> Any:
            async def later(session: Any) -> None:
                await store.insert(review, session=session)
                await store.insert(sale, session=session)

            def now(session: Any) -> None:
                store.insert(review, session=session)
                store.insert(sale, session=session)

            return store.with_transaction(now if isinstance(store, Store) else later)

        return Step(both, changes)

    def review_again(self) -> Step | None:
        found = self.mine("reviews")
        if found is None:
            return None
        key, rating = found[0], self.random.randint(1, 5)
        review = Review(id=key, product_id=self.random.randrange(PRODUCTS), rating=rating)
        return Step(
            lambda store: store.replace(review), {("reviews", key): (review.product_id, review.rating)}
        )

    def gone(self) -> Step | None:
        kind, model = self.random.choice(
            (("reviews", Review), ("orders", Order), ("sales", Sale), ("notes", Note))
        )
        found = self.mine(kind)
        if found is None:
            return None
        return Step(lambda store: store.delete(model, found[0]), {(kind, found[0]): ABSENT})

    def sale(self) -> Step:
        sale = Sale(
            id=self.fresh(),
            shop=self.random.randrange(SHOPS),
            at=START + timedelta(hours=self.random.randrange(100)),
            amount=self.random.randint(1, 100),
        )
        return Step(lambda store: store.insert(sale), {("sales", sale.id): (sale.shop, sale.at, sale.amount)})

    def note(self) -> Step:
        key = self.fresh()
        return Step(lambda store: store.insert(Note(id=key)), {("notes", key): 0})

    def edit(self) -> Step | None:
        found = self.mine("notes")
        if found is None:
            return None
        key, edits = found
        update = {"$inc": {"edits": 1}}
        return Step(lambda store: store.update(Note, key, update), {("notes", key): edits + 1})

    def tally(self) -> Step:
        key, amount = self.random.randrange(TALLIES), self.random.randint(1, 3)
        update = {"$inc": {"total": amount}}
        return Step(lambda store: store.update(Tally, key, update), counts=(("tallies", key), amount))

    # -- layouts ---------------------------------------------------------------------------------------

    def category(self) -> Step:
        key, found = self.fresh(), self.mine("categories")
        parent = found[0] if found else None
        node = Category(id=key)
        return Step(
            lambda store: store.tree(Category).insert(node, parent=parent), {("categories", key): (parent,)}
        )

    def move(self) -> Step | None:
        node, parent = self.mine("categories"), self.mine("categories")
        if node is None or parent is None or node == parent:
            return None
        # A move below itself is refused.
        return Step(
            lambda store: store.tree(Category).move(node[0], parent[0]),
            {("categories", node[0]): (parent[0],)},
        )

    def member(self) -> Step:
        club, item = self.random.randrange(CLUBS), self.fresh()
        return Step(
            lambda store: store.array(Club, "members", club).append(item), {("members", (club, item)): True}
        )

    def reading(self) -> Step:
        self.serial += 1
        at, value = START + timedelta(seconds=self.serial), self.random.randint(0, 9)
        reading = Reading(sensor=self.number, at=at, value=value)
        return Step(lambda store: store.insert(reading), {("readings", (self.number, at)): value})

    def like(self) -> Step:
        product = self.random.randrange(PRODUCTS)
        return Step(
            lambda store: store.counter(Product, "likes").add(product), counts=(("likes", product), 1)
        )

    def view(self) -> Step:
        product = self.random.randrange(PRODUCTS)
        return Step(
            lambda store: store.counter(Product, "views").add(product, 2), counts=(("views", product), 2)
        )

    # -- kinds and versions ----------------------------------------------------------------------------

    def item(self) -> Step:
        key = self.fresh()
        kind = self.random.choice((Book, Tool))
        name = "book" if kind is Book else "tool"
        return Step(lambda store: store.insert(kind(id=key, title=key)), {("items", key): (name, key)})

    def user(self) -> Step:
        key = self.fresh()
        made = User(id=key, name=key)
        return Step(lambda store: store.insert(made), {("users", key): key})
