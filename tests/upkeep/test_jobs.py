"""Long runs: a sample, a stretch of time, going on after a kill; throttles, and what an operator asks of them.

Covers: upkeep/sweep
"""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tests.upkeep.followed import Sale, Shop, settled
from tests.upkeep.marketplace import wait_for
from treadle import DataError, Limits, Store, UsageError
from treadle.graph.outcomes import Progress
from treadle.upkeep.jobs import Gentleness, Job

PAGE = Limits(verify_page=10, rebuild_page=10)


@pytest.fixture(autouse=True)
def noted_at_once(constants: Any) -> None:
    constants(job_note_seconds=0.001)


def fill(database: Any, number: int) -> list[ObjectId]:
    keys = [ObjectId() for _ in range(number)]
    right = {"name": "shop", "sales": 0, "total": 0, "_treadle": {"state": {"mean": {"sum": 0, "count": 0}}}}
    database["shops"].insert_many([{"_id": key, **right} for key in keys])
    return keys


def spoil(database: Any, keys: list[Any]) -> None:
    database["shops"].update_many({"_id": {"$in": keys}}, {"$set": {"total": 9}})


@pytest.fixture
def many(run, database) -> Any:
    store = run.store([Sale, Shop], limits=PAGE)
    store.setup()
    return store, fill(database, 60)


# -- which documents are looked at ---------------------------------------------------------------------


@pytest.mark.quick
def test_a_sample_looks_at_so_many_documents(many, database, constants):
    store, keys = many
    spoil(database, keys)
    assert 60 == len({each.document_id for each in store.verify(Shop, sample=1.0)})
    seen: list[Progress] = []
    found = store.verify(Shop, sample=0.5, progress=seen.append)
    assert 10 <= len(found) <= 50
    assert len({each.document_id for each in found}) == seen[-1].done == seen[-1].total
    constants(verify_sample_max=20)
    small = Store(database, [Sale, Shop])
    with pytest.raises(UsageError) as error:
        small.verify(Shop, sample=1.0)
    assert "verify-option" == error.value.code


def test_since_looks_at_what_changed_and_at_what_follows_from_it(many, database):
    store, keys = many
    settled(store)
    store.pause("Shop.total")
    store.worker().run_until_idle()
    spoil(database, keys[:5])
    database.client.admin.command("appendOplogNote", 1, data={"msg": "a second passes"})
    before = dt.datetime.fromtimestamp(database.client.admin.command("ping")["operationTime"].time, dt.UTC)
    database["sales"].insert_one({"shop_id": keys[50], "amount": 5, "open": True})
    store.worker().run_until_idle()
    found = {each.document_id for each in store.verify(Shop, since=before)}
    assert keys[50] in found
    assert set(keys[:5]) < {each.document_id for each in store.verify(Shop)}
    assert found <= {keys[50], *keys[:5]}


def test_since_before_the_servers_history_is_refused_with_the_way_out(many, monkeypatch, database):
    store, _ = many
    with pytest.raises(UsageError) as error:
        store.verify(since="yesterday")
    assert "verify-option" == error.value.code
    for wrong in ({"sample": 0}, {"sample": 2}, {"sample": 0.5, "resume": True}):
        with pytest.raises(UsageError) as error:
            store.verify(**wrong)
        assert "verify-option" == error.value.code


class Killed(BaseException):
    """The process ends here."""


def test_verify_goes_on_where_it_was_interrupted_and_repeats_at_most_a_page(many, database):
    store, keys = many
    spoil(database, [keys[3], keys[33], keys[55]])
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if progress.done >= 40:
            raise Killed

    with pytest.raises(Killed):
        store.verify(Shop, progress=stop)
    database["treadle.jobs"].update_many({}, {"$set": {"owner": ""}})
    database["treadle.jobs"].update_many({}, {"$set": {"updated": dt.datetime(2020, 1, 1)}})
    again: list[Progress] = []
    found = store.verify(Shop, resume=True, progress=again.append)
    assert {keys[3], keys[33], keys[55]} == {each.document_id for each in found}
    assert 30 == again[-1].done  # 60, of which 30 had been noted.
    assert ["done"] == [each.state for each in store.jobs()]
    assert 3 == sum(store.jobs()[0].findings.values())
    # It came to its end, so that there is nothing to go on with.
    assert 3 == len(store.verify(Shop, resume=True))


def test_a_rebuild_goes_on_where_it_was_interrupted(many, database):
    """The documents before that place are as they were, and are not computed again."""
    store, keys = many
    spoil(database, [keys[3], keys[55]])

    def stop(progress: Progress) -> None:
        if progress.done >= 40:
            raise Killed

    with pytest.raises(Killed):
        store.rebuild(Shop, resume=True, progress=stop)
    database["treadle.jobs"].update_many({}, {"$set": {"owner": "", "updated": dt.datetime(2020, 1, 1)}})
    spoil(database, [keys[4]])
    assert 30 == store.rebuild(Shop, resume=True)
    assert [keys[4]] == [each.document_id for each in store.verify(Shop)]
    # It came to its end; the next one begins at the first document.
    assert 60 == store.rebuild(Shop, resume=True)
    assert [] == store.verify(Shop)


def test_a_verify_that_still_runs_is_not_taken_over(many, database):
    store, _ = many
    store.verify(Shop)
    row = database["treadle.jobs"].find_one()
    database["treadle.jobs"].update_one({}, {"$set": {"state": "running", "owner": "elsewhere:1:2/x"}})
    with pytest.raises(DataError) as error:
        store.verify(Shop, resume=True)
    assert "job-running" == error.value.code
    assert row is not None


