"""The documents of rollups: which are missing, which are too many, and how they are made right.

A group's document is found by its keys. The keys that the sources have and
the keys that the documents have are compared on the server, which tells only
where they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import UpdateOne

from treadle.engine.pipelines import update_pipeline
from treadle.engine.recompute import recompute, refuse_unfit
from treadle.graph.changes import Changes
from treadle.graph.derived import GroupRule, aggregates_in
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding
from treadle.graph.quarantine import readable
from treadle.plan import Plan, Raw, bulk_write, delete_many, find
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import KEY, distinct, freeze


def differing(entry: ModelEntry[Any]) -> Plan[list[list[Any]]]:
    """The keys of groups that have sources and no document, or several documents.

    Of groups with outdated sources all are listed. Documents without sources are found when they are read.
    """
    group = entry.rules.group
    of_sources = key_stages(group)
    documents = [{"$project": {"_id": group.on.expression(), "documents": {"$literal": 1}}}]
    stages = [
        *of_sources,
        {"$set": {"sources": 1}},
        {"$unionWith": {"coll": entry.collection, "pipeline": documents}},
        {"$group": {"_id": "$_id", "s": {"$sum": "$sources"}, "d": {"$sum": "$documents"}}},
        {"$match": {"$expr": {"$or": [{"$gt": ["$s", "$d"]}, {"$gt": ["$d", 1]}]}}},
        {"$sort": {"_id": 1}},
    ]
    return distinct((yield from group_keys(entry, stages, of_sources)))


def key_stages(group: GroupRule, only: Sequence[Raw] = ()) -> list[Raw]:
    """Stages that leave the keys of groups, each once."""
    return [*group.match.stages(), *only, {"$group": {"_id": f"${KEY}"}}]


def group_keys(entry: ModelEntry[Any], stages: Sequence[Raw], outdated: Sequence[Raw]) -> Plan[list[Any]]:
    """The ids of the rows that stages give for the sources of all groups."""
    group = entry.rules.group
    reading = group.source.sources.group(group.condition, stages, reads=group.source_paths, outdated=outdated)
    return [row["_id"] for row in (yield from readable(entry.model.__name__, reading))]


def described(entry: ModelEntry[Any], key: Sequence[Any]) -> Raw:
    """A group's key, as a finding shows it."""
    return dict(zip(entry.rules.group.on.fields, key, strict=True))


def arrange(
    server: Capabilities, entry: ModelEntry[Any], keys: Sequence[Any], ledger: Changes
) -> Plan[Arranged]:
    """Inside a transaction, let each of these groups have one document if it has sources, else none.

    A document that is made here has all its values, so that its formulas can be computed.
    """
    group = entry.rules.group
    documents = yield from find(entry.collection, entry.filter_for_keys(keys), sort=[("_id", 1)])
    values = yield from recompute([group], keys, server)
    expected = {freeze(key): key for key in keys if values[freeze(key)][group.path]}
    present: set[Any] = set()
    surplus: list[Raw] = []
    for each in documents:
        frozen = freeze(entry.key_of(each))
        if frozen not in expected or frozen in present:
            surplus.append(each)
        present.add(frozen)
    missing = [key for frozen, key in expected.items() if frozen not in present]
    made: list[Any] = []
    if surplus:
        yield from delete_many(entry.collection, {"_id": {"$in": [each["_id"] for each in surplus]}})
        yield from ledger.add(entry, [(each, None) for each in surplus])
    if missing:
        every = yield from recompute(aggregates_in(entry), missing, server)
        operations = []
        for key in missing:
            refuse_unfit(aggregates_in(entry), every[freeze(key)])
            sets = {path: {"$literal": value} for path, value in every[freeze(key)].items()}
            operations.append(
                UpdateOne(entry.filter_for_key(key), update_pipeline(entry, sets, {}), upsert=True)
            )
        result = yield from bulk_write(entry.collection, operations, ordered=False)
        made = list((result.upserted_ids or {}).values())
    return Arranged(made, [entry.key_of(each) for each in surplus])


@dataclass(slots=True, eq=False, repr=False)
class Arranged:
    """The ids of documents that were made, and the keys of those that were removed."""

    made: list[Any]
    removed: list[Any]


def examine_groups(server: Capabilities, entry: ModelEntry[Any], keys: Sequence[Any]) -> Plan[list[Finding]]:
    """Groups without a document, and documents beyond the first of their group."""
    group = entry.rules.group
    values = yield from recompute([group], keys, server)
    documents = yield from find(
        entry.collection, entry.filter_for_keys(keys), entry.key_projection(), sort=[("_id", 1)]
    )
    by_key: dict[Any, list[Any]] = {}
    for each in documents:
        by_key.setdefault(freeze(entry.key_of(each)), []).append(each["_id"])
    findings = []
    for key in keys:
        name, path, key_fields = entry.model.__name__, ", ".join(group.on.fields), described(entry, key)
        ids = by_key.get(freeze(key), [])
        if not ids and values[freeze(key)][group.path]:
            identity = key[0] if group.identity else tuple(key)
            findings.append(Finding(group.pattern, name, identity, path, None, key_fields))
        # Those without sources are found when each document is looked at.
        findings.extend(Finding(group.pattern, name, each, path, key_fields, None) for each in ids[1:])
    return findings


def orphan(entry: ModelEntry[Any], document: Raw) -> Finding:
    """The document of a group that has no sources."""
    group = entry.rules.group
    path, key_fields = ", ".join(group.on.fields), described(entry, entry.key_of(document))
    return Finding(group.pattern, entry.model.__name__, document["_id"], path, key_fields, None)


def keys_found(entry: ModelEntry[Any], findings: Sequence[Finding]) -> Plan[list[Any]]:
    """The groups that findings are about."""
    group = entry.rules.group
    keys: dict[Any, Any] = {}
    others = []
    about_groups = ", ".join(group.on.fields)
    for finding in findings:
        key_fields = finding.expected if finding.stored is None else finding.stored
        if finding.pattern == "set-aside" and isinstance(finding.document_id, tuple):
            keys[freeze(list(finding.document_id))] = list(finding.document_id)
        elif finding.path == about_groups:
            keys[freeze(list(key_fields.values()))] = list(key_fields.values())
        else:
            others.append(finding.document_id)
    reading = find(entry.collection, {"_id": {"$in": others}}, entry.key_projection())
    documents = yield from readable(entry.model.__name__, reading)
    keys.update({freeze(entry.key_of(each)): entry.key_of(each) for each in documents})
    return list(keys.values())
