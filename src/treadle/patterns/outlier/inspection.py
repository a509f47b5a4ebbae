"""Proof and repair of outlier arrays: counts, flags, limits, repetitions, and overflow without an owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.engine.write_path import commit_changes
from treadle.errors import DataError
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding
from treadle.graph.quarantine import set_aside
from treadle.patterns.outlier.fields import OutlierFields, first_of_each
from treadle.patterns.outlier.writes import Tidy
from treadle.plan import Plan, Raw, aggregate, by_id, delete_many, find, find_one
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze

# Overflow documents without an owner that verify names.
ARRAY_ORPHANS_MAX = 1_000
# Items of one array, stored twice, that verify names.
ARRAY_REPEATED_MAX = 10


def examine(rule: OutlierFields, documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """What is wrong with the arrays of these documents, read up to one item beyond the limit."""
    findings: list[Finding] = []
    overflow = yield from _overflow(rule, [each["_id"] for each in documents])
    long = [each["_id"] for each in documents if len(rule.embedded(each)) > rule.limit]
    lengths = yield from _lengths(rule, long)
    for document in documents:
        key, embedded = freeze(document["_id"]), rule.embedded(document)
        row = overflow.get(key, {"items": 0})
        wrong = _compare(rule, document, lengths.get(key, len(embedded)), row)
        if rule.unique:
            new = first_of_each(embedded)
            repeated = [item for item, is_new in zip(embedded, new, strict=True) if not is_new]
            if key in overflow:
                repeated += yield from _repeated_in_overflow(rule, document)
            wrong += [(rule.path, repeated, [])] if repeated else []
        findings += [rule.finding(document["_id"], *each) for each in wrong]
    return findings


def _overflow(rule: OutlierFields, keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """Per owner: how many items its overflow holds, how many it says it holds, and its last number."""
    items: Any = 1
    counted: Any = 1
    if rule.form == "page":
        array = {"$cond": [{"$isArray": f"${rule.field}"}, f"${rule.field}", []]}
        items, counted = {"$size": array}, "$count"
    is_missing = {"$eq": [{"$type": f"${rule.content}"}, "missing"]}
    other = [is_missing, {"$ne": [{"$type": f"${rule.other_order}"}, "missing"]}]
    group = {
        "_id": f"${rule.owner}",
        "items": {"$sum": items},
        "counted": {"$sum": counted},
        "wrong": {"$sum": {"$cond": [{"$eq": [items, counted]}, 0, 1]}},
        "empty": {"$sum": {"$cond": [{"$eq": [items, 0]}, 1, 0]}},
        "last": {"$max": f"${rule.order}"},
        "other": {"$sum": {"$cond": [{"$and": other}, 1, 0]}},
    }
    stages: list[Raw] = [{"$match": {rule.owner: {"$in": list(keys)}}}, {"$group": group}]
    rows = yield from aggregate(rule.overflow_collection, stages)
    return {freeze(row["_id"]): row for row in rows}


def _lengths(rule: OutlierFields, keys: Sequence[Any]) -> Plan[dict[Any, int]]:
    if not keys:
        return {}
    stages: list[Raw] = [{"$project": {"n": {"$size": f"${rule.path}"}}}]
    rows = yield from rule.owners.group({"_id": {"$in": list(keys)}}, stages, reads=[rule.path])
    return {freeze(row["_id"]): row["n"] for row in rows}


def _compare(rule: OutlierFields, document: Raw, embedded: int, row: Raw) -> list[tuple[str, Any, Any]]:
    """(path, stored, expected) of what is wrong in one document."""
    if row.get("other"):
        return [(rule.overflow_collection, f"{row['other']} documents in another layout", "none")]
    wrong: list[tuple[str, Any, Any]] = []
    if not isinstance(rule.value(document, rule.path), list):
        wrong.append((rule.path, rule.value(document, rule.path), []))
    if embedded > rule.limit:
        wrong.append((rule.path, f"{embedded} items", f"at most {rule.limit} items"))
    count, total = rule.value(document, rule.count_path), embedded + row["items"]
    if count != total or isinstance(count, bool):
        wrong.append((rule.count_path, count, total))
    overflowing = row["items"] > 0
    if rule.flag_path is not None and (rule.value(document, rule.flag_path) is True) != overflowing:
        wrong.append((rule.flag_path, rule.value(document, rule.flag_path), overflowing))
    if row.get("wrong"):
        wrong.append((f"{rule.overflow_collection}.count", row["counted"], row["items"]))
    if row.get("empty"):
        wrong.append((f"{rule.overflow_collection}.{rule.content}", f"{row['empty']} empty pages", "none"))
    last = rule.value(document, rule.last_path)
    needed = row.get("last") if overflowing else None
    if (last is None) != (needed is None) or (last is not None and needed is not None and last < needed):
        wrong.append((rule.last_path, last, needed))
    return wrong


def _repeated_in_overflow(rule: OutlierFields, document: Raw) -> Plan[list[Any]]:
    """Items that the overflow holds twice, or that are embedded as well."""
    embedded = {"$in": [f"${rule.content}", {"$literal": rule.embedded(document)}]}
    group = {"n": {"$sum": 1}, "embedded": {"$max": {"$cond": [embedded, 1, 0]}}}
    stages: list[Raw] = [
        {"$match": rule.owned(document["_id"])},
        *([{"$unwind": f"${rule.field}"}] if rule.form == "page" else []),
        {"$group": {"_id": f"${rule.content}", **group}},
        {"$match": {"$or": [{"n": {"$gt": 1}}, {"embedded": 1}]}},
        {"$limit": ARRAY_REPEATED_MAX},
    ]
    rows = yield from aggregate(rule.overflow_collection, stages, allowDiskUse=True)
    return [row["_id"] for row in rows]


def mend(graph: Graph, server: Capabilities, rule: OutlierFields, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Bring the arrays of these documents in order, one transaction each; those that changed."""
    changed: list[Any] = []
    for key in keys:
        work = Tidy(rule, key)
        # Only an array that is not in order costs a transaction.
        needed = yield from work.needed()
        if needed is None:
            done = yield from _remove_orphan(rule, key)
        else:
            done = needed and (yield from _mend_one(graph, server, work))
        if done:
            changed.append(key)
    return changed


