"""What the server at hand can do: tried by harmless commands, never concluded from its version.

A probe names a collection that does not exist, reads nothing there and writes
nothing. What matters is how the server refuses it, if it does. A refusal for
want of rights says nothing, and counts as "has it": the real command will
tell. An error that passes is raised, and nothing is concluded from it.

A Store probes what its declarations use, before its first write that others
follow, and again after a failover. `treadle doctor` probes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from bson import Binary, ObjectId
from pymongo.errors import ConfigurationError, OperationFailure

from treadle.errors import DeclarationError, TreadleError, UsageError
from treadle.plan import Plan, Raw, database_command, find_one, transact, update_one
from treadle.plan.server_errors import NAMESPACE_NOT_FOUND, UNAUTHORIZED, is_refusal

R = TypeVar("R")

# MongoDB 6.0. Told by the protocol, which a server announces before any login.
WIRE_VERSION_MIN = 17
OPERATIONS_MAX = 100_000
# No collection has this name.
NOWHERE = "treadle.probe"
REPLICA_SET_OF_ONE = (
    "make it a replica set of one (restart mongod with --replSet rs0, then run rs.initiate() once in mongosh)"
)


@dataclass(frozen=True)
class Capabilities:
    """The facts on which plans depend; what was not probed counts as missing."""

    transactions: bool = False
    # How long a transaction may last; None where the server does not say.
    transaction_seconds: int | None = None
    retryable_writes: bool = False
    # Change streams of a database whose events have a cluster time.
    streams: bool = False
    # The database's name, as the events of its collections have it; empty where streams were not probed.
    database: str = ""
    pre_images: bool = False
    # Whether an event of more than 16 MB comes in pieces.
    split_events: bool = False
    pipeline_updates: bool = False
    merges: bool = False
    unions: bool = False
    graph_lookups: bool = False
    # `$lookup` by a field and with a pipeline of its own.
    lookup_pipelines: bool = False
    array_sorts: bool = False
    # Whether a session can read as of one moment without a transaction.
    snapshots: bool = False
    time_series: bool = False
    validators: bool = False
    kill_sessions: bool = False
    # Operations in one batch.
    operations_max: int = OPERATIONS_MAX
    # Whether it is one server alone, and whether it is the router of a sharded cluster.
    standalone: bool = False
    sharded: bool = False

    def together(self, make: Callable[[], Plan[R]]) -> Plan[R]:
        """The plan that `make` makes, in a transaction where the server has them."""
        return transact(make) if self.transactions else make()

    def require_transactions(
        self,
        what: str,
        instead: str | None = None,
        code: str = "transactions-unavailable",
        error: type[TreadleError] = UsageError,
    ) -> None:
        """Refuse what a server without transactions cannot do; `instead` is another way out."""
        if self.transactions:
            return
        this, ways = "this server", ["use a server that has them"]
        if self.standalone:
            this, ways = "this standalone server", [REPLICA_SET_OF_ONE]
        choices = ", or ".join([*ways, instead] if instead else ways)
        raise error(f"{what} needs transactions, which {this} does not have; {choices}", code=code) from None

    def require(self, name: str, what: str, instead: str) -> None:
        """Refuse a declaration that cannot be kept without a capability."""
        if name == "transactions":
            self.require_transactions(what, instead, code="transactions-needed", error=DeclarationError)
        elif not getattr(self, name):
            raise DeclarationError(
                f"{what} needs {NAMES[name]}, which this server does not have; {instead}",
                code="capability-missing",
            ) from None


# What each is called in messages and tables.
NAMES: Mapping[str, str] = {
    "transactions": "transactions",
    "transaction_seconds": "seconds that a transaction may last",
    "retryable_writes": "retryable writes",
    "streams": "change streams",
    "pre_images": "pre-images in change streams",
    "split_events": "$changeStreamSplitLargeEvent",
    "pipeline_updates": "updates by pipeline",
    "merges": "$merge",
    "unions": "$unionWith",
    "graph_lookups": "$graphLookup",
    "lookup_pipelines": "$lookup with a pipeline",
    "array_sorts": "$sortArray",
    "snapshots": "snapshot reads",
    "time_series": "time series",
    "validators": "$jsonSchema in collMod",
    "kill_sessions": "killSessions",
    "operations_max": "operations in one batch",
}
# Every Store knows these, whatever it declares.
BASIC = frozenset({"transactions", "retryable_writes", "pipeline_updates", "operations_max"})
EVERYTHING = frozenset(NAMES)


def clock() -> Plan[datetime]:
    """The server's time: a client's own may be wrong."""
    now: datetime = (yield from database_command({"hello": 1}, writes=False, admin=True))["localTime"]
    return now


def greet() -> Plan[Raw]:
    """How the server describes itself; one that is too old is refused."""
    hello = yield from database_command({"hello": 1}, writes=False, admin=True)
    if hello.get("maxWireVersion", 0) < WIRE_VERSION_MIN:
        raise UsageError(
            f"this server is older than MongoDB 6.0 (its wire version is {hello.get('maxWireVersion', 0)}); "
            "upgrade it: Treadle needs MongoDB 6.0 or newer",
            code="server-too-old",
        )
    return hello


def read_capabilities(used: Iterable[str] = EVERYTHING) -> Plan[Capabilities]:
    """Ask the server for what is used."""
    hello = yield from greet()
    used = {*used, *BASIC}
    found = described_by(hello)
    if not found.standalone and "logicalSessionTimeoutMinutes" in hello:
        found = replace(found, transactions=(yield from _has_transactions()))
    found = replace(found, **(yield from _try_update()))
    for names, probe in _PROBES.items():
        if used.intersection(names):
            found = replace(found, **(yield from probe(found)))
    return found


def described_by(hello: Mapping[str, Any]) -> Capabilities:
    """What the server's own description tells."""
    sharded = hello.get("msg") == "isdbgrid"
    return Capabilities(
        standalone=not (sharded or "setName" in hello or "serviceId" in hello),
        sharded=sharded,
        operations_max=int(hello.get("maxWriteBatchSize", OPERATIONS_MAX)),
    )


