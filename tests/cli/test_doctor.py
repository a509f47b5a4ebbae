"""What the doctor finds, on real servers."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pymongo import MongoClient
from rich.console import Console

from treadle.commands import doctor
from treadle.commands.connection import CannotConnect, Target
from treadle.commands.doctor import CHECKS, Check, Report, Server, meet, show
from treadle.server import local as servers

PASSWORD = "p@ss:w/rd?"
ESCAPED = "p%40ss%3Aw%2Frd%3F"


def look(uri: str, **options: Any) -> dict[str, Check]:
    report = doctor.doctor(Target(uri, "argument"), **options)
    return {check.name: check for check in report.checks}


@pytest.fixture
def met(client: MongoClient[dict[str, Any]]) -> Server:
    return meet(client, time.time)


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a standalone server that asks for a login; its users are root and nobody."""
    with servers.start(replica_set=False, arguments=["--auth"]) as running:
        address = running.uri.removeprefix("mongodb://")
        with MongoClient[dict[str, Any]](running.uri) as first:
            first.admin.command("createUser", "root", pwd=PASSWORD, roles=["root"])
        with MongoClient[dict[str, Any]](running.uri, username="root", password=PASSWORD) as root:
            root.admin.command("createUser", "nobody", pwd="hush", roles=[])
        yield address


def test_a_replica_set_has_everything(server: Any) -> None:
    found = look(server.uri)
    assert list(CHECKS) == list(found)
    assert {"ok"} == {check.status for check in found.values()}
    assert {"kind": "replica_set", "name": "treadle", "members": 1} == found["topology"].details
    assert {"seconds": 30} == found["transaction_lifetime"].details
    assert {"w": "majority", "source": "implicit"} == found["write_concern"].details


def test_a_standalone_server_is_usable_with_warnings(guarded: str) -> None:
    report = doctor.doctor(Target(f"mongodb://root:{ESCAPED}@{guarded}", "option"))
    found = {check.name: check for check in report.checks}
    assert "warn" == report.status
    missing = {"topology", "transactions", "change_streams", "pre_images", "retryable_writes"}
    assert missing == {name for name, check in found.items() if check.status == "warn"}
    assert {"ok", "warn"} == {check.status for check in found.values()}


def test_missing_rights_are_unknown_and_no_crash(guarded: str) -> None:
    found = look(f"mongodb://nobody:hush@{guarded}")
    for name in ("profiler", "storage_engine", "feature_compatibility", "change_streams", "write_concern"):
        assert ("unknown", "no rights") == (found[name].status, found[name].value)
        assert found[name].advice


def test_a_refused_login_names_the_host_and_nothing_secret(guarded: str) -> None:
    with pytest.raises(CannotConnect) as caught:
        look(f"mongodb://nobody:wrong-one@{guarded}")
    assert "login-refused" == caught.value.code
    assert guarded.rstrip("/") in str(caught.value)
    assert "wrong-one" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_nothing_is_written(server: Any, client: MongoClient[dict[str, Any]]) -> None:
    """Neither the transaction nor anything else leaves a trace in the oplog."""
    oplog = client.local["oplog.rs"]
    # The server itself writes no-ops and, now and then, sessions.
    written = {"op": {"$ne": "n"}, "ns": {"$not": {"$regex": r"^config\."}}}
    before = oplog.count_documents(written), sorted(client.list_database_names())
    look(server.uri.replace("/?", "/never_made?"))
    after = oplog.count_documents(written), sorted(client.list_database_names())
    assert before == after


def test_the_profiler_of_the_uris_database_is_seen(server: Any, database: Any) -> None:
    uri = server.uri.replace("/?", f"/{database.name}?")
    database.command("profile", 1, slowms=250)
    try:
        assert (
            Check("profiler", "ok", "level 1, from 250 ms", None, {"level": 1, "slow_ms": 250})
            == (look(uri)["profiler"])
        )
        database.command("profile", 2)
        assert "warn" == look(uri)["profiler"].status
    finally:
        database.command("profile", 0, slowms=100)


def test_a_clock_that_is_off_is_told_with_its_sign(server: Any) -> None:
    found = look(server.uri, clock=lambda: time.time() + 100)["clock_skew"]
    assert "warn" == found.status
    assert -100 == pytest.approx(found.details["seconds"], abs=1)


def test_tz_awareness_is_the_clients(server: Any) -> None:
    assert {"tz_aware": False} == look(server.uri)["tz_aware"].details
    assert {"tz_aware": True} == look(f"{server.uri}&tz_aware=true")["tz_aware"].details


@pytest.mark.parametrize(
    ("version", "statuses"),
    [
        ((4, 2), ("problem", "warn", "warn")),
        ((4, 4), ("ok", "warn", "warn")),
        ((5, 0), ("ok", "ok", "warn")),
        ((6, 0), ("ok", "ok", "ok")),
    ],
)
def test_old_versions_lack_things(met: Server, version: tuple[int, int], statuses: tuple[str, ...]) -> None:
    old = replace(met, version="{}.{}.1".format(*version), version_pair=version)
    assert statuses == tuple(
        CHECKS[name](old).status for name in ("server_version", "time_series", "pre_images")
    )


@pytest.mark.parametrize(
    ("hello", "kind", "status"),
    [
        ({"msg": "isdbgrid"}, "sharded", "ok"),
        ({"isreplicaset": True}, "uninitiated", "problem"),
        ({"setName": "a", "hosts": ["b", "c"], "isWritablePrimary": False}, "replica_set", "warn"),
        ({"isWritablePrimary": True}, "standalone", "warn"),
    ],
)
def test_topologies_are_told_apart(met: Server, hello: dict[str, Any], kind: str, status: str) -> None:
    found = CHECKS["topology"](replace(met, hello=hello))
    assert (kind, status) == (found.details["kind"], found.status)


def test_each_check_reports_under_its_own_name(met: Server) -> None:
    assert list(CHECKS) == [look_at(met).name for look_at in CHECKS.values()]


def test_json_has_the_documented_keys(server: Any) -> None:
    report = json.loads(json.dumps(doctor.doctor(Target(server.uri, "option")).as_json()))
    assert ["hosts", "source", "database", "status", "checks"] == list(report)
    assert {("name", "status", "value", "advice", "details")} == {tuple(check) for check in report["checks"]}
    assert doctor.__doc__ is not None
    for name in CHECKS:
        assert name in doctor.__doc__


def test_advice_that_several_checks_share_is_shown_once() -> None:
    checks = (Check("a_b", "warn", "[no]", "do it"), Check("c", "warn", "no", "do it"), Check("d", "ok", "1"))
    shown = io.StringIO()
    show(Report("host", "argument", "test", "warn", checks), Console(file=shown, width=80))
    assert "a b, c: do it." == shown.getvalue().splitlines()[-1]
    assert "[no]" in shown.getvalue()


@pytest.mark.server
def test_a_server_that_goes_away_meanwhile_is_no_connection() -> None:
    with servers.start() as running:

        def clock() -> float:
            running.stop()
            return time.time()

        with pytest.raises(CannotConnect) as caught:
            look(running.uri, clock=clock)
    assert "server-unreachable" == caught.value.code
