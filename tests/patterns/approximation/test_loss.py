"""Approximation: nothing counted twice, nothing lost, whatever fails or is missing.

Covers: patterns/approximation/add_amounts, patterns/approximation/problems, store/counter_buffer
"""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import datetime
from typing import Annotated, Any

import pymongo
import pytest
from bson import ObjectId
from pydantic import BaseModel, Field
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests.kit.faults import Fault, Proxy
from tests.patterns.approximation.products import NEVER, SOON, Narrow, Painted, Product, store_of, stored
from tests.support import race
from treadle import Approximate, Document, Limits, Store
from treadle.store.counter_buffer import Buffer


class Metrics(BaseModel):
    view_count: Annotated[
        int, Approximate(every=10, within=NEVER, upsert=True, by="page_id", flushed_at="at")
    ] = 0
    at: datetime | None = None
    other: int = 7


class Page(Document, collection="pages", naming="camel"):
    page_id: str
    approximate_metrics: Metrics = Metrics()
    tag_list: list[str] = ["new"]


# -- ids that are not there --------------------------------------------------------------------------


def test_unknown_ids_are_told_and_the_others_are_written(run, database, field, caplog):
    store = store_of(run)
    counter = store.counter(Product, field)
    counter.add_many({1: 2, 77: 3, 78: 1})
    with caplog.at_level(logging.WARNING, logger="treadle"):
        done = counter.flush()
    assert (1, {77: 3, 78: 1}) == (done.documents, done.unknown)
    assert "77" in caplog.text
    assert {77: 3, 78: 1} == counter.unknown
    assert (2, {}) == (stored(database, field), counter.pending())
    assert database["products"].count_documents({}) == 1
    assert counter.read(77) is None
    assert counter.read(77, exact=True) is None


def test_a_document_without_a_number_does_not_stop_the_others(run, database, field):
    store = store_of(run, 1, 2)
    database["products"].update_one({"_id": 2}, {"$set": {field: None}}, bypass_document_validation=True)
    counter = store.counter(Product, field)
    counter.add_many({1: 2, 2: 5})
    done = counter.flush()
    assert ({2: 5}, 2) == (done.unknown, stored(database, field))
    # It is no count, and it is not of the type that the model declares.
    assert {(2, field)} == {(each.document_id, each.path) for each in store.verify()}
    assert 1 == store.repair()
    counter.add(2, 3)
    counter.flush()
    assert 3 == stored(database, field, 2)


class Capped(Document, collection="products"):
    id: int
    views: Annotated[int, Approximate(every=10**6, within=NEVER), Field(le=10)] = 0
    likes: Annotated[int, Approximate(every=10**6, within=NEVER, buffer="durable"), Field(le=10)] = 0


@pytest.mark.parametrize("again_max", [1, 200])
def test_a_document_that_the_validator_refuses_does_not_stop_the_others(
    run, database, field, again_max, constants
):
    constants(counter_again_chunk=again_max, counter_events_again_max=again_max)
    store = run.store([Capped])
    store.setup()
    store.insert_many([Capped(id=key) for key in range(1, 6)])
    counter = store.counter(Capped, field)
    counter.add_many({1: 2, 2: 50, 3: 7, 4: 99, 77: 1, 5: 10})
    done = counter.flush()
    assert (3, {2: 50, 4: 99, 77: 1}) == (done.documents, done.unknown)
    assert [2, 0, 7, 0, 10] == [each[field] for each in database["products"].find().sort("_id")]
    assert {} == counter.pending()
    counter.add_many({1: 1, 5: 1})
    assert {5: 1} == counter.flush().unknown
    assert ({2: 50, 4: 99, 77: 1, 5: 1}, 3) == (counter.unknown, stored(database, field))


