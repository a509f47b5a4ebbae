"""The documents of rollups: which are missing, and which are too many.

A group's document is found by its keys. The keys that the sources have and
the keys that the documents have are compared on the server, which tells only
where they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.engine.aggregation import aggregate_values
from treadle.graph.derived import GroupRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding
from treadle.graph.quarantine import readable
from treadle.plan import Plan, Raw, find
from treadle.query.keys import KEY, distinct, freeze


def differing(entry: ModelEntry) -> Plan[list[list[Any]]]:
    """Return the keys of groups that have sources and no document, or several documents.

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
    """Return the stages that leave the keys of groups, each once."""
    return [*group.match.stages(), *only, {"$group": {"_id": f"${KEY}"}}]


def group_keys(entry: ModelEntry, stages: Sequence[Raw], outdated: Sequence[Raw]) -> Plan[list[Any]]:
    """Return the ids of the rows that stages give for the sources of all groups."""
    group = entry.rules.group
    reading = group.source.sources.group(group.condition, stages, reads=group.source_paths, outdated=outdated)
    return [row["_id"] for row in (yield from readable(entry.model.__name__, reading))]


def described(entry: ModelEntry, key: Sequence[Any]) -> Raw:
    """Return a group's key, as a finding shows it."""
    return dict(zip(entry.rules.group.on.fields, key, strict=True))


def examine_groups(entry: ModelEntry, keys: Sequence[Any]) -> Plan[list[Finding]]:
    """Find groups without a document, and documents beyond the first of their group."""
    group = entry.rules.group
    values = yield from aggregate_values([group], keys)
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


def orphan(entry: ModelEntry, document: Raw) -> Finding:
    """Return the finding of a document whose group has no sources."""
    group = entry.rules.group
    path, key_fields = ", ".join(group.on.fields), described(entry, entry.key_of(document))
    return Finding(group.pattern, entry.model.__name__, document["_id"], path, key_fields, None)


def keys_found(entry: ModelEntry, findings: Sequence[Finding]) -> Plan[list[Any]]:
    """Return the keys of the groups that findings are about."""
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
