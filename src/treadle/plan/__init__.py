"""Commands and plans: what is to be done, without doing it.

A `Plan` is a generator. It yields frozen `Command`s, is sent their results,
and returns a value. A runner performs the commands; there is one over
`pymongo.MongoClient` and one over `pymongo.AsyncMongoClient`, and neither
knows any pattern. Rules:

1. A plan runs once. A spent generator would silently return None, so running
   one that is not fresh is an error, and a transaction takes a function that
   *makes* its plan.
2. Driver errors are thrown into the plan, so that it can answer them; inside
   a transaction it can only clean up, because the server has already aborted.
3. A runner closes the plan whatever happens, cancellation included.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, TypeVar
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

SCHEMA_COMMANDS = frozenset({"create", "collMod", "createIndexes"})
HARMLESS_COMMANDS = frozenset({"hello", "buildInfo", "ping", "listCollections", "listIndexes"})
# The server ends a reply at 16 MB, whatever is asked for; by default it ends the first one at 101 documents.
REPLY_DOCUMENTS = 1_000_000


class Command:
    """One request for I/O; each kind is a class of frozen values."""

    __slots__ = ()


NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True, eq=False, repr=False)
class Call(Command):
    """One method of a PyMongo collection, with its arguments.

    `ids` names the documents that it is about, and nothing but these, where
    it may go together with others of its kind (`plan/together.py`).
    """

    collection: str
    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    writes: bool = True
    ids: Sequence[Any] = ()


@dataclass(slots=True, eq=False, repr=False)
class Read(Command):
    """A method that returns a cursor; the result is the list of its documents.

    Only for results that are bounded by construction. `naive` leaves the time
    zone, which is always UTC, out of dates: they take a quarter of the time
    to decode. `ids` is as in a `Call`.
    """

    collection: str
    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    naive: bool = False
    ids: Sequence[Any] = ()


@dataclass(slots=True, eq=False, repr=False)
class DatabaseCommand(Command):
    """A command of the database itself, such as collMod."""

    document: Mapping[str, Any]
    writes: bool = True
    admin: bool = False
    # Whether the reply is left as bytes, to be decoded piece by piece.
    raw: bool = False

    @property
    def lasting(self) -> bool:
        """Whether it changes the schema, which must not be lost with the primary."""
        return next(iter(self.document)) in SCHEMA_COMMANDS

    @property
    def repeatable(self) -> bool:
        """Whether sending it again comes to the same, where nobody knows if it was received."""
        return next(iter(self.document)) in SCHEMA_COMMANDS | HARMLESS_COMMANDS


@dataclass(slots=True, eq=False, repr=False)
class Transact(Command):
    """Run the plan that `make` makes in a transaction, again after a conflict."""

    make: Callable[[], Plan[Any]]


@dataclass(slots=True, eq=False, repr=False)
class Wait(Command):
    """Let some time pass; a plan has no clock of its own."""

    seconds: float


@dataclass(slots=True, eq=False, repr=False)
class Aside(Command):
    """Run the plan that `make` makes beside the transaction under way: where there is one, not at all.

    For what a reader does as a favour, which must never fail its caller's transaction.
    """

    make: Callable[[], Plan[Any]]


@dataclass(slots=True, eq=False, repr=False)
class Outside(Command):
    """Run the plan that `make` makes without the caller's session, even where a transaction is under way."""

    make: Callable[[], Plan[Any]]


@dataclass(slots=True, eq=False, repr=False)
class ServerFacts(Command):
    """What the server can do; a runner asks once, and remembers."""


@dataclass(slots=True, eq=False, repr=False)
class IsInside(Command):
    """Whether a transaction of the caller is under way."""


@dataclass(slots=True, eq=False, repr=False)
class Share(Command):
    """Perform a work in a commit that it may share with others who come at the same time."""

    work: Any
    # Whether it has a commit of its own.
    alone: bool = False


Plan: TypeAlias = Generator[Command, Any, R]
# A plan of one command, which returns the command's result.
Single: TypeAlias = Generator[Command, R, R]


def not_fresh() -> UsageError:
    """The error where a plan runs a second time."""
    return UsageError(
        "this plan has already been started, and a plan runs once; call the function that made it again",
        code="plan-not-fresh",
    )


def unwind(plan: Plan[Any], error: Exception) -> NoReturn:
    """Let a plan inside a transaction clean up after an error, then raise it.

    The server has aborted the transaction already, so whatever the plan wants
    to do next is not done. It may raise a clearer error, but not in place of
    one that makes the caller of the whole transaction try again.
    """
    try:
        plan.throw(error)
    except StopIteration:
        pass
    except BaseException as answer:
        if not (is_transient(error) or is_outcome_unknown(error)):
            raise
        if not isinstance(answer, Exception):
            raise
    raise error


# Values that cannot be taken for an operator; a bare id is what the server looks up quickest.
_PLAIN_IDS = frozenset({ObjectId, str, int, float, bytes, UUID, Decimal128})


