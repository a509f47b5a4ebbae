"""`treadle doctor`: what a server can do, and what Treadle will miss there.

Every check only reads: transactions and change streams are really opened, and
closed again without a write. A check that the login does not permit is
"unknown", never a failure. The checks use the URI's database, or `test` when
it names none. What the JSON output holds is in docs/cli.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from treadle.cli.options import FINDINGS, UriOption
from treadle.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from treadle.cli.connection import Client, Source, Target
    from treadle.plan.capabilities import Capabilities

CHECK_SECONDS_MAX = 3.0
CLOCK_SKEW_SECONDS_MAX = 1.0
TRANSACTION_LIFETIME_SECONDS_MIN = 5
DATABASE_DEFAULT = "test"
# Only read, never created.
COLLECTION_READ = "treadle.doctor"

NEEDS_REPLICA_SET = (
    "needs a replica set; start mongod with --replSet and run rs.initiate() in mongosh, "
    "a single member will do"
)
NO_RIGHTS = "log in as a user with the role clusterMonitor, and read on the database"
NOT_REPORTED = "this kind of server does not report it"

Status = Literal["ok", "warn", "problem", "unknown"]
_STYLES = {"ok": "green", "warn": "yellow", "problem": "bold red", "unknown": "dim"}
_SEVERITY: tuple[Status, ...] = ("ok", "warn", "problem")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one check found out, as it is reported."""

    name: str
    status: Status
    value: str
    advice: str | None
    details: Mapping[str, Any]


def _answers(status: Status) -> Callable[..., Answer]:
    def answer(value: str, advice: str | None = None, **details: Any) -> Answer:
        # `examine` knows the name.
        return Answer("", status, value, advice, details)

    return answer


ok, warn, problem, unknown = (_answers(status) for status in ("ok", "warn", "problem", "unknown"))
UNAVAILABLE = warn("not available", NEEDS_REPLICA_SET, available=False)
# The answers of checks that fail with `NOT_A_REPLICA_SET`.
STANDALONE_ANSWERS = {
    "transactions": UNAVAILABLE,
    "change_streams": UNAVAILABLE,
    "write_concern": ok("1 (standalone)", w=1, source="standalone"),
}


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one server."""

    hosts: str
    source: Source
    database: str
    status: Status
    checks: tuple[Answer, ...]


@dataclass(frozen=True)
class Server:
    """What the checks share: a client, its database, and how the server describes itself."""

    client: Client
    database: str
    hello: Mapping[str, Any]
    # Only for people to read; empty where only users may know it.
    version: str
    clock: Callable[[], float]

    @cached_property
    def found(self) -> Capabilities:
        """What it can do, as it is for a Store."""
        from treadle.plan.capabilities import read_capabilities
        from treadle.store.blocking.runner import Runner

        return Runner(self.client[self.database]).run(read_capabilities())

    @property
    def kind(self) -> str:
        if self.hello.get("msg") == "isdbgrid":
            return "sharded"
        if "serviceId" in self.hello:
            return "load_balanced"
        if self.hello.get("isreplicaset"):
            return "uninitiated"
        return "replica_set" if self.hello.get("setName") else "standalone"

    def admin(self, name: str, **options: Any) -> dict[str, Any]:
        """The reply to a command of the admin database that reads only."""
        return self.client.admin.command({name: 1, **options})


def doctor(
    uri: Annotated[
        str | None,
        typer.Argument(
            metavar="URI",
            help="The database; else --uri, else MONGODB_URI, else a private local server.",
            show_default=False,
        ),
    ] = None,
    uri_option: UriOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what a server can do, and what Treadle will miss there. Writes nothing.

    Exits with 1 when there is a problem, with 3 when nothing answers.

    \b
    Example:
      treadle doctor mongodb://localhost:27017/shop
      MONGODB_URI=mongodb://localhost:27017/shop treadle doctor --json
    """
    from treadle.cli.connection import Target, choose_target

    target = choose_target(uri, uri_option, os.environ)
    if target is not None:
        report = examine(target)
    else:
        from treadle.server import local

        say("No URI was given, so a private local server is started and examined.", err=True)
        with local.start() as running:
            report = examine(Target(running.uri, "local"))
    if as_json:
        print_json(report)
    else:
        show(report)
    if report.status == "problem":
        raise typer.Exit(FINDINGS)


def examine(target: Target, clock: Callable[[], float] = time.time) -> Report:
    """Return the report on a server; raises `CannotConnect` when it does not answer, or stops answering."""
    import pymongo
    from pymongo.errors import ConnectionFailure

    from treadle.cli.connection import cannot_connect, connected, hosts
    from treadle.cli.record import restore_profiler_of

    with connected(target.uri) as client:
        try:
            with pymongo.timeout(CHECK_SECONDS_MAX):
                server = describe_server(client, clock)
                restore_profiler_of(client[server.database])
            checks = tuple(replace(_run(name, check, server), name=name) for name, check in CHECKS.items())
        except ConnectionFailure as error:
            raise cannot_connect(target.uri, error) from None
    worst = max((check.status for check in checks if check.status != "unknown"), key=_SEVERITY.index)
    return Report(hosts(target.uri), target.source, server.database, worst, checks)


