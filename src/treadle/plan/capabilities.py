"""What a server can do, probed by harmless commands and never concluded from its version.

A probe names a collection that does not exist, and writes nothing. What counts is how the server refuses
it, if it does. A refusal for missing rights says nothing and counts as "has it": the real command will
tell. A transient error is raised, and nothing is concluded from it.

A Store probes what its declarations use, before its first write that has effects, and again after a
failover. `treadle doctor` probes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, TypeVar

from bson import ObjectId
from pymongo.errors import ConfigurationError, OperationFailure

from treadle.errors import DeclarationError, TreadleError, UsageError
from treadle.plan import Plan, Raw, database_command, find_one, transact, update_one
from treadle.plan.server_errors import NAMESPACE_NOT_FOUND, UNAUTHORIZED, is_refusal

R = TypeVar("R")

# MongoDB 6.0. A server announces its protocol before any login.
WIRE_VERSION_MIN = 17
OPERATIONS_MAX = 100_000
# No collection has this name.
NOWHERE = "treadle.probe"
REPLICA_SET_OF_ONE = (
    "make it a replica set of one (restart mongod with --replSet rs0, then run rs.initiate() once in mongosh)"
)
# The server's default of `transactionLifetimeLimitSeconds`, for one that does not say.
TRANSACTION_SECONDS = 60
# The server looks for expired transactions every half of that time, and at least this often.
EXPIRY_CHECK_SECONDS_MAX = 60
# For an election or a slow disk on top of that.
LOCK_MARGIN_SECONDS = 10


def _fact(name: str, default: bool | int | None = False) -> Any:
    """Declare a capability with its name in messages and tables."""
    return field(default=default, metadata={"name": name})


@dataclass(frozen=True)
class Capabilities:
    """The facts on which plans depend; what was not probed counts as missing."""

    transactions: bool = _fact("transactions")
    # None where the server does not say.
    transaction_seconds: int | None = _fact("seconds that a transaction may last", None)
    retryable_writes: bool = _fact("retryable writes")
    # Of a database, with the cluster time in their events.
    streams: bool = _fact("change streams")
    pre_images: bool = _fact("pre-images in change streams")
    split_events: bool = _fact("$changeStreamSplitLargeEvent")
    pipeline_updates: bool = _fact("updates by pipeline")
    merges: bool = _fact("$merge")
    unions: bool = _fact("$unionWith")
    graph_lookups: bool = _fact("$graphLookup")
    snapshots: bool = _fact("snapshot reads")
    time_series: bool = _fact("time series")
    validators: bool = _fact("$jsonSchema in collMod")
    operations_max: int = _fact("operations in one batch", OPERATIONS_MAX)
    standalone: bool = False
    sharded: bool = False  # the router of a sharded cluster
    database: str = ""  # its name in change events; empty where streams were not probed

    @property
    def lock_seconds(self) -> float:
        """For how long the server may hold the locks of a client that was killed."""
        limit = self.transaction_seconds or TRANSACTION_SECONDS
        return limit + min(limit / 2, EXPIRY_CHECK_SECONDS_MAX) + LOCK_MARGIN_SECONDS

    def transact(self, make: Callable[[], Plan[R]]) -> Plan[R]:
        """Run the plan that `make` makes, in a transaction if the server has them."""
        return transact(make) if self.transactions else make()

    def require_transactions(
        self,
        what: str,
        instead: str | None = None,
        *,
        code: str = "transactions-unavailable",
        error: type[TreadleError] = UsageError,
    ) -> None:
        """Refuse what a server without transactions cannot do; `instead` is another way out."""
        if self.transactions:
            return
        server = "this standalone server" if self.standalone else "this server"
        advice = REPLICA_SET_OF_ONE if self.standalone else "use a server that has them"
        choices = f"{advice}, or {instead}" if instead else advice
        text = f"{what} needs transactions, which {server} does not have; {choices}"
        raise error(text, code=code) from None

    def require(self, name: str, what: str, instead: str) -> None:
        """Refuse a declaration that needs a missing capability."""
        if name == "transactions":
            self.require_transactions(what, instead, code="transactions-needed", error=DeclarationError)
        elif not getattr(self, name):
            raise DeclarationError(
                f"{what} needs {NAMES[name]}, which this server does not have; {instead}",
                code="capability-missing",
            ) from None


# The names of the capabilities that are probed, as messages and tables have them.
NAMES: Mapping[str, str] = {
    each.name: each.metadata["name"] for each in fields(Capabilities) if "name" in each.metadata
}
# What every Store needs, whatever it declares.
BASIC = frozenset(
    {"transactions", "transaction_seconds", "retryable_writes", "pipeline_updates", "operations_max"}
)
EVERYTHING = frozenset(NAMES)


def clock() -> Plan[datetime]:
    """Return the server's time, because a client's own may be wrong."""
    now: datetime = (yield from database_command({"hello": 1}, writes=False, admin=True))["localTime"]
    return now


def greet() -> Plan[Raw]:
    """Return the server's description of itself; raises `UsageError` for one that is too old."""
    hello = yield from database_command({"hello": 1}, writes=False, admin=True)
    if hello.get("maxWireVersion", 0) < WIRE_VERSION_MIN:
        raise UsageError(
            f"this server is older than MongoDB 6.0 (its wire version is {hello.get('maxWireVersion', 0)}); "
            "upgrade it: Treadle needs MongoDB 6.0 or newer",
            code="server-too-old",
        )
    return hello


