"""The collections and indexes that models ask for, compared with those that are there, and made.

An index that conflicts with another is found before anything is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pymongo import IndexModel
from pymongo.errors import OperationFailure

from treadle.errors import DataError, DeclarationError
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Action
from treadle.model.bson_types import to_bson
from treadle.model.codec import Codec, StoredField, codec_of
from treadle.model.document import Indexed
from treadle.model.dump import omitted_when_none
from treadle.model.json_schema import stored_types
from treadle.plan import Plan, Raw, aggregate, create, database_command
from treadle.plan.server_errors import DUPLICATE_KEY, is_refusal, message_of
from treadle.query.paths import models_of

# Examples that a message names.
EXAMPLES_MAX = 5

INDEXES_MAX = 1000  # the server itself allows 64
# What an index may say without being another index.
_COMPARED = (
    "unique", "sparse", "partialFilterExpression", "collation", "wildcardProjection", "hidden", "weights",
    "default_language", "language_override", "bits", "min", "max",
)  # fmt: skip
# Options that the server does not add by itself, so that having one unasked is a difference.
_OURS = frozenset({"unique", "sparse", "partialFilterExpression", "wildcardProjection", "hidden"})


def existing_indexes(collection: str) -> Plan[list[Raw]]:
    """A collection's indexes; by command, because the driver's own call decodes dates without their zone."""
    reply = yield from database_command(
        {"listIndexes": collection, "cursor": {"batchSize": INDEXES_MAX}}, writes=False
    )
    indexes: list[Raw] = reply["cursor"]["firstBatch"]
    return indexes


def existing_collections() -> Plan[dict[str, Raw]]:
    """The database's collections by name, as listCollections shows them."""
    reply = yield from database_command({"listCollections": 1, "cursor": {"batchSize": 10_000}}, writes=False)
    collections = {each["name"]: each for each in reply["cursor"]["firstBatch"]}
    while reply["cursor"]["id"]:
        reply = yield from database_command(
            {"getMore": reply["cursor"]["id"], "collection": "$cmd.listCollections"}, writes=False
        )
        collections.update({each["name"]: each for each in reply["cursor"]["nextBatch"]})
    return collections


def require_collection(entry: ModelEntry[Any], existing: Mapping[str, Any]) -> None:
    if existing["type"] != "collection":
        raise DataError(
            f"{entry.model.__name__} is to be stored in {entry.collection!r}, but that is a "
            f"{existing['type']} in this database; rename one of them",
            code="collection-conflict",
        )


def set_up_collection(
    entry: ModelEntry[Any],
    existing: Raw | None,
    schema: Raw | None,
    actions: list[Action],
    detail: str = "",
) -> Plan[tuple[Raw, Raw] | None]:
    """Make a collection with its validator, or tell how the one that is there validates and how it should.

    None where nothing is to be changed; without a schema nothing is to be validated.
    """
    options: Raw = {
        "validator": {} if schema is None else {"$jsonSchema": schema},
        "validationLevel": entry.model.__treadle__.validation,
        "validationAction": entry.model.__treadle__.validation_action,
    }
    if existing is None:
        actions.append(Action("create collection", entry.collection, detail))
        if (yield from create(entry.collection, **(options if schema is not None else {}))):
            return None
        # Another process made it first; bring it to the same state.
        existing = {}
    current = existing.get("options", {})
    now = {
        "validator": current.get("validator", {}),
        "validationLevel": current.get("validationLevel", "strict" if current.get("validator") else "off"),
        "validationAction": current.get("validationAction", "error"),
    }
    return None if now == options or (schema is None and not now["validator"]) else (now, options)


def change_validator(entry: ModelEntry[Any], options: Raw, detail: str, actions: list[Action]) -> Plan[None]:
    actions.append(Action("change validator", entry.collection, detail))
    yield from database_command({"collMod": entry.collection, **options})


def set_up_indexes(
    entry: ModelEntry[Any], missing: list[IndexModel], changed: list[Raw], actions: list[Action]
) -> Plan[None]:
    for change in changed:
        detail = f"{change['name']} expires after {change['expireAfterSeconds']} s"
        actions.append(Action("change index", entry.collection, detail))
        yield from database_command({"collMod": entry.collection, "index": change})
    for index in missing:
        document = index.document
        actions.append(Action("create index", entry.collection, describe_index(document)))
        try:
            yield from _create_index(entry.collection, to_bson(dict(document), []))
        except OperationFailure as error:
            if error.code == DUPLICATE_KEY:
                raise (yield from _duplicates(entry, document, error)) from None
            raise DataError(
                f"the index {document['name']!r} on {entry.collection} could not be made: "
                f"{message_of(error)}",
                code="index-refused",
            ) from error