def describe_server(client: Client, clock: Callable[[], float]) -> Server:
    """The server as it describes itself."""
    from pymongo.errors import OperationFailure

    from treadle.plan.server_errors import UNAUTHORIZED

    hello = client.admin.command("hello")
    database = client.get_default_database(DATABASE_DEFAULT).name
    try:
        build = client.server_info()
    except OperationFailure as error:
        if error.code not in UNAUTHORIZED:
            raise
        return Server(client, database, hello, "", clock)
    return Server(client, database, hello, str(build["version"]), clock)


def show(report: Report) -> None:
    """Print the report as a table, below it what the server can do, and what to do."""
    from rich.text import Text

    from treadle.cli.gaps import capability_rows

    rows = []
    names_by_advice: dict[str, list[str]] = {}
    for check in report.checks:
        name = check.name.replace("_", " ")
        rows.append((name, Text(check.status, style=_STYLES[check.status]), check.value))
        if check.advice:
            names_by_advice.setdefault(check.advice, []).append(name)
    print_table(("check", "status", "value"), rows, f"MongoDB at {report.hosts}, database {report.database}")
    for check in report.checks:
        if check.name == "capabilities" and check.details:
            print_table(("capability", "found", "what follows"), capability_rows(check.details))
    for advice, names in names_by_advice.items():
        say(f"{', '.join(names)}: {advice}.")


# -- the checks -----------------------------------------------------------------


def _run(name: str, check: Callable[[Server], Answer], server: Server) -> Answer:
    """The answer of a check, or "unknown" with the reason when the server does not say."""
    import pymongo
    from pymongo.errors import (
        ConfigurationError,
        ConnectionFailure,
        NotPrimaryError,
        OperationFailure,
        PyMongoError,
        ServerSelectionTimeoutError,
    )

    from treadle.errors import TreadleError
    from treadle.plan.server_errors import NOT_A_REPLICA_SET, UNAUTHORIZED

    try:
        with pymongo.timeout(CHECK_SECONDS_MAX):
            return check(server)
    except OperationFailure as error:
        if error.code in UNAUTHORIZED:
            return unknown("no rights", NO_RIGHTS)
        if error.code in NOT_A_REPLICA_SET and name in STANDALONE_ANSWERS:
            return STANDALONE_ANSWERS[name]
        reason = (error.details or {}).get("codeName") or f"error {error.code}"
        return unknown(f"the server answers {reason}", NOT_REPORTED)
    except TreadleError as error:
        return unknown(error.code, str(error).rstrip("."))
    except NotPrimaryError:
        return unknown("this member is no primary", "connect to the primary")
    except ServerSelectionTimeoutError:
        raise  # Not slow but gone, which concerns all checks.
    except PyMongoError as error:
        if error.timeout:
            return unknown(f"no answer in {CHECK_SECONDS_MAX:g} s", "see whether the server is overloaded")
        if isinstance(error, ConnectionFailure):
            raise
        if isinstance(error, ConfigurationError) and name in STANDALONE_ANSWERS:
            return STANDALONE_ANSWERS[name]
        return unknown(type(error).__name__, NOT_REPORTED)


def _server_version(server: Server) -> Answer:
    from treadle.plan.capabilities import WIRE_VERSION_MIN

    # Whether it is recent enough, the protocol tells; an engine may call its versions as it likes.
    wire = server.hello.get("maxWireVersion", 0)
    if wire < WIRE_VERSION_MIN:
        named = server.version or f"wire version {wire}"
        return problem(named, "Treadle needs MongoDB 6.0 or newer", version=named)
    if not server.version:
        return unknown("no rights", NO_RIGHTS)
    return ok(server.version, version=server.version)


def _capabilities(server: Server) -> Answer:
    """Everything that a Store asks of a server; what is missing is shown below the table."""
    from treadle.plan.capabilities import NAMES

    found = {name: value for name, value in asdict(server.found).items() if name in NAMES}
    missing = [NAMES[name] for name, value in found.items() if not value]
    return ok(f"lacks {', '.join(missing)}" if missing else "all that Treadle makes use of", **found)


def _topology(server: Server) -> Answer:
    hello = server.hello
    members = sum(len(hello.get(role, ())) for role in ("hosts", "passives", "arbiters"))
    details = {"kind": server.kind, "name": hello.get("setName"), "members": members or None}
    if server.kind == "standalone":
        from treadle.plan.capabilities import REPLICA_SET_OF_ONE

        advice = (
            "plain, polymorphic and versioned models work here; derived data, trees, histories and "
            f"migrations are refused: {REPLICA_SET_OF_ONE}"
        )
        return warn("standalone", advice, **details)
    if server.kind == "uninitiated":
        advice = "nothing can be written yet; run rs.initiate() in mongosh"
        return problem("replica set, not initiated", advice, **details)
    if server.kind == "replica_set":
        value = f"replica set {hello['setName']!r}, {members} member{'s' if members != 1 else ''}"
        if not hello.get("isWritablePrimary"):
            advice = "leave out directConnection=true, so that writes find the primary"
            return warn(f"{value}, connected to a secondary", advice, **details)
        return ok(value, **details)
    return ok(server.kind.replace("_", " "), **details)


