"""What is wrong with outlier arrays: one function says it, for verify, for repair and for writers.

Overflow of documents that do not exist is found here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from treadle.errors import DataError
from treadle.graph.outcomes import Finding
from treadle.patterns.outlier.stored_array import StoredArray, is_first_occurrence
from treadle.plan import Plan, Raw, aggregate, by_id, delete_many, find, find_one
from treadle.query.keys import freeze
from treadle.query.paths import value_at

# Owners of overflow that do not exist, of which verify names so many.
ORPHANS_MAX = 1_000
# Items of one array, stored twice, of which verify names so many.
REPEATED_MAX = 10
# The pages of an owner that has none.
NO_PAGES: Raw = {"items": 0, "last": None}


class Problem(NamedTuple):
    """One part of an array that is not as it should be."""

    path: str
    stored: Any
    expected: Any
    # Whether items must be stored again; otherwise it is enough to set numbers.
    repacks: bool = False
    # Whether verify reports it. What is only loosely packed, it does not.
    is_finding: bool = True


class CheckedArray(NamedTuple):
    """An owner, the summary of its pages, and the problems of both."""

    owner: Raw
    pages: Raw
    problems: list[Problem]


def check_arrays(rule: StoredArray, owners: Sequence[Raw]) -> Plan[list[CheckedArray]]:
    """Return the problems of each owner. Owners are read up to one item beyond the limit, or whole."""
    pages = yield from _summarize_pages(rule, [each["_id"] for each in owners])
    long = [each["_id"] for each in owners if len(rule.embedded(each)) > rule.limit]
    lengths = yield from _count_embedded(rule, long)
    checked = []
    for owner in owners:
        key = freeze(owner["_id"])
        summary = pages.get(key, NO_PAGES)
        problems = list_problems(rule, owner, summary, lengths.get(key, len(rule.embedded(owner))))
        if rule.unique:
            repeated = yield from _find_repeated(rule, owner, summary)
            problems += [Problem(rule.path, repeated, [], repacks=True)] if repeated else []
        checked.append(CheckedArray(owner, summary, problems))
    return checked


def is_consistent(rule: StoredArray, owner: Raw) -> bool:
    """Whether an owner holds what its own numbers say, and all that is maintained; pages are not read."""
    count, last = value_at(owner, rule.count_path), value_at(owner, rule.last_path)
    overflowing = last is not None and _is_number(count)
    items = count - len(rule.embedded(owner)) if overflowing else 0
    problems = list_problems(rule, owner, {"items": items, "last": last}, len(rule.embedded(owner)))
    return not any(problem.is_finding for problem in problems)


def list_problems(rule: StoredArray, owner: Raw, pages: Raw, embedded: int) -> list[Problem]:
    """Return the problems of one owner, given the summary of its pages and the length of its own part."""
    collection = rule.overflow.collection_name
    if pages.get("other"):
        return [Problem(collection, f"{pages['other']} documents in another layout", "none", repacks=True)]
    problems = []
    if pages.get("damaged"):
        text = f"{pages['damaged']} damaged documents, by number, size or count"
        problems.append(Problem(collection, text, "none", repacks=True))
    array = value_at(owner, rule.path)
    if not isinstance(array, list):
        problems.append(Problem(rule.path, array, [], repacks=True))
    if embedded > rule.limit:
        expected = f"at most {rule.limit} items"
        problems.append(Problem(rule.path, f"{embedded} items", expected, repacks=True))
    if not problems and _is_loose(rule, embedded, pages):
        problems.append(Problem(rule.path, "loosely packed", "packed", repacks=True, is_finding=False))
    last = pages["last"] if pages["items"] > 0 else None
    for path, expected in rule.bookkeeping(embedded + pages["items"], last).items():
        stored = value_at(owner, path)
        if not _is_right(rule, path, stored, expected):
            problems.append(Problem(path, stored, expected))
    return problems


def _is_right(rule: StoredArray, path: str, stored: Any, expected: Any) -> bool:
    """Whether a flag, a count or a last number is right."""
    if path == rule.flag_path:
        return (stored is True) is expected
    if not (_is_number(stored) and _is_number(expected)):
        return stored is None and expected is None
    # Pages at the end may have been emptied since their number was noted.
    return bool(stored == expected or (path == rule.last_path and stored > expected))


def _is_loose(rule: StoredArray, embedded: int, pages: Raw) -> bool:
    """Whether an array has overflow and takes twice the room that it needs."""
    needed = -(-pages["items"] // rule.overflow.page_size)
    return needed > 0 and (2 * embedded <= rule.limit or pages.get("pages", 0) >= 2 * needed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _summarize_pages(rule: StoredArray, keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """Return by frozen id what the pages of these owners hold, and how many of them are damaged."""
    overflow = rule.overflow
    is_missing = {"$eq": [{"$type": f"${overflow.content}"}, "missing"]}
    is_numbered = {"$in": [{"$type": f"${overflow.order}"}, ["int", "long"]]}
    page = {
        "owner": f"${overflow.owner}",
        "size": {"$size": overflow.items_expression},
        "count": overflow.stored_count,
        "number": {"$cond": [is_numbered, f"${overflow.order}", None]},
        "other": {"$and": [is_missing, {"$ne": [{"$type": f"${overflow.other_order}"}, "missing"]}]},
    }
    is_sound = [
        {"$gt": ["$size", 0]},
        {"$lte": ["$size", overflow.page_size]},
        {"$eq": ["$size", "$count"]},
        {"$ne": ["$number", None]},
    ]
    group = {
        "_id": "$owner",
        "pages": {"$sum": 1},
        "items": {"$sum": "$size"},
        "last": {"$max": "$number"},
        "damaged": {"$sum": {"$cond": [{"$and": is_sound}, 0, 1]}},
        "other": {"$sum": {"$cond": ["$other", 1, 0]}},
    }
    stages = [{"$match": {overflow.owner: {"$in": list(keys)}}}, {"$replaceWith": page}, {"$group": group}]
    rows = yield from aggregate(overflow.collection_name, stages)
    return {freeze(row["_id"]): row for row in rows}


def _count_embedded(rule: StoredArray, keys: Sequence[Any]) -> Plan[dict[Any, int]]:
    """Return by frozen id how many items these owners embed, of whom only the first were read."""
    if not keys:
        return {}
    stages: list[Raw] = [{"$project": {"n": {"$size": f"${rule.path}"}}}]
    rows = yield from rule.owners.group({"_id": {"$in": list(keys)}}, stages, reads=[rule.path])
    return {freeze(row["_id"]): row["n"] for row in rows}


def count_overflow(rule: StoredArray, key: Any) -> Plan[int]:
    """Return how many items the pages of one owner hold, whatever it says itself."""
    rows = yield from _summarize_pages(rule, [key])
    return sum(row["items"] for row in rows.values())


def _find_repeated(rule: StoredArray, owner: Raw, pages: Raw) -> Plan[list[Any]]:
    """Return items that an array holds twice."""
    embedded, overflow = rule.embedded(owner), rule.overflow
    first = is_first_occurrence(embedded)
    repeated = [item for item, is_first in zip(embedded, first, strict=True) if not is_first]
    if not pages["items"]:
        return repeated
    is_embedded = {"$in": ["$items", {"$literal": embedded}]}
    group = {"n": {"$sum": 1}, "embedded": {"$max": {"$cond": [is_embedded, 1, 0]}}}
    stages: list[Raw] = [
        {"$match": overflow.filter(owner["_id"])},
        {"$project": {"items": overflow.items_expression}},
        {"$unwind": "$items"},
        {"$group": {"_id": "$items", **group}},
        {"$match": {"$or": [{"n": {"$gt": 1}}, {"embedded": 1}]}},
        {"$limit": REPEATED_MAX},
    ]
    rows = yield from aggregate(overflow.collection_name, stages, allowDiskUse=True)
    return repeated + [row["_id"] for row in rows]


# -- overflow without an owner -----------------------------------------------------------------------


def find_orphans(rule: StoredArray) -> Plan[list[Finding]]:
    """Return the findings of overflow whose owner does not exist, or is not named."""
    collection = rule.overflow.collection_name
    rows = yield from _orphans(rule)
    findings = [rule.finding(row["_id"], collection, row["n"], 0) for row in rows]
    counting: list[Raw] = [{"$match": _unowned(rule)}, {"$count": "n"}]
    for row in (yield from aggregate(collection, counting)):
        stored = f"{row['n']} documents without {rule.overflow.owner}"
        findings.append(rule.finding(None, collection, stored, "none"))
    return findings


def _unowned(rule: StoredArray) -> Raw:
    """Pages that name no owner are no orphans, but written under another declaration."""
    return {rule.overflow.owner: {"$exists": False}}


def _orphans(rule: StoredArray) -> Plan[list[Raw]]:
    lookup = {"from": rule.target.collection, "localField": "_id", "foreignField": "_id", "as": "owner"}
    stages: list[Raw] = [
        {"$match": {rule.overflow.owner: {"$exists": True}}},
        {"$group": {"_id": f"${rule.overflow.owner}", "n": {"$sum": 1}}},
        {"$lookup": lookup},
        {"$match": {"owner": []}},
        {"$project": {"n": 1}},
        {"$limit": ORPHANS_MAX},
    ]
    return (yield from aggregate(rule.overflow.collection_name, stages, allowDiskUse=True))


def delete_orphans(rule: StoredArray) -> Plan[None]:
    """Delete the overflow of documents that do not exist."""
    while rows := (yield from _orphans(rule)):
        deleted = 0
        for row in rows:
            deleted += yield from delete_orphan(rule, row["_id"])
        if not deleted:
            break


def delete_orphan(rule: StoredArray, key: Any) -> Plan[bool]:
    """Delete the pages of one owner, if it does not exist."""
    overflow = rule.overflow
    # By their own ids: an owner that is inserted concurrently brings other pages.
    # Those without an owner's field would be found by an owner of None, too.
    condition = {overflow.owner: {"$eq": key, "$exists": True}}
    pages = yield from find(overflow.collection_name, condition, {"_id": 1})
    if not pages or (yield from find_one(rule.target.collection, by_id(key), {"_id": 1})) is not None:
        return False
    yield from delete_many(overflow.collection_name, {"_id": {"$in": [page["_id"] for page in pages]}})
    return True


def require_layout(rule: StoredArray) -> Plan[None]:
    """Refuse overflow that was stored under another declaration, before its indexes are changed."""
    overflow = rule.overflow
    other = {overflow.content: {"$exists": False}, overflow.other_order: {"$exists": True}}
    if (yield from find_one(overflow.collection_name, other, {"_id": 1})) is not None:
        raise overflow.other_layout()
    if (yield from find_one(overflow.collection_name, _unowned(rule), {"_id": 1})) is not None:
        raise DataError(
            f"{rule.place.label}: {overflow.collection_name} holds documents without {overflow.owner!r}, "
            "which is to name their owner; declare owner= as they have it, or rename their field first",
            code="overflow-layout",
        )