def _create_index(collection: str, document: Raw) -> Plan[None]:
    try:
        yield from database_command({"createIndexes": collection, "indexes": [document]})
    except OperationFailure as error:
        if "storageEngine" not in document or error.code == DUPLICATE_KEY or not is_refusal(error):
            raise
        # Another storage engine, or a server that leaves no choice; the index itself is what matters.
        plain = {name: value for name, value in document.items() if name != "storageEngine"}
        yield from database_command({"createIndexes": collection, "indexes": [plain]})


def check_sharded(graph: Graph) -> None:
    """Refuse unique indexes that do not begin with the shard key: no shard could tell what others hold."""
    for entry in [*graph.by_collection.values()]:
        key = list(graph.shards.keys.get(entry.collection, ()))
        for index in declared_indexes(entry) if key else ():
            document = index.document
            paths = [path for path, _ in key_pairs(document)]
            if document.get("unique") and paths[: len(key)] != key:
                raise DeclarationError(
                    f"{entry.model.__name__} is sharded by {', '.join(key)}, and its unique index "
                    f"{document['name']!r} does not begin with that; declare it in indexes=, that key first",
                    code="shard-key-index",
                )


def describe_index(document: Mapping[str, Any]) -> str:
    keys = ", ".join(f"{path} {direction}" for path, direction in dict(document["key"]).items())
    return f"{document['name']} ({keys})" + (" unique" if document.get("unique") else "")


def declared_indexes(entry: ModelEntry[Any]) -> list[IndexModel]:
    """The indexes that a model asks for, from its fields and its class keyword."""
    indexes: list[IndexModel] = []
    texts: dict[str, int] = {}
    for each in [entry, *entry.kinds.below]:
        inherited = {
            prefix + field.stored: mark
            for above in each.kinds.above
            for prefix, field, mark in _marked(above)
        }
        for prefix, field, mark in _marked(each):
            if inherited.get(prefix + field.stored) == mark:
                continue
            if mark.text:
                texts[prefix + field.stored] = int(mark.text)
            if not mark.text or mark != Indexed(text=mark.text):
                indexes.append(field_index(each, prefix, field, mark))
        known = {id(index) for above in each.kinds.above for index in above.model.__treadle__.indexes}
        indexes += [
            _living(each, index) for index in each.model.__treadle__.indexes if id(index) not in known
        ]
    if texts:
        indexes.append(_text_index(texts))
    declared = [
        key_pairs(each.document) for each in entry.model.__treadle__.indexes if each.document.get("unique")
    ]
    unique = [index for rule in entry.rules.implementing("storage") for index in rule.storage().unique]
    chosen = [*indexes, *(index for index in unique if key_pairs(index.document) not in declared)]
    unique_keys = {tuple(dict(index.document["key"])) for index in chosen if index.document.get("unique")}
    return [*chosen, *_names(entry, unique_keys)]


def _names(entry: ModelEntry[Any], known: Collection[tuple[str, ...]]) -> Iterator[IndexModel]:
    """The unique indexes of the fields by which others name documents of a model, but for those `known`."""
    for each in [entry, *entry.kinds.below]:
        for path, named in each.paths.alternate_keys.items():
            if (path,) in known:
                continue
            present: Raw = {path: {"$type": stored_types(named.shape)}} if named.shape.optional else {}
            if each.targets.with_deleted.filter():
                present = {**each.targets.with_deleted.filter(), **(present or {path: {"$exists": True}})}
            if each.paths.deletion is not None:
                present[each.paths.deletion] = None
            partial = {"partialFilterExpression": present} if present else {}
            yield IndexModel([(path, 1)], unique=True, **partial)


def _living(entry: ModelEntry[Any], index: IndexModel) -> IndexModel:
    """A unique index without the deleted documents of its model; one that says which it holds is as it is."""
    document = index.document
    said = document.get("partialFilterExpression") or document.get("sparse")
    if entry.paths.deletion is None or said or not document.get("unique"):
        return index
    options = {name: value for name, value in document.items() if name != "key"}
    keys = list(dict(document["key"]).items())
    return IndexModel(keys, **{**options, "partialFilterExpression": {entry.paths.deletion: None}})


