"""Random histories of sources, targets and workers: after each catching up, every value is as computed anew.

TREADLE_TOTALS_HISTORIES=50 runs so many seeds instead of two.
"""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import Decimal128, Int64
from pymongo.errors import AutoReconnect, PyMongoError

from tests.kit.tiers import IS_FULL
from tests.upkeep.followed import leading, without_former_states
from treadle import Average, Count, Document, Limits, Store, Sum
from treadle.engine import lease
from treadle.engine.lease import LeaseLost
from treadle.plan import IsInside, Outside, Wait

HISTORIES = int(os.environ.get("TREADLE_TOTALS_HISTORIES", "2" if IS_FULL else "1"))
SHOPS = 4


class Sale(Document, collection="sales", validation="off"):
    shop_id: int | None = None
    amount: int = 1
    price: Decimal = Decimal(0)


class Shop(Document, collection="shops", validation="off"):
    id: int
    city_id: int | None = None
    sales: Annotated[int, Count(Sale, by="shop_id", maintain="stream")] = 0
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0
    turnover: Annotated[Decimal, Sum(Sale, "price", by="shop_id", maintain="stream")] = Decimal(0)
    mean: Annotated[Decimal | None, Average(Sale, "price", by="shop_id", maintain="stream")] = None


class City(Document, collection="cities", validation="off"):
    id: int
    shops: Annotated[int, Count(Shop, by="city_id", maintain="stream")] = 0
    total: Annotated[int, Sum(Shop, "total", by="city_id", maintain="stream")] = 0


class Following:
    """A worker that is stepped by hand, and may be replaced by another that is."""

    def __init__(self, follower: Any, run: Any) -> None:
        self.follower, self.run = follower, run
        # Events that it has read, and not handled when another took over.
        self.held: list[Any] = []


