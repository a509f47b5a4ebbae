"""Plans for the Store's plain calls: insert, get, find, update, replace, delete.

Each costs one command on a model that feeds nothing and maintains nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from treadle.engine import lazy
from treadle.errors import DataError, UsageError
from treadle.graph.pattern import Entry
from treadle.model.document import Document
from treadle.model.storable import check_batch, check_depth, too_deep
from treadle.plan import (
    Call,
    Plan,
    Raw,
    Read,
    count_documents,
    find_one,
    find_one_and_update,
    update_many,
)
from treadle.plan.server_errors import translate
from treadle.query.safety import Sort, clean_filter, sort_keys

D = TypeVar("D", bound=Document)


@contextmanager
def translated(
    name: str, documents: Sequence[Mapping[str, Any]] = (), entry: Entry[Any] | None = None
) -> Generator[None]:
    """Raise the clear error in place of the driver's."""
    try:
        yield
    except Exception as error:
        for rule in entry.answering("translate") if entry is not None else ():
            if (clear := rule.translate(error)) is not None:
                raise clear from error
        better = translate(error, name, documents)
        if better is error:
            raise
        raise better from error


def dump(entry: Entry[D], document: D, altered: list[Any]) -> Raw:
    """The document to store; refuses what the server would."""
    return dump_all(entry, [document], altered)[0]


def dump_all(entry: Entry[D], documents: Sequence[D], altered: list[Any]) -> list[Raw]:
    """The documents to store; refuses what the server would."""
    try:
        raws = entry.codec.dump_all(documents, altered)
    except RecursionError:
        raise too_deep(entry.model.__name__) from None
    if not entry.codec.bounded_depth:
        for raw in raws:
            check_depth(raw, entry.model.__name__)
    return raws


def as_stored(entry: Entry[D], document: D, raw: Raw, altered: list[Any]) -> D:
    """The document as a later read will show it; asked for before anything is written."""
    document.__pydantic_fields_set__.add("id")
    if not altered:
        return document
    try:
        return entry.codec.load(copy.deepcopy(raw))
    except DataError as error:
        raise UsageError(
            f"this {entry.model.__name__} could not be read back: with dates in UTC and cut to milliseconds "
            f"it no longer fits its own model ({error})",
            code="model-inconsistent",
        ) from None


def insert(entry: Entry[D], document: D) -> Plan[D]:
    """Store one new document."""
    altered: list[Any] = []
    raw = dump(entry, document, altered)
    stored = as_stored(entry, document, raw, altered)
    try:
        yield Call(entry.collection, "insert_one", (raw,))
    except Exception as error:
        better = translate(error, entry.model.__name__, [raw])
        if better is error:
            raise
        raise better from error
    return stored


def insert_many(entry: Entry[D], documents: Iterable[D]) -> Plan[list[D]]:
    """Store new documents, in order; stops at the first that the server refuses."""
    documents = list(documents)
    if not documents:
        return []
    altered: list[Any] = []
    raws = dump_all(entry, documents, altered)
    check_batch(raws, entry.model.__name__)
    stored = documents
    if altered:
        stored = [as_stored(entry, each, raw, altered) for each, raw in zip(documents, raws, strict=True)]
    with translated(entry.model.__name__, raws):
        yield Call(entry.collection, "insert_many", (raws,))
    return stored


def get(entry: Entry[D], identity: Any) -> Plan[D | None]:
    """The document with this id, or None."""
    raw = yield Call(entry.collection, "find_one", (entry.one(entry.identity(identity)),), {}, writes=False)
    if raw is not None and entry.attends:
        (raw,) = yield from lazy.present(entry, [raw])
    return None if raw is None else entry.codec.load(raw)


def find_first(entry: Entry[D], filter: Any, sort: Sort | None = None) -> Plan[D | None]:
    """The first document that matches, or None."""
    cleaned = clean_filter(entry.codec, filter)
    with translated(entry.model.__name__, [cleaned]):
        raw = yield from find_one(entry.collection, cleaned, sort=sort_keys(sort, entry.codec))
    if entry.versioned:
        raws = yield from lazy.attend(entry, [] if raw is None else [raw], filter)
        raw = raws[0] if raws else None
    return None if raw is None else entry.codec.load(raw)


def check_window(skip: Any, limit: Any) -> None:
    """Refuse a part of the results that is none."""
    for name, value in (("skip", skip), ("limit", limit)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise UsageError(f"{name}={value!r} is not a whole number from 0", code="filter-invalid")


def find_command(entry: Entry[Any], filter: Any, sort: Sort | None, skip: int, limit: int | None) -> Read:
    """The command whose cursor streams the matching documents."""
    check_window(skip, limit)
    options = {"sort": sort_keys(sort, entry.codec), "skip": skip, "limit": limit or 0}
    return Read(entry.collection, "find", (clean_filter(entry.codec, filter),), options)


def count(entry: Entry[Any], filter: Any) -> Plan[int]:
    """How many documents match."""
    cleaned = clean_filter(entry.codec, filter)
    with translated(entry.model.__name__, [cleaned]):
        return (yield from count_documents(entry.collection, cleaned))


def which(entry: Entry[Any], id_or_filter: Any) -> dict[str, Any]:
    """A filter from what may be an id; an id never becomes an operator."""
    if isinstance(id_or_filter, Mapping):
        return clean_filter(entry.codec, id_or_filter)
    return entry.one(entry.identity(id_or_filter))


def update_one_raw(entry: Entry[Any], chosen: Raw, update: Any) -> Plan[Raw | None]:
    """Update one document and see it; one of an older version is upgraded up first."""
    if not entry.versioned:
        return (yield from find_one_and_update(entry.collection, chosen, update))
    current = {"$and": [chosen, lazy.current_only(entry)]}
    for _ in range(entry.limits.upgrade_attempts_max):
        raw = yield from find_one_and_update(entry.collection, current, update)
        if raw is not None:
            return raw
        upgraded = yield from lazy.bring_up(entry, chosen, limit=1)
        if not upgraded and (yield from find_one(entry.collection, chosen, {"_id": 1})) is None:
            return None
    raise lazy.contended(entry)


def update_many_raw(entry: Entry[Any], chosen: Raw, update: Any) -> Plan[int]:
    """Update all that match; those of older versions are brought up first."""
    if entry.versioned:
        yield from lazy.bring_up(entry, chosen)
        chosen = {"$and": [chosen, lazy.current_only(entry)]}
    result = yield from update_many(entry.collection, chosen, update)
    return result.matched_count


def gone(entry: Entry[Any], identity: Any) -> DataError:
    return DataError(
        f"{entry.model.__name__} {identity!r} is not stored (any more), so it cannot be replaced; "
        + (
            "insert it if it should exist"
            if entry.family is None
            else "insert it if it should exist; if it is stored as another kind, use change_kind()"
        ),
        code="document-gone",
    )


def require_filter(entry: Entry[Any], filter: Any) -> None:
    """Refuse None where all documents would be written by mistake; {} says so on purpose."""
    if filter is None:
        raise UsageError(
            f"which {entry.model.__name__} documents? A filter is needed here; {{}} means all of them",
            code="filter-invalid",
        )
