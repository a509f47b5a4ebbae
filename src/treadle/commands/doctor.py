"""`treadle doctor`: what a server can do, and what Treadle will miss there.

Every check only reads: transactions and change streams are really opened, and
closed again without a write. A check that the login may not make is
"unknown", never a failure. The checks talk to the URI's database, or to
`test` when it names none.

Keys of the JSON output, which stay as they are:

    hosts     the hosts as the URI names them
    source    "argument", "option", "environment" or "local": where the URI came from
    database  the database whose profiler, transactions and change streams were looked at
    status    the worst of the checks that are known: "ok", "warn" or "problem"
    checks    a list of {name, status, value, advice, details}: `name` is one of `CHECKS`, `status`
              is "ok", "warn", "problem" or "unknown", `value` is a phrase for people, `advice` is
              null when the status is "ok", and `details` holds the figures for programs

`details` are: server_version {version}; topology {kind: "replica_set", "sharded", "standalone",
"load_balanced" or "uninitiated", name, members}; transactions, change_streams, pre_images,
time_series, retryable_writes {available}; transaction_lifetime {seconds}; feature_compatibility
{version}; write_concern {w, source}; profiler {level, slow_ms}; storage_engine {name}; tz_aware
{tz_aware}; clock_skew {seconds}. They are empty when the status is "unknown".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import pymongo
from pymongo.errors import (
    ConfigurationError,
    ConnectionFailure,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)

from treadle.commands.connection import Client, Source, Target, cannot_connect, connected, hosts

if TYPE_CHECKING:
    from rich.console import Console

CHECK_SECONDS_MAX = 3.0
CLOCK_SKEW_SECONDS_MAX = 1.0
TRANSACTION_LIFETIME_SECONDS_MIN = 5
VERSION_MIN = (4, 4)
VERSION_OF_TIME_SERIES = (5, 0)
VERSION_OF_PRE_IMAGES = (6, 0)
DATABASE_DEFAULT = "test"
# Never created; only looked for.
COLLECTION_LOOKED_FOR = "treadle.doctor"

# Codes of the server's errors.
UNAUTHORIZED = (13, 8000)  # The second is Atlas's.
NOT_A_REPLICA_SET = (20, 263, 40573, 51300)

NEEDS_REPLICA_SET = (
    "needs a replica set; start mongod with --replSet and run rs.initiate() in mongosh, "
    "a single member will do"
)
NO_RIGHTS = "log in as a user with the role clusterMonitor, and read on the database"
# The version that speaks each wire protocol, for servers that tell it only to users.
WIRE_VERSIONS = {9: (4, 4), 13: (5, 0), 17: (6, 0), 21: (7, 0), 25: (8, 0)}

Status = Literal["ok", "warn", "problem", "unknown"]
_STYLES = {"ok": "green", "warn": "yellow", "problem": "bold red", "unknown": "dim"}
_SEVERITY: tuple[Status, ...] = ("ok", "warn", "problem")


@dataclass(frozen=True, slots=True)
class Check:
    """What one look at the server found."""

    name: str
    status: Status
    value: str
    advice: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one server."""

    hosts: str
    source: Source
    database: str
    status: Status
    checks: tuple[Check, ...]

    def as_json(self) -> dict[str, Any]:
        """The documented keys, with values that JSON knows."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Server:
    """What the checks share: a client, its database, and what the server says of itself."""

    client: Client
    database: str
    hello: Mapping[str, Any]
    version: str
    version_pair: tuple[int, int]
    clock: Callable[[], float]

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


def doctor(target: Target, clock: Callable[[], float] = time.time) -> Report:
    """Look at the server; raises `CannotConnect` when it is not there, or goes away meanwhile."""
    with connected(target.uri) as client:
        try:
            return examine(client, hosts(target.uri), target.source, clock)
        except ConnectionFailure as error:
            raise cannot_connect(hosts(target.uri), error) from None


def examine(client: Client, named: str, source: Source, clock: Callable[[], float]) -> Report:
    """The report on the server of an open client."""
    with pymongo.timeout(CHECK_SECONDS_MAX):
        server = meet(client, clock)
    checks = tuple(_guarded(name, look, server) for name, look in CHECKS.items())
    worst = max((check.status for check in checks if check.status != "unknown"), key=_SEVERITY.index)
    return Report(named, source, server.database, worst, checks)


def meet(client: Client, clock: Callable[[], float]) -> Server:
    """The server with what it says of itself; its version is empty when only users may know it."""
    hello = client.admin.command("hello")
    database = client.get_default_database(DATABASE_DEFAULT).name
    try:
        built = client.server_info()
    except OperationFailure as error:
        if error.code not in UNAUTHORIZED:
            raise
        spoken = [wire for wire in WIRE_VERSIONS if wire <= hello["maxWireVersion"]]
        return Server(client, database, hello, "", WIRE_VERSIONS.get(max(spoken, default=0), (0, 0)), clock)
    major, minor = built["versionArray"][:2]
    return Server(client, database, hello, str(built["version"]), (major, minor), clock)


def show(report: Report, console: Console) -> None:
    """Print the report as a table, and below it what to do."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"MongoDB at {report.hosts}, database {report.database}"), title_justify="left")
    for heading in ("check", "status", "value"):
        table.add_column(heading)
    for check in report.checks:
        label = Text(check.name.replace("_", " "))
        table.add_row(label, Text(check.status, style=_STYLES[check.status]), Text(check.value))
    console.print(table)
    advised: dict[str, list[str]] = {}
    for check in report.checks:
        if check.advice:
            advised.setdefault(check.advice, []).append(check.name.replace("_", " "))
    for advice, names in advised.items():
        console.print(f"{', '.join(names)}: {advice}.", markup=False, highlight=False, soft_wrap=True)


