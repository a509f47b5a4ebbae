"""Plans for the Store's plain calls: insert, get, find, update, replace, delete.

Each costs one command on a model that feeds nothing and maintains nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

from bson import ObjectId
from pymongo.errors import BulkWriteError, WriteError

from treadle.engine.pages import by_ids
from treadle.engine.version_upgrade import lowered, matches_outdated, read_current
from treadle.errors import DataError, UsageError
from treadle.graph.card import Card
from treadle.graph.model_entry import ModelEntry
from treadle.graph.stored_pages import chunks
from treadle.graph.write import CommitNeeded
from treadle.model.codec import Codec
from treadle.model.document import Document
from treadle.model.encodable import check_batch, require_encodable, too_deep
from treadle.model.text import quote
from treadle.plan import (
    NO_OPTIONS,
    Call,
    Plan,
    Raw,
    Read,
    count_documents,
    delete_many,
    find_one,
    find_one_and_update,
    is_inside,
    server_facts,
    transact,
    update_many,
)
from treadle.plan.server_errors import refusals, translate
from treadle.query.attributes import sorting_stages, sorts_by_attribute
from treadle.query.filters import Sort, parse_filter, sort_keys
from treadle.query.keys import freeze

D = TypeVar("D", bound=Document)

# Types of which a value in a filter is an id, and no operator.
NAMING = frozenset({ObjectId, str, int, UUID})


class translated:
    """Raises the clear error in place of the driver's, for what runs inside."""

    # By hand: every write goes through one, and one that is made of a generator takes three times as long.
    __slots__ = ("_documents", "_entry", "_name", "_translate")

    def __init__(
        self,
        name: str,
        documents: Sequence[Mapping[str, Any]] = (),
        entry: ModelEntry[Any] | None = None,
        *,
        translate: Callable[..., Exception] = translate,
    ) -> None:
        self._name = name
        self._documents = documents
        self._entry = entry
        self._translate = translate

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        for rule in self._entry.rules.implementing("storage") if self._entry is not None else ():
            explain = rule.storage().explain
            if explain is not None and (clear := explain(error)) is not None:
                raise clear from error
        better = self._translate(error, self._name, self._documents)
        if better is not error:
            raise better from error


def dump(entry: ModelEntry[D], document: D, altered: list[Any]) -> Raw:
    """The document to store; refuses what the server would."""
    try:
        return entry.codec.dump(document, altered)
    except RecursionError:
        raise too_deep(entry.model.__name__) from None


def dump_all(
    entry: ModelEntry[D], documents: Sequence[D], altered: list[Any], codec: Codec[D] | None = None
) -> list[Raw]:
    """The documents to store, by the entry's codec or another; refuses what the server would."""
    codec = codec or entry.codec
    try:
        return codec.dump_all(documents, altered)
    except RecursionError:
        raise too_deep(entry.model.__name__) from None


def as_stored(entry: ModelEntry[D], document: D, raw: Raw, altered: list[Any]) -> D:
    """The document as a later read will show it; asked for before anything is written."""
    document.__pydantic_fields_set__.add("id")
    if not altered:
        return document
    try:
        return entry.codec.load(copy.deepcopy(raw))
    except DataError as error:
        raise UsageError(
            f"this {entry.model.__name__} could not be read back: with dates in UTC and cut to milliseconds "
            f"it no longer fits its own model ({error.message})",
            code="model-inconsistent",
        ) from None


def insert(entry: ModelEntry[D], document: D) -> Plan[D]:
    """Store one new document."""
    altered: list[Any] = []
    raw = dump(entry, document, altered)
    stored = as_stored(entry, document, raw, altered)
    if entry.versions.writes_older:
        (raw,) = yield from lowered(entry, [raw])
    try:
        yield Call(entry.collection, "insert_one", (raw,), NO_OPTIONS, ids=(raw["_id"],))
    except Exception as error:
        better = translate(error, entry.model.__name__, [raw])
        if better is error:
            raise
        raise better from error
    return stored


def insert_many(entry: ModelEntry[D], documents: Iterable[D], together: bool = True) -> Plan[list[D]]:
    """Store new documents, all or none of each chunk; one after another if not `together`."""
    documents = list(documents)
    if not documents:
        return []
    altered: list[Any] = []
    raws = dump_all(entry, documents, altered)
    check_batch(raws, entry.model.__name__)
    stored = documents
    if altered:
        stored = [as_stored(entry, each, raw, altered) for each, raw in zip(documents, raws, strict=True)]
    raws = yield from lowered(entry, raws)
    with translated(entry.model.__name__, raws):
        for chunk in chunks(raws, entry.limits.insert_max):
            if together:
                yield from insert_all(entry.collection, chunk)
            else:
                yield Call(entry.collection, "insert_many", (chunk,))
    return stored