def _text_index(weights: dict[str, int]) -> IndexModel:
    """The one text index that a collection may have, over the fields of all its kinds."""
    chosen = {path: weight for path, weight in weights.items() if weight > 1}
    keys: list[tuple[str, Any]] = [(path, "text") for path in weights]
    return IndexModel(keys, name="text", **({"weights": chosen} if chosen else {}))


def _marked(entry: ModelEntry[Any]) -> list[tuple[str, StoredField, Indexed]]:
    return list(_marks(entry.codec, "", ()))


def _marks(
    codec: Codec[Any], prefix: str, inside: tuple[type, ...]
) -> Iterator[tuple[str, StoredField, Indexed]]:
    """Each `Indexed` on a field of the document or of a nested model."""
    if codec.model in inside:
        return
    for field in codec.fields:
        for mark in field.shape.metadata:
            if isinstance(mark, Indexed):
                yield prefix, field, mark
        for model in models_of(field.shape):
            yield from _marks(codec_of(model), f"{prefix}{field.stored}.", (*inside, codec.model))


def field_index(entry: ModelEntry[Any], prefix: str, field: StoredField, mark: Indexed) -> IndexModel:
    path = prefix + field.stored
    options: Raw = dict(mark.options)
    if mark.unique:
        options["unique"] = True
        if omitted_when_none(field):
            options["partialFilterExpression"] = {path: {"$exists": True}}
        elif field.shape.optional:
            # None is stored as null here, which an index on existing fields would hold.
            options["partialFilterExpression"] = {path: {"$type": stored_types(field.shape)}}
    if entry.targets.with_deleted.filter() and not mark.sparse:
        own = options.get("partialFilterExpression") or {}
        options["partialFilterExpression"] = _partial(entry, path, mark.unique, own)
        options["name"] = f"{path}_{-1 if mark.descending else 1}_{entry.kinds.kind or entry.model.__name__}"
    if mark.unique and not mark.sparse and not mark.deleted and entry.paths.deletion is not None:
        # Deleted documents hold no key, so that another may have it.
        partial = options.get("partialFilterExpression") or {}
        options["partialFilterExpression"] = {**partial, entry.paths.deletion: None}
    if mark.sparse and not (mark.unique and field.shape.optional):
        # Partial as it is, it holds no more than a sparse one; the server refuses both together.
        options["sparse"] = True
    if mark.expire_after is not None:
        options["expireAfterSeconds"] = int(mark.expire_after.total_seconds())
    if mark.name is not None:
        options["name"] = mark.name
    return IndexModel([(path, -1 if mark.descending else 1)], **options)


def _partial(entry: ModelEntry[Any], path: str, unique: bool, own: Raw) -> Raw:
    """Which documents an index on a kind's field holds; a query on the kind must be seen to lie within.

    Those of its kinds, and if it is unique only those that have a value.
    """
    present = own or {path: {"$exists": True}}
    return {**entry.targets.with_deleted.filter(), **(present if unique else own)}


def compare_indexes(
    entry: ModelEntry[Any], present: list[Raw], expected: list[IndexModel] | None = None
) -> tuple[list[IndexModel], list[Raw]]:
    """The indexes to make, and the ones whose expiry is to change."""
    missing: list[IndexModel] = []
    changed: list[Raw] = []
    by_name = {index["name"]: index for index in present}
    for index in declared_indexes(entry) if expected is None else expected:
        document = index.document
        same = next((each for each in present if is_same(each, document)), None)
        if same is None:
            clashing = (each for each in present if _clashes(each, document))
            other = by_name.get(document["name"]) or next(clashing, None)
            if other is not None:
                raise _conflict(entry, document, other)
            missing.append(index)
        elif same.get("expireAfterSeconds") != document.get("expireAfterSeconds"):
            if "expireAfterSeconds" not in document:
                raise _conflict(entry, document, same)
            changed.append({"name": same["name"], "expireAfterSeconds": document["expireAfterSeconds"]})
    return missing, changed


def maintenance_indexes(graph: Graph, entry: ModelEntry[Any], present: list[Raw]) -> list[IndexModel]:
    """The indexes that the patterns need on a collection, as far as no other serves."""
    declared = [index.document for index in declared_indexes(entry)]
    serving = [key_pairs(each) for each in [*present, *declared] if serves_all(each)]
    needed = [
        index
        for rule in graph.rules
        for source, index in rule.storage().indexes
        if source.collection == entry.collection
    ]
    needed += version_indexes(entry)
    # The longest first: an index also serves whatever its beginning serves.
    needed.sort(key=lambda index: -len(key_pairs(index.document)))
    missing = []
    for index in needed:
        keys = key_pairs(index.document)
        essential = keys[:-1] if keys[-1] == ("_id", 1) and len(keys) == 2 else keys
        if not any(each[: len(essential)] == essential for each in serving):
            missing.append(index)
            serving.append(keys)
    return missing


