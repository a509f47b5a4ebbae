"""Commands and plans: descriptions of I/O that a runner performs.

A `Plan` is a generator. It yields `Command`s, is sent their results, and returns a value. One runner
performs commands by `pymongo.MongoClient`, one by `pymongo.AsyncMongoClient`; neither knows a pattern.

1. A plan runs once. A spent generator would silently return None, so running one that has been started
   is an error, and a transaction takes a function that *makes* its plan.
2. Driver errors are thrown into the plan, which may handle them. Inside a transaction it can only clean
   up, because the server has already aborted.
3. A runner closes the plan in any case, also when it is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import GEN_CREATED, getgeneratorstate
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar
from uuid import UUID

from bson import ObjectId
from bson.decimal128 import Decimal128
from pymongo import ReturnDocument
from pymongo.errors import OperationFailure
from pymongo.results import BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

from treadle.errors import UsageError
from treadle.model.bson_types import Filter as Filter
from treadle.model.bson_types import Raw as Raw
from treadle.model.bson_types import Update as Update
from treadle.plan.server_errors import exists_already, is_outcome_unknown, is_transient

R = TypeVar("R")
Fields: TypeAlias = Mapping[str, Any]

SCHEMA_COMMANDS = frozenset({"create", "collMod", "createIndexes"})
IDEMPOTENT_COMMANDS = SCHEMA_COMMANDS | {"hello", "buildInfo", "ping", "listCollections", "listIndexes"}
# The server ends a reply at 16 MB in any case; by default it ends the first one at 101 documents.
REPLY_DOCUMENTS = 1_000_000
NO_OPTIONS: Fields = MappingProxyType({})


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One method of a PyMongo collection, with its arguments.

    `ids` are set where the command concerns the documents of these ids and no others, so that it may
    share a round trip with others of its kind.
    """

    collection: str
    method: str
    arguments: tuple[Any, ...]
    options: Fields = field(default_factory=lambda: NO_OPTIONS)
    writes: bool = True
    ids: Sequence[Any] = ()


@dataclass(slots=True, eq=False, repr=False)
class Read:
    """A method that returns a cursor; the result is the list of its documents.

    Only for results that are bounded by construction. With `naive`, dates come without their time zone,
    which is always UTC: they decode four times as fast. `ids` is as in a `Call`.
    """

    collection: str
    method: str
    arguments: tuple[Any, ...]
    options: Fields = field(default_factory=lambda: NO_OPTIONS)
    naive: bool = False
    ids: Sequence[Any] = ()


@dataclass(slots=True, eq=False, repr=False)
class DatabaseCommand:
    """A command of the database, such as collMod; of the admin database with `admin`.

    With `raw` the reply is left as bytes, to be decoded piece by piece.
    """

    document: Fields
    writes: bool = True
    admin: bool = False
    raw: bool = False

    @property
    def changes_schema(self) -> bool:
        """Whether its effect must survive the loss of the primary."""
        return next(iter(self.document)) in SCHEMA_COMMANDS

    @property
    def is_idempotent(self) -> bool:
        """Whether it may be sent again when its reply was lost."""
        return next(iter(self.document)) in IDEMPOTENT_COMMANDS


class Transact(NamedTuple):
    """Run the plan that `make` makes in a transaction, and again after a conflict."""

    make: Callable[[], Plan[Any]]


class Outside(NamedTuple):
    """Run the plan that `make` makes without the caller's session, even inside a transaction."""

    make: Callable[[], Plan[Any]]


class Wait(NamedTuple):
    """Let some time pass; a plan has no clock of its own."""

    seconds: float


class ServerFacts(NamedTuple):
    """Get the server's `Capabilities`."""


class IsInside(NamedTuple):
    """Ask whether a transaction of the caller is open."""


class Share(NamedTuple):
    """Perform `work` in a commit that it shares with concurrent writers; with `alone`, in its own."""

    work: Any
    alone: bool = False


Request: TypeAlias = Call | Read | DatabaseCommand
Command: TypeAlias = Request | Transact | Outside | Wait | ServerFacts | IsInside | Share
Plan: TypeAlias = Generator[Command, Any, R]
# A plan of one command, which returns the command's result.
Single: TypeAlias = Generator[Command, R, R]


class Failed(NamedTuple):
    """The outcome of one of several commands or writes that raised, while others did not."""

    error: Exception


def not_fresh() -> UsageError:
    """Return the error for a plan that runs a second time."""
    return UsageError(
        "this plan has already been started, and a plan runs once; call the function that made it again",
        code="plan-not-fresh",
    )


def unwind(plan: Plan[Any], error: Exception) -> NoReturn:
    """Let a plan inside a transaction clean up after an error, then raise an error.

    The server has aborted the transaction, so commands that the plan yields now are not performed. The
    plan may raise a clearer error instead, unless the given one makes the whole transaction run again.
    """
    try:
        plan.throw(error)
    except StopIteration:
        pass
    except BaseException as answer:
        if not isinstance(answer, Exception) or not (is_transient(error) or is_outcome_unknown(error)):
            raise
    raise error


