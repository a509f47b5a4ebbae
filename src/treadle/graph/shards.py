"""Sharded models: every command that speaks of one document by its id carries the shard key too.

On a sharded cluster a filter by `_id` alone is sent to every shard, and some
commands are refused. So the commands of a plan pass through here. The key of
a document is known from the document itself, from a reference that holds it
(`by=("region", "customer_id")`), or it is looked up. A write of one document
by another filter finds that document first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from treadle.errors import DeclarationError, UsageError
from treadle.graph.pattern import Entry, Models
from treadle.plan import Call, Command, Plan, Raw, Read, find
from treadle.plan.dry_run import nothing_matched
from treadle.plan.operations import DeleteMany, InsertOne, Operation, ReplaceOne, UpdateOne
from treadle.query.keys import freeze
from treadle.query.paths import resolve, value_at
from treadle.values import frozen

R = TypeVar("R")

# What a lookup of keys is called in the server's log; it is the one command that has no key.
LOOKUP = "treadle: the shard key of these documents"
ONE = frozenset(
    {"update_one", "replace_one", "delete_one"}
    | {"find_one_and_update", "find_one_and_delete", "find_one_and_replace"}
)
FILTERED = ONE | {"find_one", "update_many", "delete_many", "count_documents"}
_MISSING = object()


@frozen
class Held:
    """Where documents that refer to a sharded model hold its id, and its key."""

    identity: str
    key: tuple[str, ...]
    of: str
    # The same key in the documents of that model.
    at: tuple[str, ...]


@dataclass(slots=True)
class Shards:
    """The stored paths of each sharded collection's key, and who holds keys of others."""

    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    held: dict[str, list[Held]] = field(default_factory=dict)

    def targeted(self, plan: Plan[R]) -> Plan[R]:
        """The same plan, whose commands carry the keys."""
        known: dict[Any, tuple[Any, ...]] = {}
        try:
            command = next(plan)
            while True:
                try:
                    sent: Command | None = command
                    if isinstance(command, (Call, Read)) and command.collection in self.keys:
                        sent = yield from self._with_key(command, known)
                    result = nothing_matched(command) if sent is None else (yield sent)
                except Exception as error:
                    command = plan.throw(error)
                else:
                    if isinstance(command, (Call, Read)):
                        self._note(command, result, known)
                    command = plan.send(result)
        except StopIteration as stop:
            value: R = stop.value
            return value
        finally:
            plan.close()

    def aimed(self, command: Read) -> Plan[Read]:
        """The read of a cursor that streams, with the key."""
        if command.collection not in self.keys:
            return command
        sent = yield from self._with_key(command, {})
        return sent if isinstance(sent, Read) else command

    # -- what is known ---------------------------------------------------------------------------

    def _note(self, command: Call | Read, result: Any, known: dict[Any, tuple[Any, ...]]) -> None:
        """Remember the keys in documents that came by."""
        documents: list[Any] = []
        if command.method == "insert_one":
            documents = [command.arguments[0]]
        elif command.method == "insert_many":
            documents = list(command.arguments[0])
        elif isinstance(result, dict):
            documents = [result]
        elif isinstance(result, list) and command.method == "find":
            documents = result
        paths = self.keys.get(command.collection)
        for document in documents:
            if not isinstance(document, Mapping):
                continue
            if paths is not None and "_id" in document:
                _learn(known, command.collection, document["_id"], document, paths)
            for held in self.held.get(command.collection, ()):
                identity = value_at(document, held.identity)
                if identity is not None:
                    _learn(known, held.of, identity, document, held.key)

    def _look_up(self, collection: str, ids: Sequence[Any], known: dict[Any, tuple[Any, ...]]) -> Plan[None]:
        unknown = [each for each in ids if (collection, freeze(each)) not in known]
        if unknown:
            paths = self.keys[collection]
            shown = dict.fromkeys(paths, 1)
            for each in (yield from find(collection, {"_id": {"$in": unknown}}, shown, comment=LOOKUP)):
                _learn(known, collection, each["_id"], each, paths)

    # -- commands --------------------------------------------------------------------------------

    def _with_key(self, command: Call | Read, known: dict[Any, tuple[Any, ...]]) -> Plan[Command | None]:
        """The command with the key in its filter; None where there is no such document."""
        method, arguments = command.method, command.arguments
        if method == "bulk_write":
            operations = []
            for operation in arguments[0]:
                changed = yield from self._operation(command.collection, operation, known)
                operations += [] if changed is None else [changed]
            return replace(command, arguments=(operations,)) if operations else None
        if method == "aggregate":
            first = arguments[0][0] if arguments[0] else {}
            if "$match" not in first:
                return command
            chosen = yield from self._filter(command.collection, first["$match"], known)
            return replace(command, arguments=([{"$match": chosen}, *arguments[0][1:]], *arguments[1:]))
        if method == "distinct":
            chosen = yield from self._filter(command.collection, arguments[1], known)
            return replace(command, arguments=(arguments[0], chosen))
        if method in FILTERED or method == "find":
            if command.options.get("comment") == LOOKUP:
                return command
            update = arguments[1] if len(arguments) > 1 and command.options.get("upsert") else None
            one = method in ONE
            sort = command.options.get("sort")
            chosen = yield from self._filter(command.collection, arguments[0], known, one, update, sort)
            return None if chosen is None else replace(command, arguments=(chosen, *arguments[1:]))
        return command

    def _operation(
        self, collection: str, operation: Operation, known: dict[Any, tuple[Any, ...]]
    ) -> Plan[Operation | None]:
        """One operation of a bulk write, with the key."""
        if isinstance(operation, InsertOne):
            document = operation.document
            _learn(known, collection, document.get("_id"), document, self.keys[collection])
            return operation
        upserted = None
        if isinstance(operation, (UpdateOne, ReplaceOne)) and operation.upsert:
            upserted = operation.document
        one = not isinstance(operation, DeleteMany)
        chosen = yield from self._filter(collection, operation.filter, known, one, upserted)
        return None if chosen is None else operation.at(chosen)

    def _filter(
        self,
        collection: str,
        filter: Mapping[str, Any],
        known: dict[Any, tuple[Any, ...]],
        one: bool = False,
        upserted: Any = None,
        sort: Any = None,
    ) -> Plan[Any]:
        """A filter with the key; None where no document can match it."""
        paths = self.keys[collection]
        missing = [path for path in paths if equality(filter, path) is _MISSING]
        if not missing:
            return filter
        ids = ids_in(filter)
        if ids is None:
            if not one:
                # Of many documents, or of none in particular: every shard is asked.
                return filter
            if upserted is not None:
                raise key_missing(collection, missing)
            found = yield from find(
                collection, filter, {"_id": 1, **dict.fromkeys(paths, 1)}, sort=sort, limit=1, comment=LOOKUP
            )
            if not found:
                return None
            own = {path: {"$eq": value_at(found[0], path)} for path in paths}
            return {"$and": [filter, {"_id": {"$eq": found[0]["_id"]}, **own}]}
        yield from self._look_up(collection, ids, known)
        values = [known[collection, freeze(each)] for each in ids if (collection, freeze(each)) in known]
        if not values and upserted is not None:
            given = [_in_update(upserted, path) for path in paths]
            if any(each is _MISSING for each in given):
                raise key_missing(collection, missing)
            values = [tuple(given)]
        added: Raw = {}
        for number, path in enumerate(paths):
            if path in missing:
                distinct = {freeze(value[number]): value[number] for value in values}
                several = list(distinct.values())
                added[path] = {"$eq": several[0]} if len(several) == 1 else {"$in": several}
        return {**filter, **added} if not added.keys() & filter.keys() else {"$and": [filter, added]}


