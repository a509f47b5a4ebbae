"""Outdated documents where a call meets them: upgraded for a reader, stored upgraded before a write.

A reader always gets the current version. With `migrate_on_read="store"` what
it got is stored as well, which never fails the reader. An upgraded document
is stored inside a transaction, so that a concurrent write of it conflicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pymongo import ReplaceOne
from pymongo.errors import PyMongoError

from treadle.errors import DataError
from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.graph.versions import Upgraded
from treadle.model.bson_types import ENCODING_ERRORS
from treadle.model.text import get_logger
from treadle.plan import (
    Plan,
    Raw,
    bulk_write,
    by_id,
    find,
    find_one,
    is_inside,
    server_facts,
    transact,
)
from treadle.plan.capabilities import Capabilities

log = get_logger(__name__)


# -- for readers --------------------------------------------------------------------------------


def read_current(entry: ModelEntry, raws: Sequence[Raw]) -> Plan[list[Raw]]:
    """Stored documents as current ones; stored so as well where the model says it. Raises `DataError`."""
    chain = entry.versions
    outdated = [raw for raw in raws if chain.is_outdated(raw)]
    if not outdated:
        return list(raws)
    current = (yield from chain.upgrade(raws)).required()
    # Where others follow, only the background migration stores documents: it lets them follow.
    stores_back = chain.stores_back and not chain.writes_older and entry.kinds.root.effects.is_plain
    if stores_back and not (yield from is_inside()):
        yield from _store_back(entry, [raw["_id"] for raw in outdated])
    return current


def upgraded(entry: ModelEntry, raws: Sequence[Raw]) -> Plan[list[Raw]]:
    """Stored documents as current ones, nothing stored. Raises `DataError`."""
    return (yield from entry.versions.upgrade(raws)).required()


def _store_back(entry: ModelEntry, keys: Sequence[Any]) -> Plan[None]:
    def store() -> Plan[None]:
        documents = yield from find(entry.collection, {"_id": {"$in": list(keys)}})
        yield from upgrade_stored(entry, documents, Changes())

    if not (yield from server_facts()).transactions:
        return
    try:
        yield from transact(store)
    except (PyMongoError, DataError, *ENCODING_ERRORS) as error:
        # The reader has what it asked for, and the document is upgraded another time. The server's
        # message may quote the document, and has no place in a log.
        kind = f"{type(error).__name__}, code {getattr(error, 'code', None)}"
        log.warning("%s: could not store upgraded documents (%s)", entry.model.__name__, kind)


# -- before a write -----------------------------------------------------------------------------


def upgrade_stored(entry: ModelEntry, raws: Sequence[Raw], changes: Changes) -> Plan[list[Raw]]:
    """Store documents, just read in the transaction under way, as current ones; these, in order.

    Raises `DataError` for one that cannot be upgraded.
    """
    current = (yield from entry.versions.upgrade(raws)).required()
    if (yield from store_converted(entry, raws, current)):
        outdated = [each["_id"] for each in raws if entry.versions.is_outdated(each)]
        changes.note_upgraded(entry, outdated)
    return current


def store_converted(entry: ModelEntry, raws: Sequence[Raw], converted: Sequence[Raw]) -> Plan[int]:
    """Store documents in another version, in the transaction in which they were read; how many changed."""
    changed = [each for raw, each in zip(raws, converted, strict=True) if each is not raw]
    yield from replace_each(entry.collection, changed)
    return len(changed)


def replace_each(collection: str, documents: Sequence[Raw]) -> Plan[None]:
    """Store documents in the place of those with their ids."""
    if documents:
        writes = [ReplaceOne(by_id(each["_id"]), each) for each in documents]
        yield from bulk_write(collection, writes, ordered=False)


def upgrade_possible(entry: ModelEntry, condition: Raw, changes: Changes) -> Plan[Upgraded]:
    """Store the outdated documents that match and can be upgraded as current ones; what became of each.

    Runs inside a transaction.
    """
    documents = yield from find(entry.collection, {"$and": [condition, entry.versions.outdated_only]})
    upgraded = yield from entry.versions.upgrade(documents)
    yield from store_converted(entry, *upgraded.pairs)
    changes.note_upgraded(entry, [each["_id"] for each in upgraded.documents])
    return upgraded


def upgrade_matching_upgraded(
    entry: ModelEntry, own: Raw, changes: Changes, writes: Iterable[str] | None = ()
) -> Plan[None]:
    """Store as current ones the outdated documents that match only once they are upgraded.

    Without it a write would not find them by a renamed field, or would write a
    changed field among these paths, None for any. Runs inside a transaction.
    """
    if entry.targets.splits(own, writes):
        images = yield from entry.targets.find_outdated(own)
        documents = [each.document for each in images]
        yield from replace_each(entry.collection, documents)
        changes.note_upgraded(entry, [each["_id"] for each in documents])


def matches_outdated(entry: ModelEntry, condition: Raw, collection: str | None = None) -> Plan[bool]:
    """Whether an outdated document meets a condition as it is stored."""
    outdated = {"$and": [condition, entry.versions.outdated_only]}
    return (yield from find_one(collection or entry.collection, outdated, {"_id": 1})) is not None


def has_outdated(entry: ModelEntry) -> Plan[bool]:
    """Whether any document of a model, archived or not, is outdated."""
    if entry.versions.may_change:
        for collection in entry.everything.collections:
            if (yield from matches_outdated(entry, {}, collection)):
                return True
    return False


# -- after a write ------------------------------------------------------------------------------


def lowered(entry: ModelEntry, documents: Sequence[Raw]) -> Plan[list[Raw]]:
    """Current documents in the version that this Store writes."""
    chain = entry.versions
    return (yield from chain.lower(documents, chain.written)) if chain.writes_older else list(documents)


def lower_documents(changes: Changes) -> Plan[None]:
    """Store what a commit has stored in the current version as this Store writes it: its last step.

    Everything before reads and writes current documents.
    """
    for model, keys in changes.to_lower():
        chain = model.versions
        chosen = {"_id": {"$in": keys}, **chain.current_only}
        current = yield from find(model.collection, chosen)
        converted = yield from chain.lower(current, chain.written)
        yield from replace_each(model.collection, converted)


def check_lowering(entry: ModelEntry, server: Capabilities) -> None:
    """Refuse what would show others a version that this Store must not write."""
    if entry.versions.writes_older:
        what = f"an update of a {entry.model.__name__} that is written in an older version (write_versions=)"
        server.require_transactions(what, "replace the document", code="write-version-update")
