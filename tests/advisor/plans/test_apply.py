"""A plan is applied beside raw writers, survives a kill, and is taken back byte for byte."""

from __future__ import annotations

import datetime as dt
import threading
from dataclasses import replace
from typing import Any

import pytest
from pymongo import MongoClient

from tests.advisor.plans.shops import everything, plan_for, shop
from tests.advisor.symptoms import at
from tests.support import shared_standalone
from treadle.advisor.plans import before
from treadle.advisor.plans.apply import Application
from treadle.advisor.plans.models import load_models
from treadle.advisor.plans.settle import verified
from treadle.advisor.plans.undo import Undoing
from treadle.errors import TreadleError, UsageError
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Progress
from treadle.store.blocking.store import Store
from treadle.upkeep.findings import VERIFICATIONS

PAGES = Limits(rebuild_page=100)
CODES = ("computed", "extended-reference", "subset")


def code_of(call: Any) -> str:
    with pytest.raises(TreadleError) as refused:
        call()
    return refused.value.code


def test_apply_fills_and_undo_leaves_no_difference(database: Any) -> None:
    """A dry run of either changes nothing."""
    products = shop(database)
    plan = plan_for(database, *CODES)
    was = everything(database)
    listed = Application(database, plan).dry_run()
    assert any("create index" in line for line in listed)
    assert was == everything(database)
    Application(database, plan).run()
    product = database["products"].find_one({"_id": products[3]})
    reviews = database["reviews"]
    assert reviews.count_documents({"product_id": products[3]}) == product["review_count"]
    assert 3 == len(product["recent_reviews"])
    assert {"name": "p3", "price": 9.5} == reviews.find_one({"product_id": products[3]})["product"]
    applied = everything(database)
    assert set(was) < set(applied)
    assert any("remove" in line for line in Undoing(database, plan).dry_run())
    assert applied == everything(database)
    Undoing(database, plan).run()
    assert was == everything(database)


def test_writes_of_others_stay_and_are_followed(database: Any) -> None:
    """Raw writers go on during apply; afterwards the values are right, and undo keeps what was written."""
    products = shop(database)
    plan = plan_for(database, *CODES)
    twin = database.client[f"{database.name}_twin"]
    for name in ("products", "reviews"):
        twin[name].insert_many(database[name].find())
    ended = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        while not ended.is_set() or written < 50:
            for each in (database, twin):
                review = {"product_id": products[written % 7], "rating": 1, "date": at(written / 10)}
                each["reviews"].insert_one({"_id": -written - 1, **review})
                each["products"].update_one({"_id": products[written % 5]}, {"$set": {"name": f"n{written}"}})
                each["reviews"].delete_one({"_id": written * 2 + 1})
            written += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        Application(database, plan).run()
    finally:
        ended.set()
        writer.join()
    try:
        store = Store(database, models=load_models(plan.models))
        assert [] == verified(store)
        for each in database["products"].find():
            assert database["reviews"].count_documents({"product_id": each["_id"]}) == each["review_count"]
        Undoing(database, plan).run()
        for name in ("products", "reviews"):
            assert everything(twin)[name][3] == everything(database)[name][3]
    finally:
        database.client.drop_database(twin.name)


class Killed(BaseException):
    """The process ends here."""


def test_a_killed_apply_goes_on_where_it_was(database: Any) -> None:
    shop(database)
    plan = plan_for(database, *CODES)
    was = everything(database)
    seen: list[Progress] = []

    def kill(progress: Progress) -> None:
        seen.append(progress)
        if progress.model == "Review" and progress.done >= 200:
            raise Killed

    with pytest.raises(Killed):
        Application(database, plan, progress=kill, limits=PAGES).run()
    row = before.row_of(database, plan)
    assert row is not None
    assert ("applying", ["set up"]) == (row["state"], row["done"][:1])
    # The job row says "running", as after a kill; its process has ended.
    database["treadle.jobs"].update_many({}, {"$set": {"updated": dt.datetime(2025, 1, 1)}})
    visited: list[int] = []
    Application(database, plan, progress=lambda each: visited.append(each.done), limits=PAGES).run()
    assert [] == verified(Store(database, models=load_models(plan.models)))
    # The pages that were done are not done again.
    assert max(visited) < 400
    Undoing(database, plan).run()
    assert was == everything(database)