# -- what is remembered -----------------------------------------------------------------------------------


def test_where_something_was_wrong_is_remembered_without_values_until_it_is_repaired(many, database):
    store, keys = many
    spoil(database, keys[:2])
    store.verify(Shop)
    assert {("Shop.total", key, "total") for key in keys[:2]} == {
        (each.rule, each.document_id, each.path) for each in store.findings()
    }
    assert "9" not in str(list(database["treadle.findings"].find({}, {"_id.path": 1, "rule": 1})))
    assert 1 == store.repair(Shop, ids=keys[:1])
    store.repair(Shop)
    assert [] == store.findings()


def test_jobs_are_listed_with_how_they_ended_and_only_so_many(run, database):
    store = run.store([Sale, Shop], limits=Limits(jobs_kept=3))
    store.setup()
    fill(database, 3)
    for _ in range(3):
        store.verify(Shop)
    store.rebuild(Shop)
    listed = store.jobs()
    assert ["rebuild", "verify", "verify"] == [each.kind for each in listed]
    assert {"done"} == {each.state for each in listed}
    assert (3, 3) == (listed[0].done, listed[0].total)


def test_a_reader_without_the_right_to_write_verifies_all_the_same(guarded_reader, database):
    assert [] == guarded_reader.verify(Shop)
    assert 0 == database["treadle.jobs"].count_documents({})
    with pytest.raises(OperationFailure):
        guarded_reader.pause("Shop.total")


@pytest.fixture
def guarded_reader(server, database):
    Store(database, [Sale, Shop]).setup()
    fill(database, 3)
    database.command("createUser", "reader", pwd="reader", roles=["read"])
    try:
        login = {"username": "reader", "password": "reader", "authSource": database.name}
        with MongoClient(server.uri, **login) as client:
            yield Store(client[database.name], [Sale, Shop])
    finally:
        database.command("dropUser", "reader")


# -- the pace -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, True, "slow", float("inf")])
def test_what_is_no_pace_is_refused(run, wrong):
    store = run.store([Sale, Shop])
    with pytest.raises(UsageError) as error:
        store.rebuild(Shop, throttle=wrong)
    assert "throttle-invalid" == error.value.code


def stepped(plan: Any) -> list[float]:
    """The waits of a plan whose other commands answer nothing."""
    waits = []
    try:
        command = next(plan)
        while True:
            waits += [command.seconds] if hasattr(command, "seconds") else []
            command = plan.send(None)
    except StopIteration:
        return waits


def test_a_rate_waits_for_what_the_page_did_not_take_itself():
    clock = iter([0.0, *[2.0] * 9])
    job = Job(Limits(), "rebuild", [], owner="", monotonic=lambda: next(clock), throttle=10.0)
    job._recorded = False
    assert 10 == job.sized(500)
    assert [3.0] == stepped(job.rest(50))  # 5 s for 50 documents, of which the page took 2.


def test_gentle_rests_longer_while_requests_queue_and_less_when_they_no_longer_do(constants):
    constants(gentle_look_seconds=0.001)
    limits = Limits()
    ticks = iter(range(10_000))
    gentle = Gentleness(limits, lambda: float(next(ticks)))

    def rest(queued: int, latency: int) -> float:
        plan = gentle.rest_seconds(0.01)
        next(plan)
        reply = {
            "globalLock": {"currentQueue": {"total": queued}},
            "opLatencies": {"reads": {"latency": latency, "ops": next(ticks)}},
        }
        with pytest.raises(StopIteration) as stop:
            plan.send(reply)
        return float(stop.value.value)

    calm = rest(0, 0)
    assert pytest.approx(0.01 * limits.gentle_rest_min) == calm
    assert calm < rest(3, 0) < rest(3, 0)
    busy = rest(3, 0)
    for _ in range(30):
        last = rest(0, 0)
    assert pytest.approx(calm) == last
    assert busy > last


def test_a_job_is_paused_slowed_down_resumed_and_stopped_by_another_process(server, database):
    store = Store(database, [Sale, Shop], limits=PAGE)
    store.setup()
    keys = fill(database, 60)
    reached, go_on = threading.Event(), threading.Event()

    def progress(each: Progress) -> None:
        if each.done == 10:
            reached.set()
            assert go_on.wait(40)

    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(store.rebuild(Shop, progress=progress))
        except DataError as error:
            outcome.append(error.code)

    thread = threading.Thread(target=run)
    thread.start()
    assert reached.wait(40)
    (job,) = store.jobs()
    store.control_job(job.id, "pause")
    go_on.set()
    wait_for(lambda: store.jobs()[0].state == "paused")
    assert 20 >= store.jobs()[0].done
    store.control_job(job.id, "resume", throttle=1e6)
    thread.join(40)
    assert [60] == outcome
    assert ("done", 1e6) == (store.jobs()[0].state, store.jobs()[0].throttle)
    assert len(keys) == 60
    with pytest.raises(UsageError) as error:
        store.control_job("nothing", "pause")
    assert "job-unknown" == error.value.code


def test_a_stopped_job_says_so(many):
    store, _ = many
    asked: list[str] = []

    def progress(each: Progress) -> None:
        if not asked:
            asked.append("stop")
            store.control_job(store.jobs()[0].id, "stop")

    if not isinstance(store, Store):
        return
    with pytest.raises(DataError) as error:
        store.rebuild(Shop, progress=progress)
    assert "job-stopped" == error.value.code
    assert "stopped" == store.jobs()[0].state
