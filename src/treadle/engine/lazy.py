"""Documents of older versions where they are met: read as the current version, brought up before an update.

A reader always gets the current version. With `migrate_on_read="store"` what
it got is stored as well, unless the document changed meanwhile; a reader
never fails because that could not be done.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from pymongo.errors import ExecutionTimeout, OperationFailure, PyMongoError

from treadle.engine.convert import (
    Converted,
    convert,
    encodable,
    guarded_write,
    lineage_of,
    stops_others,
    store_alone,
)
from treadle.engine.pages import by_ids
from treadle.errors import DataError
from treadle.graph.gather import freeze
from treadle.graph.pattern import Entry
from treadle.graph.versions import Lineage
from treadle.model.encodable import ENCODING_ERRORS
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, bulk_write, by_id, find, find_one, is_inside, one_reply, replace_one, wait
from treadle.plan.capabilities import Capabilities

# Attempts while others write older versions.
UPGRADE_ATTEMPTS_MAX = 30
# The pause between two, times their number.
UPGRADE_PAUSE_SECONDS = 0.002
# How long a reader looks for older documents, to warn of them.
OLD_DOCUMENTS_MILLISECONDS = 200

log = get_logger(__name__)


class OldDocuments(UserWarning):
    """A query may miss documents that are stored in an older version."""


def present(entry: Entry[Any], raws: Sequence[Raw]) -> Plan[list[Raw]]:
    """Stored documents as the current version has them; stored back where the model says so."""
    current = list(raws)
    stale = [number for number, raw in enumerate(raws) if is_stale(entry, raw)]
    back: list[Converted] = []
    conversions = yield from _convert_all(entry, [raws[number] for number in stale])
    for number, conversion in zip(stale, conversions, strict=True):
        current[number] = conversion.after
        lineage = conversion.lineage
        if lineage.stores_back and lineage.written == lineage.current:
            back.append(conversion)
    if back and not (yield from is_inside()):
        # A favour to later readers, which must not fail the caller's transaction.
        yield from _store_back(entry, back)
    return current


def in_memory(entry: Entry[Any], raws: Sequence[Raw]) -> Plan[list[Raw]]:
    """The same, with nothing stored back."""
    return [conversion.after for conversion in (yield from _convert_all(entry, raws))]


def _convert_all(entry: Entry[Any], raws: Sequence[Raw]) -> Plan[list[Converted]]:
    """The conversions of documents to the current version; raises what went wrong with one."""
    conversions = []
    for outcome in (yield from convert(entry, raws)):
        if isinstance(outcome, DataError):
            raise outcome
        conversions.append(outcome)
    return conversions


def is_stale(entry: Entry[Any], raw: Raw) -> bool:
    lineage = lineage_of(entry, raw)
    return lineage is not None and lineage.is_stale(raw)


def _store_back(entry: Entry[Any], converted: Sequence[Converted]) -> Plan[None]:
    writes = [write for each in converted if (write := guarded_write(each)) is not None]
    if not writes or not entry.root.plain:
        # Where others follow, only the background migration may write: it takes them along.
        return
    try:
        yield from bulk_write(entry.collection, writes, ordered=False)
    except (PyMongoError, *ENCODING_ERRORS) as error:
        # The reader has what it asked for; the document is brought up another time. What the server
        # says may quote the document, and has no place in a log.
        kind = f"{type(error).__name__}, code {getattr(error, 'code', None)}"
        log.warning("%s: could not store migrated documents back (%s)", entry.model.__name__, kind)


# -- updates ------------------------------------------------------------------------------------


def bring_up(entry: Entry[Any], condition: Raw, limit: int = 0) -> Plan[int]:
    """Store the documents that match in the current version, because an update speaks of that one."""
    done = idle = 0
    while idle < UPGRADE_ATTEMPTS_MAX:
        older = other_versions(entry)
        most = one_reply(limit or entry.limits.upgrade_chunk)
        documents = yield from find(entry.collection, {"$and": [condition, older]}, **most)
        if not documents:
            return done
        written = yield from _bring_up(entry, documents)
        done += written
        if limit and done:
            return done
        idle = 0 if written else idle + 1
        if idle > 1:
            yield from wait(UPGRADE_PAUSE_SECONDS * idle)
    raise contended(entry)


def matches_older(entry: Entry[Any], condition: Raw) -> Plan[bool]:
    """Whether a document of another version meets a condition."""
    older = {"$and": [condition, other_versions(entry)]}
    return (yield from find_one(entry.collection, older, {"_id": 1})) is not None


def bring_up_but(entry: Entry[Any], condition: Raw) -> Plan[list[Raw]]:
    """The same for all but the documents that cannot be converted; these."""
    documents = yield from find(entry.collection, {"$and": [condition, other_versions(entry)]})
    outcomes = yield from convert(entry, documents)
    bad = [raw for raw, each in zip(documents, outcomes, strict=True) if isinstance(each, DataError)]
    others: Raw = {"_id": {"$nin": [raw["_id"] for raw in bad]}}
    yield from bring_up(entry, {"$and": [condition, others]} if bad else condition)
    return bad


def contended(entry: Entry[Any]) -> DataError:
    return DataError(
        f"documents of {entry.model.__name__} kept being written in other versions while they were to be "
        "updated; try again when fewer writers are at it",
        code="write-contended",
    )


def other_versions(entry: Entry[Any]) -> Raw:
    """The condition that a document is not of its class's current version."""
    conditions = []
    for each in [entry, *entry.below]:
        if each.lineage is not None:
            conditions.append({**each.whole_exactly, each.lineage.field: each.lineage.unlike})
    return conditions[0] if len(conditions) == 1 else {"$or": conditions}


