"""Recorded writes as clients send them, each with the documents as they must be before it.

A copy is made after the recording, so a write that is run as it was recorded
often changes nothing there: the document is inserted already, or gone. So the
documents that a write touches are noted, and put into a state in which it has
something to do before each run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import bson
from bson import ObjectId
from pymongo.database import Database
from pymongo.errors import OperationFailure, PyMongoError

from treadle.advisor.trials.perform import CODEC, COMMENT, OPERATION_SECONDS_MAX, Row
from treadle.advisor.trials.workload_file import MALFORMED, Request

# Documents that one write may touch, and their bytes: they are held in memory, to be put back.
DOCUMENTS_MAX = 2_000
BYTES_MAX = 20_000_000
_NUMBER_MAX = 2**31 - 1
_FIND_OPTIONS = ("collation", "hint", "let")


class NotTried(Exception):
    """A write that cannot be performed in both ways; says why."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A write that can be repeated: documents that are there before each run, and ids that are not."""

    request: Request
    documents: tuple[Row, ...] = ()
    absent: tuple[Any, ...] = ()


def write(database: Database[Any], request: Request) -> dict[str, Any]:
    """Send a recorded write; the server's reply. Raises without any value of a document."""
    body = request.body
    if request.operation == "insert":
        command: dict[str, Any] = {"insert": request.collection, "documents": [body["document"]]}
    elif request.operation == "delete":
        parts = {name: body[name] for name in ("q", "collation", "hint") if name in body}
        command = {"delete": request.collection, "deletes": [{"limit": int(body.get("limit", 1)), **parts}]}
    elif request.operation == "update":
        names = ("q", "u", "c", "multi", "upsert", "arrayFilters", "collation", "hint")
        command = {
            "update": request.collection,
            "updates": [{name: body[name] for name in names if name in body}],
        }
    else:
        command = {"findAndModify": request.collection, **body}
    milliseconds = int(OPERATION_SECONDS_MAX * 1000)
    reply: dict[str, Any] = database.command(
        command, codec_options=CODEC, maxTimeMS=milliseconds, comment=COMMENT
    )
    for failure in reply.get("writeErrors", ()):
        raise OperationFailure("the write was refused", failure.get("code"))
    return reply


def restore(
    database: Database[Any], prepared: Iterable[Prepared], kept: frozenset[str] = frozenset()
) -> None:
    """Put the documents back as they must be before these writes; fields in `kept` stay as they are."""
    for each in prepared:
        collection = database[each.request.collection]
        if each.absent:
            collection.delete_many({"_id": {"$in": list(each.absent)}})
        for document in each.documents:
            others = {name: f"${name}" for name in kept}
            update = [{"$replaceWith": {"$mergeObjects": [{"$literal": document}, others]}}]
            if not collection.update_one({"_id": document["_id"]}, update).matched_count:
                collection.insert_one(dict(document))


@dataclass(slots=True)
class Preparation:
    """Prepares writes on a copy; each time that it borrows documents it takes others."""

    database: Database[Row]
    borrowed: int = 0

    def prepare(self, request: Request) -> Prepared:
        try:
            if request.operation == "insert":
                return self._insert(request)
            if request.operation == "delete" or request.body.get("remove"):
                return self._delete(request)
            return self._update(request)
        except (PyMongoError, *MALFORMED) as error:
            raise NotTried(f"it is refused on the copy ({type(error).__name__})") from None

    def _insert(self, request: Request) -> Prepared:
        given = request.body.get("document")
        if not isinstance(given, Mapping):
            (given,) = self._borrow(request, 1)
        document = {"_id": given.get("_id", ObjectId()), **given}
        return Prepared(replace(request, body={"document": document}), (), (document["_id"],))

    def _delete(self, request: Request) -> Prepared:
        one = request.operation == "modify" or request.body.get("limit", 1) == 1
        documents = self._matching(request, one)
        if documents:
            return _of_one(request, documents) if one else Prepared(request, tuple(documents))
        number = 1 if one else max(1, min(request.returned, DOCUMENTS_MAX))
        documents = self._borrow(request, number)
        return Prepared(_by_id(request, [each["_id"] for each in documents]), tuple(documents))

    def _update(self, request: Request) -> Prepared:
        one = not request.body.get("multi")
        documents = self._matching(request, one)
        if request.body.get("upsert") and not (documents and request.returned):
            # It inserts; under an id of ours, so that both sides hold the same.
            ids = [each["_id"] for each in documents] or [_identity(_condition(request))]
            return Prepared(_inserting(request, ids[0]), (), tuple(ids))
        if documents:
            return self._changing(_of_one(request, documents) if one else Prepared(request, tuple(documents)))
        if not request.returned:
            return Prepared(request)
        # It was found by what it has changed since, or is gone.
        documents = self._borrow(request, 1)
        return self._changing(Prepared(_by_id(request, [documents[0]["_id"]]), tuple(documents)))

    def _changing(self, prepared: Prepared) -> Prepared:
        """The write from a state that it changes: where it would not, with other values in what it sets."""
        if not prepared.documents:
            return prepared
        request = prepared.request
        write(self.database, request)
        ids = [each["_id"] for each in prepared.documents]
        after = {
            repr(each["_id"]): each for each in self.database[request.collection].find({"_id": {"$in": ids}})
        }
        restore(self.database, [prepared])
        if any(after.get(repr(each["_id"])) != each for each in prepared.documents):
            return prepared
        update = request.body.get("u", request.body.get("update"))
        others = other_values(_constants(update), _condition(request))
        documents = tuple(_with_values(each, others) for each in prepared.documents)
        return replace(prepared, documents=documents)

    def _matching(self, request: Request, one: bool) -> list[Row]:
        """The documents that a write touches; of one that touches one, at most the first two that match."""
        condition = _condition(request)
        limit = 2 if one else DOCUMENTS_MAX + 1
        options = {name: request.body[name] for name in _FIND_OPTIONS if request.body.get(name)}
        sort = request.body.get("sort")
        cursor = self.database[request.collection].find(
            condition, sort=list(sort.items()) if isinstance(sort, Mapping) and sort else None, limit=limit,
            max_time_ms=int(OPERATION_SECONDS_MAX * 1000), comment=COMMENT, **options,
        )  # fmt: skip
        return _bounded(cursor)

    def _borrow(self, request: Request, number: int) -> list[Row]:
        """Documents of the collection, others each time: two inserts of one document would meet."""
        collection = self.database[request.collection]
        for skipped in (self.borrowed, 0):
            documents = _bounded(collection.find().sort("_id", 1).skip(skipped).limit(number))
            if documents:
                self.borrowed += number
                return documents
        raise NotTried("the copy holds no document of the collection")