class History:
    """A random history."""

    def __init__(self, database: Any, store: Store, workers: list[Following], seed: int) -> None:
        self.database, self.store, self.workers = database, store, workers
        self.chance = random.Random(seed)
        self.number = 0
        self.leader = workers[0]
        self.paused: set[str] = set()
        # How many commands go well until the next fails.
        self.until_failure: int | None = None
        self._perform = store.runner._perform
        store.runner._perform = self.perform  # type: ignore[method-assign]

    def perform(self, command: Any, *rest: Any) -> Any:
        """Let commands of the worker fail, before or after they were done."""
        if self.until_failure is None or isinstance(command, (Wait, Outside, IsInside)):
            return self._perform(command, *rest)
        self.until_failure -= 1
        if self.until_failure > 0:
            return self._perform(command, *rest)
        self.until_failure = None
        if self.chance.random() < 0.5:
            self._perform(command, *rest)
        labels = {"errorLabels": self.chance.choice([[], ["TransientTransactionError"]])}
        raise AutoReconnect("the connection was lost", labels)

    # -- what happens ------------------------------------------------------------------------------

    def key(self) -> Any:
        number = self.chance.randrange(SHOPS)
        other: list[Any] = [float(number), Int64(number), Decimal128(f"{number}.0"), None, str(number)]
        return (
            number if self.chance.random() < 0.7 else self.chance.choice([*other, True, [number], {"a": 1}])
        )

    def sale(self) -> dict[str, Any]:
        chance = self.chance
        self.number += 1
        cents = chance.randrange(-300, 1000)
        amounts = [cents, cents, cents, Int64(cents), Int64(2**40), 2**31 - 1, None, "much", True]
        exact = Decimal128(str(Decimal(cents) / 100))
        odd = [cents, Decimal128("1E+2"), Decimal128("0E-5"), Decimal128("4E+32"), 0.5, None, "dear", [1]]
        price = exact if chance.random() < 0.7 else chance.choice(odd)
        made = {"_id": self.number, "shop_id": self.key(), "amount": chance.choice(amounts), "price": price}
        if chance.random() < 0.1:
            made.pop(chance.choice(["shop_id", "amount", "price"]))
        return made

    def some(self) -> Any:
        return {"_id": self.chance.randrange(max(0, self.number - 15), self.number + 1)}

    def sell(self) -> None:
        self.database["sales"].insert_many([self.sale() for _ in range(self.chance.randrange(1, 7))])

    def sell_in_one_transaction(self) -> None:
        sales = self.database["sales"]
        with self.database.client.start_session() as session, session.start_transaction():
            for _ in range(self.chance.randrange(1, 7)):
                sold = self.sale()
                sales.insert_one(sold, session=session)
                if self.chance.random() < 0.3:
                    sales.update_one({"_id": sold["_id"]}, {"$set": {"shop_id": self.key()}}, session=session)
                elif self.chance.random() < 0.3:
                    sales.delete_one({"_id": sold["_id"]}, session=session)

    def sell_again(self) -> None:
        sold = self.sale()
        self.database["sales"].insert_one(sold)
        self.database["sales"].delete_one({"_id": sold["_id"]})
        self.database["sales"].insert_one({**self.sale(), "_id": sold["_id"]})

    def move(self) -> None:
        self.database["sales"].update_one(self.some(), {"$set": {"shop_id": self.key()}})

    def change(self) -> None:
        self.database["sales"].update_one(self.some(), {"$set": {"amount": 7, "price": Decimal128("7.70")}})

    def take_back(self) -> None:
        self.database["sales"].delete_many({"$or": [self.some(), self.some()]})

    def exchange(self) -> None:
        sale = self.sale()
        sale.pop("_id")
        self.database["sales"].replace_one(self.some(), sale, upsert=True)

    def meddle(self) -> None:
        ways = [{"$inc": {"total": 1}}, {"$set": {"sales": 3}}, {"$unset": {"turnover": 1}}]
        self.database["shops"].update_one({"_id": self.chance.randrange(SHOPS)}, self.chance.choice(ways))

    def open_or_close(self) -> None:
        shop = {"_id": self.chance.randrange(SHOPS)}
        if self.chance.random() < 0.5:
            self.database["shops"].delete_one(shop)
        number = {"sales": self.chance.randrange(5), "city_id": self.chance.randrange(2)}
        self.database["shops"].update_one(shop, {"$setOnInsert": number}, upsert=True)

    def change_city(self) -> None:
        city = {"$set": {"city_id": self.chance.randrange(2)}}
        self.database["shops"].update_one({"_id": self.chance.randrange(SHOPS)}, city)

    def repair(self) -> None:
        self.store.repair(self.chance.choice([Shop, City]))

    def rebuild(self) -> None:
        self.store.rebuild(Shop)

    def pause_or_resume(self) -> None:
        rule = self.chance.choice(["Shop.total", "City.total"])
        if rule in self.paused:
            self.store.resume(rule)
        else:
            self.store.pause(rule)
        self.paused ^= {rule}

    def drop(self) -> None:
        if self.chance.random() < 0.2:
            self.database["sales"].drop()
            self.store.setup()

    # -- workers -----------------------------------------------------------------------------------

    def work(self) -> None:
        self.step(self.leader)

    def fail(self) -> None:
        self.until_failure = self.chance.randrange(1, 25)
        self.step(self.leader)
        self.until_failure = None

    def step(self, worker: Following) -> int:
        try:
            if not worker.follower.lease.held and not worker.run(worker.follower.lead()):
                return 0
            if worker.held:
                held, worker.held = worker.held, []
                return worker.run(worker.follower._handle(held))
            return worker.run(worker.follower.step(0.05, linger=False))
        except LeaseLost:
            worker.follower.lease.token, worker.held = None, []
        except PyMongoError as error:
            worker.held = []
            worker.follower._warn_of(error)
        return 1

    def hand_over(self) -> None:
        """Another leads, and who led handles what it had read, in its own time."""
        before = self.leader
        if before.follower.lease.held and not before.held and self.chance.random() < 0.5:
            try:
                before.held = before.run(before.follower._read(0.05))
            except PyMongoError as error:
                before.follower._warn_of(error)
        self.database[lease.COLLECTION].update_many({}, {"$set": {"until": lease.LONG_AGO}})
        self.leader = self.chance.choice(self.workers)
        self.step(self.leader)
        if self.chance.random() < 0.5:
            self.step(before)

    def catch_up(self) -> None:
        self.until_failure = None
        for rule in sorted(self.paused):
            self.store.resume(rule)
        self.paused.clear()
        leader = self.leader
        while True:
            self.step(leader)
            try:
                if leader.follower.lease.held and not leader.held:
                    leader.run(leader.follower.run_until_idle())
                    return
            except LeaseLost:
                # The other one took it, and nobody had told.
                leader.follower.lease.token = None
            self.database[lease.COLLECTION].update_many({}, {"$set": {"until": lease.LONG_AGO}})

    # -- the truth -----------------------------------------------------------------------------------

    def check(self) -> None:
        assert [] == self.store.verify()
        for shop in self.database["shops"].find():
            own = {"$expr": {"$eq": ["$shop_id", shop["_id"]]}}
            sold = list(self.database["sales"].find(own))
            total = sum(each["amount"] for each in sold if type(each.get("amount")) in (int, Int64))
            assert (len(sold), total) == (shop["sales"], shop["total"])
        for city in self.database["cities"].find():
            shops = list(self.database["shops"].find({"city_id": city["_id"]}))
            assert (len(shops), sum(each["total"] for each in shops)) == (city["shops"], city["total"])


# What happens, and how often.
HAPPENINGS = {
    History.sell: 8,
    History.sell_in_one_transaction: 4,
    History.sell_again: 2,
    History.move: 2,
    History.change: 2,
    History.take_back: 2,
    History.exchange: 2,
    History.meddle: 2,
    History.open_or_close: 2,
    History.change_city: 2,
    History.repair: 1,
    History.rebuild: 1,
    History.pause_or_resume: 1,
    History.drop: 1,
    History.work: 9,
    History.fail: 3,
    History.hand_over: 1,
}


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_random_history(database, seed, constants):
    constants(worker_totals_max=6, worker_targets_max=3)
    limits = Limits(worker_batch_max=5, worker_linger_below=2)
    store = Store(database, [Sale, Shop, City], limits=limits)
    store.setup()
    if seed % 2:
        # No event says then what a source that is deleted or moved has fed.
        without_former_states(database, "sales", "shops")
    database["cities"].insert_many([{"_id": number} for number in range(2)])
    with ExitStack() as stack:
        workers = []
        for _ in range(2):
            workers.append(Following(*stack.enter_context(leading(store))))
            database[lease.COLLECTION].update_many({}, {"$set": {"until": lease.LONG_AGO}})
        history = History(database, store, workers[::-1], seed)
        for _ in range(5):
            for happening in history.chance.choices([*HAPPENINGS], [*HAPPENINGS.values()], k=30):
                happening(history)
            history.catch_up()
            history.check()