def current_only(entry: Entry[Any]) -> Raw:
    """The condition that a document is of its class's current version."""
    members = [entry, *entry.below]
    lineage = next((each.lineage for each in members if each.lineage is not None), None)
    if lineage is None:
        return {}
    if len({each.lineage.current if each.lineage else None for each in members}) == 1:
        return {lineage.field: lineage.alike}
    return {
        "$or": [
            {**each.whole_exactly, **({lineage.field: each.lineage.alike} if each.lineage else {})}
            for each in members
        ]
    }


def _bring_up(entry: Entry[Any], raws: Sequence[Raw]) -> Plan[int]:
    conversions = yield from _convert_all(entry, raws)
    for each in conversions:
        # Before anything is sent: a transaction does not survive an error, not even the driver's own.
        each.after = encodable(each.after, entry.model)
    writes = [write for each in conversions if (write := guarded_write(each)) is not None]
    if not writes:
        return 0
    try:
        return (yield from bulk_write(entry.collection, writes, ordered=False)).matched_count
    except (OperationFailure, *ENCODING_ERRORS) as error:
        if not stops_others(error):
            raise
    done = 0
    for each in conversions:
        done += yield from store_alone(entry, each)
    return done


def upgraded(entry: Entry[Any], befores: Sequence[Raw]) -> Plan[list[Raw]]:
    """The same inside a transaction, for documents that were just read; the documents after."""
    current = list(befores)
    for _ in range(UPGRADE_ATTEMPTS_MAX):
        stale = [raw for raw in current if is_stale(entry, raw)]
        if not stale:
            return current
        if not (yield from _bring_up(entry, stale)):
            break
        now = yield from by_ids(entry.collection, [raw["_id"] for raw in stale])
        # Again for one that a migration gave a kind, which has versions of its own.
        current = [now.get(freeze(raw["_id"]), raw) for raw in current]
    raise contended(entry)


def downgraded(entry: Entry[Any], raws: Sequence[Raw]) -> Plan[None]:
    """Store documents, just updated in the current version, in the one that this Store writes."""
    for raw in raws:
        lineage = lineage_of(entry, raw)
        if lineage is not None and lineage.written < lineage.current:
            yield from replace_one(entry.collection, by_id(raw["_id"]), lineage.lower(dict(raw)))


def check_lowering(entry: Entry[Any], server: Capabilities) -> None:
    """Refuse what would show others a version that this Store promised not to write."""
    what = f"an update of a {entry.model.__name__} that is written in an older version (write_versions=)"
    server.require_transactions(what, "replace the document", code="write-version-update")


# -- the warning ----------------------------------------------------------------------------------


def warn_once(entry: Entry[Any], filter: Any) -> Plan[None]:
    """Say once per Store that a filter on fields may miss documents of older versions."""
    if entry.warned or entry.lineage is None or not filter or set(filter) <= {"_id"}:
        return
    entry.warned = True
    if entry.lineage.current > 1 and not (yield from is_inside()):
        yield from _look_for(entry, entry.lineage)


def _look_for(entry: Entry[Any], lineage: Lineage) -> Plan[None]:
    older, most = {**entry.whole_scope, **lineage.older}, OLD_DOCUMENTS_MILLISECONDS
    try:
        document = yield from find_one(entry.collection, older, {"_id": 1}, max_time_ms=most)
    except (ExecutionTimeout, OperationFailure):
        # A large collection without any, most likely; not worth a reader's time.
        return
    if document is not None:
        warnings.warn(
            f"{entry.collection} holds {entry.model.__name__} documents of versions before "
            f"{lineage.current}; a filter on a field that a migration renamed does not find them: run "
            "migrate, or name the old field as well",
            OldDocuments,
            stacklevel=2,
        )