def _learn(
    known: dict[Any, tuple[Any, ...]], collection: str, identity: Any, document: Any, paths: tuple[str, ...]
) -> None:
    values = tuple(value_at(document, path) for path in paths)
    if all(value is not None for value in values):
        known[collection, freeze(identity)] = values


def key_missing(collection: str, missing: Sequence[str]) -> UsageError:
    return UsageError(
        f"an upsert into {collection} must say into which shard: name {', '.join(missing)} in its filter",
        code="shard-key-missing",
    )


def _in_update(update: Any, path: str) -> Any:
    """The value that an upsert would give a path."""
    if not isinstance(update, Mapping):
        return _MISSING
    for part in (update.get("$setOnInsert"), update.get("$set"), update):
        if isinstance(part, Mapping) and path in part:
            return part[path]
    return _MISSING


def equality(filter: Mapping[str, Any], path: str) -> Any:
    """The value that a filter asks for at a path; a choice of several counts too."""
    if path in filter:
        condition = filter[path]
        if not isinstance(condition, Mapping) or not any(str(name).startswith("$") for name in condition):
            return condition
        for operator in ("$eq", "$in"):
            if operator in condition:
                return condition[operator]
    for part in filter.get("$and", ()):
        if (value := equality(part, path)) is not _MISSING:
            return value
    return _MISSING


