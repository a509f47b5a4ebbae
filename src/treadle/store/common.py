"""Checks, options and names that the blocking and the asyncio Store share."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from bson import ObjectId
from pymongo import ReadPreference
from pymongo.errors import ConfigurationError, InvalidURI
from pymongo.read_concern import ReadConcern
from pymongo.uri_parser import parse_uri
from pymongo.write_concern import WriteConcern

from treadle import upkeep
from treadle.errors import DataError, UsageError
from treadle.graph.graph import Graph
from treadle.graph.kinds import root_of
from treadle.model.bson_types import ENCODING_ERRORS, not_storable
from treadle.model.document import Document
from treadle.plan.capabilities import Capabilities
from treadle.store.shared_commands import copy_error

D = TypeVar("D", bound=Document)

MAJORITY = WriteConcern("majority")
# Reads by which Treadle itself decides what to write: the latest of everything. A majority's view would
# miss what others wrote a moment ago; what it guards against, the majority of the write that follows does.
OWN_READS: dict[str, Any] = {
    "read_preference": ReadPreference.PRIMARY,
    "read_concern": ReadConcern("local"),
}
TRANSACTION_OPTIONS: dict[str, Any] = {
    "read_concern": ReadConcern("snapshot"),
    "write_concern": MAJORITY,
    "read_preference": ReadPreference.PRIMARY,
}
CLIENT_OPTIONS = {"connectTimeoutMS": 2_000, "heartbeatFrequencyMS": 2_000}
LOCAL_DATABASE = "treadle"
ACTIONS_SHOWN_MAX = 10
OWNERS_REMEMBERED = 1_000


def check_database(database: Any, kind: type) -> None:
    """Refuse a value that is not a database of this kind, and a client that does not retry writes."""
    if not isinstance(database, kind):
        raise UsageError(
            f"this takes a {kind.__name__} of PyMongo such as client['shop'], not "
            f"{type(database).__name__}; Store goes with MongoClient, AsyncStore with AsyncMongoClient",
            code="database-invalid",
        )
    client: Any = database.client  # type: ignore[attr-defined]
    if not client.options.retry_writes:
        raise UsageError(
            "the client was opened with retryWrites=false; Treadle needs retryable writes, so that "
            "nothing is written twice: remove the option",
            code="retryable-writes-off",
        )


def require_one_router(server: Capabilities, client: Any) -> None:
    """Refuse to follow a change stream through several routers: its cursor is known to one of them alone."""
    if server.sharded and len(client.nodes) > 1:
        raise UsageError(
            f"the worker of a sharded cluster reads its stream through one router, and the URI names "
            f"{len(client.nodes)}: give the worker a URI with one mongos, and start a standby with another",
            code="stream-routers",
        )


def call_seconds(database: Any, timeout: float | None) -> float | None:
    """Return how long a call may take: by the Store's option, or as the client bounds each operation."""
    if timeout is None:
        seconds: float | None = database.client.options.timeout
        return seconds
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise UsageError(f"timeout={timeout!r} is not a number of seconds above 0", code="timeout-invalid")
    return timeout


Primaries: TypeAlias = frozenset[tuple[Any, Any]]


def primaries(topology: Any) -> Primaries:
    """Return the servers that take writes, by address and election."""
    servers = topology.server_descriptions().values()
    return frozenset((each.address, each.election_id) for each in servers if each.is_writable)


def database_name(uri: str) -> str:
    """Return the database that the path of a URI names."""
    try:
        name = parse_uri(uri, validate=True, warn=False)["database"]
    except (InvalidURI, ConfigurationError, ValueError):
        # The driver's message may repeat the URI, password included.
        raise UsageError(
            "the URI cannot be parsed; it looks like mongodb://host:27017/shop",
            code="uri-invalid",
        ) from None
    if not name:
        raise UsageError(
            "the URI names no database; add it as the path: mongodb://host:27017/shop",
            code="database-missing",
        )
    return str(name)