def test_repair_moves_events_past_a_document_that_refuses_them(run, database):
    store = run.store([Capped])
    store.setup()
    store.insert_many([Capped(id=1), Capped(id=2)])
    old = ObjectId.from_datetime(datetime(2026, 1, 1))
    event = {"_id": old, "d": [{"k": 2, "n": 50}, {"k": 1, "n": 5}]}
    database["treadle.buffer.products.likes"].insert_one(event)
    another = run.store([Capped])
    another.counter(Capped, "likes").add(1, 2)
    database["products"].update_one({"_id": 1}, {"$unset": {"likes": ""}}, bypass_document_validation=True)
    assert store.repair()
    assert (7, 0) == (stored(database, "likes"), stored(database, "likes", 2))
    assert {} == another.counter(Capped, "likes").pending()


def test_a_number_that_would_grow_too_large_does_not_stop_the_others(run, database, field):
    """The server refuses the sum, or the driver the amount; both are told."""
    counter = store_of(run, 1, 2).counter(Product, field)
    counter.add(1, 2**62)
    counter.add_many({1: 2**62, 2: 1})
    counter.flush()
    assert (2**62, 1) == (stored(database, field), stored(database, field, 2))
    assert ({1: 2**62}, {}) == (counter.unknown, counter.pending())
    if field == "likes":
        huge = [{"d": [{"k": key, "n": n}]} for key, n in ((2, 2**62), (2, 2**62), (1, 3))]
        database["treadle.buffer.products.likes"].insert_many(huge)
        assert {2: 2**63} == counter.flush().unknown
        assert (2**62 + 3, 1) == (stored(database, field), stored(database, field, 2))


def test_what_else_lies_in_the_buffer_stops_nothing(run, database):
    """Somebody's own document, and an event from a time when ids were text."""
    store = store_of(run)
    counter = store.counter(Product, "likes")
    buffer = database["treadle.buffer.products.likes"]
    junk: list[Any] = [
        {"x": 1},
        {"d": None},
        {"d": [{"k": 1, "n": 9}, {"k": 1, "n": "x"}]},
        {"d": [{"k": 1}]},
    ]
    buffer.insert_many(junk)
    buffer.insert_many([{"_id": "a", "d": [{"k": "abc", "n": 2}]}, {"d": [{"k": 1, "n": 4}, 5]}])
    counter.add(1, 3)
    assert ({1: 7, "abc": 2}, 7) == (counter.pending(), counter.read(1, exact=True))
    store.verify()
    done = counter.flush()
    assert (1, {"abc": 2}, 7) == (done.documents, done.unknown, stored(database, "likes"))
    assert len(junk) == buffer.count_documents({})
    assert ({}, 7) == (counter.pending(), counter.read(1, exact=True))
    assert [] == store.verify()


def test_upsert_makes_documents_by_another_field(run, database):
    """With the model's own defaults around the counter, nested and under stored names."""
    store = run.store([Page])
    told = [str(action) for action in store.setup()]
    assert any("pageId_1" in each and "unique" in each for each in told)
    counter = store.counter(Page, "approximate_metrics.view_count")
    counter.add("home", 3)
    assert 3 == counter.read("home", exact=True)
    assert 0 == counter.read("home")
    counter.flush()
    counter.add("home", 4)
    counter.flush()
    (raw,) = database["pages"].find()
    assert 7 == raw["approximateMetrics"]["view_count"]
    assert isinstance(raw["approximateMetrics"]["at"], datetime)
    assert ("home", ["new"], 7) == (raw["pageId"], raw["tagList"], raw["approximateMetrics"]["other"])
    assert 7 == store.find_one(Page).approximate_metrics.view_count
    assert [] == store.verify()


def test_two_stores_upsert_the_same_documents(database):
    stores = [Store(database, [Page]) for _ in range(4)]
    stores[0].setup()

    def count(store: Store) -> None:
        counter = store.counter(Page, "approximate_metrics.view_count")
        for turn in range(20):
            counter.add(f"page {turn % 5}", 1)
            counter.flush()

    race(*[lambda store=store: count(store) for store in stores])
    assert 5 == database["pages"].count_documents({})
    assert 80 == sum(page.approximate_metrics.view_count for page in stores[0].find(Page))


