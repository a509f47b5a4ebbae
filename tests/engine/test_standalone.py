"""A server without transactions: right after every write, every race, and every kill -9."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest
from pymongo import MongoClient, common
from pymongo.errors import PyMongoError

from tests import faults, shop, victim
from tests.engine import test_refused_updates as refused
from tests.shop import MODELS, SCENARIOS, Customer, Order, Product, Region, Review, Scenario, Shop
from tests.support import shared_server
from treadle import DataError, Limits, Store, UsageError
from treadle.server.local import LocalServer

pytestmark = pytest.mark.heavy

APP = "standalone"
WRITERS = 8
ROUNDS = 2
CASCADE_ROUNDS = 8
SOON_SECONDS = 2.0
# A kill costs about a quarter of a second; a long write is killed at this many of its moments.
KILLS_MAX = 8
IDS = [scenario.name for scenario in SCENARIOS]


@pytest.fixture(scope="module")
def alone() -> Generator[LocalServer]:
    """A server that is no member of a replica set."""
    interval, common.MIN_HEARTBEAT_INTERVAL = common.MIN_HEARTBEAT_INTERVAL, 0.005
    with shared_server(replica_set=False) as server:
        yield server
    common.MIN_HEARTBEAT_INTERVAL = interval


@pytest.fixture(scope="module")
def opened(alone: LocalServer) -> Generator[MongoClient[Any]]:
    with MongoClient[Any](alone.uri) as client:
        yield client


@pytest.fixture(scope="module")
def standing(opened: MongoClient[Any]) -> Shop:
    """One shop for the whole file; each test puts it back first."""
    return Shop(opened["shop"])


@pytest.fixture(scope="module")
def afters(client: MongoClient[Any]) -> Callable[[Scenario], Any]:
    """What callers own after a scenario, as a replica set has it."""
    model = Shop(client["standalone_model"])
    store = Store(client["standalone_model"], MODELS)
    known: dict[str, Any] = {}

    def after(scenario: Scenario) -> Any:
        if scenario.name not in known:
            model.reset()
            with contextlib.suppress(DataError):
                scenario.act(store)
            known[scenario.name] = shop.owned(shop.stored(model.database))
        return known[scenario.name]

    return after


def check(standing: Shop, store: Store, after: Any, *, done: bool) -> None:
    """Nothing lost, doubled or stale; every document is as before or as after."""
    state = shop.stored(standing.database)
    own = shop.owned(state)
    if done:
        assert after == own
    assert [] == shop.between(own, shop.owned(standing.beginning), after)
    assert [] == shop.wrong(state)
    assert [] == store.verify()


# -- without faults -------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=IDS)
def test_every_write_does_what_it_does_on_a_replica_set(standing, afters, scenario):
    """The same documents afterwards, every maintained value right, and nothing still owed."""
    standing.reset()
    store = Store(standing.database, MODELS)
    with contextlib.suppress(DataError):
        scenario.act(store)
    check(standing, store, afters(scenario), done=True)
    assert [] == standing.intents()


# -- races -----------------------------------------------------------------------------------------


def race(*bodies: Callable[[], Any]) -> None:
    """Run all at once; the first error of any of them is raised here."""
    errors: list[BaseException] = []
    line = threading.Barrier(len(bodies))

    def run(body: Callable[[], Any]) -> None:
        line.wait()
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_eight_writers_of_one_parent(standing):
    """Each inserts, raises, moves and deletes reviews of the same product."""
    standing.reset()
    store = Store(standing.database, MODELS)

    def write(number: int) -> None:
        for turn in range(ROUNDS):
            kept = store.insert(Review(product_id=1, rating=turn, text=f"{number}/{turn}"))
            store.update(Review, kept.id, {"$inc": {"rating": 1}})
            gone = store.insert(Review(product_id=1, rating=9, text="gone"))
            store.delete(Review, gone.id)

    race(*[partial(write, number) for number in range(WRITERS)])
    state = shop.stored(standing.database)
    assert [] == shop.wrong(state)
    assert 4 + WRITERS * ROUNDS == state["products"][0]["review_count"]
    assert 13 + WRITERS * sum(range(1, ROUNDS + 1)) == state["products"][0]["rating_total"]
    assert [] == store.verify()
    assert [] == standing.intents()


def test_eight_writers_count_every_increment(standing):
    """`$inc` of one document that feeds others, from all sides: each counts once."""
    standing.reset()
    store = Store(standing.database, MODELS)

    def write() -> None:
        for _ in range(ROUNDS):
            store.update(Order, 1, {"$inc": {"amount": 1, "n": 1}})

    race(*[write] * WRITERS)
    state = shop.stored(standing.database)
    assert WRITERS * ROUNDS == state["orders"][0]["n"]
    assert [] == shop.wrong(state)
    assert [] == standing.intents()


def test_racing_renames_and_inserts(standing):
    """Renames of one customer and one product while orders of both are made and moved."""
    standing.reset()
    store = Store(standing.database, MODELS)

    def rename(number: int) -> None:
        for turn in range(ROUNDS):
            store.update(Customer, 1, {"$set": {"name": f"Ann {number}/{turn}"}})
            store.update(Product, 1, {"$set": {"name": f"Loom {number}/{turn}"}})

    def order(number: int) -> None:
        for turn in range(ROUNDS):
            key = 100 + number * ROUNDS + turn
            store.insert(Order(id=key, customer_id=1, amount=1, lines=shop.lines((1, 120))))
            store.update(Order, key, {"$set": {"customer_id": 2}})

    race(*[partial(rename, number) for number in range(4)], *[partial(order, number) for number in range(4)])
    state = shop.stored(standing.database)
    assert [] == shop.wrong(state)
    assert 4 + 4 * ROUNDS == len(state["orders"])
    assert [] == store.verify()
    assert [] == standing.intents()


def move_orders(store: Store, moved: list[int]) -> None:
    """Give the orders of customer 1 to customer 2, and note those for which that was acknowledged."""
    for key in (3, 2, 1):
        if store.update(Order, key, {"$set": {"customer_id": 2}}):
            moved.append(key)


def test_a_cascade_spares_what_no_longer_refers(standing):
    """An order that was moved away while its customer is deleted is there afterwards."""
    for _ in range(CASCADE_ROUNDS):
        standing.reset()
        store = Store(standing.database, MODELS)
        moved: list[int] = []
        race(partial(store.delete, Customer, 1), partial(move_orders, store, moved))
        state = shop.stored(standing.database)
        assert [] == shop.wrong(state)
        assert set(moved) <= {each["_id"] for each in state["orders"]}
        assert [] == standing.intents()


# -- kill -9 -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    victim.prepare()


def moments(alone: LocalServer, standing: Shop, scenario: Scenario) -> list[int]:
    """Before which of its writing commands to kill a write; all of them, if they are few."""
    heard = faults.Heard()
    with MongoClient[Any](alone.uri, event_listeners=[heard]) as client:
        store = Store(client["shop"], MODELS)
        store.recover()
        heard.clear()
        with contextlib.suppress(DataError):
            scenario.act(store)
    count = sum(name in victim.WRITES for name in heard.names)
    if count <= KILLS_MAX:
        return list(range(count))
    # The same ones each time, and others for each scenario.
    return sorted(random.Random(scenario.name).sample(range(count), KILLS_MAX))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=IDS)
def test_kill_9_between_any_two_commands(alone, standing, afters, scenario, tried):
    """The next Store, in another process, brings every maintained value right and owes nothing."""
    standing.reset()
    points = moments(alone, standing, scenario)
    for skip in points:
        standing.reset()
        assert victim.kill(alone.uri, "shop", scenario.name, skip)
        store = Store(standing.database, MODELS)
        store.recover()
        check(standing, store, afters(scenario), done=False)
        assert [] == standing.intents()
    tried(len(points))


# -- lost connections --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["drop_reply", "close_before"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=IDS)
def test_a_lost_reply_or_request_leaves_nothing_wrong(alone, standing, afters, scenario, fault, tried):
    """The driver does not retry writes here; what raised is there once or not at all."""
    standing.reset()
    points = moments(alone, standing, scenario)[:: 2 if fault == "drop_reply" else 3]
    with (
        faults.Proxy(alone) as proxy,
        MongoClient[Any](proxy.uri, appname=APP) as client,
    ):
        store = Store(client["shop"], MODELS, limits=Limits(lease_wait_seconds=SOON_SECONDS))
        store.recover()
        for skip in points:
            standing.reset()
            acknowledged = False
            with (
                getattr(proxy, fault)(skip, names=victim.WRITES),
                contextlib.suppress(PyMongoError, DataError),
            ):
                scenario.act(store)
                acknowledged = True
            store.recover()
            check(standing, store, afters(scenario), done=acknowledged)
            # What was lost locks nobody out: this store waits for a lease much shorter than the lease lasts.
            store.update(Region, {}, {"$set": {"name": "Soon"}})
            standing.database["treadle.intents"].delete_many({})
    tried(len(points))


# -- a replica set of one ----------------------------------------------------------------------------


def test_what_a_standalone_server_left_is_finished_on_the_replica_set_that_it_became(database):
    """The intent of a write that was killed before its maintenance."""
    standing = Shop(database)
    standing.reset()
    key = database["reviews"].insert_one({"product_id": 1, "rating": 5, "text": "left"}).inserted_id
    intent = {"collection": "reviews", "keys": [key], "feeds": {}, "cards": [], "owner": "gone:1:1"}
    database["treadle.intents"].insert_one({"_id": {"kind": "write", "n": 1}, **intent})
    assert [] != shop.wrong(shop.stored(database))
    Store(database, MODELS).recover()
    assert [] == shop.wrong(shop.stored(database))
    assert [] == standing.intents()


@pytest.mark.parametrize("update", [{"$set": {"n": 3}}, {"$inc": {"n": 3}}, {"$inc": {"bounded": 11}}])
def test_a_refused_update_has_changed_nothing(opened, update):
    """A refused update is taken back before anything follows from it."""
    opened.drop_database("refused")
    store = Store(opened["refused"], refused.MODELS)
    store.insert(refused.Owner(id="a"))
    fed, plain = store.insert(refused.Fed(owner_id="a", n=2)), store.insert(refused.Plain(n=2))
    for call in (
        lambda: store.update(refused.Fed, fed.id, update),
        lambda: store.update_many(refused.Fed, {}, update),
        lambda: store.update(refused.Plain, plain.id, update),
        lambda: store.update_many(refused.Plain, {}, update),
    ):
        with pytest.raises(UsageError):
            call()
        assert (fed, plain) == (store.get(refused.Fed, fed.id), store.get(refused.Plain, plain.id))
        assert 2 == store.get(refused.Owner, "a").total
    assert [] == store.verify()
