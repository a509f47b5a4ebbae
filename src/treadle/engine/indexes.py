"""The collections and indexes that models ask for, compared with those that are there, and made.

An index that conflicts with another is found before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    "unique", "sparse", "partialFilterExpression", "wildcardProjection", "hidden", "default_language",
    "language_override", "bits", "min", "max",
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


def require_collection(entry: ModelEntry, existing: Mapping[str, Any]) -> None:
    if existing["type"] != "collection":
        raise DataError(
            f"{entry.model.__name__} is to be stored in {entry.collection!r}, but that is a "
            f"{existing['type']} in this database; rename one of them",
            code="collection-conflict",
        )


def set_up_collection(
    entry: ModelEntry,
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


def change_validator(entry: ModelEntry, options: Raw, detail: str, actions: list[Action]) -> Plan[None]:
    actions.append(Action("change validator", entry.collection, detail))
    yield from database_command({"collMod": entry.collection, **options})


def set_up_indexes(
    entry: ModelEntry, missing: list[IndexModel], changed: list[Raw], actions: list[Action]
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


def declared_indexes(entry: ModelEntry) -> list[IndexModel]:
    """Return the indexes that a model and the kinds below it ask for."""
    members = [entry, *entry.kinds.below]
    indexes = [index for each in members for index in (*_of_fields(each), *_of_class(each))]
    indexes += [*_text_index(members), *_of_rules(entry)]
    unique = {tuple(dict(index.document["key"])) for index in indexes if _is_unique(index)}
    return [*indexes, *(index for each in members for index in _of_alternate_keys(each, unique))]


def _of_fields(entry: ModelEntry) -> Iterator[IndexModel]:
    for prefix, field, mark in _own_marks(entry):
        if not mark.text or mark != Indexed(text=mark.text):
            yield field_index(entry, prefix, field, mark)


def _of_alternate_keys(entry: ModelEntry, unique: set[tuple[str, ...]]) -> Iterator[IndexModel]:
    """Yield the unique indexes of the fields by which others refer to a model, where it declares none."""
    # The index of a class holds its kinds too.
    above = {path for other in entry.kinds.above for path in other.paths.alternate_keys}
    for path in entry.paths.alternate_keys:
        if (path,) not in unique and path not in above:
            yield _of_alternate_key(entry, path)


def _text_index(members: Sequence[ModelEntry]) -> Iterator[IndexModel]:
    """Yield the one text index that a collection may have, over the fields of all its kinds."""
    weights: dict[str, int] = {}
    for each in members:
        own = (marked for marked in _own_marks(each) if marked[2].text)
        weights.update((prefix + field.stored, int(mark.text)) for prefix, field, mark in own)
    if weights:
        chosen = {path: weight for path, weight in weights.items() if weight > 1}
        options: Raw = {"weights": chosen} if chosen else {}
        yield IndexModel([(path, "text") for path in weights], name="text", **options)


def _of_rules(entry: ModelEntry) -> Iterator[IndexModel]:
    """Yield the unique indexes of a model's rules that the model does not declare itself."""
    own = [key_pairs(each.document) for each in entry.model.__treadle__.indexes if _is_unique(each)]
    for rule in entry.rules.implementing("storage"):
        yield from (index for index in rule.storage().unique if key_pairs(index.document) not in own)


def _own_marks(entry: ModelEntry) -> list[tuple[str, StoredField, Indexed]]:
    """Return each `Indexed` of a model that is not inherited from a class above it."""
    above = (marked for each in entry.kinds.above for marked in _marks(each.codec))
    inherited = {prefix + field.stored: mark for prefix, field, mark in above}
    return [each for each in _marks(entry.codec) if inherited.get(each[0] + each[1].stored) != each[2]]


def _marks(
    codec: Codec[Any], prefix: str = "", inside: tuple[type, ...] = ()
) -> Iterator[tuple[str, StoredField, Indexed]]:
    """Yield each `Indexed` on a field of the document or of a nested model."""
    if codec.model in inside:
        return
    for field in codec.fields:
        for mark in field.shape.metadata:
            if isinstance(mark, Indexed):
                yield prefix, field, mark
        for model in models_of(field.shape):
            yield from _marks(codec_of(model), f"{prefix}{field.stored}.", (*inside, codec.model))