def by_id(identity: Any) -> dict[str, Any]:
    """The filter for one document; an id never becomes an operator."""
    return {"_id": identity if type(identity) in _PLAIN_IDS else {"$eq": identity}}


# -- plans of one command ----------------------------------------------------


def find(
    collection: str,
    filter: Filter,
    projection: Mapping[str, Any] | None = None,
    *,
    sort: Sequence[tuple[str, int]] | None = None,
    limit: int = 0,
    naive: bool = False,
    **options: Any,
) -> Single[list[Raw]]:
    """The matching documents, all of them; give a limit where the data does not."""
    options = {"sort": sort, "limit": limit, "batch_size": REPLY_DOCUMENTS, **options}
    return (yield Read(collection, "find", (filter, projection), options, naive))


def find_one(
    collection: str, filter: Filter, projection: Mapping[str, Any] | None = None, **options: Any
) -> Single[Raw | None]:
    return (yield Call(collection, "find_one", (filter, projection), options, writes=False))


def aggregate(collection: str, pipeline: Sequence[Mapping[str, Any]], **options: Any) -> Single[list[Raw]]:
    """What the pipeline returns, all of it."""
    return (yield Read(collection, "aggregate", (pipeline,), {"batchSize": REPLY_DOCUMENTS, **options}))


def count_documents(collection: str, filter: Filter, **options: Any) -> Single[int]:
    return (yield Call(collection, "count_documents", (filter,), options, writes=False))


def insert_one(collection: str, document: Mapping[str, Any]) -> Single[InsertOneResult]:
    return (yield Call(collection, "insert_one", (document,)))


def insert_many(
    collection: str, documents: Sequence[Mapping[str, Any]], **options: Any
) -> Single[InsertManyResult]:
    return (yield Call(collection, "insert_many", (documents,), options))


def update_one(collection: str, filter: Filter, update: Update, **options: Any) -> Single[UpdateResult]:
    return (yield Call(collection, "update_one", (filter, update), options))


def update_many(collection: str, filter: Filter, update: Update, **options: Any) -> Single[UpdateResult]:
    return (yield Call(collection, "update_many", (filter, update), options))


def replace_one(
    collection: str, filter: Filter, document: Mapping[str, Any], **options: Any
) -> Single[UpdateResult]:
    return (yield Call(collection, "replace_one", (filter, document), options))


def delete_one(collection: str, filter: Filter) -> Single[DeleteResult]:
    return (yield Call(collection, "delete_one", (filter,)))


def delete_many(collection: str, filter: Filter) -> Single[DeleteResult]:
    return (yield Call(collection, "delete_many", (filter,)))


def find_one_and_update(
    collection: str,
    filter: Filter,
    update: Update,
    *,
    after: bool = True,
    **options: Any,
) -> Single[Raw | None]:
    """Update one document and see it, after the update unless asked otherwise."""
    options["return_document"] = ReturnDocument.AFTER if after else ReturnDocument.BEFORE
    return (yield Call(collection, "find_one_and_update", (filter, update), options))


def find_one_and_delete(collection: str, filter: Filter, **options: Any) -> Single[Raw | None]:
    return (yield Call(collection, "find_one_and_delete", (filter,), options))


def bulk_write(
    collection: str, operations: Sequence[Any], *, ordered: bool = True
) -> Single[BulkWriteResult]:
    return (yield Call(collection, "bulk_write", (operations,), {"ordered": ordered}))


def database_command(
    document: Mapping[str, Any], *, writes: bool = True, admin: bool = False, raw: bool = False
) -> Single[Raw]:
    return (yield DatabaseCommand(document, writes, admin, raw))


def create(name: str, **options: Any) -> Plan[bool]:
    """Make a collection or a view; whether it was made, and not by another process meanwhile."""
    try:
        yield from database_command({"create": name, **options})
    except OperationFailure as error:
        if not exists_already(error):
            raise
        return False
    return True


def transact(make: Callable[[], Plan[R]]) -> Single[R]:
    """The result of the plan that `make` makes, committed."""
    return (yield Transact(make))


def outside(make: Callable[[], Plan[R]]) -> Single[R]:
    """The result of a plan that no transaction of the caller takes part in."""
    return (yield Outside(make))


def server_facts() -> Single[Any]:
    """The server's `Capabilities`."""
    return (yield ServerFacts())


def is_inside() -> Single[bool]:
    """Whether a transaction of the caller is under way."""
    return (yield IsInside())


def share(work: Any, *, alone: bool = False) -> Single[Any]:
    """The outcome of a work, committed."""
    return (yield Share(work, alone))


def aside(make: Callable[[], Plan[Any]]) -> Single[None]:
    """Do something that may as well be left undone."""
    return (yield Aside(make))


def wait(seconds: float) -> Single[None]:
    return (yield Wait(seconds))


def in_one_reply(number: int) -> Raw:
    """What makes a find return as many documents as one reply of the server holds, at most this many.

    Documents may be large, and so many of them would take any amount of memory.
    """
    return {"limit": -number, "batch_size": number}
