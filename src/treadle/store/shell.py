"""What the blocking and the asyncio shell have in common."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterable
from typing import Any, TypeVar

from pymongo import ReadPreference
from pymongo.errors import ConfigurationError, InvalidURI, PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.uri_parser import parse_uri
from pymongo.write_concern import WriteConcern

from treadle.errors import DataError, UsageError
from treadle.graph.graph import Graph
from treadle.graph.kinds import root_of
from treadle.model.document import Document
from treadle.plan.server_errors import is_outcome_unknown, refuses_transactions
from treadle.upkeep.schedule import jobs

D = TypeVar("D", bound=Document)

MAJORITY = WriteConcern("majority")
TRANSACTION_OPTIONS: dict[str, Any] = {
    "read_concern": ReadConcern("snapshot"),
    "write_concern": MAJORITY,
    "read_preference": ReadPreference.PRIMARY,
}
LOCAL_DATABASE = "treadle"


def check_database(database: Any, kind: type) -> None:
    """Refuse what is no database of this kind, and a client that would not retry writes."""
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


def database_name(uri: str) -> str:
    """The database that the path of a URI names."""
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


def local_uri(uri: str) -> str:
    """The URI of the private server, with a database in its path."""
    base, _, options = uri.partition("?")
    return f"{base.rstrip('/')}/{LOCAL_DATABASE}" + (f"?{options}" if options else "")


def one_model(documents: Iterable[D]) -> tuple[type[D] | None, list[D]]:
    """The documents as a list, and their model."""
    listed = list(documents)
    if not listed:
        return None, listed
    model = type(listed[0])
    root = root_of(model) if isinstance(listed[0], Document) else None
    for document in listed:
        if root is not None and type(document) is not model and isinstance(document, root):
            # Several kinds of one collection.
            model = root  # type: ignore[assignment]
        elif type(document) is not model and not (model is root and isinstance(document, root)):
            raise UsageError(
                f"insert_many takes documents of one model; it got {model.__name__} and "
                f"{type(document).__name__}",
                code="model-unknown",
            )
    return model, listed


def clear(error: PyMongoError) -> Exception:
    """A clearer error where a standalone server refuses transactions."""
    if refuses_transactions(error):
        return UsageError(
            "this server is standalone and has no transactions; start it as a replica set "
            "(a single node will do), or use Store.local()",
            code="transactions-unavailable",
        )
    return error


def may_commit_again(error: PyMongoError, attempt: int, most: int) -> bool:
    """Whether a commit's outcome is unknown, so that asking again is right."""
    return attempt + 1 < most and is_outcome_unknown(error)


def outcome_unknown(error: BaseException) -> Exception:
    """What the others of a group are told when its transaction did not end in a known way."""
    if isinstance(error, Exception):
        return error
    return DataError(
        "this write shared a transaction with another thread's or task's, which was interrupted; "
        "whether it was committed is not known: look before you try again",
        code="write-outcome-unknown",
    )


def owner() -> str:
    """This process, in a way that tells whether it is still the same one."""
    return _described(os.getpid())


@functools.cache
def _described(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{_started(pid)}"


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty where that cannot be told."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *rest = file.read().rpartition(")")[2].split()
            # One that has ended and was not yet waited for does nothing more.
            return "" if state in "ZX" else rest[18]
    except (OSError, IndexError):
        return ""


def is_dead(described: str) -> bool:
    """Whether a process that `owner` described has certainly ended."""
    described = described.partition("/")[0]
    host, _, rest = described.rpartition(":")[0].rpartition(":")
    started = described.rpartition(":")[2]
    if host != socket.gethostname() or not rest.isdigit() or not started:
        return False
    return _started(int(rest)) != started


def is_scheduled(graph: Graph) -> bool:
    """Whether there is anything for `run_due` to do, now or later."""
    return bool(jobs(graph)) or any(rule.due_work for rule in graph.rules)
