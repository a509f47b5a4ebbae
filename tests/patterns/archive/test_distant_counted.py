"""An archive in another cluster that derived values go on counting: exactly, whoever computes and moves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pymongo import MongoClient, monitoring

from tests.patterns.archive.distant import AT_ONCE, NOW, OLD, models
from tests.patterns.archive.test_distant import away as away
from tests.patterns.archive.test_distant import in_one_place
from tests.patterns.archive.test_distant import other as other
from treadle import Count, Day, DeclarationError, Document, ExtendedReference, Rollup, Store

ROUNDS = 3


class Before(monitoring.CommandListener):
    """Does something once, just before a command goes to a collection."""

    def __init__(self) -> None:
        self.sought: tuple[str, str] | None = None
        self.act: Callable[[], Any] = lambda: None

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        name = event.command_name
        if self.sought == (name, event.command.get(name)):
            self.sought = None
            self.act()

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


def right(shop: Any, amounts: list[int]) -> None:
    assert (len(amounts), sum(amounts)) == (shop.sales, shop.total)
    assert (min(amounts), max(amounts)) == (shop.least, shop.most)
    assert sum(amounts) / len(amounts) == shop.average
    assert sorted(amounts)[:-4:-1] == [each.amount for each in shop.best]
    assert sorted(amounts) == shop.amounts


@pytest.fixture
def opened(database: Any, away: Any) -> Any:
    Sale, Shop = models(away.client, away.name, counted=True)
    store = Store(database, [Sale, Shop], limits=AT_ONCE)
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Sale(id=key, amount=key, date=OLD) for key in range(10)])
    store.insert(Sale(id=10, amount=10, date=NOW))
    return store, Sale, Shop


def test_values_go_on_counting_what_is_archived(opened, database, away):
    store, Sale, Shop = opened
    everything = list(range(11))
    assert 10 == store.archive(Sale, now=NOW)
    in_one_place(database, away, 11)
    assert 0 == away["sales"].count_documents({"_treadle.copied": {"$exists": True}})
    right(store.get(Shop, 1), everything)
    assert [] == store.verify()
    store.rebuild()
    right(store.get(Shop, 1), everything)
    database["shops"].update_one({"_id": 1}, {"$set": {"sales": 1, "least": 7, "best": []}})
    assert {"sales", "least", "best"} == {each.path for each in store.verify()}
    store.repair()
    right(store.get(Shop, 1), everything)
    # The extreme leaves: the others are looked for in both places.
    store.delete(Sale, 10)
    right(store.get(Shop, 1), everything[:-1])
    store.delete(Shop, 1)
    right(store.insert(Shop(id=1)), everything[:-1])
    assert 9 == store.restore(Sale, 9).amount
    store.update(Sale, 9, {"$set": {"amount": 20}})
    right(store.get(Shop, 1), [*everything[:-2], 20])
    assert [] == store.verify()


def test_a_copy_that_is_not_archived_yet_is_not_counted(other, opened, database, away):
    """A value is computed while documents are copied, and not deleted here: before the archive is read."""
    store, _, Shop = opened
    before = Before()
    with MongoClient[Any](other.uri, event_listeners=[before]) as client:
        Seen, Computed = models(client, away.name, counted=True)
        computing = Store(database, [Seen, Computed])
        rule = next(each for each in store.graph.rules if each.pattern == "archive")
        plan = rule.archive(NOW, None, False)

        def copy_some() -> None:
            command, result = next(plan), None
            while away["sales"].count_documents({}) == 0:
                result = store.runner._perform(command, None)
                command = plan.send(result)

        before.sought, before.act = ("aggregate", "sales"), copy_some
        computing.rebuild(Computed)
        assert before.sought is None
        assert away["sales"].count_documents({}) > 0
        right(store.get(Shop, 1), list(range(11)))
        plan.close()
    store.recover()
    assert [] == store.verify()
    in_one_place(database, away, 11)


def test_what_moves_while_a_value_is_computed_is_counted_once(server, opened, database):
    """Documents are archived after the transaction has begun that computes, and before it reads the archive."""
    store, Sale, Shop = opened
    before = Before()

    def back() -> None:
        for key in range(10):
            store.restore(Sale, key)

    with MongoClient[Any](server.uri, event_listeners=[before]) as client:
        computing = Store(client[database.name], list(store.graph.entries))
        # What is made once is there: collections that are new would stop the transaction as well.
        store.archive(Sale, now=NOW)
        back()
        computing.rebuild(Shop)
        for act in (lambda: store.archive(Sale, now=NOW), back):
            before.sought, before.act = ("update", "treadle.guards"), act
            computing.rebuild(Shop)
            assert before.sought is None
            right(store.get(Shop, 1), list(range(11)))
    assert [] == store.verify()


@pytest.mark.heavy
def test_movers_and_computers_race(opened, database, away):
    store, Sale, Shop = opened
    done = threading.Event()
    wrong: list[Any] = []

    def compute() -> None:
        number = 100
        while not done.is_set():
            number += 1
            try:
                wrong.extend(store.verify(Shop))
                store.rebuild(Shop)
                right(store.get(Shop, 1), list(range(11)))
            except BaseException as error:
                wrong.append(error)
                return

    thread = threading.Thread(target=compute)
    thread.start()
    for _ in range(ROUNDS):
        store.archive(Sale, now=NOW)
        for key in range(0, 10, 3):
            store.restore(Sale, key)
    done.set()
    thread.join()
    assert [] == wrong
    store.recover()
    in_one_place(database, away, 11)
    assert [] == store.verify()


def test_references_see_what_is_archived(opened, database):
    _, Sale, Shop = opened

    class Refund(Document, collection="refunds"):
        id: int
        sale_id: int
        amount: Annotated[int | None, ExtendedReference(Sale, by="sale_id", field="amount")] = None

    both = Store(database, [Sale, Shop, Refund], limits=AT_ONCE)
    both.setup()
    both.archive(Sale, now=NOW)
    assert 3 == both.insert(Refund(id=1, sale_id=3)).amount
    both.rebuild()
    assert 3 == both.get(Refund, 1).amount
    assert [] == both.verify()


def test_a_rollup_over_two_clusters_is_refused_by_name(opened, database):
    _, Sale, Shop = opened

    class Daily(Document, collection="daily", rollup=Rollup(Sale, keys={"day": Day("date")})):
        day: Any
        count: Annotated[int, Count()] = 0

    with pytest.raises(DeclarationError, match="archive-counted"):
        Store(database, [Sale, Shop, Daily])


def test_several_values_count_what_is_in_another_database_of_the_same_server(database):
    """Rules that ask for the same index of the archive get it once."""
    name = f"{database.name}_old"
    Sale, Shop = models(None, name, counted=True)
    store = Store(database, [Sale, Shop], limits=AT_ONCE)
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Sale(id=key, amount=key, date=OLD) for key in range(6)])
    assert 6 == store.archive(Sale, now=NOW)
    store.rebuild()
    right(store.get(Shop, 1), list(range(6)))
    assert [] == store.verify()
    database.client.drop_database(name)