# -- the checks -----------------------------------------------------------------


def _guarded(name: str, look: Callable[[Server], Check], server: Server) -> Check:
    """The check, or "unknown" with the reason when the server does not tell."""
    try:
        with pymongo.timeout(CHECK_SECONDS_MAX):
            return look(server)
    except OperationFailure as error:
        if error.code in UNAUTHORIZED:
            return Check(name, "unknown", "no rights", NO_RIGHTS)
        said = (error.details or {}).get("codeName") or f"error {error.code}"
        return Check(name, "unknown", f"the server answers {said}", "this kind of server does not tell")
    except NotPrimaryError:
        return Check(name, "unknown", "this member is no primary", "connect to the primary")
    except ServerSelectionTimeoutError:
        raise  # Not slow but gone, which concerns all checks.
    except PyMongoError as error:
        if error.timeout:
            value = f"no answer in {CHECK_SECONDS_MAX:g} s"
            return Check(name, "unknown", value, "see whether the server is overloaded")
        if isinstance(error, ConnectionFailure):
            raise
        return Check(name, "unknown", type(error).__name__, "this kind of server does not tell")


def _server_version(server: Server) -> Check:
    if not server.version:
        return Check("server_version", "unknown", "no rights", NO_RIGHTS)
    details = {"version": server.version}
    if server.version_pair < VERSION_MIN:
        advice = "Treadle needs MongoDB 4.4 or later"
        return Check("server_version", "problem", server.version, advice, details)
    return Check("server_version", "ok", server.version, None, details)