def read_capabilities(used: Iterable[str] = EVERYTHING) -> Plan[Capabilities]:
    """Probe what is used; raises `UsageError` for a server that is too old."""
    hello = yield from greet()
    used = {*used, *BASIC}
    server = describe(hello)
    if not server.standalone and "logicalSessionTimeoutMinutes" in hello:
        server = replace(server, transactions=(yield from _has_transactions()))
    for names, probe in _PROBES.items():
        if used.intersection(names):
            server = replace(server, **(yield from probe(server)))
    return server


def describe(hello: Mapping[str, Any]) -> Capabilities:
    """Return the capabilities that the server's description tells."""
    sharded = hello.get("msg") == "isdbgrid"
    return Capabilities(
        standalone=not (sharded or "setName" in hello or "serviceId" in hello),
        sharded=sharded,
        operations_max=int(hello.get("maxWriteBatchSize", OPERATIONS_MAX)),
    )


# -- probes ----------------------------------------------------------------------------------------


class _Abort(Exception):
    """Aborts the transaction of a probe."""


def _has_transactions() -> Plan[bool]:
    def probe() -> Plan[None]:
        yield from find_one(NOWHERE, {}, {"_id": 1})
        raise _Abort

    try:
        yield from transact(probe)
    except _Abort:
        return True
    except ConfigurationError:
        return False
    except OperationFailure as error:
        return _has_it(error)
    return True


def _read_lifetime(server: Capabilities) -> Plan[Raw]:
    name = "transactionLifetimeLimitSeconds"
    try:
        reply = yield from database_command({"getParameter": 1, name: 1}, writes=False, admin=True)
    except OperationFailure as error:
        if error.code not in UNAUTHORIZED and not is_refusal(error):
            raise
        return {}
    return {"transaction_seconds": reply.get(name)}


def _probe_updates(server: Capabilities) -> Plan[Raw]:
    """Send a retryable update by pipeline that matches nothing; if it is refused, one by operators."""
    nothing = {"_id": ObjectId()}
    if (yield from _accepts(update_one(NOWHERE, nothing, [{"$set": {"at": "$$NOW"}}]))):
        return {"retryable_writes": True, "pipeline_updates": True}
    return {"retryable_writes": (yield from _accepts(update_one(NOWHERE, nothing, {"$set": {"at": 1}})))}


