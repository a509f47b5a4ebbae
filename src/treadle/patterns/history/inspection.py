"""Proof and repair of histories: documents without their open row, and rows that do not follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymongo import DESCENDING

from treadle.engine.pages import by_ids, projection_of
from treadle.engine.version_upgrade import upgraded
from treadle.graph.outcomes import Finding
from treadle.patterns.history.followed import hold
from treadle.patterns.history.rows import HEAD, MILLISECOND, OPEN, HistoryRows, Move
from treadle.plan import Plan, Raw, aggregate, by_id, find, find_one, transact, update_one
from treadle.query.keys import distinct, freeze

# Documents whose rows do not follow each other that verify names.
HISTORY_DISORDER_MAX = 1_000

PATH = "history"
DISK = {"allowDiskUse": True}


def examine(rule: HistoryRows, documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """Documents whose open row is missing, or is not the document."""
    rows = yield from find(
        rule.rows_collection, {"document_id": {"$in": [each["_id"] for each in documents]}, **OPEN}
    )
    states = {freeze(row["document_id"]): row.get("document") for row in rows}
    if documents and projection_of(rule.target) is not None:
        whole = yield from by_ids(rule.target.collection, [each["_id"] for each in documents])
        documents = [whole.get(freeze(each["_id"]), each) for each in documents]
    findings = []
    for document in documents:
        state = states.get(freeze(document["_id"]))
        if state is None or not (yield from _alike(rule, state, document)):
            findings.append(_finding(rule, document["_id"], state, rule.state(document)))
    return findings


def _alike(rule: HistoryRows, state: Raw, document: Raw) -> Plan[bool]:
    if rule.alike(state, document):
        return True
    if not rule.target.versions.is_versioned:
        return False
    # This Store may store the document in an older version than it writes down.
    one, other = yield from upgraded(rule.target, [state, document])
    return rule.alike(one, other)


def _finding(rule: HistoryRows, key: Any, stored: Any, expected: Any) -> Finding:
    return Finding(rule.pattern, rule.target.model.__name__, key, PATH, stored, expected)


# -- rows --------------------------------------------------------------------------------------------


def _suspicious(rule: HistoryRows) -> list[Raw]:
    """The stages that find documents whose rows do not follow each other."""
    window = {
        "partitionBy": "$document_id",
        "sortBy": {"valid_from": 1},
        "output": {
            name: {"$shift": {"output": f"${path}", "by": -1}}
            for name, path in (("number", "revision"), ("end", "valid_to"), ("gone", "deleted"))
        },
    }
    missed = {"$ifNull": ["$missed", 0]}
    later = {"$ne": ["$number", None]}
    wrong = [
        {"$and": [{"$ne": ["$valid_to", None]}, {"$lte": ["$valid_to", "$valid_from"]}]},
        {"$and": [later, {"$ne": ["$revision", {"$add": ["$number", 1, missed]}]}]},
        {"$and": [later, {"$eq": ["$end", None]}]},
        {"$and": [later, {"$lt": ["$valid_from", "$end"]}]},
        {
            "$and": [
                later,
                {"$gt": ["$valid_from", "$end"]},
                {"$not": ["$gone"]},
                {"$eq": [missed, 0]},
            ]
        },
    ]
    return [
        {"$project": HEAD},
        {"$setWindowFields": window},
        {"$match": {"$expr": {"$or": wrong}}},
        {"$group": {"_id": "$document_id"}},
        {"$limit": HISTORY_DISORDER_MAX},
    ]


def _orphans(rule: HistoryRows) -> list[Raw]:
    """The stages that find open rows of documents that are gone."""
    stages: list[Raw] = [{"$match": OPEN}, {"$project": {"document_id": 1}}]
    collections = [rule.target.collection]
    if rule.target.everything.archive is not None:
        collections.append(rule.target.everything.archive)
    for collection in collections:
        look = {
            "from": collection,
            "localField": "document_id",
            "foreignField": "_id",
            "pipeline": [
                *([{"$match": rule.target.targets.filter()}] if rule.target.targets.filter() else []),
                {"$project": {"_id": 1}},
            ],
            "as": "living",
        }
        stages += [{"$lookup": look}, {"$match": {"living": []}}]
    return [*stages, {"$group": {"_id": "$document_id"}}]


def _suspects(rule: HistoryRows) -> Plan[list[Any]]:
    """The ids of documents whose rows may be wrong, as far as they are named at once."""
    most, keys = HISTORY_DISORDER_MAX, list[Any]()
    keys += [row["_id"] for row in (yield from aggregate(rule.rows_collection, _suspicious(rule), **DISK))]
    gone = yield from aggregate(rule.rows_collection, [*_orphans(rule), {"$limit": most}], **DISK)
    return distinct([*keys, *(row["_id"] for row in gone)])


def examine_rows(rule: HistoryRows) -> Plan[list[Finding]]:
    """Rows that overlap, leave a gap or a hole, or are open though their document is gone."""
    findings: list[Finding] = []
    for key in (yield from _suspects(rule)):
        found = yield from transact(lambda key=key: _disorder(rule, key))  # type: ignore[misc]
        if found:
            findings.append(_finding(rule, key, found[0], found[1]))
    return findings


def _rows(rule: HistoryRows, key: Any) -> Plan[list[Raw]]:
    return (yield from find(rule.rows_collection, rule.of(key), HEAD, sort=[("valid_from", 1)]))


def _disorder(rule: HistoryRows, key: Any) -> Plan[tuple[Any, Any] | None]:
    """What of a document's rows is, and what it should be, read at one moment; None where all is well."""
    rows = yield from _rows(rule, key)
    living = yield from _is_stored(rule, key)
    for row, changes in zip(rows, _expected([dict(row) for row in rows], living), strict=True):
        stored = {name: row.get(name) for name in changes}
        # An end that is missing, and should be null, is a finding of its document.
        if stored != changes:
            return stored, changes
    return None


