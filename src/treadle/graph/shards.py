"""Sharded models: every filter for a document by its id carries the shard key, too.

On a sharded cluster a filter by `_id` alone is sent to every shard, and some
commands are refused. So the runner passes the commands of each plan through
here. The key is known from a document that the plan has read or inserted, or
it is looked up. A write of one document by another filter finds it first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pymongo import DeleteMany, InsertOne

from treadle.errors import DeclarationError, UsageError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Rule
from treadle.plan import Call, Command, Plan, Raw, Read, intercept
from treadle.plan.dry_run import nothing_matched
from treadle.query.keys import distinct, freeze
from treadle.query.paths import resolve, value_at

R = TypeVar("R")
# The keys of documents, by collection and frozen id.
Known = dict[tuple[str, Any], tuple[Any, ...]]

# The comment of a lookup in the server's log; it is the one command without the key.
LOOKUP = "treadle: the shard key of these documents"
ONE = frozenset({"update_one", "replace_one", "delete_one", "find_one_and_update", "find_one_and_delete"})
FILTERED = ONE | {"find", "find_one", "update_many", "delete_many", "count_documents", "distinct"}


class Shards:
    """The sharded collections of a Store, with the stored paths of their keys."""

    def __init__(self, entries: Iterable[ModelEntry[Any]]) -> None:
        self.keys: dict[str, tuple[str, ...]] = {}
        for entry in entries:
            paths = _paths(entry)
            if paths and self.keys.setdefault(entry.collection, paths) != paths:
                raise DeclarationError(
                    f"{entry.model.__name__} has another shard_key= than the other kinds of "
                    f"{entry.collection}; a collection has one",
                    code="shard-key-invalid",
                )

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
        """The same plan, whose commands carry the keys."""
        known: Known = {}

        def perform(command: Command) -> Plan[Any]:
            if not isinstance(command, (Call, Read)) or command.collection not in self.keys:
                return (yield command)
            sent = yield from self._with_key(command, known)
            result = nothing_matched(command) if sent is None else (yield sent)
            self._note(command, result, known)
            return result

        return intercept(plan, perform)

    def aimed(self, command: Read) -> Plan[Read]:
        """The read of a cursor that streams, with the key."""
        sent = (yield from self._with_key(command, {})) if command.collection in self.keys else command
        return sent if isinstance(sent, Read) else command

    def _note(self, command: Call | Read, result: Any, known: Known) -> None:
        """Remember the keys of documents that the plan inserts or reads; not of computed rows."""
        documents = command.arguments[0] if command.method in ("insert_one", "insert_many") else result
        for document in documents if isinstance(documents, list) else [documents]:
            if isinstance(document, Mapping) and "_id" in document and command.method != "aggregate":
                values = tuple(value_at(document, path) for path in self.keys[command.collection])
                if all(value is not None for value in values):
                    known[command.collection, freeze(document["_id"])] = values

    def _with_key(self, command: Call | Read, known: Known) -> Plan[Command | None]:
        """The command with the key in its filter; None where there is no such document."""
        method, arguments, collection = command.method, list(command.arguments), command.collection
        if method == "bulk_write":
            operations = []
            for operation in arguments[0]:
                operations.append((yield from self._operation(collection, operation, known)))
            arguments[0] = [each for each in operations if each is not None]
            return replace(command, arguments=tuple(arguments)) if arguments[0] else None
        if method == "aggregate" and arguments[0] and "$match" in arguments[0][0]:
            chosen = yield from self._filter(collection, arguments[0][0]["$match"], known)
            arguments[0] = [{"$match": chosen}, *arguments[0][1:]]
        elif method in FILTERED and command.options.get("comment") != LOOKUP:
            upserted = arguments[1] if command.options.get("upsert") else None
            one, sort, at = method in ONE, command.options.get("sort"), int(method == "distinct")
            arguments[at] = yield from self._filter(collection, arguments[at], known, one, upserted, sort)
            if arguments[at] is None:
                return None
        return replace(command, arguments=tuple(arguments))

    def _operation(self, collection: str, operation: Any, known: Known) -> Plan[Any]:
        """One operation of a bulk write, with the key; None where there is no such document."""
        if isinstance(operation, InsertOne):
            return operation
        upserted = operation._doc if getattr(operation, "_upsert", None) else None
        one = not isinstance(operation, DeleteMany)
        changed = copy.copy(operation)
        changed._filter = yield from self._filter(collection, operation._filter, known, one, upserted)
        return None if changed._filter is None else changed

    def _filter(
        self,
        collection: str,
        filter: Raw,
        known: Known,
        one: bool = False,
        upserted: Any = None,
        sort: Any = None,
    ) -> Plan[Any]:
        """A filter with the key; None where no document can match it."""
        paths, ids = self.keys[collection], choices(filter, "_id")
        missing = [path for path in paths if choices(filter, path) is None]
        if not missing or (ids is None and not one):
            # It has the key, or is about many documents: then every shard is asked.
            return filter
        if ids is None and upserted is None:
            documents = yield from self._look_up(collection, filter, known, sort=sort, limit=1)
            own = [{path: {"$eq": value_at(each, path)} for path in ("_id", *paths)} for each in documents]
            return {"$and": [filter, *own]} if own else None
        places = [(collection, freeze(each)) for each in ids or ()]
        if unknown := [each for each, place in zip(ids or (), places, strict=True) if place not in known]:
            yield from self._look_up(collection, {"_id": {"$in": unknown}}, known)
        keys = [known[place] for place in places if place in known]
        if not keys and upserted is not None:
            new = upserted if isinstance(upserted, Mapping) else {}
            new = {**new, **new.get("$set", {}), **new.get("$setOnInsert", {})}
            if ids is None or not new.keys() >= {*paths}:
                raise UsageError(
                    f"an upsert into {collection} must say into which shard: name {', '.join(missing)} in "
                    "its filter",
                    code="shard-key-missing",
                )
            keys = [tuple(new[path] for path in paths)]
        added: Raw = {}
        for path in missing:
            values = distinct(key[paths.index(path)] for key in keys)
            added[path] = {"$eq": values[0]} if len(values) == 1 else {"$in": values}
        return {**filter, **added} if not added.keys() & filter.keys() else {"$and": [filter, added]}

    def _look_up(self, collection: str, filter: Raw, known: Known, **options: Any) -> Plan[list[Raw]]:
        lookup = Read(collection, "find", (filter, dict.fromkeys(("_id", *self.keys[collection]), 1)),
                      {"comment": LOOKUP, **options})  # fmt: skip
        documents: list[Raw] = yield lookup
        self._note(lookup, documents, known)
        return documents


def _paths(entry: ModelEntry[Any]) -> tuple[str, ...]:
    """The stored paths of a model's shard key; empty where it has none."""
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
    """The values that a filter admits at a path; None where it names none."""
    condition = filter.get(path)
    if isinstance(condition, Mapping) and any(str(name).startswith("$") for name in condition):
        if "$eq" in condition:
            return [condition["$eq"]]
        if "$in" in condition:
            return list(condition["$in"])
    elif path in filter:
        return [condition]
    inner = (choices(part, path) for part in filter.get("$and", ()))
    return next((values for values in inner if values is not None), None)
