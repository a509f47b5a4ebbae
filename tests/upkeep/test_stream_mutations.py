"""The naive versions of a stream worker, put back one by one: a named check must fail with each.

Made like `tests/engine/test_derived_mutations.py`: each check is run with the worker
as it is, where it holds, and with one piece replaced by what is written
everywhere, where it must not.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Generator
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel
from pymongo.errors import AutoReconnect

from treadle import Count, Document, ExtendedReference, Id, Store, Sum
from treadle.engine import contention, lease
from treadle.engine.lease import LeaseLost
from treadle.plan import find, find_one_and_update, transact, update_one
from treadle.upkeep import apply, events, position, rebuild, stream
from treadle.upkeep.stream import Follower


class Sale(Document, collection="sales"):
    shop_id: Id
    amount: int = 1


class Shop(Document, collection="shops"):
    name: str = ""
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0
    count: Annotated[int, Count(Sale, by="shop_id", maintain="stream")] = 0


class ShopCard(BaseModel):
    name: str


class Visit(Document, collection="visits"):
    shop_id: Id
    shop: Annotated[ShopCard | None, ExtendedReference(Shop, by="shop_id", maintain="stream")] = None


class Death(BaseException):
    """The process ends here; nothing after it is done."""


def begun(database: Any) -> tuple[Store, list[Any]]:
    """A store that a worker has looked at, and the ids of three shops."""
    store = Store(database, [Sale, Shop, Visit])
    store.setup()
    keys = [ObjectId() for _ in range(3)]
    database["shops"].insert_many([{"_id": key, "name": "shop", "total": 0, "count": 0} for key in keys])
    store.worker().run_until_idle()
    return store, keys


def totals(database: Any, keys: list[Any]) -> list[int]:
    return [database["shops"].find_one({"_id": key})["total"] for key in keys]


@contextlib.contextmanager
def leading(store: Store) -> Generator[tuple[Follower, Any]]:
    """A follower that leads, to be stepped by hand, and what performs its plans."""
    with store.runner.database.client.start_session() as session:
        follower = store.worker()._following(store._capabilities(), session, "follower")
        assert store.runner.run(follower.lead(), session)
        yield follower, lambda plan: store.runner.run(plan, session)


def read(follower: Follower, run: Any) -> list[Any]:
    found: list[Any] = []
    while not found:
        found = run(follower._read(0.5))
    return found


def dying(store: Store, collection: str) -> None:
    """Let the runner die as it first writes to this collection."""
    real = store.runner._perform

    def perform(command: Any, session: Any) -> Any:
        if getattr(command, "collection", None) == collection and getattr(command, "writes", False):
            raise Death
        return real(command, session)

    store.runner._perform = perform  # type: ignore[method-assign]


# -- the checks ---------------------------------------------------------------------------------


def _die_at(collection: str, database: Any) -> None:
    """A worker dies just before it writes there; the next one brings all to the right sums."""
    store, keys = begun(database)
    database["sales"].insert_one({"shop_id": keys[0], "amount": 5})
    with leading(store) as (follower, run):
        dying(store, collection)
        with pytest.raises(Death):
            run(follower._handle(read(follower, run)))
        store.runner.__dict__.pop("_perform")
        run(follower.lease.release())
    store.worker().run_until_idle()
    assert [5, 0, 0] == totals(database, keys)


def check_death_before_the_effect_loses_nothing(database: Any) -> None:
    """The worker dies with its events in hand, before it wrote a target."""
    _die_at("shops", database)


def check_death_after_the_effect_doubles_nothing(database: Any) -> None:
    """The worker dies between the target and its position."""
    _die_at(position.COLLECTION, database)


def check_a_batch_that_fails_is_not_taken_for_done(database: Any) -> None:
    """`run_until_idle` meets an error while it applies what it has read."""
    store, keys = begun(database)
    database["sales"].insert_one({"shop_id": keys[0], "amount": 5})
    real, failures = store.runner._perform, iter([True])

    def perform(command: Any, session: Any) -> Any:
        if (
            getattr(command, "collection", None) == "shops"
            and command.method == "bulk_write"
            and next(failures, False)
        ):
            raise AutoReconnect("the connection is lost")
        return real(command, session)

    store.runner._perform = perform  # type: ignore[method-assign]
    store.worker().run_until_idle()
    assert [5, 0, 0] == totals(database, keys)


def check_a_replaced_leader_moves_no_position(database: Any) -> None:
    """It slept, another leads, and now it goes on with what it had read."""
    store, keys = begun(database)
    with leading(store) as (sleeper, run):
        database["sales"].insert_one({"shop_id": keys[0], "amount": 5})
        found = read(sleeper, run)
        database["treadle.leases"].update_one({}, [{"$set": {"until": "$$NOW"}}])
        with leading(store) as (successor, other):
            database["sales"].insert_one({"shop_id": keys[1], "amount": 7})
            other(successor.step(0.5, linger=False))
            other(successor.step(0.5, linger=False))
            there = database["treadle.streams"].find_one()
            with contextlib.suppress(LeaseLost):
                run(sleeper._handle(found))
            assert there == database["treadle.streams"].find_one()


def check_a_target_inserted_after_its_sources_is_filled(database: Any) -> None:
    """And a new reference is, which no event of a source tells of."""
    store, keys = begun(database)
    late = ObjectId()
    database["sales"].insert_one({"shop_id": late, "amount": 5})
    store.worker().run_until_idle()
    database["shops"].insert_one({"_id": late, "name": "late"})
    database["visits"].insert_one({"shop_id": keys[0]})
    store.worker().run_until_idle()
    assert (5, {"name": "shop"}) == (
        database["shops"].find_one({"_id": late}).get("total"),
        database["visits"].find_one().get("shop"),
    )


def check_a_deleted_source_is_missed(database: Any) -> None:
    """Its event holds nothing but its id."""
    store, keys = begun(database)
    sale = database["sales"].insert_one({"shop_id": keys[0], "amount": 5}).inserted_id
    store.worker().run_until_idle()
    database["sales"].delete_one({"_id": sale})
    store.worker().run_until_idle()
    assert [0, 0, 0] == totals(database, keys)


def check_a_target_that_counted_in_between_is_told(database: Any) -> None:
    """From A to B; B is recomputed for another reason, and counts it; then on to C."""
    store, (a, b, c) = begun(database)
    sale = database["sales"].insert_one({"shop_id": a, "amount": 5}).inserted_id
    store.worker().run_until_idle()
    database["sales"].insert_one({"shop_id": b, "amount": 1})
    with leading(store) as (follower, run):
        found = read(follower, run)
        database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": b}})
        run(follower._handle(found))
        assert [6] == totals(database, [b])
        run(follower.resign())
    database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": c}})
    store.worker().run_until_idle()
    assert [0, 1, 5] == totals(database, [a, b, c])


def check_a_clock_that_is_fast_takes_no_lease(database: Any) -> None:
    """Its holder has it for another minute, whatever another client's clock says."""
    store = Store(database, [Sale, Shop, Visit])
    real = time.time
    assert 1 == store.runner.run(
        lease.attempt(store.graph.limits, "one", "holder", 60.0, lambda owner: False)
    )
    try:
        time.time = lambda: real() + 3600.0
        assert (
            store.runner.run(lease.attempt(store.graph.limits, "one", "other", 60.0, lambda owner: False))
            is None
        )
    finally:
        time.time = real