def _transactions(server: Server) -> Answer:
    """Opens a transaction, reads in it and aborts it; from the primary, whatever the URI prefers."""
    from pymongo import ReadPreference

    with server.client.start_session() as session:
        session.start_transaction(read_preference=ReadPreference.PRIMARY)
        database = server.client.get_database(server.database, read_preference=ReadPreference.PRIMARY)
        database[COLLECTION_READ].find_one({}, session=session)
        session.abort_transaction()
    return ok("opened and aborted one", available=True)


def _transaction_lifetime(server: Server) -> Answer:
    reply = server.admin("getParameter", transactionLifetimeLimitSeconds=1)
    seconds = reply["transactionLifetimeLimitSeconds"]
    if seconds < TRANSACTION_LIFETIME_SECONDS_MIN:
        advice = "raise transactionLifetimeLimitSeconds, or large fan-outs will be aborted"
        return warn(f"{seconds} s", advice, seconds=seconds)
    return ok(f"{seconds} s", seconds=seconds)


def _change_streams(server: Server) -> Answer:
    """Opens a change stream on the database, and closes it."""
    with server.client[server.database].watch(max_await_time_ms=1):
        return ok("opened and closed one", available=True)


def _write_concern(server: Server) -> Answer:
    """The URI's, else the default of the server; Treadle itself asks for the majority always."""
    chosen = server.client.write_concern.document.get("w")
    if chosen in (0, 1):
        advice = f"Treadle asks for the majority itself; with w={chosen} other writers may lose writes"
        return warn(f"{chosen} (URI)", advice, w=chosen, source="uri")
    reply = server.admin("getDefaultRWConcern")
    w = reply.get("defaultWriteConcern", {}).get("w", 1)
    source = reply.get("defaultWriteConcernSource", "implicit")
    if w in (0, 1):
        advice = "Treadle asks for the majority itself; other writers may lose writes in a failover"
        return warn(f"{w} ({source})", advice, w=w, source=source)
    return ok(f"{w} ({source})", w=w, source=source)


def _read_preference(server: Server) -> Answer:
    """The URI's, which the caller's own reads follow."""
    mode = server.client.read_preference.mongos_mode
    if mode == "primary":
        return ok(mode, mode=mode)
    advice = (
        "get, find and count may miss what was written a moment before; "
        "whatever Treadle decides by is read from the primary"
    )
    return warn(f"{mode} (URI)", advice, mode=mode)


def _retryable_writes(server: Server) -> Answer:
    """Whether the URI turns them off; what the server says of them is among the capabilities."""
    if not server.client.options.retry_writes:
        advice = "remove retryWrites=false from the URI; a Store refuses to work with it"
        return problem("turned off in the URI", advice, available=False)
    return ok("not turned off in the URI", available=True)


def _profiler(server: Server) -> Answer:
    reply = server.client[server.database].command({"profile": -1})
    level, slow = int(reply["was"]), int(reply["slowms"])
    if level == 2:
        advice = "it records every operation, which costs; db.setProfilingLevel(1) records the slow ones"
        return warn("level 2, everything", advice, level=level, slow_ms=slow)
    return ok(f"level 1, from {slow} ms" if level == 1 else "level 0, off", level=level, slow_ms=slow)


def _clock_skew(server: Server) -> Answer:
    """The server's clock minus this machine's, give or take half of the round trip."""
    before = server.clock()
    local_time: datetime = server.admin("hello")["localTime"]
    after = server.clock()
    seconds = round(local_time.replace(tzinfo=UTC).timestamp() - (before + after) / 2, 3)
    if abs(seconds) > CLOCK_SKEW_SECONDS_MAX + (after - before) / 2:
        advice = "set both clocks by NTP; windows and expiry dates are cut by them"
        return warn(f"{seconds:+.1f} s", advice, seconds=seconds)
    return ok(f"{seconds:+.3f} s", seconds=seconds)


def _time_zones(server: Server) -> Answer:
    """The server's offsets against Python's, for zones that are used much or changed of late."""
    from treadle.store.blocking.runner import Runner
    from treadle.upkeep.zones import WELL_KNOWN, describe, wrong_zones

    wrong = Runner(server.client[server.database]).run(wrong_zones(WELL_KNOWN, step_days=28))
    if wrong:
        zone, day = next(iter(wrong.items()))
        return warn(f"{len(wrong)} of {len(WELL_KNOWN)} differ", describe(zone, day), wrong=wrong)
    return ok("as in Python's zoneinfo", wrong={})


CHECKS: Mapping[str, Callable[[Server], Answer]] = {
    check.__name__[1:]: check
    for check in (
        _server_version,
        _topology,
        _transactions,
        _transaction_lifetime,
        _change_streams,
        _write_concern,
        _read_preference,
        _retryable_writes,
        _profiler,
        _clock_skew,
        _time_zones,
        _capabilities,
    )
}
