"""A rule is paused and resumed: others go on, nothing is lost, and what catches up joins without a gap."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, OperationFailure

from tests import shop, streamed
from tests.upkeep.followed import Sale, Shop, of, settled, without_former_states
from tests.upkeep.marketplace import wait_for, working
from treadle import Store, UsageError
from treadle.plan import database_command
from treadle.upkeep.replay import Replay
from treadle.upkeep.stream import Follower

SALES, TOTAL = "Shop.sales", "Shop.total"


def sell(database: Any, shop: Any, amount: int = 5) -> None:
    database["sales"].insert_one({"shop_id": shop, "amount": amount, "open": True})


def states(store: Any) -> dict[str, str]:
    return {each.rule: each.state for each in store.status().rules}


@pytest.mark.quick
def test_a_paused_rule_stays_as_it_is_while_the_others_follow(shops, database):
    store, (key, *_) = shops
    assert store.pause(TOTAL)
    sell(database, key)
    store.worker().run_until_idle()
    assert {"name": "shop", "sales": 1, "mean": 5.0} == of(database, "shops", key)
    assert "paused" == states(store)[TOTAL]


def test_resuming_catches_up_with_what_was_missed(shops, database):
    store, (key, other, _) = shops
    store.pause(TOTAL)
    sell(database, key)
    store.worker().run_until_idle()
    sell(database, other, 7)
    store.worker().run_until_idle()
    assert "behind" == store.resume(TOTAL)
    settled(store)
    assert 5 == of(database, "shops", key)["total"]
    assert 7 == of(database, "shops", other)["total"]
    assert "behind" == states(store)[TOTAL]  # Nobody leads just now.
    assert [] == list(database["treadle.controls"].find())


@pytest.mark.parametrize("lost", ["events", "cursor"])
def test_what_fails_while_a_rule_catches_up_is_read_again(shops, database, monkeypatch, lost):
    """Neither are events passed by that were read and not handled, nor is a cursor read on that is gone."""
    store, (key, *_) = shops
    store.pause(TOTAL)
    sell(database, key)
    store.worker().run_until_idle()
    store.resume(TOTAL)
    real, failed = Replay._handle, []

    def handle(self: Any, events: Any, fence: Any) -> Any:
        if failed or not any(each.get("coll") == "sales" for each in events):
            return (yield from real(self, events, fence))
        failed.append(events)
        if lost == "events":
            raise AutoReconnect("the connection was lost")
        seen = yield from real(self, events, fence)
        kill = {"killCursors": "$cmd.aggregate", "cursors": [self._stream.cursor]}
        yield from database_command(kill, writes=False)
        return seen

    monkeypatch.setattr(Replay, "_handle", handle)
    settled(store)
    assert (5, 1) == (of(database, "shops", key)["total"], len(failed))


def test_a_pause_is_for_every_process_and_is_asked_for_once(shops, database, run):
    store, _ = shops
    assert [True, False] == [store.pause(SALES), store.pause(SALES)]
    again = run.store([Sale, Shop])
    assert "paused" == states(again)[SALES]


def test_resuming_what_nobody_has_stopped_following_needs_no_replay(shops, database):
    store, (key, *_) = shops
    store.pause(TOTAL)
    sell(database, key)
    assert "following" == store.resume(TOTAL)
    settled(store)
    assert 5 == of(database, "shops", key)["total"]


def test_what_is_written_while_a_rule_catches_up_is_not_lost_where_no_former_states_are_kept(run, database):
    """A sale moves twice, around the resume, and no event says where it was."""
    store = run.store([Sale, Shop])
    store.setup()
    without_former_states(database, "sales", "shops")
    shops = [ObjectId() for _ in range(3)]
    database["shops"].insert_many([{"_id": key, "name": "shop"} for key in shops])
    sale = database["sales"].insert_one({"shop_id": shops[0], "amount": 5, "open": True}).inserted_id
    settled(store)
    store.pause(TOTAL)
    store.worker().run_until_idle()
    database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": shops[1]}})
    store.worker().run_until_idle()
    store.resume(TOTAL)
    database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": shops[2]}})
    settled(store)
    database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": shops[0]}})
    settled(store)
    assert [5, 0, 0] == [of(database, "shops", key)["total"] for key in shops]


def test_a_rule_that_is_paused_before_it_was_built_is_built_when_it_goes_on(run, database):
    store = run.store([Sale, Shop])
    store.setup()
    key = ObjectId()
    database["shops"].insert_one({"_id": key, "name": "shop"})
    sell(database, key)
    for rule in (SALES, TOTAL, "Shop.mean"):
        store.pause(rule)
    store.worker().run_until_idle()
    assert {"name": "shop"} == of(database, "shops", key)
    for rule in (SALES, TOTAL, "Shop.mean"):
        store.resume(rule)
    settled(store)
    assert 5 == of(database, "shops", key)["total"]


def test_the_rules_of_one_group_stop_together(run, database):
    store = run.store([streamed.Review, streamed.BySite])
    store.setup()
    settled(store)
    store.pause("BySite.review_count")
    database["reviews"].insert_one({"_id": 1, "productKey": {"site": "north", "number": 1}, "starRating": 3})
    store.worker().run_until_idle()
    assert [] == list(database["by_site"].find())
    assert {"paused"} == set(states(store).values())
    store.resume("BySite.review_count")
    settled(store)
    assert 1 == database["by_site"].count_documents({})


def test_a_running_worker_obeys_at_once(shops, database, server):
    """The control itself comes by in the stream: no polling, no restart."""
    earlier, (key, *_) = shops
    settled(earlier)
    with MongoClient(server.uri) as client:
        store = Store(client[database.name], [Sale, Shop])
        worker = store.worker()
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            wait_for(lambda: worker.leading)
            store.pause(TOTAL)
            wait_for(lambda: (database["treadle.controls"].find_one({"_id": TOTAL}) or {}).get("place"))
            sell(database, key)
            wait_for(lambda: of(database, "shops", key).get("sales") == 1)
            assert 0 == of(database, "shops", key).get("total", 0)
            (total,) = [each for each in store.status().rules if each.rule == TOTAL]
            assert ("paused", 1) == (total.state, total.lag_events)
            assert "behind" == store.resume(TOTAL)
            wait_for(lambda: of(database, "shops", key).get("total") == 5)
            wait_for(lambda: states(store)[TOTAL] == "following")
        finally:
            worker.stop()
            thread.join()


def test_a_paused_schedule_waits(run, database):
    store = run.store([streamed.Review, streamed.ByNumber])
    store.setup()
    store.pause("ByNumber.review_count")
    database["reviews"].insert_one({"_id": 1, "productKey": {"site": "north", "number": 1}, "starRating": 3})
    assert [] == store.run_due()
    store.resume("ByNumber.review_count")
    assert ["ByNumber"] == [each.name for each in store.run_due()]
    (count,) = [each for each in store.status().rules if each.rule == "ByNumber.review_count"]
    assert ("following", True, "the first run") == (count.state, count.whole, count.why)
    assert count.next_run > count.last_run


def test_what_cannot_be_paused_is_refused_by_name(run):
    store = run.store(shop.MODELS)
    rule = next(rule.place.label for rule in store.graph.rules if rule.maintain == "write")
    with pytest.raises(UsageError) as error:
        store.pause(rule)
    assert "rule-not-pausable" == error.value.code
    with pytest.raises(UsageError) as error:
        store.resume("Shop.nothing")
    assert "rule-unknown" == error.value.code


def test_a_worker_that_fails_is_seen_until_it_succeeds_again(shops, database, server, monkeypatch):
    """What the error says is not kept: it may quote a document."""
    earlier, _ = shops
    settled(earlier)
    failing, step = [True], Follower.step

    def stumble(self: Any, *arguments: Any, **options: Any) -> Any:
        if failing[0]:
            raise OperationFailure("dup key: {secret}", 42)
        return (yield from step(self, *arguments, **options))

    monkeypatch.setattr(Follower, "step", stumble)
    with MongoClient(server.uri) as client:
        store = Store(client[database.name], [Sale, Shop])
        with working(store.worker()):
            wait_for(lambda: store.status().worker.error == "OperationFailure, code 42")
            assert {"failed"} == set(states(store).values())
            failing[0] = False
            wait_for(lambda: set(states(store).values()) == {"following"})
