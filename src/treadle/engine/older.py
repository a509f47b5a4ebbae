"""Sources in an older version, as whoever reads them for others sees them: in the current one.

A value that follows from other documents follows from what their migrations
make of them, whether or not they were migrated yet. Documents at hand are
converted in memory. Where the server aggregates, it takes the current ones
from the collection; in the place of each older one it puts the converted one,
which the pipeline itself holds.

Which targets an older document belongs to is known only once it is converted.
So a recomputation reads all older documents of a source; set-up makes the
index by which they are found, and there are none once `migrate` has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bson

from treadle.engine.version_upgrade import upgraded_leniently
from treadle.graph.gather import GatherRule
from treadle.graph.pattern import Entry
from treadle.graph.stored_pages import matching, readable_page
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED
from treadle.plan import Plan, Raw, find, find_one
from treadle.query.keys import freeze

# Older sources that are converted into one aggregation.
OLDER_CHUNK = 2_000
# Their size; the command holds them twice.
OLDER_BYTES_MAX = 4 * 1024 * 1024


def older_sources(rule: GatherRule, keys: Sequence[Any] | None) -> Plan[list[Raw]]:
    """The older documents of a rule's source, converted; those of some targets, where Python can tell.

    They travel in a command, which has an end: without what nobody follows,
    and where only the targets are asked for (`keys` is None), one for each.
    """
    source = rule.source
    if not source.versions.may_change:
        return []
    condition, limits = source.versions.outdated_only, source.limits
    wanted = None if keys is None or not rule.key.local else set(map(freeze, keys))
    kept: list[Raw] = []
    met: set[Any] = set()
    last: list[Any] | None = None
    collections = [source.collection]
    if (archive := source.sources.archive) is not None:
        collections.append(archive)
    for collection in collections:
        last = None
        while True:
            reading = matching(collection, condition, last, limits.upgrade_chunk)
            documents, last = yield from readable_page(source.model.__name__, reading, last)
            if last is None:
                break
            for raw in (yield from upgraded_leniently(source, documents)):
                if keys is None and not rule.server_side:
                    mine = {freeze(key) for key, _ in rule.contributions(raw)}
                    needed = not mine <= met
                    met |= mine
                else:
                    needed = wanted is None or any(
                        freeze(key) in wanted for key in rule.key.of_sources([raw])
                    )
                if needed:
                    kept.append(_followed(source, raw))
    return kept


def _followed(source: Entry[Any], raw: Raw) -> Raw:
    """A source without the fields that no rule reads."""
    names = source.once("followed", lambda: _names_followed(source))
    return raw if names is None else {name: value for name, value in raw.items() if name in names}


def _names_followed(source: Entry[Any]) -> set[str] | None:
    """The fields of a source that its rules read, however they are maintained; None for all."""
    names = {"_id", RESERVED}
    names.add(source.versions.field)
    if source.family is not None:
        names.add(source.family.discriminator)
    for rule in [rule for each in source.related for rule in each.feeding(GatherRule, None)]:
        paths = rule.reads()[source.collection]
        if paths is None:
            return None
        names |= {path.split(".", 1)[0] for path in paths}
    return names


def has_older(source: Entry[Any]) -> Plan[bool]:
    """Whether a source holds documents of older versions."""
    if not source.versions.may_change:
        return False
    condition = source.versions.outdated_only
    return (yield from find_one(source.collection, condition, {"_id": 1})) is not None


def older_among(source: Entry[Any], ids: Sequence[Any]) -> Plan[list[Raw]]:
    """Those of some sources that are older, converted; without what no rule reads."""
    if not ids or not source.versions.may_change:
        return []
    chosen = {"$and": [{"_id": {"$in": list(ids)}}, source.versions.outdated_only]}
    current = yield from upgraded_leniently(source, (yield from find(source.collection, chosen)))
    return [_followed(source, each) for each in current]


def in_commands(source: Entry[Any], match: Raw, older: Sequence[Raw]) -> list[list[Raw]]:
    """Stages as `through_versions` gives them, for several aggregations of which each fits into a command.

    The first has the documents of the current version; what the others find is put together with it.
    """
    first, *others = _pieces(source, older)
    rest = [through_versions(source, match, piece, only=True) for piece in others]
    return [through_versions(source, match, first), *rest]


def _pieces(source: Entry[Any], older: Sequence[Raw]) -> list[list[Raw]]:
    """Older documents, as many at a time as a command holds twice and the server finds quickly."""
    pieces, size = list[list[Raw]]([[]]), 0
    for each in older:
        size += len(bson.encode(each, codec_options=CODEC_OPTIONS))
        if pieces[-1] and (len(pieces[-1]) >= OLDER_CHUNK or size > OLDER_BYTES_MAX):
            pieces.append([])
            size = 0
        pieces[-1].append(each)
    return pieces


def through_versions(
    source: Entry[Any], match: Raw, older: Sequence[Raw], *, only: bool = False
) -> list[Raw]:
    """Stages that begin an aggregation over a source with its documents, these older ones converted.

    With `only`, these alone, as long as they are older.
    """
    if not older:
        return [{"$match": match}] if match else []
    ids = [each["_id"] for each in older]
    field = source.versions.field
    converted = {"$arrayElemAt": [{"$literal": list(older)}, "$$at"]}
    # One that was migrated since it was read is taken as it is now.
    versions = [{"$ifNull": [f"${field}", 1]}, {"$let": {"vars": {"v": converted}, "in": f"$$v.{field}"}}]
    replaced = {"$and": [{"$gte": ["$$at", 0]}, {"$ne": versions}]}
    at = {"$indexOfArray": [{"$literal": ids}, "$_id"]}
    mine: Raw = {"_id": {"$in": ids}}
    if only:
        chosen: Raw = {"$and": [mine, source.versions.outdated_only]}
    else:
        chosen = {"$or": [{"$and": [match, source.versions.current_only]}, mine]}
    return [
        {"$match": chosen},
        {"$replaceWith": {"$let": {"vars": {"at": at}, "in": {"$cond": [replaced, converted, "$$ROOT"]}}}},
        *([{"$match": match}] if match else []),
    ]