def insert_all(collection: str, raws: Sequence[Raw]) -> Plan[None]:
    """Store all documents or none; without transactions by deleting those before a refused one."""

    def store() -> Plan[None]:
        yield Call(collection, "insert_many", (raws,))

    if len(raws) == 1:
        yield Call(collection, "insert_one", (raws[0],))
    elif (yield from is_inside()):
        yield from store()
    elif (yield from server_facts()).transactions:
        yield from transact(store)
    else:
        yield from insert_or_undo(collection, raws)


def insert_or_undo(collection: str, raws: Sequence[Raw]) -> Plan[None]:
    """Store documents in order; where one is refused, those before it are deleted again."""
    try:
        yield Call(collection, "insert_many", (raws,))
    except BulkWriteError as error:
        at = next((each["index"] for each in refusals(error)), 0)
        if at:
            yield from delete_many(collection, {"_id": {"$in": [raw["_id"] for raw in raws[:at]]}})
        raise


def insert_past_refused(
    entry: ModelEntry[D], documents: Sequence[D]
) -> Plan[tuple[list[D], dict[int, Exception]]]:
    """Store those documents that can be; these, and by position why the others were refused."""
    name, refused = entry.model.__name__, dict[int, Exception]()
    raws, stored, positions = list[Raw](), list[D](), list[int]()
    for position, document in enumerate(documents):
        altered: list[Any] = []
        try:
            raw = dump(entry, document, altered)
            require_encodable(raw, name)
            stored.append(as_stored(entry, document, raw, altered))
        except UsageError as error:
            refused[position] = error
            continue
        raws.append(raw)
        positions.append(position)
    raws = yield from lowered(entry, raws)
    try:
        if raws:
            yield Call(entry.collection, "insert_many", (raws,), {"ordered": False})
    except BulkWriteError as error:
        if (error.details or {}).get("writeConcernErrors"):
            raise
        for each in refusals(error):
            one = WriteError(each.get("errmsg", ""), each.get("code"), each)
            refused[positions[each["index"]]] = translate(one, name)
    return [each for each, at in zip(stored, positions, strict=True) if at not in refused], refused


def get(entry: ModelEntry[Any], identity: Any, card: Card[Any] | None = None) -> Plan[Any]:
    """The document with this id, or None."""
    key = entry.ids.encode(identity)
    chosen: tuple[Any, ...] = (entry.filter_for_id(key),)
    if card is not None:
        chosen = (*chosen, card.projection)
    raw = yield Call(entry.collection, "find_one", chosen, NO_OPTIONS, writes=False, ids=(key,))
    if raw is not None and (entry.versions.needs_server or card is not None):
        (raw,) = yield from shown(entry, [raw], card)
    return None if raw is None else loader(entry, card)(raw)


def find_first(
    entry: ModelEntry[Any], filter: Any, sort: Sort | None = None, card: Card[Any] | None = None
) -> Plan[Any]:
    """The first document that matches, or None."""
    cleaned, keys = parse_filter(entry.paths.fields, filter), sort_keys(sort, entry.paths.fields)
    projection = None if card is None else card.projection
    with translated(entry.model.__name__, [cleaned]):
        if sorts_by_attribute(entry.codec, keys):
            options = {"sort": keys, "skip": 0, "limit": 1}
            raw = next(iter((yield _sorted_by_names(entry, cleaned, options, projection))), None)
        elif ids := [] if keys else named(entry, cleaned):
            raw = yield Call(entry.collection, "find_one", (cleaned, projection), writes=False, ids=ids)
        else:
            raw = yield from find_one(entry.collection, cleaned, projection, sort=keys)
    if raw is None:
        return None
    (raw,) = yield from shown(entry, [raw], card)
    return None if raw is None else loader(entry, card)(raw)


def named(entry: ModelEntry[Any], filter: Raw) -> list[Any]:
    """The id of the one document that a filter means and that nothing else is asked of; else nothing."""
    key = filter.get("_id")
    return [key] if type(key) in NAMING and filter == entry.filter_for_id(key) else []


def loader(entry: ModelEntry[Any], card: Card[Any] | None) -> Callable[[Raw], Any]:
    """What makes of a document what the caller asked for."""
    return entry.codec.load if card is None else card.load


def shown(entry: ModelEntry[Any], raws: list[Raw], card: Card[Any] | None) -> Plan[list[Raw | None]]:
    """Documents as the current version has them; None for one that was deleted meanwhile."""
    if not entry.versions.is_versioned:
        return list(raws)
    if card is None:
        return list((yield from read_current(entry, raws)))
    # A migration may read any field, so a card of an older document is taken from the whole of it.
    older = [raw["_id"] for raw in raws if entry.versions.is_outdated(raw)]
    if not older:
        return list(raws)
    whole = yield from by_ids(entry.collection, older)
    current = yield from read_current(entry, [*whole.values()])
    converted = dict(zip(whole, current, strict=True))
    return [converted.get(freeze(raw["_id"])) if entry.versions.is_outdated(raw) else raw for raw in raws]


