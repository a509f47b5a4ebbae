"""The reads of documents that are stored as one document each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from uuid import UUID

from bson import ObjectId

from treadle.engine.documents import translated
from treadle.engine.indexes import declared_indexes
from treadle.engine.pipelines import READ_KEYS_MAX
from treadle.engine.queries import find_matching, refuse_changed, upgraded_for_reader
from treadle.engine.reads import (
    ArchiveReader,
    DocumentReader,
    PipelineReader,
    adapted_values,
    checked_pipeline,
    find_command,
    path_of,
)
from treadle.errors import DeclarationError, UsageError
from treadle.graph.layout import Layout
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Page
from treadle.graph.query import Query
from treadle.graph.stored_pages import chunks
from treadle.model.document import Document
from treadle.model.text import quote
from treadle.plan import NO_OPTIONS, Call, Plan, Raw, Read, count_documents, find
from treadle.query import keyset
from treadle.query.attributes import refuse_attributes
from treadle.query.filters import Sort, confine, parse_filter, sort_keys
from treadle.query.keys import distinct, freeze
from treadle.query.paths import overlap, resolve, value_at

D = TypeVar("D", bound=Document)

# Documents of one page().
PAGE_MAX = 10_000

# What MongoDB's text search reads as operators: phrases in quotes, and words to leave out.
_TEXT_OPERATORS = re.compile(r'["\\]|(?<!\w)-+')

# Types of which a value in a filter is an id, and no operator.
_ID_TYPES = frozenset({ObjectId, str, int, UUID})


class DocumentReads(Layout[D]):
    """What reads documents one by one."""

    entry: ModelEntry[D]

    def __init__(self, entry: ModelEntry[D]) -> None:
        self.entry = entry
        # Whether an upgrade changes what tells the model's documents from others.
        self._is_divided = entry.versions.divide(entry.targets.filter()) is not None
        needs_plan = self._is_divided or entry.versions.needs_server
        self._reads_at_once = entry.everything.archive is None and not needs_plan

    # -- by id -------------------------------------------------------------------------------------

    def read_command(self, identity: Any) -> Call | None:
        if not self._reads_at_once:
            return None
        key = self.entry.ids.encode(identity)
        if type(key) not in _ID_TYPES:
            return None
        chosen = (self.entry.filter_for_id(key),)
        return Call(self.entry.collection, "find_one", chosen, NO_OPTIONS, False, (key,))

    def get(self, identity: Any, card: Any = None) -> Plan[Any]:
        if self._is_divided:
            return (yield from self.first(self.id_filter(identity), None, card))
        key = self.entry.ids.encode(identity)
        chosen = self.entry.filter_for_id(key), None if card is None else card.projection
        for collection in self._lookups():
            raw = yield Call(collection, "find_one", chosen, NO_OPTIONS, False, (key,))
            if raw is not None:
                return (yield from self._load([raw], card))[0]
        return None

    def _lookups(self) -> Sequence[str]:
        """The collections to look into for one document, in order."""
        scope = self.entry.everything
        if scope.archive is None:
            return scope.collections
        # It may move between two looks, and move back during the second.
        live, archive = scope.collections
        return live, archive, live, archive, live

    def many(self, identities: Iterable[Any], card: Any = None) -> Plan[list[Any]]:
        entry = self.entry
        if entry.everything.archive is not None or self._is_divided:
            return (yield from super().many(identities, card))
        keys = [entry.ids.encode(each) for each in identities]
        projection, raws = None if card is None else card.projection, list[Raw]()
        for chunk in chunks(distinct(keys), READ_KEYS_MAX):
            chosen = {"_id": {"$in": chunk}, **entry.targets.filter()}
            raws += yield Read(entry.collection, "find", (chosen, projection), ids=chunk)
        # Loading takes the documents over.
        found = [freeze(raw["_id"]) for raw in raws]
        by_key = dict(zip(found, (yield from self._load(raws, card)), strict=True))
        return [by_key.get(freeze(key)) for key in keys]

    def _load(self, raws: list[Raw], card: Any) -> Plan[list[Any]]:
        """Return documents as the caller asked for them; None for one that was deleted concurrently."""
        load = Query(card=card).loader(self.entry.codec)
        current = yield from upgraded_for_reader(self.entry, raws, card)
        return [None if raw is None else load(raw) for raw in current]

    # -- by a filter -------------------------------------------------------------------------------

    def first(self, filter: Any, sort: Sort | None, card: Any = None) -> Plan[Any]:
        entry = self.entry
        condition, keys = parse_filter(entry.paths.fields, filter), sort_keys(sort, entry.paths.fields)
        yield from refuse_changed(entry, "a sort", dict(keys or ()))
        projection = None if card is None else card.projection
        with translated(entry.model.__name__, [condition]):
            if not keys and not self._is_divided and self._is_by_id(condition):
                chosen, ids = (condition, projection), (condition["_id"],)
                raw = yield Call(entry.collection, "find_one", chosen, writes=False, ids=ids)
                raws = [] if raw is None else [raw]
            else:
                raws = yield from find_matching(entry, condition, keys, 1, projection)
        return next(iter((yield from self._load(raws, card))), None)

    def _is_by_id(self, condition: Raw) -> bool:
        """Whether a filter means one document by its id, and asks nothing else of it."""
        key = condition.get("_id")
        return type(key) in _ID_TYPES and condition == self.entry.filter_for_id(key)

    def exists(self, filter: Any) -> Plan[bool]:
        condition = parse_filter(self.entry.paths.fields, filter)
        with translated(self.entry.model.__name__, [condition]):
            return bool((yield from find_matching(self.entry, condition, None, 1, {"_id": 1})))

    def count(self, filter: Any) -> Plan[int]:
        entry, condition = self.entry, parse_filter(self.entry.paths.fields, filter)
        divided = entry.versions.divide(condition)
        with translated(entry.model.__name__, [condition]):
            if divided is None:
                return (yield from count_documents(entry.collection, condition))
            current = yield from count_documents(entry.collection, entry.versions.matching_current(divided))
            return current + len((yield from entry.targets.find_outdated(divided)))

    def reader(self, query: Query) -> DocumentReader[Any]:
        return DocumentReader(self.entry, find_command(self.entry, query), query)

    def archive_reader(self, query: Query) -> ArchiveReader:
        return ArchiveReader(self.entry, query)

    def search(self, text: str, filter: Any, limit: int | None, card: Any = None) -> DocumentReader[Any]:
        """Read the documents that hold the words, the best match first."""
        entry, query = self.entry, Query(None, limit=limit, card=card)
        if not isinstance(text, str) or not text.strip():
            raise UsageError(
                f"a search of {entry.model.__name__} takes the words to look for, not {text!r}",
                code="search-invalid",
            )
        indexes = declared_indexes(entry.kinds.root)
        if not any("text" in dict(index.document["key"]).values() for index in indexes):
            raise UsageError(
                f"no field of {entry.model.__name__} is marked Indexed(text=True), so its collection has no "
                "text index to search; mark the fields and run setup()",
                code="search-invalid",
            )
        command = find_command(entry, query)
        words = {"$text": {"$search": _TEXT_OPERATORS.sub(" ", text)}}
        # In front of the caller's filter, which must not replace it.
        sought = {"$and": [words, parse_filter(entry.paths.fields, filter)]}
        options = {**command.options, "sort": [("score", {"$meta": "textScore"}), ("_id", 1)]}
        command = replace(command, arguments=(sought, *command.arguments[1:]), options=options)
        return DocumentReader(entry, command, query)

    # -- page after page ---------------------------------------------------------------------------

    def page(
        self, filter: Any, sort: Sort | None, size: int, after: str | None, card: Any = None
    ) -> Plan[Page[Any]]:
        entry = self.entry
        _require_page_size(size)
        keys = refuse_attributes(entry.codec, sort_keys(sort or [], entry.paths.fields)) or []
        condition, paths = parse_filter(entry.paths.fields, filter), [*dict(keys)]
        yield from refuse_changed(entry, "page", paths, condition)
        mixed = self._mixed(paths)
        query, chosen = keyset.digest(entry.collection, condition, keys), condition
        if after is not None:
            beyond = keyset.after(keys, keyset.from_token(query, after, len(keys)), mixed=mixed)
            chosen = {"$and": [condition, beyond]} if condition else beyond
        with translated(entry.model.__name__, [chosen]):
            projection = _page_projection(paths, card)
            raws = yield from find(entry.collection, chosen, projection, sort=keys, limit=size + 1)
        following = self._token(query, raws[size - 1], paths) if len(raws) > size else None
        documents = yield from self._load(raws[:size], card)
        # One may have been deleted concurrently.
        return Page([each for each in documents if each is not None], following)

    def _token(self, query: bytes, last: Raw, paths: Sequence[str]) -> str:
        """Return the token of the page after a document."""
        values = [value_at(last, path) for path in paths]
        for path, value in zip(paths, values, strict=True):
            if isinstance(value, list):
                raise self._several_values(path)
        return keyset.to_token(query, values)

    def _mixed(self, paths: Sequence[str]) -> list[str]:
        """Return the paths of a sort whose values may be of several types."""
        return [path for path in paths if self._is_mixed(path)]

    def _is_mixed(self, path: str) -> bool:
        """Whether values at a path of a sort may be of several types; refuses a path into an array."""
        try:
            resolved = resolve(self.entry.codec, path, "", "sort-invalid")
        except DeclarationError:
            return True
        if resolved.in_array:
            raise self._several_values(path)
        return resolved.shape.kind not in ("scalar", "enum", "literal")

    def _several_values(self, path: str) -> UsageError:
        return UsageError(
            f"the sort names {path!r}, which holds several values in one {self.entry.model.__name__}; page "
            "sorts by single values",
            code="sort-invalid",
        )

    # -- values and pipelines ----------------------------------------------------------------------

    def distinct(self, field: str, filter: Any) -> Plan[list[Any]]:
        entry = self.entry
        path, owner = path_of(entry, field)
        condition = parse_filter(entry.paths.fields, filter)
        yield from refuse_changed(entry, "distinct", [path.stored], condition)
        with translated(entry.model.__name__, [condition]):
            values = yield Call(entry.collection, "distinct", (path.stored, condition), {}, writes=False)
        return adapted_values(owner, path, values)

    def aggregate(self, pipeline: Any, into: Any) -> PipelineReader:
        entry, scope = self.entry, dict(self.entry.targets.filter())
        stages = checked_pipeline(entry, pipeline)
        first = stages[0] if stages else {}
        if scope and "$match" in first:
            # One condition: a text search must stand in the first stage.
            stages[0] = {"$match": confine(entry.codec, first["$match"])}
        elif scope and "$geoNear" in first:
            near = first["$geoNear"]
            stages[0] = {"$geoNear": {**near, "query": confine(entry.codec, near.get("query", {}))}}
        elif scope:
            stages.insert(0, {"$match": scope})
        command = Read(entry.collection, "aggregate", (stages,), {"allowDiskUse": True})
        return PipelineReader(entry, command, into)


def _require_page_size(size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= PAGE_MAX:
        raise UsageError(
            f"size={quote(size)}; a page has from 1 to {PAGE_MAX:,} documents", code="filter-invalid"
        )


def _page_projection(paths: Sequence[str], card: Any) -> Raw | None:
    """Return what is read of a page: of a card its fields, and those of the sort."""
    if card is None:
        return None
    extra = [path for path in paths if not any(overlap(path, other) for other in card.paths)]
    return {**card.projection, **dict.fromkeys(extra, 1)}
