"""A plan is applied beside raw writers, survives a kill, and is taken back byte for byte.

Covers: advisor/loop/apply, advisor/loop/undo
"""

from __future__ import annotations

import datetime as dt
import threading
from dataclasses import replace
from typing import Any

import pytest
from pymongo import MongoClient

from tests.advisor.loop.shops import everything, plan_for, shop
from tests.advisor.symptoms import at
from tests.support import shared_standalone
from treadle.advisor.loop.apply import PLANS, apply, apply_dry_run, row_of, verify
from treadle.advisor.loop.undo import undo
from treadle.advisor.model_text import load_models
from treadle.errors import TreadleError, UsageError
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Progress
from treadle.store.blocking.store import Store

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
    listed = apply_dry_run(database, plan)
    assert any("create index" in line for line in listed)
    assert was == everything(database)
    apply(database, plan)
    product = database["products"].find_one({"_id": products[3]})
    reviews = database["reviews"]
    assert reviews.count_documents({"product_id": products[3]}) == product["review_count"]
    assert 3 == len(product["recent_reviews"])
    assert {"name": "p3", "price": 9.5} == reviews.find_one({"product_id": products[3]})["product"]
    applied = everything(database)
    assert set(was) < set(applied)
    assert any("remove" in line for line in undone(database, plan, dry_run=True))
    assert applied == everything(database)
    undo(database, plan)
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
        apply(database, plan)
    finally:
        ended.set()
        writer.join()
    try:
        store = Store(database, models=load_models(plan.models))
        assert [] == verify(store)
        for each in database["products"].find():
            assert database["reviews"].count_documents({"product_id": each["_id"]}) == each["review_count"]
        undo(database, plan)
        for name in ("products", "reviews"):
            assert everything(twin)[name][3] == everything(database)[name][3]
    finally:
        database.client.drop_database(twin.name)


def undone(database: Any, plan: Any, **options: Any) -> list[str]:
    """What undo says that it does."""
    lines: list[str] = []
    undo(database, plan, log=lines.append, **options)
    return lines


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
        apply(database, plan, progress=kill, limits=PAGES)
    row = row_of(database, plan)
    assert row is not None
    assert "applying" == row["state"]
    # Data, and nothing that could be executed.
    assert {"_id", "state", "begun", "filled"} == set(row)
    # The job row says "running", as after a kill; its process has ended.
    database["treadle.jobs"].update_many({}, {"$set": {"updated": dt.datetime(2025, 1, 1)}})
    visited: list[int] = []
    filled: list[int] = []

    def log(text: str) -> None:
        if text == "verify":
            filled.extend(visited)

    apply(database, plan, progress=lambda each: visited.append(each.done), log=log, limits=PAGES)
    assert [] == verify(Store(database, models=load_models(plan.models)))
    # The pages that were done are not done again.
    assert max(filled) < 400
    undo(database, plan)
    assert was == everything(database)


def test_a_half_applied_plan_is_undone(database: Any) -> None:
    shop(database)
    plan = plan_for(database, *CODES)
    was = everything(database)

    def kill(progress: Progress) -> None:
        raise Killed

    with pytest.raises(Killed):
        apply(database, plan, progress=kill)
    assert was != everything(database)
    undo(database, plan)
    assert was == everything(database)


def test_what_cannot_be_is_refused_in_a_sentence(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    other = database.client[f"{database.name}_other"]
    was = everything(database)
    assert "plan-other-database" == code_of(lambda: apply(other, plan))
    assert "plan-other-database" == code_of(lambda: apply(other, replace(plan, database=other.name)))
    assert "plan-not-applied" == code_of(lambda: undo(database, plan))
    apply(database, plan)
    assert "plan-applied" == code_of(lambda: apply(database, plan))
    again = replace(plan, id="another")
    assert "plan-treadle-in-use" == code_of(lambda: apply(database, again))
    assert "plan-treadle-in-use" == code_of(lambda: apply_dry_run(database, again))
    database[PLANS].update_one({"_id": plan.id}, {"$set": {"state": "undoing"}})
    assert "plan-half-undone" == code_of(lambda: apply(database, plan))
    undo(database, plan)
    assert was == everything(database)
    assert "plan-not-applied" == code_of(lambda: undo(database, plan))


def test_a_worker_forbids_undo(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    apply(database, plan)
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
        with pytest.raises(UsageError, match="teardown-worker-running"):
            undo(database, plan)
    finally:
        worker.stop()
        thread.join()
    undo(database, plan)


@pytest.mark.server
def test_a_server_without_change_streams_is_refused(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "computed")
    with shared_standalone() as running, MongoClient[Any](running.uri) as client:
        alone = client[database.name]
        for name in ("products", "reviews"):
            alone[name].insert_many(database[name].find())
        was = everything(alone)
        assert "plan-needs-stream" == code_of(lambda: apply(alone, plan))
        assert was == everything(alone)


def test_a_field_that_was_written_since_is_refused(database: Any) -> None:
    shop(database)
    plan = plan_for(database, "extended-reference")
    database["reviews"].update_one({}, {"$set": {"product": {"name": "mine"}}})
    was = everything(database)
    assert "plan-field-taken" == code_of(lambda: apply(database, plan))
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
    assert "plan-field-refused" == code_of(lambda: apply_dry_run(database, plan))
    assert "plan-field-refused" == code_of(lambda: apply(database, plan))
    assert was == everything(database)
    schema["patternProperties"] = {"^review_count$|^_treadle$": {}}
    database.command({"collMod": "products", "validator": {"$jsonSchema": schema}})
    was = everything(database)
    apply(database, plan)
    assert database["products"].count_documents({"review_count": {"$gt": 0}})
    undo(database, plan)
    assert was == everything(database)


def test_nothing_that_a_database_holds_is_executed(database: Any, tmp_path: Any) -> None:
    """Write access to treadle.plans is no way to the machine of the operator."""
    shop(database)
    plan = plan_for(database, "computed")
    proof = tmp_path / "executed"
    source = f"open({str(proof)!r}, 'w')"
    row = {"_id": plan.id, "state": "applying", "begun": dt.datetime(2025, 1, 1), "filled": []}
    evil = {"models": source, "draft": source, "places": [{"collection": source, "field": source}]}
    database[PLANS].insert_one({**row, **evil})
    database["treadle.setup"].insert_one({"_id": "format", "kind": "format", "version": 1})
    database["treadle.setup"].insert_one(
        {"_id": "x", "kind": "rule", "models": source, "fingerprint": source}
    )
    apply(database, plan)
    database[PLANS].update_one({}, {"$set": evil})
    prove_code = code_of(lambda: apply(database, plan))
    assert "plan-applied" == prove_code
    undo(database, plan)
    assert not proof.exists()


def test_what_cannot_be_restored_is_counted(database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that writes whole documents back, as it read them while the plan was applied."""
    from treadle.upkeep import teardown

    products = shop(database)
    plan = plan_for(database, "computed")
    apply(database, plan)
    read = database["products"].find_one({"_id": products[0]})
    monkeypatch.setattr(teardown, "PASSES_MAX", 1)
    removed: list[str] = []

    def write_back(progress: Progress) -> None:
        removed.append(progress.model)
        database["products"].replace_one({"_id": products[0]}, read)

    left = undo(database, plan, progress=write_back)
    assert removed
    assert [
        "1 documents of products hold review_count again",
        "1 documents of products hold _treadle again",
    ] == [each.partition(":")[0] for each in left]
    assert row_of(database, plan) is not None
    assert [] == undo(database, plan)
    assert row_of(database, plan) is None
