"""Workers killed with kill -9 while rules are paused and resumed and others write: nothing is lost."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from tests import streamed
from tests.kit import processes
from tests.kit.tiers import IS_FULL
from treadle import Store

pytestmark = pytest.mark.heavy

SHOP = "tests.streamed:ROLLED"
WAIT_SECONDS_MAX = 60.0
KILLS = 8 if IS_FULL else 2
WRITES = ["insert", "update", "delete", "findAndModify", "commitTransaction"]
RULES = ["Product.summary.review_count", "Product.best", "Order.customer", "BySite.review_count"]


@pytest.fixture
def shop(database: Any) -> Any:
    store = Store(database, streamed.ROLLED)
    store.setup()
    for number, key in enumerate(streamed.KEYS):
        database["products"].insert_one(streamed.product(key, number))
    streamed.Writer(database, 99, numbers=40).write(80)
    store.worker().run_until_idle()
    yield store
    database.client.admin.command({"killAllSessions": []})


def test_a_rule_is_paused_the_worker_killed_restarted_and_resumed(server, database, shop):
    """At each point between two of its writes, around the pause and around the catching up."""
    writer, chance = streamed.Writer(database, 7, numbers=40), random.Random(7)
    what = (processes.catch_up, SHOP, database.name)
    for kill in range(KILLS):
        rule = RULES[kill % len(RULES)]
        shop.pause(rule)
        writer.write(8)
        # It dies while it takes note of the pause, or works without the rule.
        assert processes.kill_before(server.uri, WRITES, chance.randrange(12), *what)
        assert "paused" == {each.rule: each.state for each in shop.status().rules}[rule]
        writer.write(8)
        shop.resume(rule)
        # And again while it catches up.
        processes.kill_before(server.uri, WRITES, chance.randrange(12), *what)
    database.client.admin.command({"killAllSessions": []})
    shop.worker().run_until_idle()
    shop.run_due()
    assert [] == [each for each in shop.verify() if each.model != "ByNumber"]
    assert [] == list(database["treadle.controls"].find())


def verify_and_die(uri: str, database: str, pages: int) -> None:
    """Verify, and end as if killed after so many pages."""
    from pymongo import MongoClient

    from treadle import Limits

    store = Store(MongoClient(uri)[database], streamed.MODELS, limits=Limits(verify_page=10))
    seen = 0

    def progress(_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > pages:
            os.kill(os.getpid(), signal.SIGKILL)

    store.verify(streamed.Order, progress=progress)


@pytest.mark.parametrize("pages", [0, 3, 7])
def test_a_verify_that_was_killed_goes_on_and_repeats_at_most_a_page(server, database, pages):
    from treadle import Limits

    store = Store(database, streamed.MODELS, limits=Limits(verify_page=10))
    store.setup()
    database["orders"].insert_many([streamed.order(number, None, []) for number in range(100)])
    store.rebuild(streamed.Order)
    database["treadle.jobs"].drop()
    wrong = [3, 44, 95]
    database["orders"].update_many({"_id": {"$in": wrong}}, {"$set": {"customer": {"fullName": "nobody"}}})
    process = processes.start(verify_and_die, server.uri, database.name, pages)
    process.join(WAIT_SECONDS_MAX)
    assert -signal.SIGKILL == process.exitcode
    looked: list[Any] = []
    found = store.verify(streamed.Order, resume=True, progress=looked.append)
    assert wrong == sorted({each.document_id for each in found})
    assert 100 - 10 * pages == looked[-1].done
