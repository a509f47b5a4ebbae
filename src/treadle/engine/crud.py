"""Plans for the Store's plain reads: get, find, count, search."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from uuid import UUID

from bson import ObjectId

from treadle.engine.divided_reads import find_matching, refuse_changed
from treadle.engine.documents import translated
from treadle.engine.indexes import declared_indexes
from treadle.engine.pages import by_ids
from treadle.engine.version_upgrade import read_current
from treadle.errors import UsageError
from treadle.graph.card import Card
from treadle.graph.model_entry import ModelEntry
from treadle.graph.query import Query, ReadAs
from treadle.graph.scope import Scope
from treadle.model.document import Document
from treadle.plan import (
    NO_OPTIONS,
    Call,
    Plan,
    Raw,
    Read,
    count_documents,
    find_one,
)
from treadle.query.attributes import sorting_stages, sorts_by_attribute
from treadle.query.filters import Sort, parse_filter, sort_keys
from treadle.query.keys import freeze

D = TypeVar("D", bound=Document)

# What MongoDB's text search reads as operators: phrases in quotes, and words to leave out.
_OPERATORS = re.compile(r'["\\]|(?<!\w)-+')

# Types of which a value in a filter is an id, and no operator.
NAMING = frozenset({ObjectId, str, int, UUID})


def get(entry: ModelEntry, identity: Any, card: Card[Any] | None = None) -> Plan[Any]:
    """The document with this id, archived or not, or None."""
    key = entry.ids.encode(identity)
    chosen: tuple[Any, ...] = (entry.filter_for_id(key),)
    if card is not None:
        chosen = (*chosen, card.projection)
    for collection in _looks(entry.everything):
        raw = yield Call(collection, "find_one", chosen, NO_OPTIONS, writes=False, ids=(key,))
        if raw is not None:
            if entry.versions.needs_server or card is not None:
                (raw,) = yield from shown(entry, [raw], card)
            return None if raw is None else Query(card=card).loader(entry.codec)(raw)
    return None


def _looks(scope: Scope) -> Sequence[str]:
    """The collections to look into for one document, in order."""
    if scope.archive is None:
        return scope.collections
    # It may move between two looks, and move back during the second.
    live, archive = scope.collections
    return live, archive, live, archive, live


def find_first(
    entry: ModelEntry, filter: Any, sort: Sort | None = None, card: Card[Any] | None = None
) -> Plan[Any]:
    """The first document that matches, or None."""
    cleaned, keys = parse_filter(entry.paths.fields, filter), sort_keys(sort, entry.paths.fields)
    yield from refuse_changed(entry, "a sort", [path for path, _ in keys or ()])
    projection = None if card is None else card.projection
    with translated(entry.model.__name__, [cleaned]):
        divided = entry.versions.divide(cleaned) is not None
        if divided or sorts_by_attribute(entry.codec, keys):
            command = read_of(entry, cleaned, keys, limit=1, projection=projection)
            raw = next(iter((yield from find_matching(entry, command))), None)
        elif ids := [] if keys else named(entry, cleaned):
            raw = yield Call(entry.collection, "find_one", (cleaned, projection), writes=False, ids=ids)
        else:
            raw = yield from find_one(entry.collection, cleaned, projection, sort=keys)
    if raw is None:
        return None
    (raw,) = yield from shown(entry, [raw], card)
    return None if raw is None else Query(card=card).loader(entry.codec)(raw)


def named(entry: ModelEntry, filter: Raw) -> list[Any]:
    """The id of the one document that a filter means and that nothing else is asked of; else nothing."""
    key = filter.get("_id")
    return [key] if type(key) in NAMING and filter == entry.filter_for_id(key) else []


def shown(entry: ModelEntry, raws: list[Raw], card: ReadAs | None) -> Plan[list[Raw | None]]:
    """Documents as the current version has them; None for one that was deleted concurrently."""
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


def find_command(entry: ModelEntry, query: Query) -> Read:
    """The command whose cursor streams the matching documents."""
    query.require_window()
    keys = sort_keys(query.sort, entry.paths.fields)
    scope = entry.deleted.filter() if query.deleted else None
    cleaned = parse_filter(entry.paths.fields, query.filter, scope)
    return read_of(entry, cleaned, keys, query.skip or 0, query.limit or 0, query.projection)


def read_of(
    entry: ModelEntry,
    cleaned: Raw,
    keys: Sequence[tuple[str, Any]] | None = None,
    skip: int = 0,
    limit: int = 0,
    projection: Mapping[str, Any] | None = None,
) -> Read:
    """The read of what meets a parsed filter."""
    options = {"sort": keys, "skip": skip, "limit": limit}
    if sorts_by_attribute(entry.codec, keys):
        return _sorted_by_names(entry, cleaned, options, projection)
    return Read(entry.collection, "find", (cleaned, projection), options)


def _sorted_by_names(
    entry: ModelEntry, cleaned: Raw, options: Mapping[str, Any], projection: Mapping[str, Any] | None
) -> Read:
    """The same by a pipeline, for a sort by what a map stored as pairs holds."""
    sorting, tidying = sorting_stages(entry.codec, options["sort"])
    stages: list[Raw] = [{"$match": cleaned}, *sorting]
    stages += [{f"${name}": options[name]} for name in ("skip", "limit") if options[name]]
    stages.append(tidying if projection is None else {"$project": dict(projection)})
    return Read(entry.collection, "aggregate", (stages,), {"allowDiskUse": True})


def count(entry: ModelEntry, filter: Any) -> Plan[int]:
    """How many documents match."""
    cleaned = parse_filter(entry.paths.fields, filter)
    divided = entry.versions.divide(cleaned)
    with translated(entry.model.__name__, [cleaned]):
        condition = cleaned if divided is None else entry.versions.matching_current(divided)
        number = yield from count_documents(entry.collection, condition)
        return number + (0 if divided is None else len((yield from entry.targets.find_outdated(divided))))


# -- text search ------------------------------------------------------------------------------


def search_command(entry: ModelEntry, text: Any, query: Query) -> Read:
    """The command whose cursor streams what holds the words, the best match first."""
    if not isinstance(text, str) or not text.strip():
        raise UsageError(
            f"a search of {entry.model.__name__} takes the words to look for, not {text!r}",
            code="search-invalid",
        )
    if not _has_text_index(entry):
        raise UsageError(
            f"no field of {entry.model.__name__} is marked Indexed(text=True), so its collection has no "
            "text index to search; mark the fields and run setup()",
            code="search-invalid",
        )
    command = find_command(entry, query._replace(filter=None))
    words = _OPERATORS.sub(" ", text)
    # In front of the caller's filter, which must not replace it.
    sought = {"$and": [{"$text": {"$search": words}}, parse_filter(entry.paths.fields, query.filter)]}
    ranked = [("score", {"$meta": "textScore"}), ("_id", 1)]
    options = {**command.options, "sort": ranked}
    return replace(command, arguments=(sought, *command.arguments[1:]), options=options)


def _has_text_index(entry: ModelEntry) -> bool:
    return any("text" in dict(index.document["key"]).values() for index in declared_indexes(entry.kinds.root))