def test_the_last_step_verifies_everything_again(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    times: list[Any] = []

    def look(text: str) -> None:
        if "follow the changes" in text:
            times.append((database[VERIFICATIONS].find_one({"_id": "Product"}) or {})["at"])

    Application(database, plan, tell=look).run()
    (filled,) = times
    assert filled < (database[VERIFICATIONS].find_one({"_id": "Product"}) or {})["at"]


def test_a_half_applied_plan_is_undone(database: Any) -> None:
    shop(database)
    plan = plan_for(database, *CODES)
    was = everything(database)

    def kill(progress: Progress) -> None:
        raise Killed

    with pytest.raises(Killed):
        Application(database, plan, progress=kill).run()
    assert was != everything(database)
    Undoing(database, plan).run()
    assert was == everything(database)


def test_what_cannot_be_is_refused_in_a_sentence(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    other = database.client[f"{database.name}_other"]
    was = everything(database)
    assert "plan-other-database" == code_of(lambda: Application(other, plan).run())
    assert "plan-other-database" == code_of(
        lambda: Application(other, replace(plan, database=other.name)).run()
    )
    assert "plan-not-applied" == code_of(lambda: Undoing(database, plan))
    Application(database, plan).run()
    assert "plan-applied" == code_of(lambda: Application(database, plan).run())
    again = replace(plan, id="another")
    assert "plan-treadle-in-use" == code_of(lambda: Application(database, again).run())
    before.mark(database, plan, state="undoing")
    assert "plan-half-undone" == code_of(lambda: Application(database, plan).run())
    Undoing(database, plan).run()
    assert was == everything(database)
    assert "plan-not-applied" == code_of(lambda: Undoing(database, plan))


def test_a_worker_forbids_undo(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    Application(database, plan).run()
    store = Store(database, models=load_models(plan.models))
    worker = store.worker()
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        for _ in range(600):
            if worker.leading:
                break
            ended = threading.Event()
            ended.wait(0.1)
        with pytest.raises(UsageError, match="stop treadle watch first"):
            Undoing(database, plan).run()
    finally:
        worker.stop()
        thread.join()
    Undoing(database, plan).run()


@pytest.mark.server
def test_a_server_without_change_streams_is_refused(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    with shared_standalone() as running, MongoClient[Any](running.uri) as client:
        alone = client[database.name]
        for name in ("products", "reviews"):
            alone[name].insert_many(database[name].find())
        was = everything(alone)
        assert "plan-needs-stream" == code_of(lambda: Application(alone, plan).run())
        assert was == everything(alone)


def test_a_field_that_was_written_since_is_refused(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "extended-reference")
    database["reviews"].update_one({}, {"$set": {"product": {"name": "mine"}}})
    was = everything(database)
    assert "plan-field-taken" == code_of(lambda: Application(database, plan).run())
    assert was == everything(database)


def test_a_validator_that_lets_no_field_in_is_named_before_anything_changes(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    schema: dict[str, Any] = {
        "additionalProperties": False,
        "properties": {"_id": {}, "name": {}, "price": {}},
    }
    database.command({"collMod": "products", "validator": {"$jsonSchema": schema}})
    was = everything(database)
    assert "plan-field-refused" == code_of(Application(database, plan).dry_run)
    assert "plan-field-refused" == code_of(Application(database, plan).run)
    assert was == everything(database)
    schema["patternProperties"] = {"^review_count$|^_treadle$": {}}
    database.command({"collMod": "products", "validator": {"$jsonSchema": schema}})
    was = everything(database)
    Application(database, plan).run()
    assert database["products"].count_documents({"review_count": {"$gt": 0}})
    Undoing(database, plan).run()
    assert was == everything(database)
