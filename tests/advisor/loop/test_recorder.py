"""Recording: what clients did is in the file with its values, and the profiler is as it was.

Covers: advisor/loop/recorder, advisor/loop/profiler_level, advisor/loop/profiler_rows
"""

from __future__ import annotations

import datetime as dt
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient

from tests.cli.invoke import RUN_SECONDS_MAX, run_verb, start
from tests.kit.command_log import CommandLog
from treadle.advisor import scan
from treadle.advisor.loop import profiler_level, recorder, workload_file
from treadle.advisor.loop.copying import Copier
from treadle.advisor.loop.workload_file import Request, Workload
from treadle.errors import DataError, UsageError


@contextmanager
def clients_at_work(uri: str, work: Callable[[Any], object]) -> Iterator[threading.Event]:
    """Another client that goes on until it has worked twice while it was recorded."""
    over, failures = threading.Event(), list[BaseException]()

    def go_on() -> None:
        with MongoClient(uri) as client:
            while not over.is_set():
                try:
                    work(client.get_default_database())
                except BaseException as failure:
                    failures.append(failure)
                    return
                over.wait(0.02)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()
        assert [] == failures


def of(workload: Workload, operation: str) -> Request:
    return next(each for each in workload if each.operation == operation)


def level(database: Any) -> int:
    return int(database.command({"profile": -1})["was"])


def test_reads_and_writes_are_recorded_with_their_values(uri, database, tmp_path):
    database["orders"].insert_one({"_id": 0, "customer": ObjectId()})
    key, moment = ObjectId(), dt.datetime(2026, 2, 3, tzinfo=dt.UTC)

    def work(shop):
        orders = shop["orders"]
        number = ObjectId()
        orders.insert_one({"_id": number, "customer": key, "text": "first\nsecond"})
        list(orders.find({"customer": key, "date": {"$lt": moment}}, sort=[("date", -1)], limit=3))
        list(orders.aggregate([{"$match": {"customer": key}}, {"$count": "n"}]))
        shop.command({"count": "orders", "query": {"customer": key}})
        orders.distinct("customer", {"n": 5})
        orders.update_one({"_id": number}, {"$set": {"text": "other"}})
        orders.find_one_and_update({"_id": number}, {"$inc": {"n": 2}})
        orders.delete_many({"_id": number})

    with clients_at_work(uri, work):
        recorded = recorder.record(database, tmp_path / "w", seconds=1.0)
    workload = workload_file.read(tmp_path / "w")
    assert 0o600 == stat.S_IMODE((tmp_path / "w").stat().st_mode)
    assert {"find", "aggregate", "count", "distinct", "insert", "update", "modify", "delete"} == {
        each.operation for each in workload
    }
    found = of(workload, "find").body
    assert {"customer": key, "date": {"$lt": moment}} == found["filter"]
    assert ({"date": -1}, 3) == (found["sort"], found["limit"])
    assert {"$set": {"text": "other"}} == of(workload, "update").body["u"]
    assert (1, {}) == (of(workload, "insert").returned, of(workload, "insert").body)
    assert {"$inc": {"n": 2}} == of(workload, "modify").body["update"]
    summary = workload.summary()
    assert (recorded.operations, True) == (summary.operations, summary.complete)
    assert recorded.seconds > 0.5
    assert all(0 <= each.at < 30 for each in workload)
    # Our own reads of the profiler are none of the clients' work.
    assert {"orders"} == {each.collection for each in workload}
    assert 0 == level(database)


def test_what_may_not_be_recorded_is_refused(database, tmp_path):
    with pytest.raises(UsageError, match="server's own"):
        recorder.record(database.client["admin"], tmp_path / "w")
    (tmp_path / "there").write_text("mine")
    with pytest.raises(UsageError) as refused:
        recorder.record(database, tmp_path / "there", seconds=0.1)
    assert "output-exists" == refused.value.code
    assert "mine" == (tmp_path / "there").read_text()
    recorder.record(database, tmp_path / "there", seconds=0.1, force=True)
    assert 0o600 == stat.S_IMODE((tmp_path / "there").stat().st_mode)


def test_a_login_without_the_right_is_told_which(database, tmp_path, server):
    name = f"reader{ObjectId()}"
    database.command({"createUser": name, "pwd": "x", "roles": [{"role": "read", "db": database.name}]})
    address = f"mongodb://{name}:x@127.0.0.1:{server.port}/{database.name}?directConnection=true"
    try:
        with MongoClient(address) as client, pytest.raises(DataError, match="dbAdmin"):
            recorder.record(client.get_default_database(), tmp_path / "w")
    finally:
        database.command({"dropUser": name})
    assert not (tmp_path / "w").exists()