def _is_unique(index: IndexModel) -> bool:
    return bool(index.document.get("unique"))


def _of_class(entry: ModelEntry) -> Iterator[IndexModel]:
    """Yield the indexes of a model's own class keyword.

    A unique one leaves out the deleted documents, unless it says itself which documents it holds.
    """
    inherited = {id(index) for above in entry.kinds.above for index in above.model.__treadle__.indexes}
    for index in entry.model.__treadle__.indexes:
        options = dict(index.document)
        is_partial = options.get("partialFilterExpression") or options.get("sparse")
        if id(index) in inherited:
            continue
        if entry.paths.deletion is None or is_partial or not _is_unique(index):
            yield index
        else:
            keys = list(dict(options.pop("key")).items())
            yield IndexModel(keys, **{**options, "partialFilterExpression": {entry.paths.deletion: None}})


def _of_alternate_key(entry: ModelEntry, path: str) -> IndexModel:
    """Return the unique index of a field by which others refer to documents of a model."""
    shape = entry.paths.alternate_keys[path].shape
    has_value: Raw = {path: {"$type": stored_types(shape)}} if shape.optional else {}
    condition = _unique_condition(entry, path, has_value)
    options: Raw = {"partialFilterExpression": condition} if condition else {}
    if entry.kinds.above:
        options["name"] = f"{path}_1_{entry.kinds.kind or entry.model.__name__}"
    return IndexModel([(path, 1)], unique=True, **options)


def field_index(entry: ModelEntry, prefix: str, field: StoredField, mark: Indexed) -> IndexModel:
    """Return the index that a mark on a field asks for."""
    path, direction = prefix + field.stored, -1 if mark.descending else 1
    expires = mark.expire_after
    options: Raw = {
        "partialFilterExpression": _condition(entry, path, field, mark),
        "unique": mark.unique,
        # Partial as it may be, it holds no more than a sparse one; the server refuses both together.
        "sparse": mark.sparse and not (mark.unique and field.shape.optional),
        "name": mark.name or _kind_name(entry, f"{path}_{direction}", mark),
    }
    chosen = {option: value for option, value in options.items() if value}
    if expires is not None:
        chosen["expireAfterSeconds"] = int(expires.total_seconds())
    return IndexModel([(path, direction)], **{**mark.options, **chosen})


def _kind_name(entry: ModelEntry, name: str, mark: Indexed) -> str | None:
    """Return the name of an index that holds the documents of one kind only; None for the server's own."""
    if mark.sparse or not entry.targets.with_deleted.filter():
        return None
    return f"{name}_{entry.kinds.kind or entry.model.__name__}"


def _condition(entry: ModelEntry, path: str, field: StoredField, mark: Indexed) -> Raw:
    """Return which documents an index on a field holds; a query on a kind must be seen to lie within."""
    own: Raw = mark.options.get("partialFilterExpression") or {}
    if mark.unique and omitted_when_none(field):
        own = {path: {"$exists": True}}
    elif mark.unique and field.shape.optional:
        # None is stored as null here, which an index on existing fields would hold.
        own = {path: {"$type": stored_types(field.shape)}}
    if mark.sparse:
        return own
    if mark.unique:
        return _unique_condition(entry, path, own, deleted=mark.deleted)
    return {**entry.targets.with_deleted.filter(), **own}


def _unique_condition(entry: ModelEntry, path: str, own: Raw, *, deleted: bool = False) -> Raw:
    """Return which documents a unique index holds: of a kind, those that have a value.

    Deleted documents hold no key, so that another may have it, unless they are to.
    """
    if entry.targets.with_deleted.filter():
        own = own or {path: {"$exists": True}}
    scope = entry.targets.with_deleted if deleted else entry.targets
    return {**scope.filter(), **own}


