"""What the doctor finds, on real servers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tests.cli.invoke import assert_one_sentence, run, run_verb
from tests.kit.standalone import StandaloneServer
from treadle.cli.connection import CannotConnect, Target
from treadle.cli.doctor import CHECKS, Answer, Report, Server, describe_server, examine, show
from treadle.cli.gaps import MEANINGS, capability_rows
from treadle.plan.capabilities import NAMES
from treadle.server import local as servers

# The command itself gives up after less than 5 s; the rest is what a busy machine adds.
ANSWER_SECONDS_MAX = 30
PASSWORD = "p@ss:w/rd?"
ESCAPED = "p%40ss%3Aw%2Frd%3F"


def look(uri: str, **options: Any) -> dict[str, Answer]:
    report = examine(Target(uri, "argument"), **options)
    return {check.name: check for check in report.checks}


@pytest.fixture
def met(client: MongoClient[dict[str, Any]]) -> Server:
    return describe_server(client, time.time)


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a standalone server that asks for a login; its users are root and nobody."""
    with StandaloneServer(arguments=["--auth"]) as running:
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
    assert {"seconds": 60} == found["transaction_lifetime"].details
    assert {"w": "majority", "source": "implicit"} == found["write_concern"].details


def test_what_the_uri_asks_for_is_judged_and_hides_nothing(server: Any) -> None:
    found = look(f"{server.uri}&readPreference=secondaryPreferred&w=1")
    assert {"mode": "secondaryPreferred"} == found["read_preference"].details
    assert {"w": 1, "source": "uri"} == found["write_concern"].details
    warned = {name for name, check in found.items() if check.status != "ok"}
    assert {"read_preference", "write_concern"} == warned


def test_a_standalone_server_is_usable_with_warnings(guarded: str) -> None:
    report = examine(Target(f"mongodb://root:{ESCAPED}@{guarded}", "option"))
    found = {check.name: check for check in report.checks}
    assert "warn" == report.status
    missing = {"topology", "transactions", "change_streams"}
    assert missing == {name for name, check in found.items() if check.status == "warn"}
    assert {"ok", "warn"} == {check.status for check in found.values()}


def test_missing_rights_are_unknown_and_no_crash(guarded: str) -> None:
    found = look(f"mongodb://nobody:hush@{guarded}")
    for name in ("profiler", "transaction_lifetime", "change_streams", "write_concern"):
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
            Answer("profiler", "ok", "level 1, from 250 ms", None, {"level": 1, "slow_ms": 250})
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


@pytest.mark.parametrize(("wire", "status"), [(13, "problem"), (17, "ok"), (25, "ok")])
def test_servers_before_6_0_are_a_problem(met: Server, wire: int, status: str) -> None:
    """Whatever version they say they are: engines other than MongoDB count their own."""
    old = replace(met, version="99.0", hello={"maxWireVersion": wire})
    assert status == CHECKS["server_version"](old).status


def test_what_a_server_lacks_is_said_with_what_follows(met: Server) -> None:
    met.__dict__["found"] = replace(met.found, pre_images=False, time_series=False, retryable_writes=False)
    assert "ok" == CHECKS["capabilities"](met).status
    rows = {row[0]: row[1:] for row in capability_rows(CHECKS["capabilities"](met).details)}
    assert ("no", "Time Series: refused; Bucket works") == rows["time series"]
    assert ("no", "every pattern: refused") == rows["retryable writes"]
    assert ("yes", "") == rows["$merge"]


def test_every_gap_has_a_meaning() -> None:
    assert set(NAMES) - set(MEANINGS) == {"operations_max"}


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


def test_json_has_the_documented_keys(server: Any) -> None:
    report = json.loads(run("doctor", server.uri, "--json")[1])
    assert ["hosts", "source", "database", "status", "checks"] == list(report)
    assert {("name", "status", "value", "advice", "details")} == {tuple(check) for check in report["checks"]}
    reference = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [] == [name for name in CHECKS if f"`{name}`" not in reference]


def test_advice_that_several_checks_share_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    checks = (
        Answer("a_b", "warn", "[no]", "do it", {}),
        Answer("c", "warn", "no", "do it", {}),
        Answer("d", "ok", "1", None, {}),
    )
    show(Report("host", "argument", "test", "warn", checks))
    output = capsys.readouterr().out
    assert "a b, c: do it." == output.splitlines()[-1]
    assert "[no]" in output


@pytest.mark.server
def test_a_server_that_goes_away_meanwhile_is_no_connection() -> None:
    with servers.start() as running:

        def clock() -> float:
            running.stop()
            return time.time()

        with pytest.raises(CannotConnect) as caught:
            look(running.uri, clock=clock)
    assert "server-unreachable" == caught.value.code


# -- from outside ---------------------------------------------------------------


@pytest.mark.server
def test_doctor_without_a_uri_looks_at_a_private_server_and_says_so() -> None:
    code, output, errors = run("doctor", "--json")
    assert 0 == code, errors
    assert "local" == json.loads(output)["source"]
    assert "private local server" in errors
    assert_one_sentence(errors)


def test_doctor_prefers_the_argument_to_the_option_to_the_environment(server: Any) -> None:
    gone = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=1"
    for arguments, environment, source in [
        ((server.uri, "--uri", gone), gone, "argument"),
        (("--uri", server.uri), gone, "option"),
        ((), server.uri, "environment"),
    ]:
        code, output, errors = run("doctor", "--json", *arguments, MONGODB_URI=environment)
        assert (0, source) == (code, json.loads(output)["source"]), errors


def test_doctor_prints_a_table(server: Any) -> None:
    result = run_verb("doctor", server.uri)
    assert 0 == result.exit_code, result.output
    assert re.search(r"change streams\W+ok\W+opened and closed one", result.output)


def test_doctor_exits_with_1_on_a_problem(server: Any) -> None:
    """A Store refuses retryWrites=false, so that is a problem."""
    code, output, _ = run("doctor", "--json", f"{server.uri}&retryWrites=false")
    found = {check["name"]: check["status"] for check in json.loads(output)["checks"]}
    assert (1, "problem") == (code, found["retryable_writes"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("closed", ""),
        ("closed", "?directConnection=true"),
        ("silent", ""),
        ("silent", "?serverSelectionTimeoutMS=60000"),
    ],
)
def test_unreachable_server_is_told_in_time(kind: str, options: str, request: pytest.FixtureRequest) -> None:
    """The limit holds whatever the URI says."""
    port = request.getfixturevalue(f"{kind}_port")
    begun = time.monotonic()
    code, output, errors = run("doctor", f"mongodb://127.0.0.1:{port}/{options}")
    assert ANSWER_SECONDS_MAX > time.monotonic() - begun
    assert (3, "") == (code, output)
    assert f"127.0.0.1:{port}" in errors
    assert_one_sentence(errors)