def intercept(plan: Plan[R], perform: Callable[[Command], Plan[Any]]) -> Plan[R]:
    """Run a plan whose commands are performed by another one; an error is thrown into it, as by a runner."""
    if getgeneratorstate(plan) != GEN_CREATED:
        raise not_fresh()
    try:
        command = next(plan)
        while True:
            try:
                result = yield from perform(command)
            except Exception as error:
                command = plan.throw(error)
            else:
                command = plan.send(result)
    except StopIteration as stop:
        value: R = stop.value
        return value
    finally:
        plan.close()


# Types that the server cannot take for an operator; it finds a bare id faster than an `$eq`.
_PLAIN_IDS = frozenset({ObjectId, str, int, float, bytes, UUID, Decimal128})


def by_id(identity: Any) -> dict[str, Any]:
    """Return the filter for one document; an id never becomes an operator."""
    return {"_id": identity if type(identity) in _PLAIN_IDS else {"$eq": identity}}


# -- plans of one command --------------------------------------------------------------------------


def find(
    collection: str,
    filter: Filter,
    projection: Fields | None = None,
    *,
    sort: Sequence[tuple[str, int]] | None = None,
    limit: int = 0,
    naive: bool = False,
    **options: Any,
) -> Single[list[Raw]]:
    """Return all matching documents; give a limit where the data sets none."""
    options = {"sort": sort, "limit": limit, "batch_size": REPLY_DOCUMENTS, **options}
    return (yield Read(collection, "find", (filter, projection), options, naive))


def find_one(
    collection: str, filter: Filter, projection: Fields | None = None, **options: Any
) -> Single[Raw | None]:
    return (yield Call(collection, "find_one", (filter, projection), options, writes=False))


def aggregate(collection: str, pipeline: Sequence[Fields], **options: Any) -> Single[list[Raw]]:
    """Return all documents that the pipeline yields."""
    return (yield Read(collection, "aggregate", (pipeline,), {"batchSize": REPLY_DOCUMENTS, **options}))


def count_documents(collection: str, filter: Filter, **options: Any) -> Single[int]:
    return (yield Call(collection, "count_documents", (filter,), options, writes=False))


def insert_one(collection: str, document: Fields) -> Single[InsertOneResult]:
    return (yield Call(collection, "insert_one", (document,)))


def insert_many(collection: str, documents: Sequence[Fields], **options: Any) -> Single[InsertManyResult]:
    return (yield Call(collection, "insert_many", (documents,), options))


def update_one(collection: str, filter: Filter, update: Update, **options: Any) -> Single[UpdateResult]:
    return (yield Call(collection, "update_one", (filter, update), options))


def update_many(collection: str, filter: Filter, update: Update, **options: Any) -> Single[UpdateResult]:
    return (yield Call(collection, "update_many", (filter, update), options))


def replace_one(collection: str, filter: Filter, document: Fields, **options: Any) -> Single[UpdateResult]:
    return (yield Call(collection, "replace_one", (filter, document), options))


def delete_one(collection: str, filter: Filter) -> Single[DeleteResult]:
    return (yield Call(collection, "delete_one", (filter,)))


def delete_many(collection: str, filter: Filter) -> Single[DeleteResult]:
    return (yield Call(collection, "delete_many", (filter,)))


def find_one_and_update(
    collection: str, filter: Filter, update: Update, *, after: bool = True, **options: Any
) -> Single[Raw | None]:
    """Update one document and return it as it is afterwards, or with `after=False` as it was."""
    options["return_document"] = ReturnDocument.AFTER if after else ReturnDocument.BEFORE
    return (yield Call(collection, "find_one_and_update", (filter, update), options))


def find_one_and_delete(collection: str, filter: Filter, **options: Any) -> Single[Raw | None]:
    return (yield Call(collection, "find_one_and_delete", (filter,), options))


def bulk_write(
    collection: str, operations: Sequence[Any], *, ordered: bool = True
) -> Single[BulkWriteResult]:
    return (yield Call(collection, "bulk_write", (operations,), {"ordered": ordered}))


def database_command(
    document: Fields, *, writes: bool = True, admin: bool = False, raw: bool = False
) -> Single[Raw]:
    return (yield DatabaseCommand(document, writes, admin, raw))


def create(name: str, **options: Any) -> Plan[bool]:
    """Create a collection or a view. Returns False if it exists, even if created concurrently."""
    try:
        yield from database_command({"create": name, **options})
    except OperationFailure as error:
        if not exists_already(error):
            raise
        return False
    return True


def transact(make: Callable[[], Plan[R]]) -> Single[R]:
    """Return the result of the plan that `make` makes, committed."""
    return (yield Transact(make))


def outside(make: Callable[[], Plan[R]]) -> Single[R]:
    """Return the result of the plan that `make` makes, run outside of the caller's transaction."""
    return (yield Outside(make))


def server_facts() -> Single[Any]:
    """Return the server's `Capabilities`."""
    return (yield ServerFacts())


def is_inside() -> Single[bool]:
    """Return whether a transaction of the caller is open."""
    return (yield IsInside())


def share(work: Any, *, alone: bool = False) -> Single[Any]:
    """Return the outcome of a work, committed."""
    return (yield Share(work, alone))


def wait(seconds: float) -> Single[None]:
    return (yield Wait(seconds))


def one_reply(documents_max: int) -> Raw:
    """Return the options of a `find` that takes as many documents as one reply holds, and no more.

    Documents may be large, so that `documents_max` of them could need any amount of memory.
    """
    return {"limit": -documents_max, "batch_size": documents_max}