def _capabilities(server: Server) -> Check:
    hello = server.hello
    members = sum(len(hello.get(role, ())) for role in ("hosts", "passives", "arbiters"))
    details = {"kind": server.kind, "name": hello.get("setName"), "members": members or None}
    if server.kind == "standalone":
        advice = (
            "Treadle works here, with intents in place of transactions, but without trees, outlier arrays, "
            "durable counters and the worker"
        )
        return Check("topology", "warn", "standalone", advice, details)
    if server.kind == "uninitiated":
        advice = "nothing can be written yet; run rs.initiate() in mongosh"
        return Check("topology", "problem", "replica set, not initiated", advice, details)
    if server.kind == "replica_set":
        value = f"replica set {hello['setName']!r}, {members} member{'s' if members != 1 else ''}"
        if not hello.get("isWritablePrimary"):
            advice = "leave out directConnection=true, so that writes find the primary"
            return Check("topology", "warn", f"{value}, connected to a secondary", advice, details)
        return Check("topology", "ok", value, None, details)
    return Check("topology", "ok", server.kind.replace("_", " "), None, details)


def _transactions(server: Server) -> Check:
    """Opens a transaction, reads in it and aborts it."""
    collection = server.client[server.database][COLLECTION_LOOKED_FOR]
    try:
        with server.client.start_session() as session:
            session.start_transaction()
            collection.find_one({}, session=session)
            session.abort_transaction()
    except ConfigurationError:
        refused = True
    except OperationFailure as error:
        if error.code not in NOT_A_REPLICA_SET:
            raise
        refused = True
    else:
        refused = False
    if refused:
        return Check("transactions", "warn", "not available", NEEDS_REPLICA_SET, {"available": False})
    return Check("transactions", "ok", "opened and aborted one", None, {"available": True})


def _transaction_lifetime(server: Server) -> Check:
    found = server.admin("getParameter", transactionLifetimeLimitSeconds=1)
    seconds = found["transactionLifetimeLimitSeconds"]
    details = {"seconds": seconds}
    if seconds < TRANSACTION_LIFETIME_SECONDS_MIN:
        advice = "raise transactionLifetimeLimitSeconds, or large fan-outs will be aborted"
        return Check("transaction_lifetime", "warn", f"{seconds} s", advice, details)
    return Check("transaction_lifetime", "ok", f"{seconds} s", None, details)


def _change_streams(server: Server) -> Check:
    """Opens a change stream on the database and closes it."""
    try:
        with server.client[server.database].watch(max_await_time_ms=1):
            pass
    except OperationFailure as error:
        if error.code not in NOT_A_REPLICA_SET:
            raise
        return Check("change_streams", "warn", "not available", NEEDS_REPLICA_SET, {"available": False})
    return Check("change_streams", "ok", "opened and closed one", None, {"available": True})


def _pre_images(server: Server) -> Check:
    if server.version_pair < VERSION_OF_PRE_IMAGES:
        advice = "they come with MongoDB 6.0; until then Treadle reads the old state itself"
    elif server.kind in ("standalone", "uninitiated"):
        advice = NEEDS_REPLICA_SET
    else:
        return Check("pre_images", "ok", "available", None, {"available": True})
    return Check("pre_images", "warn", "not available", advice, {"available": False})


def _time_series(server: Server) -> Check:
    if server.version_pair < VERSION_OF_TIME_SERIES:
        advice = "native time series come with MongoDB 5.0; bucket= works everywhere"
        return Check("time_series", "warn", "not available", advice, {"available": False})
    return Check("time_series", "ok", "available", None, {"available": True})


def _feature_compatibility(server: Server) -> Check:
    found = server.admin("getParameter", featureCompatibilityVersion=1)["featureCompatibilityVersion"]
    version = str(found["version"])
    details = {"version": version}
    if tuple(int(part) for part in version.split(".")) < server.version_pair:
        newest = ".".join(map(str, server.version_pair))
        advice = f"when the upgrade has proven itself, run setFeatureCompatibilityVersion with {newest!r}"
        return Check("feature_compatibility", "warn", version, advice, details)
    return Check("feature_compatibility", "ok", version, None, details)