def version_indexes(entry: ModelEntry[Any]) -> list[IndexModel]:
    """The index by which outdated documents are found, where there may be any."""
    return [IndexModel([(entry.versions.field, 1)])] if entry.versions.may_change else []


def serves_all(document: Mapping[str, Any]) -> bool:
    partial = ("partialFilterExpression", "sparse", "collation", "hidden")
    return not any(document.get(option) for option in partial)


def key_pairs(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    keys: list[tuple[str, Any]] = []
    for path, kind in dict(document["key"]).items():
        # All text fields of an index are listed as this one pair.
        pairs = [("_fts", "text"), ("_ftsx", 1)] if kind == "text" and path != "_fts" else [(path, kind)]
        keys.extend(each for each in pairs if each not in keys)
    return keys


def is_same(present: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether an existing index is the declared one."""
    if key_pairs(present) != key_pairs(expected):
        return False
    for option in _COMPARED:
        stored, declared = present.get(option) or None, to_bson(expected.get(option), []) or None
        if option == "collation":
            # The server fills a collation out with defaults; "simple" is none at all.
            stored = None if stored and stored.get("locale") == "simple" else stored
            declared = None if declared and declared.get("locale") == "simple" else declared
            if (stored is None) != (declared is None):
                return False
            if declared and stored and any(stored.get(key) != value for key, value in declared.items()):
                return False
        elif option == "weights":
            if _weights(present) != _weights(expected):
                return False
        elif stored != declared and (declared is not None or option in _OURS):
            return False
    return True


def _weights(document: Mapping[str, Any]) -> dict[str, int]:
    """The fields of a text index with their weights, which the server lists apart from its keys."""
    if "_fts" in dict(document["key"]):
        return dict(document.get("weights") or {})
    fields = [path for path, kind in dict(document["key"]).items() if kind == "text"]
    given = dict(document.get("weights") or {})
    return {path: given.get(path, 1) for path in [*fields, *(set(given) - set(fields))]}


def _clashes(present: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether the server would refuse the two side by side."""
    alike = ("partialFilterExpression", "sparse")
    return (
        key_pairs(present) == key_pairs(expected)
        and all((present.get(option) or None) == (expected.get(option) or None) for option in alike)
        and not expected.get("collation")
        and not present.get("collation")
    )


def _conflict(entry: ModelEntry[Any], expected: Mapping[str, Any], present: Mapping[str, Any]) -> DataError:
    return DataError(
        f"{entry.model.__name__} asks for the index {describe_index(expected)} on {entry.collection}, but "
        f"there is {describe_index(present)} with other options; drop that one, or declare it as it is",
        code="index-conflict",
    )


def _duplicates(
    entry: ModelEntry[Any], document: Mapping[str, Any], error: OperationFailure
) -> Plan[DataError]:
    """Which keys stand in the way of a unique index."""
    paths = list(dict(document["key"]))
    match: Raw = to_bson(document.get("partialFilterExpression", {}), [])
    if document.get("sparse"):
        match = {"$or": [{path: {"$exists": True}} for path in paths]}
    groups = yield from aggregate(
        entry.collection,
        [
            {"$match": match},
            {"$group": {"_id": {f"k{n}": f"${path}" for n, path in enumerate(paths)}, "n": {"$sum": 1}}},
            {"$match": {"n": {"$gt": 1}}},
            {"$sort": {"n": -1, "_id": 1}},
            {"$limit": EXAMPLES_MAX},
        ],
        allowDiskUse=True,
    )
    listed = "; ".join(
        ", ".join(f"{path}={group['_id'].get(f'k{n}')!r}" for n, path in enumerate(paths))
        + f" ({group['n']} times)"
        for group in groups
    )
    if not listed:
        # Inside arrays, or equal only under the collation; the server names one of them.
        met = (error.details or {}).get("keyValue") or {}
        listed = ", ".join(f"{path}={value!r}" for path, value in met.items())
    return DataError(
        f"the unique index {document['name']!r} on {entry.collection} cannot be made, because keys occur "
        f"more than once: {listed}; remove or change the surplus documents and run setup() again",
        code="index-duplicates",
    )