def check_window(skip: Any, limit: Any) -> None:
    """Refuse a part of the results that is none."""
    for name, value, least in (("skip", skip, 0), ("limit", limit, 1)):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and least <= value < 2**63):
            # Of a limit of 0 the server makes none at all.
            raise UsageError(
                f"{name}={quote(value)} is not a whole number from {least}", code="filter-invalid"
            )


def find_command(
    entry: ModelEntry[Any],
    filter: Any,
    sort: Sort | None,
    skip: int,
    limit: int | None,
    card: Card[Any] | None = None,
    *,
    deleted: bool = False,
) -> Read:
    """The command whose cursor streams the matching documents, or the deleted ones."""
    check_window(skip, limit)
    keys = sort_keys(sort, entry.paths.fields)
    options = {"sort": keys, "skip": skip or 0, "limit": limit or 0}
    projection = None if card is None else card.projection
    cleaned = parse_filter(entry.paths.fields, filter, entry.deleted.filter() if deleted else None)
    if sorts_by_attribute(entry.codec, keys):
        return _sorted_by_names(entry, cleaned, options, projection)
    return Read(entry.collection, "find", (cleaned, projection), options)


def _sorted_by_names(
    entry: ModelEntry[Any], cleaned: Raw, options: Mapping[str, Any], projection: Mapping[str, Any] | None
) -> Read:
    """The same by a pipeline, for a sort by what a map stored as pairs holds."""
    sorting, tidying = sorting_stages(entry.codec, options["sort"])
    stages: list[Raw] = [{"$match": cleaned}, *sorting]
    stages += [{f"${name}": options[name]} for name in ("skip", "limit") if options[name]]
    stages.append(tidying if projection is None else {"$project": dict(projection)})
    return Read(entry.collection, "aggregate", (stages,), {"allowDiskUse": True})


def count(entry: ModelEntry[Any], filter: Any) -> Plan[int]:
    """How many documents match."""
    cleaned = parse_filter(entry.paths.fields, filter)
    with translated(entry.model.__name__, [cleaned]):
        return (yield from count_documents(entry.collection, cleaned))


def which(entry: ModelEntry[Any], id_or_filter: Any) -> dict[str, Any]:
    """A filter from what may be an id; an id never becomes an operator."""
    if isinstance(id_or_filter, Mapping):
        return parse_filter(entry.paths.fields, id_or_filter)
    return entry.filter_for_id(entry.ids.encode(id_or_filter))


def update_one_raw(
    entry: ModelEntry[Any],
    chosen: Raw,
    update: Any,
    sort: Any = None,
    **options: Any,
) -> Plan[Raw | None]:
    """Update one document and see it; raises `CommitNeeded` where an outdated one must be upgraded first."""
    chain = entry.versions
    if not chain.is_versioned:
        return (yield from find_one_and_update(entry.collection, chosen, update, sort=sort, **options))
    # The first of all versions: an outdated one would be passed over.
    if sort is not None and (yield from matches_outdated(entry, chosen)):
        raise CommitNeeded
    current = {"$and": [chosen, chain.current_only]}
    raw = yield from find_one_and_update(entry.collection, current, update, sort=sort, **options)
    if raw is None and (yield from find_one(entry.collection, chosen, {"_id": 1})) is not None:
        raise CommitNeeded
    return raw


def update_many_raw(entry: ModelEntry[Any], chosen: Raw, update: Any) -> Plan[int]:
    """Update all that match; raises `CommitNeeded` where an outdated one must be upgraded first."""
    if entry.versions.is_versioned:
        if (yield from matches_outdated(entry, chosen)):
            raise CommitNeeded
        chosen = {"$and": [chosen, entry.versions.current_only]}
    result = yield from update_many(entry.collection, chosen, update)
    return result.matched_count


def gone(entry: ModelEntry[Any], identity: Any, done: str = "replaced") -> DataError:
    return DataError(
        f"{entry.model.__name__} {identity!r} is not stored (any more), so it cannot be {done}; "
        + (
            "insert it if it should exist"
            if entry.kinds.family is None
            else "insert it if it should exist; if it is stored as another kind, use change_kind()"
        ),
        code="document-gone",
    )


def check_returns(returns: Any) -> None:
    """Refuse what is neither of the two documents that an update can return."""
    if returns not in ("after", "before"):
        raise UsageError(f"returns={returns!r}; it takes 'after' or 'before'", code="update-invalid")


def require_filter(entry: ModelEntry[Any], filter: Any) -> None:
    """Refuse None where all documents would be written by mistake; {} says so on purpose."""
    if filter is None:
        raise UsageError(
            f"which {entry.model.__name__} documents? A filter is needed here; {{}} means all of them",
            code="filter-invalid",
        )