def _write_concern(server: Server) -> Check:
    """The default of the server; Treadle itself asks for the majority always."""
    try:
        found = server.admin("getDefaultRWConcern")
    except OperationFailure as error:
        if error.code not in NOT_A_REPLICA_SET:
            raise
        return Check("write_concern", "ok", "1 (standalone)", None, {"w": 1, "source": "standalone"})
    w = found.get("defaultWriteConcern", {}).get("w", 1)
    source = found.get("defaultWriteConcernSource", "implicit")
    details = {"w": w, "source": source}
    if w in (0, 1):
        advice = "Treadle asks for the majority itself; other writers may lose writes in a failover"
        return Check("write_concern", "warn", f"{w} ({source})", advice, details)
    return Check("write_concern", "ok", f"{w} ({source})", None, details)


def _retryable_writes(server: Server) -> Check:
    if not server.client.options.retry_writes:
        advice = "remove retryWrites=false from the URI; a Store refuses to work with it"
        return Check("retryable_writes", "problem", "turned off in the URI", advice, {"available": False})
    if server.kind in ("standalone", "uninitiated"):
        return Check("retryable_writes", "warn", "not available", NEEDS_REPLICA_SET, {"available": False})
    return Check("retryable_writes", "ok", "available", None, {"available": True})


def _profiler(server: Server) -> Check:
    found = server.client[server.database].command({"profile": -1})
    level, slow = int(found["was"]), int(found["slowms"])
    details = {"level": level, "slow_ms": slow}
    if level == 2:
        advice = "it records every operation, which costs; db.setProfilingLevel(1) records the slow ones"
        return Check("profiler", "warn", "level 2, everything", advice, details)
    value = f"level 1, from {slow} ms" if level == 1 else "level 0, off"
    return Check("profiler", "ok", value, None, details)


def _storage_engine(server: Server) -> Check:
    found = server.admin("serverStatus", repl=0, metrics=0, locks=0, wiredTiger=0)
    engine = found.get("storageEngine")
    if engine is None:
        return Check("storage_engine", "unknown", "behind a router", "ask one of the shards")
    name = str(engine["name"])
    if not engine.get("persistent", True):
        advice = "everything is lost when it stops; use wiredTiger for data that matters"
        return Check("storage_engine", "warn", f"{name}, in memory only", advice, {"name": name})
    return Check("storage_engine", "ok", name, None, {"name": name})


def _tz_aware(server: Server) -> Check:
    aware = bool(server.client.codec_options.tz_aware)
    # Not a warning: a Store reads dates as aware UTC through any client.
    value = "yes" if aware else "no, but a Store is"
    return Check("tz_aware", "ok", value, None, {"tz_aware": aware})


def _clock_skew(server: Server) -> Check:
    """The server's clock minus this machine's, as far as the round trip lets one tell."""
    before = server.clock()
    told: datetime = server.client.admin.command("hello")["localTime"]
    after = server.clock()
    seconds = round(told.replace(tzinfo=UTC).timestamp() - (before + after) / 2, 3)
    details = {"seconds": seconds}
    if abs(seconds) > CLOCK_SKEW_SECONDS_MAX + (after - before) / 2:
        advice = "set both clocks by NTP; windows and expiry dates are cut by them"
        return Check("clock_skew", "warn", f"{seconds:+.1f} s", advice, details)
    return Check("clock_skew", "ok", f"{seconds:+.3f} s", None, details)


CHECKS: Mapping[str, Callable[[Server], Check]] = {
    "server_version": _server_version,
    "topology": _capabilities,
    "transactions": _transactions,
    "transaction_lifetime": _transaction_lifetime,
    "change_streams": _change_streams,
    "pre_images": _pre_images,
    "time_series": _time_series,
    "feature_compatibility": _feature_compatibility,
    "write_concern": _write_concern,
    "retryable_writes": _retryable_writes,
    "profiler": _profiler,
    "storage_engine": _storage_engine,
    "tz_aware": _tz_aware,
    "clock_skew": _clock_skew,
}