def _is_stored(rule: HistoryRows, key: Any) -> Plan[bool]:
    """Whether a document is there, in its own collection or the archive."""
    entry = rule.target
    collections = entry.everything.collections
    for collection in collections:
        if (yield from find_one(collection, entry.filter_for_id(key), {"_id": 1})) is not None:
            return True
    return False


def _expected(rows: Sequence[Raw], living: bool) -> list[Raw]:
    """What must be set in each row, so that they follow each other; nothing where it is right."""
    expected: list[Raw] = []
    for number, row in enumerate(rows):
        changes: Raw = {}
        after = rows[number + 1] if number + 1 < len(rows) else None
        before = rows[number - 1] if number else None
        if before is not None:
            missed = row["revision"] - before["revision"] - 1
            if missed < 0:
                changes["revision"] = row["revision"] = before["revision"] + 1
                missed = 0
            if missed != row.get("missed", 0):
                changes["missed"] = row["missed"] = missed
        begins, ends = row["valid_from"], row.get("valid_to")
        if after is not None:
            gap = ends is not None and ends < after["valid_from"]
            allowed = row.get("deleted") or after["revision"] > row["revision"] + 1
            if ends != after["valid_from"] and not (gap and allowed and ends > begins):
                changes["valid_to"] = after["valid_from"]
        elif not living and ends is None:
            changes["valid_to"] = begins + MILLISECOND
            changes["deleted"] = True
        elif ends is not None and ends <= begins:
            changes["valid_to"] = begins + MILLISECOND
        elif "valid_to" not in row:
            changes["valid_to"] = None
        expected.append(changes)
    return expected


# -- repair ------------------------------------------------------------------------------------------


def mend(rule: HistoryRows, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Bring the rows of these documents in order; the keys of those that changed."""
    changed = []
    for key in keys:
        if (yield from transact(lambda key=key: _mend(rule, key))):  # type: ignore[misc]
            changed.append(key)
    return changed


def _mend(rule: HistoryRows, key: Any) -> Plan[bool]:
    # The worker must know what came before this, and what comes after.
    awaits = (yield from hold(rule, key)) if rule.maintain == "stream" else None
    rows = yield from _rows(rule, key)
    images = yield from rule.target.targets.find(by_id(key))
    document = images[0].document if images else None
    done = False
    living = document is not None or (yield from _is_stored(rule, key))
    for row, changes in zip(rows, _expected(rows, living), strict=True):
        if changes:
            update: list[Raw] = [{"$set": {name: {"$literal": value} for name, value in changes.items()}}]
            if changes.get("deleted"):
                update = [
                    {"$set": {"valid_to": {"$max": ["$$NOW", {"$add": ["$valid_from", 1]}]}, "deleted": True}}
                ]
            yield from update_one(rule.rows_collection, by_id(row["_id"]), update)
            done = True
    if document is None:
        return done
    newest = [("valid_from", DESCENDING)]
    last = yield from find_one(rule.rows_collection, rule.of(key), sort=newest)
    is_open = last is not None and last.get("valid_to") is None
    before = (last or {}).get("document") or {} if is_open else None
    if before is None or not (yield from _alike(rule, before, document)):
        yield from rule.perform([Move(key, before, document, False)])
        done = True
    if awaits is not None:
        yield from update_one(rule.rows_collection, {**rule.of(key), **OPEN}, {"$set": {"awaits": awaits}})
    return done


def tidy(rule: HistoryRows) -> Plan[None]:
    """The end of a rebuild: rows of documents that are gone."""
    yield from mend(rule, (yield from _suspects(rule)))