def ids_in(filter: Mapping[str, Any]) -> list[Any] | None:
    """The ids that a filter asks for; None where it does not."""
    value = equality(filter, "_id")
    if value is _MISSING:
        return None
    condition = filter.get("_id")
    several = isinstance(condition, Mapping) and "$in" in condition
    return list(value) if several or (condition is None and isinstance(value, list)) else [value]


# -- declarations ---------------------------------------------------------------------------------------


def shard_paths(entry: Entry[Any]) -> tuple[str, ...]:
    """The stored paths of a model's shard key; empty where it has none."""
    names = entry.settings.shard_key or ()
    label = f"{entry.model.__name__} (shard_key=)"
    paths = []
    for name in names:
        path = resolve(entry.codec, name, label, "shard-key-invalid")
        if path.in_array or path.shape.optional:
            raise DeclarationError(
                f"{label} names {name!r}, which is an array or may be None; a shard key is one value that "
                "every document has",
                code="shard-key-invalid",
            )
        paths.append(path.stored)
    return tuple(paths)


def split_reference(by: Any) -> tuple[tuple[str, ...], Any]:
    """The fields of `by=` that hold the shard key, and the one that holds the id."""
    if isinstance(by, (tuple, list)):
        return tuple(by[:-1]), by[-1]
    return (), by


def check_held(held: tuple[str, ...], referenced: Entry[Any], label: str) -> None:
    """Refuse a reference that does not hold the shard key of what it refers to, or holds one too many."""
    own = [name for name in referenced.settings.shard_key or () if name not in ("id", "_id")]
    if len(own) == len(held):
        return
    name = referenced.model.__name__
    if own:
        example = ", ".join(f'"{each}"' for each in own)
        what = f"{name} is sharded by {', '.join(own)}; a reference to it holds that too: by=({example}, …)"
    else:
        what = f"{name} has no shard_key=; leave out {', '.join(held)} in by="
    raise DeclarationError(f"{label}: {what}", code="shard-key-reference")


def shards_of(graph: Models, entries: Iterable[Entry[Any]]) -> Shards:
    """The sharded models of a Store."""
    shards = Shards()
    for entry in entries:
        paths = shard_paths(entry)
        if paths:
            other = shards.keys.setdefault(entry.collection, paths)
            if other != paths:
                raise DeclarationError(
                    f"{entry.model.__name__} has another shard_key= than the other kinds of "
                    f"{entry.collection}; a collection has one",
                    code="shard-key-invalid",
                )
    for rule in graph.rules if shards.keys else ():
        for collection, held in rule.holds():
            shards.held.setdefault(collection, []).append(held)
    return shards