def test_the_file_has_a_largest_size(uri, database, tmp_path):
    database["orders"].insert_one({"_id": 0})
    with clients_at_work(uri, lambda shop: list(shop["orders"].find({"text": "x" * 2_000}))):
        recorded = recorder.record(database, tmp_path / "w", seconds=20.0, bytes_max=20_000)
    assert 20_000 < (tmp_path / "w").stat().st_size + 5_000 < 30_000
    assert recorded.lost
    assert not workload_file.read(tmp_path / "w").summary().complete


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RUN_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _follows(database: Any) -> bool:
    """Whether somebody reads the profiler, which a recording does as soon as the level is raised."""
    pipeline = [
        {"$currentOp": {"idleCursors": True, "allUsers": True}},
        {"$match": {"ns": f"{database.name}.system.profile"}},
    ]
    return bool(list(database.client.admin.aggregate(pipeline)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_usable_file(number, uri, database, tmp_path):
    database["orders"].insert_one({"_id": 0})
    process = start("record", uri, "-o", str(tmp_path / "w"), "--seconds", "500")
    _wait_for(lambda: b"\n" in ((tmp_path / "w").read_bytes() if (tmp_path / "w").exists() else b""))
    _wait_for(lambda: _follows(database))
    process.send_signal(number)
    output, errors = process.communicate(timeout=RUN_SECONDS_MAX)
    assert 130 == process.returncode, errors
    assert "back at level 0" in output
    assert 0 == level(database)
    assert workload_file.read(tmp_path / "w").database == database.name


@pytest.mark.parametrize(
    "verb", ["scan", *(pytest.param(each, marks=pytest.mark.all) for each in ("doctor", "record"))]
)
def test_a_killed_recording_ends_by_itself_and_the_next_verb_sets_the_level_back(
    verb, uri, database, tmp_path, monkeypatch
):
    """On any machine: the former level is in the profiler's own filter."""
    monkeypatch.setattr(recorder, "DEADLINE_MARGIN_SECONDS", 0.0)
    database["orders"].insert_one({"_id": 0})
    database.command({"profile": 1, "slowms": 250})
    former = profiler_level.read_level(database)
    process = start("record", uri, "-o", str(tmp_path / "w"), "--seconds", "500")
    _wait_for(lambda: _follows(database))
    # While it runs, no verb sets anything back, and no second recording begins.
    assert profiler_level.restore_profiler(database) is None
    with pytest.raises(UsageError, match="under way"):
        recorder.record(database, tmp_path / "second")
    process.kill()
    process.communicate()
    raised = profiler_level.raised_by_recording(profiler_level.read_level(database))
    assert raised is not None
    assert former == raised.former
    # Its time is over.
    ended = profiler_level.server_time(database) - dt.timedelta(seconds=5)
    profiler_level.raise_level(database, former, ended)
    kept = database["system.profile"].count_documents({"ns": f"{database.name}.orders"})
    database["orders"].find_one({"_id": 1})
    assert kept == database["system.profile"].count_documents({"ns": f"{database.name}.orders"})
    arguments = ["-o", str(tmp_path / "next"), "--seconds", "0.1"] if verb == "record" else []
    assert "was killed" in run_verb(verb, uri, *arguments).output
    assert former == profiler_level.read_level(database)
    database.command({"profile": 0, "slowms": 100})


def test_a_former_sample_and_filter_come_back(database, tmp_path):
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    command = {"profile": 2, "slowms": 120, "sampleRate": 0.5}
    database.command({**command, "filter": {"millis": {"$gt": 5}, "command.filter.at": moment}})
    former = profiler_level.read_level(database)
    recorder.record(database, tmp_path / "w", seconds=0.1)
    assert former == profiler_level.read_level(database)
    database.command({"profile": 0, "slowms": 100, "sampleRate": 1.0, "filter": "unset"})


def test_a_level_that_somebody_set_in_the_meantime_is_left_alone(database):
    former = profiler_level.read_level(database)
    ended = profiler_level.server_time(database) - dt.timedelta(seconds=5)
    profiler_level.raise_level(database, former, ended)
    database.command({"profile": 1, "filter": "unset"})
    assert profiler_level.restore_profiler(database) is None
    profiler_level.set_back(database, former)
    assert 1 == level(database)
    database.command({"profile": 0})


def test_rows_of_one_millisecond_are_read_once_though_the_cursor_is_reopened():
    moment = dt.datetime(2026, 1, 1)
    place = recorder._Place(moment.replace(tzinfo=dt.UTC))
    rows = [{"ts": moment, "n": 1}, {"ts": moment, "n": 2}]
    assert [True, True, False, False] == [place.is_new(each) for each in rows + rows]
    assert place.is_new({"ts": moment + dt.timedelta(milliseconds=1), "n": 1})


class Sent(CommandLog):
    """All commands that a client sends, greetings too."""

    def started(self, event: Any) -> None:
        self.commands.append((event.command_name, dict(event.command)))


# They take no time of the server's, or go by the time limit of the command that began them.
WITHOUT_LIMIT = {"getMore", "killCursors", "endSessions", "saslStart", "saslContinue"}


def test_every_operation_on_the_recorded_server_has_a_time_limit(uri, database, tmp_path):
    """Of a recording, and of the copy that a trial makes."""
    database["orders"].insert_many([{"customer": number % 7} for number in range(3_000)])
    database["customers"].insert_many([{"_id": number} for number in range(7)])
    sent = Sent()
    with MongoClient(uri, event_listeners=[sent]) as client:
        watched = client.get_default_database()
        recorder.record(watched, tmp_path / "w", seconds=0.2)
        report = scan(watched)
        target = database.client[f"{database.name}_copy"]
        try:
            Copier(watched, target, report.scan, 500, {}, lambda *step: None).run(["customers", "orders"], [])
        finally:
            database.client.drop_database(target.name)
    assert {"find", "aggregate", "profile", "listCollections", "listIndexes"} <= {
        name for name, _ in sent.commands
    }
    unlimited = {name for name, command in sent.commands if "maxTimeMS" not in command} - WITHOUT_LIMIT
    assert set() == unlimited
    writes = {"insert", "update", "delete", "findAndModify", "create", "createIndexes", "drop", "collMod"}
    assert not writes & {name for name, _ in sent.commands}