def check_what_is_written_during_a_rebuild_is_not_lost(database: Any) -> None:
    """The worker streams from before the scan, not from after it."""
    store = Store(database, [Sale, Shop, Visit])
    store.setup()
    key = database["shops"].insert_one({"name": "shop"}).inserted_id

    def meanwhile(progress: Any) -> None:
        database["sales"].insert_one({"shop_id": key, "amount": 5})
        database["others"].insert_one({"text": "so that the sale is not the very last thing"})

    store.rebuild(Shop, progress=meanwhile)
    store.worker().run_until_idle()
    assert [5] == totals(database, [key])


def check_others_are_brought_right_beside_one_that_cannot_be(database: Any) -> None:
    """A validator refuses one of three targets."""
    store, keys = begun(database)
    refusing = {"$or": [{"_id": {"$ne": keys[1]}}, {"total": 0}]}
    database.command({"collMod": "shops", "validator": refusing, "validationLevel": "strict"})
    database["sales"].insert_many([{"shop_id": key, "amount": 5} for key in keys])
    with contextlib.suppress(Exception):
        store.worker().run_until_idle()
    assert [5, 0, 5] == totals(database, keys)


# -- the naive versions --------------------------------------------------------------------------


def save_the_token_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = stream.apply

    def early(graph: Any, server: Any, dirty: Any, fence: Any, finish: Any, **options: Any) -> Any:
        yield from transact(finish)
        return (yield from real(graph, server, dirty, fence, fence, **options))

    monkeypatch.setattr(stream, "apply", early)