# -- faults ------------------------------------------------------------------------------------------


# Up to three times, so that the retry of the driver itself fails too.
LOSSES = [
    Fault(f"{proxy}*{times}", proxy=proxy, times=times)
    for times in (1, 2, 3)
    for proxy in ("drop_reply", "close_before")
]


def test_a_batch_counts_once_whatever_is_lost(fault_sweep, field, record_points):
    """At each command of a flush; what failed is flushed again, and until then nothing is lost or seen twice."""
    stores = fault_sweep.stores("counters", [Product])
    stores.sound.insert(Product(id=1))
    counter = stores.behind(LOSSES[0]).counter(Product, field)
    expected = 0

    def attempt(fault: Fault, skip: int) -> bool:
        nonlocal expected
        counter.add(1, 3)
        expected += 3
        with fault_sweep.arm(fault, skip) as is_met:
            try:
                counter.flush()
            except PyMongoError:
                assert expected == counter.read(1, exact=True)
            met = is_met()
        fault_sweep.end_sessions()
        counter.flush()
        assert expected == stored(stores.database, field)
        assert {} == counter.pending()
        return met

    points = fault_sweep.at_each_command(field, LOSSES, attempt)
    assert points > 2
    record_points(points)


def test_a_durable_event_that_was_acknowledged_is_there_once(server, database, fast_heartbeat):
    with Proxy(server) as proxy, MongoClient[Any](proxy.uri) as client:
        store = Store(client[database.name], [Product])
        store.setup()
        store.insert(Product(id=1))
        counter = store.counter(Product, "likes")
        acknowledged = 0
        for times in (1, 2, 3, 4):
            for fault in ("drop_reply", "close_before"):
                with getattr(proxy, fault)(0, names=["insert"], times=times):
                    try:
                        counter.add(1)
                        acknowledged += 1
                    except PyMongoError:
                        pass
        assert acknowledged >= 4
        assert acknowledged <= counter.read(1, exact=True) <= 8
        counter.flush()
        assert acknowledged <= stored(database, "likes") <= 8


def test_a_flush_that_comes_by_itself_keeps_its_counts_when_it_fails(
    server, database, caplog, fast_heartbeat, constants
):
    constants(counter_due_seconds=0.3, counter_pause_seconds=1e-9)
    with Proxy(server) as proxy, MongoClient[Any](proxy.uri) as client:
        store = Store(client[database.name], [Product])
        store.insert(Product(id=1))
        counter = store.counter(Product, "views")
        with proxy.close_before(0, times=50), caplog.at_level(logging.WARNING, logger="treadle"):
            for _ in range(10):
                counter.add(1)
        assert "will be tried again" in caplog.text
        assert {1: 10} == counter.pending()
        counter.add(1, 10)
        assert (20, {}) == (stored(database, "views"), counter.pending())


def test_what_was_found_before_a_flush_failed_is_told(server, database, fast_heartbeat):
    with Proxy(server) as proxy, MongoClient[Any](proxy.uri) as client:
        store = Store(client[database.name], [Product], limits=Limits(counter_chunk=1))
        store.insert(Product(id=1))
        counter = store.counter(Product, "views")
        counter.add_many({77: 3, 1: 2})
        with (
            proxy.close_before(1, names=["update"], times=1000),
            pytest.raises(PyMongoError),
            pymongo.timeout(1.0),
        ):
            counter.flush()
        assert ({77: 3}, {1: 2}) == (counter.unknown, counter.pending())
        assert {} == counter.flush().unknown
        assert 2 == stored(database, "views")