# -- probes ---------------------------------------------------------------------------------------------


class _Opened(Exception):
    """Ends the transaction of a probe."""


def _has_transactions() -> Plan[bool]:
    """Read in a transaction, and abort it."""

    def look() -> Plan[None]:
        yield from find_one(NOWHERE, {}, {"_id": 1})
        raise _Opened

    try:
        yield from transact(look)
    except _Opened:
        return True
    except (ConfigurationError, UsageError):
        return False
    except OperationFailure as error:
        return _has_it(error)
    return True


def _try_update() -> Plan[Raw]:
    """A retryable update by pipeline, of nothing; where it is refused, an update of each kind."""
    by_pipeline, plain = [{"$set": {"at": "$$NOW"}}], {"$set": {"at": 1}}

    def works(update: Any) -> Plan[bool]:
        return (yield from _accepted(lambda: update_one(NOWHERE, {"_id": ObjectId()}, update)))

    if (yield from works(by_pipeline)):
        return {"retryable_writes": True, "pipeline_updates": True}
    if (yield from works(plain)):
        return {"retryable_writes": True}
    return {}


def _try_stages(found: Capabilities) -> Plan[Raw]:
    """Stages by what they are called, all in one pipeline that is only explained."""
    same = {"localField": "_id", "foreignField": "_id"}
    graph = {"startWith": "$_id", "connectFromField": "_id", "connectToField": "up"}
    stages: dict[str, Raw] = {
        "lookup_pipelines": {"$lookup": {"from": NOWHERE, **same, "pipeline": [{"$limit": 1}], "as": "a"}},
        "graph_lookups": {"$graphLookup": {"from": NOWHERE, **graph, "as": "b"}},
        "unions": {"$unionWith": {"coll": NOWHERE, "pipeline": []}},
        "array_sorts": {"$set": {"c": {"$sortArray": {"input": [1], "sortBy": 1}}}},
        "merges": {"$merge": {"into": NOWHERE}},
    }
    if (yield from _explains([*stages.values()])):
        return dict.fromkeys(stages, True)
    each = {}
    for name, stage in stages.items():
        each[name] = yield from _explains([stage])
    return each