def compare_indexes(
    entry: ModelEntry, present: list[Raw], expected: list[IndexModel] | None = None
) -> tuple[list[IndexModel], list[Raw]]:
    """The indexes to make, and the ones whose expiry is to change."""
    missing: list[IndexModel] = []
    changed: list[Raw] = []
    for index in declared_indexes(entry) if expected is None else expected:
        document = index.document
        same = next((each for each in present if is_same(each, document)), None)
        if same is None:
            _refuse_clash(entry, document, present)
            missing.append(index)
        elif same.get("expireAfterSeconds") != document.get("expireAfterSeconds"):
            if "expireAfterSeconds" not in document:
                raise _conflict(entry, document, same)
            changed.append({"name": same["name"], "expireAfterSeconds": document["expireAfterSeconds"]})
    return missing, changed


def _refuse_clash(entry: ModelEntry, document: Mapping[str, Any], present: Sequence[Raw]) -> None:
    """Refuse an index beside which the server would refuse an existing one."""
    for other in present:
        if other["name"] == document["name"] or _clashes(other, document):
            raise _conflict(entry, document, other)


def maintenance_indexes(graph: Graph, entry: ModelEntry, present: list[Raw]) -> list[IndexModel]:
    """Return the indexes that rules need on a collection, as far as no other serves."""
    declared = [index.document for index in declared_indexes(entry)]
    serving = [key_pairs(each) for each in [*present, *declared] if serves_all(each)]
    needed = [pair for rule in graph.rules for pair in rule.storage().indexes]
    own = [index for source, index in needed if source.collection == entry.collection]
    # The longest first: an index also serves whatever its beginning serves.
    own = sorted([*own, *version_indexes(entry)], key=lambda index: -len(key_pairs(index.document)))
    return _not_served(own, serving)


def _not_served(indexes: Sequence[IndexModel], serving: list[list[tuple[str, Any]]]) -> list[IndexModel]:
    missing = []
    for index in indexes:
        keys = key_pairs(index.document)
        essential = keys[:-1] if keys[-1] == ("_id", 1) and len(keys) == 2 else keys
        if not any(each[: len(essential)] == essential for each in serving):
            missing.append(index)
            serving.append(keys)
    return missing


def version_indexes(entry: ModelEntry) -> list[IndexModel]:
    """Return the index by which outdated documents are found, where there may be any."""
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
    return (
        key_pairs(present) == key_pairs(expected)
        and _weights(present) == _weights(expected)
        and _is_same_collation(present.get("collation"), expected.get("collation"))
        and all(_is_same_option(option, present, expected) for option in _COMPARED)
    )


def _is_same_option(option: str, present: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    stored, declared = present.get(option) or None, to_bson(expected.get(option), []) or None
    return bool(stored == declared or (declared is None and option not in _OURS))


def _is_same_collation(stored: Raw | None, declared: Raw | None) -> bool:
    # The server completes a collation with defaults; "simple" means that there is none.
    stored, declared = (
        each if each and each.get("locale") != "simple" else {} for each in (stored, declared)
    )
    if not stored or not declared:
        return stored == declared
    return all(stored.get(name) == value for name, value in to_bson(declared, []).items())


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


def _conflict(entry: ModelEntry, expected: Mapping[str, Any], present: Mapping[str, Any]) -> DataError:
    return DataError(
        f"{entry.model.__name__} asks for the index {describe_index(expected)} on {entry.collection}, but "
        f"there is {describe_index(present)} with other options; drop that one, or declare it as it is",
        code="index-conflict",
    )


def _duplicates(entry: ModelEntry, document: Mapping[str, Any], error: OperationFailure) -> Plan[DataError]:
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
    listed = "; ".join(_describe_duplicates(paths, group) for group in groups)
    if not listed:
        # Inside arrays, or equal only under the collation; the server names one of them.
        met = (error.details or {}).get("keyValue") or {}
        listed = ", ".join(f"{path}={value!r}" for path, value in met.items())
    return DataError(
        f"the unique index {document['name']!r} on {entry.collection} cannot be made, because keys occur "
        f"more than once: {listed}; remove or change the surplus documents and run setup() again",
        code="index-duplicates",
    )


def _describe_duplicates(paths: Sequence[str], group: Raw) -> str:
    values = ", ".join(f"{path}={group['_id'].get(f'k{n}')!r}" for n, path in enumerate(paths))
    return f"{values} ({group['n']} times)"
