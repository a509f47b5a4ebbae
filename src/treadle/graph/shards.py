"""Sharded models: every filter for a document by its id carries the shard key, too.

On a sharded cluster a filter by `_id` alone is sent to every shard, and some
commands are refused. So the runner passes the commands of each plan through
here. The key is known from a document that the plan has read or inserted, or
it is looked up. A write of one document by another filter finds it first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pymongo import DeleteMany, InsertOne

from treadle.errors import DeclarationError, UsageError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Rule
from treadle.graph.scope import beside, is_one_of
from treadle.plan import Call, Command, Plan, Raw, Read, intercept
from treadle.plan.dry_run import nothing_matched
from treadle.query.keys import distinct, freeze
from treadle.query.paths import resolve, value_at

R = TypeVar("R")
# The comment of a lookup in the server's log; it is the one command without the key.
LOOKUP = "treadle: the shard key of these documents"
ONE = frozenset({"update_one", "replace_one", "delete_one", "find_one_and_update", "find_one_and_delete"})
FILTERED = ONE | {"find", "find_one", "update_many", "delete_many", "count_documents", "distinct"}


class Shards:
    """The sharded collections of a Store, with the stored paths of their keys."""

    def __init__(self, entries: Iterable[ModelEntry]) -> None:
        self.keys = {each.collection: _paths(each) for each in entries if each.model.__treadle__.shard_key}

    def check(self, rules: Iterable[Rule]) -> None:
        """Refuse rules that cannot be maintained in a sharded collection."""
        for rule in rules:
            collections = {rule.target.collection, *rule.reads()} & self.keys.keys()
            if collections and not rule.across_shards:
                raise DeclarationError(
                    f"{rule.place.label}: {rule.pattern} cannot be kept in {min(collections)}, which is "
                    "sharded: it takes documents of several shards together; leave out shard_key=, or it",
                    code="shard-key-pattern",
                )

    def targeted(self, plan: Plan[R]) -> Plan[R]:
        """Return the same plan, whose commands carry the keys."""
        return intercept(plan, _Targeting(self.keys).perform)

    def aimed(self, command: Read) -> Plan[Read]:
        """Return the read of a cursor that streams, with the key."""
        sent = yield from _Targeting(self.keys).with_key(command)
        return sent if isinstance(sent, Read) else command


class _Targeting:
    """The commands of one plan, and the keys that it has seen."""

    def __init__(self, keys: Mapping[str, tuple[str, ...]]) -> None:
        self.keys = keys
        # By collection and frozen id.
        self.known: dict[tuple[str, Any], tuple[Any, ...]] = {}

    def perform(self, command: Command) -> Plan[Any]:
        if not isinstance(command, (Call, Read)):
            return (yield command)
        sent = yield from self.with_key(command)
        result = nothing_matched(command) if sent is None else (yield sent)
        self._note(command, result)
        return result

    def _note(self, command: Call | Read, result: Any) -> None:
        """Remember the keys of documents that the plan inserts or reads; not of computed rows."""
        paths = self.keys.get(command.collection)
        if paths is None or command.method == "aggregate":
            return
        documents = command.arguments[0] if command.method in ("insert_one", "insert_many") else result
        for document in documents if isinstance(documents, list) else [documents]:
            if isinstance(document, Mapping) and "_id" in document:
                values = tuple(value_at(document, path) for path in paths)
                if None not in values:
                    self.known[command.collection, freeze(document["_id"])] = values

    def with_key(self, command: Call | Read) -> Plan[Command | None]:
        """Return the command with the key in its filter; None where there is no such document."""
        method, collection = command.method, command.collection
        if collection not in self.keys or command.options.get("comment") == LOOKUP:
            return command
        if method == "bulk_write":
            return (yield from self._with_operations(command))
        stages = command.arguments[0] if method == "aggregate" else ()
        if stages and "$match" in stages[0]:
            chosen = yield from self._filter(collection, stages[0]["$match"])
            return _with_argument(command, 0, [{"$match": chosen}, *stages[1:]])
        if method not in FILTERED:
            return command
        at, options = int(method == "distinct"), command.options
        upserted = command.arguments[1] if options.get("upsert") else None
        given, sort = command.arguments[at], options.get("sort")
        chosen = yield from self._filter(collection, given, method in ONE, upserted, sort)
        return None if chosen is None else _with_argument(command, at, chosen)

    def _with_operations(self, command: Call | Read) -> Plan[Command | None]:
        """Return a bulk write with the keys; None where it concerns no document."""
        operations = []
        for each in command.arguments[0]:
            operation = yield from self._operation(command.collection, each)
            operations += [] if operation is None else [operation]
        return _with_argument(command, 0, operations) if operations else None

    def _operation(self, collection: str, operation: Any) -> Plan[Any]:
        """Return an operation of a bulk write with the key; None where there is no such document."""
        if isinstance(operation, InsertOne):
            return operation
        upserted = operation._doc if getattr(operation, "_upsert", None) else None
        one, changed = not isinstance(operation, DeleteMany), copy.copy(operation)
        changed._filter = yield from self._filter(collection, operation._filter, one, upserted)
        return None if changed._filter is None else changed

    def _filter(
        self, collection: str, filter: Raw, one: bool = False, upserted: Any = None, sort: Any = None
    ) -> Plan[Raw | None]:
        """Return the filter with the key; None where no document can match it."""
        paths, ids = self.keys[collection], choices(filter, "_id")
        missing = [path for path in paths if choices(filter, path) is None]
        if not missing or (ids is None and not one):
            # It has the key, or is about many documents: then every shard is asked.
            return filter
        if ids is None and upserted is None:
            return (yield from self._filter_first(collection, filter, sort))
        keys = yield from self._known_keys(collection, ids or ())
        if not keys and upserted is not None:
            keys = [self._new_key(collection, upserted, missing, has_id=ids is not None)]
        columns = dict(zip(paths, zip(*keys, strict=True), strict=bool(keys)))
        return beside(filter, {path: is_one_of(distinct(columns.get(path, ()))) for path in missing})

    def _filter_first(self, collection: str, filter: Raw, sort: Any) -> Plan[Raw | None]:
        """Return the filter for the one document that is found first."""
        paths = ("_id", *self.keys[collection])
        documents = yield from self._look_up(collection, filter, sort=sort, limit=1)
        own = [{path: {"$eq": value_at(each, path)} for path in paths} for each in documents]
        return {"$and": [filter, *own]} if own else None

    def _known_keys(self, collection: str, ids: Sequence[Any]) -> Plan[list[tuple[Any, ...]]]:
        """Return the keys of the documents with these ids that exist."""
        unknown = [each for each in ids if (collection, freeze(each)) not in self.known]
        if unknown:
            yield from self._look_up(collection, {"_id": {"$in": unknown}})
        keys = (self.known.get((collection, freeze(each))) for each in ids)
        return [key for key in keys if key is not None]

    def _new_key(
        self, collection: str, upserted: Any, missing: list[str], *, has_id: bool
    ) -> tuple[Any, ...]:
        """Return the key of the document that an upsert may insert."""
        new = upserted if isinstance(upserted, Mapping) else {}
        new = {**new, **new.get("$set", {}), **new.get("$setOnInsert", {})}
        if not has_id or not new.keys() >= {*self.keys[collection]}:
            raise UsageError(
                f"an upsert into {collection} must say into which shard: name {', '.join(missing)} in "
                "its filter",
                code="shard-key-missing",
            )
        return tuple(new[path] for path in self.keys[collection])

    def _look_up(self, collection: str, filter: Raw, **options: Any) -> Plan[list[Raw]]:
        projection = dict.fromkeys(("_id", *self.keys[collection]), 1)
        lookup = Read(collection, "find", (filter, projection), {"comment": LOOKUP, **options})
        documents: list[Raw] = yield lookup
        self._note(lookup, documents)
        return documents


def _with_argument(command: Call | Read, at: int, argument: Any) -> Command:
    return replace(command, arguments=(*command.arguments[:at], argument, *command.arguments[at + 1 :]))


def _paths(entry: ModelEntry) -> tuple[str, ...]:
    """The stored paths of a model's shard key."""
    label, paths = f"{entry.model.__name__} (shard_key=)", []
    for name in entry.model.__treadle__.shard_key or ():
        path = resolve(entry.codec, name, label, "shard-key-invalid")
        if path.in_array or path.shape.optional:
            raise DeclarationError(
                f"{label} names {name!r}, which is an array or may be None; a shard key is one value that "
                "every document has",
                code="shard-key-invalid",
            )
        paths.append(path.stored)
    return tuple(paths)


def choices(filter: Mapping[str, Any], path: str) -> list[Any] | None:
    """Return the values that a filter admits at a path; None where it names none."""
    if path in filter:
        condition = filter[path]
        if not isinstance(condition, Mapping) or not any(str(name).startswith("$") for name in condition):
            return [condition]
        if "$eq" in condition:
            return [condition["$eq"]]
        if "$in" in condition:
            return list(condition["$in"])
    inner = (choices(part, path) for part in filter.get("$and", ()))
    return next((values for values in inner if values is not None), None)