def add_what_events_bring_and_save_the_token_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(self: Any, found: Any) -> Any:
        for event in found:
            if event["operationType"] == "insert" and event["coll"] == "sales":
                (sale,) = yield from find("sales", {"_id": event["id"]})
                yield from update_one("shops", {"_id": sale["shop_id"]}, {"$inc": {"total": sale["amount"]}})
            elif event["coll"] == stream.BEATS:
                self._beats.add(event["id"])
        self.position = self._ahead
        yield from self._save()
        return len(found)

    monkeypatch.setattr(Follower, "_handle", handle)


def take_a_batch_for_done_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Follower._handle

    def handle(self: Any, found: Any) -> Any:
        self._beats.update(each["id"] for each in found if each["coll"] == stream.BEATS)
        return (yield from real(self, found))

    monkeypatch.setattr(Follower, "_handle", handle)


def fence_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Any, update: Any) -> Any:
        yield from update_one(position.COLLECTION, {"_id": self.name}, update)

    monkeypatch.setattr(Follower, "_write_if_leading", write)


def watch_sources_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events._Own, "note", lambda *given: None)


def ask_for_no_former_states(monkeypatch: pytest.MonkeyPatch) -> None:
    real = events._Gathered.note

    def note(self: Any, event: Any, dirty: Any) -> None:
        if event.kind != "delete":
            real(self, event, dirty)

    monkeypatch.setattr(events._Gathered, "note", note)


def look_up_where_a_source_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the former state that the event has."""

    def note(self: Any, event: Any, dirty: Any) -> None:
        dirty.lookups.setdefault(self.rules[0], []).append(event.key)

    monkeypatch.setattr(events._Gathered, "note", note)


def go_by_the_clients_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(limits: Any, name: str, owner: str, seconds: float, is_dead: Any, session: Any = None) -> Any:
        now = dt.datetime.fromtimestamp(time.time(), dt.UTC)
        until = {"until": now + dt.timedelta(seconds=seconds), "owner": owner}
        yield from update_one(
            lease.COLLECTION, {"_id": name}, {"$setOnInsert": {"n": 0, "until": now}}, upsert=True
        )
        taken = yield from find_one_and_update(
            lease.COLLECTION, {"_id": name, "until": {"$lte": now}}, {"$set": until, "$inc": {"n": 1}}
        )
        return None if taken is None else taken["n"]

    monkeypatch.setattr(lease, "attempt", attempt)


def begin_to_stream_after_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, built = position.begin, position.built

    def late(rules: Any, *rest: Any) -> Any:
        yield from begin(*rest)
        yield from built(rules, *rest)

    def never(*rest: Any) -> Any:
        yield from ()

    monkeypatch.setattr(rebuild.position, "begin", never)
    monkeypatch.setattr(rebuild.position, "built", late)


def let_one_document_stop_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (apply, stream, contention):
        monkeypatch.setattr(each, "divides", lambda error: False)


MUTATIONS = [
    (save_the_token_first, check_death_before_the_effect_loses_nothing),
    (add_what_events_bring_and_save_the_token_last, check_death_after_the_effect_doubles_nothing),
    (add_what_events_bring_and_save_the_token_last, check_a_deleted_source_is_missed),
    (take_a_batch_for_done_when_it_is_read, check_a_batch_that_fails_is_not_taken_for_done),
    (fence_nothing, check_a_replaced_leader_moves_no_position),
    (watch_sources_only, check_a_target_inserted_after_its_sources_is_filled),
    (ask_for_no_former_states, check_a_deleted_source_is_missed),
    (look_up_where_a_source_is_now, check_a_target_that_counted_in_between_is_told),
    (go_by_the_clients_clock, check_a_clock_that_is_fast_takes_no_lease),
    (begin_to_stream_after_the_scan, check_what_is_written_during_a_rebuild_is_not_lost),
    (let_one_document_stop_all, check_others_are_brought_right_beside_one_that_cannot_be),
]


@pytest.mark.parametrize(
    "check", dict.fromkeys(check for _, check in MUTATIONS), ids=lambda each: each.__name__
)
def test_the_check_holds(check, database):
    """With the worker as it is."""
    check(database)


@pytest.mark.parametrize(("mutate", "check"), MUTATIONS, ids=lambda each: each.__name__)
def test_the_check_fails_with_the_naive_version(mutate, check, database, monkeypatch):
    """The assertion at the end of the story, and not some accident on the way there."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(database)