def _try_streams(found: Capabilities) -> Plan[Raw]:
    """Open a change stream of the database, and close it again.

    Replies of every replica set have an operation time. A server without has no time in its events either.
    """
    if found.standalone:
        return {}
    stages: list[Raw] = [{"$changeStream": {}}]
    command = {"aggregate": 1, "pipeline": stages, "cursor": {"batchSize": 0}}
    try:
        reply = yield from database_command(command, writes=False)
    except OperationFailure as error:
        return {"streams": _has_it(error)}
    close = {"killCursors": "$cmd.aggregate", "cursors": [reply["cursor"]["id"]]}
    yield from database_command(close, writes=False)
    if "operationTime" not in reply:
        return {}
    splits = yield from _explains([*stages, {"$changeStreamSplitLargeEvent": {}}], 1)
    database = reply["cursor"].get("ns", "").partition(".")[0]
    return {"streams": True, "split_events": splits, "database": database}


def _try_collection_options(found: Capabilities) -> Plan[Raw]:
    """Options of collections, as changes to one that is not there."""
    options: dict[str, Raw] = {
        "validators": {"validator": {"$jsonSchema": {}}},
        "time_series": {"timeseries": {"granularity": "hours"}},
    }
    if found.streams:
        options["pre_images"] = {"changeStreamPreAndPostImages": {"enabled": True}}
    together = {name: value for option in options.values() for name, value in option.items()}
    if (yield from _knows_option(together)):
        return dict.fromkeys(options, True)
    each = {}
    for name, option in options.items():
        each[name] = yield from _knows_option(option)
    return each


def _try_snapshot(found: Capabilities) -> Plan[Raw]:
    look = {"find": NOWHERE, "limit": 1, "readConcern": {"level": "snapshot"}}
    return {"snapshots": (yield from _accepted(lambda: database_command(look, writes=False)))}


def _try_kill(found: Capabilities) -> Plan[Raw]:
    """End a session that never was."""
    kill = {"killSessions": [{"id": Binary.from_uuid(UUID(int=0))}]}
    return {"kill_sessions": (yield from _accepted(lambda: database_command(kill, writes=False, admin=True)))}


def _read_lifetime(found: Capabilities) -> Plan[Raw]:
    name = "transactionLifetimeLimitSeconds"
    try:
        reply = yield from database_command({"getParameter": 1, name: 1}, writes=False, admin=True)
    except OperationFailure as error:
        if not is_refusal(error):
            raise
        return {}
    return {"transaction_seconds": reply.get(name)}


# In this order: later ones look at what earlier ones found.
_PROBES: Mapping[tuple[str, ...], Callable[[Capabilities], Plan[Raw]]] = {
    ("lookup_pipelines", "graph_lookups", "unions", "array_sorts", "merges"): _try_stages,
    ("streams", "split_events"): _try_streams,
    ("validators", "time_series", "pre_images"): _try_collection_options,
    ("snapshots",): _try_snapshot,
    ("kill_sessions",): _try_kill,
    ("transaction_seconds",): _read_lifetime,
}
assert {each.name for each in fields(Capabilities)} - {"standalone", "sharded", "database"} == EVERYTHING


def _has_it(error: OperationFailure) -> bool:
    """Whether a refusal leaves open that the server has it; an error that passes is raised."""
    if error.code in UNAUTHORIZED:
        return True
    if is_refusal(error):
        return False
    raise error


def _accepted(make: Callable[[], Plan[Any]]) -> Plan[bool]:
    try:
        yield from make()
    except OperationFailure as error:
        return _has_it(error)
    return True


def _explains(stages: list[Raw], of: Any = NOWHERE) -> Plan[bool]:
    explain = {"explain": {"aggregate": of, "pipeline": stages, "cursor": {}}, "verbosity": "queryPlanner"}
    return (yield from _accepted(lambda: database_command(explain, writes=False)))


def _knows_option(option: Raw) -> Plan[bool]:
    """Whether a change to a collection is refused only because there is no such collection."""
    try:
        yield from database_command({"collMod": NOWHERE, **option}, writes=False)
    except OperationFailure as error:
        return error.code == NAMESPACE_NOT_FOUND or _has_it(error)
    return True