def client_options(uri: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a client that `open` makes: Treadle's where neither the caller nor the URI has one.

    A primary that hangs is noticed after the sum of the two; the driver's own sum is half a minute.
    """
    given = {name.lower() for name, _ in parse_qsl(uri.partition("?")[2], keep_blank_values=True)}
    given |= {name.lower() for name in options}
    return {name: value for name, value in CLIENT_OPTIONS.items() if name.lower() not in given} | {**options}


def local_uri(uri: str) -> str:
    """The URI of the private server, with a database in its path."""
    base, _, options = uri.partition("?")
    return f"{base.rstrip('/')}/{LOCAL_DATABASE}" + (f"?{options}" if options else "")


def one_model(graph: Graph, documents: Iterable[D]) -> tuple[type[D] | None, list[D]]:
    """Return the model of documents that a caller gave, and them as a list."""
    if isinstance(documents, Document):
        raise UsageError(
            f"insert_many takes a list of documents, and got one {type(documents).__name__}; use insert",
            code="model-unknown",
        )
    if not isinstance(documents, Iterable) or isinstance(documents, Mapping):
        raise graph.not_a_document(documents)
    listed = list(documents)
    if not listed:
        return None, listed
    model = type(listed[0])
    if issubclass(model, Document) and len(set(map(type, listed))) == 1:
        return model, listed
    for each in listed:
        if not isinstance(each, Document):
            raise graph.not_a_document(each)
    # Several kinds of one collection are taken as the model that is their base.
    root = root_of(model)
    for document in listed:
        if type(document) is not model and (root is None or not isinstance(document, root)):
            raise UsageError(
                f"insert_many takes documents of one model; it got {model.__name__} and "
                f"{type(document).__name__}",
                code="model-unknown",
            )
    return root, listed  # type: ignore[return-value]


def listed_ids(model: Any, ids: Iterable[Any]) -> list[Any]:
    """Return the ids that a caller gave; refuses a single one."""
    if not isinstance(ids, Iterable) or isinstance(ids, (str, bytes, Mapping)):
        raise UsageError(
            f"get_many takes a list of ids of {model.__name__}, not {type(ids).__name__}; get takes one id",
            code="id-invalid",
        )
    return list(ids)


# What becomes of a document that does not fit its model.
Invalid: TypeAlias = Literal["raise", "skip"]


def noting(invalid: Any) -> list[DataError] | None:
    """Return the list for the errors of documents that are passed over; None where they are raised."""
    if invalid not in ("raise", "skip"):
        raise UsageError(f"invalid={invalid!r}; it takes 'raise' or 'skip'", code="filter-invalid")
    return [] if invalid == "skip" else None


@contextlib.contextmanager
def encoding() -> Generator[None]:
    """Raise an error of ours that names the value which the driver cannot encode."""
    try:
        yield
    except ENCODING_ERRORS as error:
        raise not_storable(error, "a document or a command") from error


def outcome_unknown(error: BaseException) -> Exception:
    """Return the error for the calls of a group whose transaction did not end in a known way."""
    if isinstance(error, Exception):
        return copy_error(error)
    return DataError(
        "this write shared a transaction with another thread's or task's, which was interrupted; "
        "whether it was committed is not known: look before you try again",
        code="write-outcome-unknown",
    )


def owner() -> str:
    """Describe this process, so that it can be told from a later one with its number."""
    return _described(os.getpid())


# The latest names of work of this process that has ended.
_ENDED: deque[str] = deque(maxlen=OWNERS_REMEMBERED)


@contextlib.contextmanager
def owning() -> Generator[str]:
    """Give a name for one piece of work; once that has ended, no process waits for a lease under this name.

    However it ended: the release of the lease may be what was cut off.
    """
    name = f"{owner()}/{ObjectId()}"
    try:
        yield name
    finally:
        _ENDED.append(name)


@functools.cache
def _described(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{_started(pid)}"


def _started(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; empty where that is not known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *rest = file.read().rpartition(")")[2].split()
            # One that has ended and was not yet waited for does nothing more.
            return "" if state in "ZX" else rest[18]
    except (OSError, IndexError):
        return ""


def is_dead(described: str) -> bool:
    """Whether a process that `owner` described, or the work that `owning` named, has certainly ended."""
    if described in _ENDED:
        return True
    described = described.partition("/")[0]
    host, _, rest = described.rpartition(":")[0].rpartition(":")
    started = described.rpartition(":")[2]
    if host != socket.gethostname() or not rest.isdigit() or not started:
        return False
    return _started(int(rest)) != started


def is_scheduled(graph: Graph) -> bool:
    """Whether there is anything for `run_due` to do, now or later."""
    return bool(upkeep.schedule.jobs(graph)) or any(rule.due_work for rule in graph.rules)