@pytest.mark.parametrize("n", [1, 2], ids=["one by one", "amounts"])
def test_an_event_that_finds_no_room_is_refused_and_not_counted(
    server, database, fast_heartbeat, n, constants
):
    """With the server away the buffer stays bounded, and nobody waits for it at each event."""
    constants(counter_due_seconds=0.3, counter_fold_max=1)
    with Proxy(server) as proxy, MongoClient[Any](proxy.uri) as client:
        store = Store(client[database.name], [Narrow])
        store.insert_many([Narrow(id=key) for key in range(40)])
        counter = store.counter(Narrow, "views")
        accepted = 0
        with proxy.close_before(0, times=10**6):
            start = time.monotonic()
            for key in range(40):
                with contextlib.suppress(PyMongoError):
                    counter.add(key, n)
                    accepted += n
            # The driver would wait for half a minute each time.
            assert time.monotonic() - start < 30
        assert accepted == sum(counter.pending().values())
        assert len(counter.pending()) <= 12
        counter._again_at = 0.0
        counter.add(0, n)
        counter.flush()
        assert accepted + n == sum(each["views"] for each in database["products"].find())
        counter.add(1)
        assert {1: 1} == counter.pending()


# -- proof and repair --------------------------------------------------------------------------------


def test_events_that_nobody_flushes_are_found_and_moved(run, database):
    """A process that died left them; they are old, and one of them is nobody's."""

    class Quick(Document, collection="products"):
        id: int
        likes: Annotated[int, Approximate(within=SOON, buffer="durable", collection="like_events")] = 0

    store = run.store([Quick])
    store.setup()
    store.insert(Quick(id=1))
    store.insert(Quick(id=2))
    # A text in the place of one number does not hide what is wrong with the others.
    text = {"$set": {"likes": "5"}}
    database["products"].update_one({"_id": 2}, text, bypass_document_validation=True)
    old = ObjectId.from_datetime(datetime(2026, 1, 1))
    amounts = [{"k": 1, "n": 5}, {"k": 9, "n": 1}, {"k": 2, "n": 3}]
    database["like_events"].insert_one({"_id": old, "d": amounts})
    findings = [each for each in store.verify() if each.pattern == "approximation"]
    found = {(each.document_id, each.path): (each.stored, each.expected) for each in findings}
    assert {(1, "likes"): (0, 5), (9, "like_events"): (1, 0), (2, "likes"): ("5", 3)} == found
    assert store.repair()
    assert [] == [each for each in store.verify() if each.pattern == "approximation"]
    assert (5, "5") == (stored(database, "likes"), stored(database, "likes", 2))


def test_fresh_events_are_no_finding(run):
    store = store_of(run)
    store.counter(Product, "likes").add(1)
    assert [] == store.verify()


def test_an_endless_sum_does_not_stop_the_buffer(run, database):
    store = run.store([Painted])
    store.setup()
    counter = store.counter(Painted, "n")
    for _ in range(3):
        counter.add("red", 1e308)
    counter.add("blue", 1)
    counter.flush()
    assert 1 == counter.read("blue")


def test_what_cannot_be_written_is_added_up():
    """Of many flushes that fail only the first batch stays as it is: it may have been written after all."""
    buffer = Buffer(10**6, 8, Limits())
    for turn in range(50):
        buffer.add(dict.fromkeys(range(turn % 2, 6), 1))
        buffer.take()
    first, second = buffer.unfinished
    assert (dict.fromkeys(range(6), 1), 49) == (first.sums, second.sums[5])
    assert {0: 25, **dict.fromkeys(range(1, 6), 50)} == buffer.pending()
    assert first.number < second.number
    assert not buffer.overfull
    buffer.add(dict.fromkeys(range(6, 9), 1))
    assert buffer.overfull
    before = buffer.pending()
    buffer.divide(2)
    assert before == {**buffer.pending()}
    numbers = [chunk.number for chunk in buffer.unfinished]
    assert sorted(set(numbers)) == numbers
    assert numbers[0] > second.number