def _probe_stages(server: Capabilities) -> Plan[Raw]:
    graph = {"startWith": "$_id", "connectFromField": "_id", "connectToField": "up"}
    stages: dict[str, Raw] = {
        "graph_lookups": {"$graphLookup": {"from": NOWHERE, **graph, "as": "b"}},
        "unions": {"$unionWith": {"coll": NOWHERE, "pipeline": []}},
        "merges": {"$merge": {"into": NOWHERE}},
    }
    return (yield from _probe_each(stages, _explain))


def _probe_streams(server: Capabilities) -> Plan[Raw]:
    """Open a change stream of the database, and close it."""
    if server.standalone:
        return {}
    stages: list[Raw] = [{"$changeStream": {}}]
    command = {"aggregate": 1, "pipeline": stages, "cursor": {"batchSize": 0}}
    try:
        reply = yield from database_command(command, writes=False)
    except OperationFailure as error:
        return {"streams": _has_it(error)}
    close = {"killCursors": "$cmd.aggregate", "cursors": [reply["cursor"]["id"]]}
    yield from database_command(close, writes=False)
    # A server whose replies have no time has none in its events either.
    if "operationTime" not in reply:
        return {}
    split = _explain([*stages, {"$changeStreamSplitLargeEvent": {}}], 1)
    splits = yield from _accepts(database_command(split, writes=False))
    database = reply["cursor"].get("ns", "").partition(".")[0]
    return {"streams": True, "split_events": splits, "database": database}


def _probe_collection_options(server: Capabilities) -> Plan[Raw]:
    """Change options of a collection that does not exist."""
    options: dict[str, Raw] = {
        "validators": {"validator": {"$jsonSchema": {}}},
        "time_series": {"timeseries": {"granularity": "hours"}},
    }
    if server.streams:
        options["pre_images"] = {"changeStreamPreAndPostImages": {"enabled": True}}
    return (yield from _probe_each(options, _modify, NAMESPACE_NOT_FOUND))


def _probe_snapshots(server: Capabilities) -> Plan[Raw]:
    read = {"find": NOWHERE, "limit": 1, "readConcern": {"level": "snapshot"}}
    return {"snapshots": (yield from _accepts(database_command(read, writes=False)))}


# In this order: `_probe_collection_options` needs to know whether there are streams.
_PROBES: Mapping[tuple[str, ...], Callable[[Capabilities], Plan[Raw]]] = {
    ("transaction_seconds",): _read_lifetime,
    ("retryable_writes", "pipeline_updates"): _probe_updates,
    ("graph_lookups", "unions", "merges"): _probe_stages,
    ("streams", "split_events"): _probe_streams,
    ("validators", "time_series", "pre_images"): _probe_collection_options,
    ("snapshots",): _probe_snapshots,
}


def _explain(stages: Sequence[Raw], source: str | int = NOWHERE) -> Raw:
    aggregate: Raw = {"aggregate": source, "pipeline": stages, "cursor": {}}
    return {"explain": aggregate, "verbosity": "queryPlanner"}


def _modify(options: Sequence[Raw]) -> Raw:
    return {"collMod": NOWHERE, **{name: value for each in options for name, value in each.items()}}


def _probe_each(
    probes: Mapping[str, Raw], command: Callable[[Sequence[Raw]], Raw], needless: int | None = None
) -> Plan[Raw]:
    """Return which of these parts of a command the server accepts: all in one, or else each in one."""
    if (yield from _accepts(database_command(command([*probes.values()]), writes=False), needless)):
        return dict.fromkeys(probes, True)
    accepted: Raw = {}
    for name, part in probes.items():
        accepted[name] = yield from _accepts(database_command(command([part]), writes=False), needless)
    return accepted


def _has_it(error: OperationFailure) -> bool:
    """Whether the server may have what it refused; raises a transient error."""
    if error.code in UNAUTHORIZED:
        return True
    if is_refusal(error):
        return False
    raise error


def _accepts(plan: Plan[Any], needless: int | None = None) -> Plan[bool]:
    """Whether the server accepts a command; a refusal with the code `needless` says nothing against it."""
    try:
        yield from plan
    except OperationFailure as error:
        return error.code == needless or _has_it(error)
    return True