def _mend_one(graph: Graph, server: Capabilities, work: Tidy) -> Plan[bool]:
    """Bring one array in order; one whose document cannot be brought to the current version is set aside."""
    try:
        return bool((yield from commit_changes(graph, work.apply)))
    except DataError as error:
        if error.code not in ("migration-failed", "version-unknown"):
            raise
        yield from set_aside(work.entry.model.__name__, work.entry.collection, work.key, error)
        return False


def orphans(rule: OutlierFields) -> Plan[list[Finding]]:
    """Overflow of documents that do not exist."""
    rows = yield from _orphans(rule)
    findings = [rule.finding(row["_id"], rule.overflow_collection, row["n"], 0) for row in rows]
    for row in (
        yield from aggregate(rule.overflow_collection, [{"$match": _nobodys(rule)}, {"$count": "n"}])
    ):
        stored = f"{row['n']} documents without {rule.owner}"
        findings.append(rule.finding(None, rule.overflow_collection, stored, "none"))
    return findings


def _nobodys(rule: OutlierFields) -> Raw:
    """Documents that name no owner at all: not orphans, but written under another declaration."""
    return {rule.owner: {"$exists": False}}


def require_layout(rule: OutlierFields) -> Plan[None]:
    """Refuse overflow that was written under another declaration, before its indexes are changed."""
    other = {rule.content: {"$exists": False}, rule.other_order: {"$exists": True}}
    if (yield from find_one(rule.overflow_collection, other, {"_id": 1})) is not None:
        raise rule.other_layout()
    if (yield from find_one(rule.overflow_collection, _nobodys(rule), {"_id": 1})) is not None:
        raise DataError(
            f"{rule.place.label}: {rule.overflow_collection} holds documents without {rule.owner!r}, which "
            "is to name their owner; declare owner= as they have it, or rename their field first",
            code="overflow-layout",
        )


def _orphans(rule: OutlierFields) -> Plan[list[Raw]]:
    lookup = {"from": rule.target.collection, "localField": "_id", "foreignField": "_id", "as": "owner"}
    stages: list[Raw] = [
        {"$match": {rule.owner: {"$exists": True}}},
        {"$group": {"_id": f"${rule.owner}", "n": {"$sum": 1}}},
        {"$lookup": lookup},
        {"$match": {"owner": []}},
        {"$project": {"n": 1}},
        {"$limit": ARRAY_ORPHANS_MAX},
    ]
    return (yield from aggregate(rule.overflow_collection, stages, allowDiskUse=True))


def remove_orphans(rule: OutlierFields) -> Plan[None]:
    """Delete overflow of documents that do not exist; what names no owner is left alone."""
    while rows := (yield from _orphans(rule)):
        removed = 0
        for row in rows:
            removed += yield from _remove_orphan(rule, row["_id"])
        if not removed:
            break


def _remove_orphan(rule: OutlierFields, key: Any) -> Plan[bool]:
    # Those very documents: an owner that is inserted meanwhile brings its own.
    # One that names no owner is nobody's: it would be found by an owner of None, too.
    pages = yield from find(rule.overflow_collection, {rule.owner: {"$eq": key, "$exists": True}}, {"_id": 1})
    if not pages or (yield from find_one(rule.target.collection, by_id(key), {"_id": 1})) is not None:
        return False
    yield from delete_many(rule.overflow_collection, {"_id": {"$in": [page["_id"] for page in pages]}})
    return True
