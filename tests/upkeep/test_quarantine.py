"""What was set aside: listed with the reason, tried again, or let be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.upkeep.marketplace import settled, totals
from treadle import UsageError


@pytest.fixture
def refused(market, database) -> Any:
    """A store whose second shop the server's validator refuses."""
    store, keys = market
    database.command(
        {"collMod": "shops", "validator": {"total": {"$not": {"$gte": 100}}}, "validationLevel": "strict"}
    )
    for key, amount in zip(keys, (1, 200, 3), strict=True):
        database["sales"].insert_one({"shop_id": key, "amount": amount})
    store.worker().run_until_idle()
    return store, keys


def test_what_was_set_aside_is_listed_with_reason_time_and_attempts(refused):
    store, keys = refused
    (item,) = store.set_aside()
    assert ("shops", keys[1]) == (item.collection, item.document_id)
    assert item.since is not None
    assert item.attempts >= 1
    assert "validation" in item.reason
    assert 1 == store.status().set_aside
    assert 1 == sum(each.set_aside for each in store.status().rules if each.rule == "Shop.total")
    assert [] == store.set_aside("Nobody.here")


def test_a_retry_that_succeeds_settles_it(refused, database):
    store, keys = refused
    database.command({"collMod": "shops", "validator": {}})
    (item,) = store.set_aside()
    assert store.retry(item)
    assert [6, 205, 8] == totals(database, keys)
    assert [] == store.set_aside()
    assert store.retry(item)  # Somebody else may have done it.
    settled(store)


def test_a_retry_that_fails_again_keeps_it_and_counts(refused):
    store, _ = refused
    (before,) = store.set_aside()
    assert not store.retry(before.token)
    (after,) = store.set_aside()
    assert (before.since, True) == (after.since, after.attempts > before.attempts)


def test_one_that_is_discarded_stays_as_it_is(refused, database):
    store, keys = refused
    (item,) = store.set_aside()
    assert [True, False] == [store.discard(item), store.discard(item)]
    assert [] == store.set_aside()
    assert 5 == totals(database, keys)[1]
    assert keys[1] in {each.document_id for each in store.verify()}


def test_one_whose_document_is_gone_is_settled_by_a_retry(refused, database):
    store, keys = refused
    database["shops"].delete_one({"_id": keys[1]})
    assert store.retry(store.set_aside()[0])
    assert [] == store.set_aside()


def test_what_a_migration_set_aside_or_nobody_knows_is_refused_with_the_way_out(market, database):
    store, _ = market
    rows = [("migrate Shop", "shops"), ("Shop.total", "elsewhere")]
    for rule, collection in rows:
        identity = {"rule": rule, "collection": collection, "key": 1}
        database["treadle.set_aside"].insert_one({"_id": identity, "reason": "because"})
    codes = []
    for item in store.set_aside():
        with pytest.raises(UsageError) as error:
            store.retry(item)
        codes.append(error.value.code)
    assert ["set-aside-unknown", "set-aside-migration"] == codes
    with pytest.raises(UsageError) as error:
        store.retry("0123456789abcdef")
    assert "set-aside-unknown" == error.value.code


def test_a_deletion_that_could_not_be_followed_is_followed_by_a_retry(market, database):
    """A visit refers to a shop that is gone, and could not be cleared because its validator refused that."""
    store, keys = market
    visit = database["visits"].insert_one({"shop_id": keys[0]}).inserted_id
    store.worker().run_until_idle()
    database.command(
        {"collMod": "visits", "validator": {"shop_id": {"$ne": None}}, "validationLevel": "strict"}
    )
    database["shops"].delete_one({"_id": keys[0]})
    store.worker().run_until_idle()
    (item,) = store.set_aside()
    assert not store.retry(item)
    database.command({"collMod": "visits", "validator": {}})
    assert store.retry(store.set_aside()[0])
    assert database["visits"].find_one({"_id": visit})["shop_id"] is None