def _bounded(cursor: Iterable[Row]) -> list[Row]:
    documents: list[Row] = []
    size = 0
    for document in cursor:
        documents.append(document)
        size += len(bson.encode(document, codec_options=CODEC))
        if len(documents) > DOCUMENTS_MAX or size > BYTES_MAX:
            raise NotTried(f"it touches more than {DOCUMENTS_MAX:,} documents, or {BYTES_MAX / 1e6:.0f} MB")
    return documents


def _condition(request: Request) -> Mapping[str, Any]:
    condition = request.body.get("q", request.body.get("query"))
    return condition if isinstance(condition, Mapping) else {}


def _with_condition(request: Request, condition: Mapping[str, Any], *without: str) -> Request:
    name = "query" if request.operation == "modify" else "q"
    body = {key: value for key, value in request.body.items() if key not in without}
    return replace(request, body={**body, name: condition})


def _by_id(request: Request, ids: Sequence[Any]) -> Request:
    """The same write of other documents than those that its filter finds."""
    chosen = {"_id": ids[0]} if len(ids) == 1 else {"_id": {"$in": list(ids)}}
    return _with_condition(request, chosen, "hint", "collation", "sort")


def _of_one(request: Request, documents: Sequence[Row]) -> Prepared:
    """A write of one document; of several that match, the same one on both sides."""
    if len(documents) > 1:
        pinned = {"$and": [_condition(request), {"_id": documents[0]["_id"]}]}
        request = _with_condition(request, pinned, "hint", "sort")
    return Prepared(request, tuple(documents[:1]))


def _identity(condition: Mapping[str, Any]) -> Any:
    """The id that an upsert would give its document, where its filter names one; else a new one."""
    given = condition.get("_id")
    if isinstance(given, Mapping):
        given = given.get("$eq") if set(given) == {"$eq"} else None
    return ObjectId() if given is None else given


def _inserting(request: Request, identity: Any) -> Request:
    """An upsert that inserts under this id."""
    if "_id" in _condition(request):
        return request
    name = "update" if request.operation == "modify" else "u"
    update = request.body.get(name)
    if isinstance(update, list):
        change: Any = [*update, {"$set": {"_id": {"$ifNull": ["$_id", {"$literal": identity}]}}}]
    elif isinstance(update, Mapping) and next(iter(update), "").startswith("$"):
        change = {**update, "$setOnInsert": {**update.get("$setOnInsert", {}), "_id": identity}}
    else:
        change = {"_id": identity, **(update or {})}
    return replace(request, body={**request.body, name: change})


# -- a state that a write changes ---------------------------------------------------------------


def _constants(update: Any) -> dict[str, Any]:
    """What an update sets to a constant, by path."""
    if isinstance(update, list):
        stages = [each.get("$set", each.get("$addFields")) for each in update if isinstance(each, Mapping)]
        pairs = itertools.chain.from_iterable(each.items() for each in stages if isinstance(each, Mapping))
        return {path: value for path, value in pairs if not str(value).startswith("$")}
    if not isinstance(update, Mapping):
        return {}
    if next(iter(update), "").startswith("$"):
        fields = update.get("$set")
        return dict(fields) if isinstance(fields, Mapping) else {}
    return dict(update)


def other_values(fields: Mapping[str, Any], condition: Mapping[str, Any]) -> Row:
    """Other values of the same types for fields that an update sets; none for what its filter names."""
    others = {path: _other(value) for path, value in fields.items() if path not in condition}
    return {path: value for path, value in others.items() if value is not None}


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1 if abs(value) < _NUMBER_MAX else 0
    if isinstance(value, str):
        return f"{value}~"
    return value - timedelta(seconds=1) if isinstance(value, datetime) and value.year > 1 else None


def _with_values(document: Row, others: Mapping[str, Any]) -> Row:
    """The document with other values at some paths; those that lead through arrays stay as they are."""
    result = dict(document)
    for path, value in others.items():
        *above, last = path.split(".")
        place: Any = result
        for name in above:
            inner = place.get(name)
            if not isinstance(inner, Mapping):
                place = None
                break
            place[name] = dict(inner)
            place = place[name]
        if place is not None and last in place:
            place[last] = value
    return result
