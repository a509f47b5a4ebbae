"""Verify and repair of histories: documents without their open row, rows that do not follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from treadle.engine.pages import by_ids, projection_of
from treadle.engine.version_upgrade import upgraded
from treadle.graph.outcomes import Finding
from treadle.patterns.history.rows import HEAD, OPEN, HistoryRows
from treadle.patterns.history.stream import bump
from treadle.patterns.history.track import MILLISECOND, NOW, store, tracks_of
from treadle.plan import Plan, Raw, aggregate, by_id, find, find_one, transact, update_one
from treadle.query.keys import distinct, freeze

# Documents whose rows do not follow each other that verify names.
HISTORY_DISORDER_MAX = 1_000


# -- documents ---------------------------------------------------------------------------------------


def examine(rules: HistoryRows, documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """Return the findings about documents whose open row is missing, or is not the document."""
    ids = [each["_id"] for each in documents]
    rows = yield from find(rules.rows_collection, {"document_id": {"$in": ids}, **OPEN})
    states = {freeze(row["document_id"]): row.get("document") for row in rows}
    if documents and projection_of(rules.target) is not None:
        whole = yield from by_ids(rules.target.collection, ids)
        documents = [whole.get(freeze(each["_id"]), each) for each in documents]
    findings = []
    for document in documents:
        state = states.get(freeze(document["_id"]))
        if not (yield from _same_state(rules, state, document)):
            findings.append(rules.finding(document["_id"], state, rules.state(document)))
    return findings


def _same_state(rules: HistoryRows, state: Raw | None, document: Raw) -> Plan[bool]:
    if state is None or rules.same_state(state, document) or not rules.target.versions.is_versioned:
        return state is not None and rules.same_state(state, document)
    # This Store may store the document in another version than that of the row.
    one, other = yield from upgraded(rules.target, [state, document])
    return rules.same_state(one, other)


# -- rows --------------------------------------------------------------------------------------------


def examine_rows(rules: HistoryRows) -> Plan[list[Finding]]:
    """Return findings for rows that overlap, leave a gap or a hole, or outlived their document."""
    findings: list[Finding] = []
    for key in (yield from _suspects(rules)):
        wrong = yield from transact(lambda key=key: _first_disorder(rules, key))  # type: ignore[misc]
        findings += [rules.finding(key, *each) for each in wrong]
    return findings


def _suspects(rules: HistoryRows) -> Plan[list[Any]]:
    """Return the ids of documents whose rows may be wrong, as far as they are named at once."""
    keys: list[Any] = []
    for stages in (_out_of_order(), _orphans(rules)):
        bounded = [*stages, {"$group": {"_id": "$document_id"}}, {"$limit": HISTORY_DISORDER_MAX}]
        rows = yield from aggregate(rules.rows_collection, bounded, allowDiskUse=True)
        keys += [row["_id"] for row in rows]
    return distinct(keys)


def _out_of_order() -> list[Raw]:
    """Return the stages that find rows which do not follow the one before."""
    before = {
        name: {"$shift": {"output": f"${path}", "by": -1}}
        for name, path in (("number", "revision"), ("end", "valid_to"), ("gone", "deleted"))
    }
    window = {"partitionBy": "$document_id", "sortBy": {"valid_from": 1}, "output": before}
    missed = {"$ifNull": ["$missed", 0]}
    gap = [{"$gt": ["$valid_from", "$end"]}, {"$not": ["$gone"]}, {"$eq": [missed, 0]}]
    follows = [
        {"$ne": ["$revision", {"$add": ["$number", 1, missed]}]},
        {"$eq": ["$end", None]},
        {"$lt": ["$valid_from", "$end"]},
        {"$and": gap},
    ]
    wrong = [
        {"$and": [{"$ne": ["$valid_to", None]}, {"$lte": ["$valid_to", "$valid_from"]}]},
        {"$and": [{"$ne": ["$number", None]}, {"$or": follows}]},
    ]
    return [{"$project": HEAD}, {"$setWindowFields": window}, {"$match": {"$expr": {"$or": wrong}}}]


def _orphans(rules: HistoryRows) -> list[Raw]:
    """Return the stages that find open rows of documents that are gone."""
    stages: list[Raw] = [{"$match": OPEN}, {"$project": {"document_id": 1}}]
    own = rules.target.targets.filter()
    for collection in rules.target.everything.collections:
        lookup = {
            "from": collection,
            "localField": "document_id",
            "foreignField": "_id",
            "pipeline": [*([{"$match": own}] if own else []), {"$project": {"_id": 1}}],
            "as": "stored",
        }
        stages += [{"$lookup": lookup}, {"$match": {"stored": []}}]
    return stages


def _first_disorder(rules: HistoryRows, key: Any) -> Plan[list[tuple[Raw, Raw]]]:
    """Return what is stored in the first wrong row of a document, and what should be; [] if all is well."""
    for row, changes in (yield from _wrong_rows(rules, key, (yield from _exists(rules, key)))):
        stored = {name: row.get(name) for name in changes}
        # An end that is missing, and should be null, is a finding of its document.
        if stored != changes:
            return [(stored, changes)]
    return []


def _exists(rules: HistoryRows, key: Any) -> Plan[bool]:
    """Whether a document is stored, in its own collection or the archive."""
    for collection in rules.target.everything.collections:
        if (yield from find_one(collection, rules.target.filter_for_id(key), {"_id": 1})) is not None:
            return True
    return False


def _wrong_rows(rules: HistoryRows, key: Any, exists: bool) -> Plan[list[tuple[Raw, Raw]]]:
    """Return the rows of a document that do not follow each other, with what must be set in each."""
    rows = yield from find(rules.rows_collection, rules.of(key), HEAD, sort=[("valid_from", 1)])
    return [(row, changes) for row, changes in _expected(rows, exists) if changes]


def _expected(rows: Sequence[Raw], exists: bool) -> Iterator[tuple[Raw, Raw]]:
    """Yield the rows of a document, in order, each with what must be set so that it follows the others."""
    number = 0
    for position, row in enumerate(rows):
        changes = _expected_number(row, number) if position else {}
        number = changes["revision"] if "revision" in changes else row["revision"]
        is_last = position + 1 == len(rows)
        ending = _last_end(row, exists) if is_last else _end(row, number, rows[position + 1])
        yield row, {**changes, **ending}


def _expected_number(row: Raw, number: int) -> Raw:
    """Return what must be set in a row that follows the one of a number."""
    expected = {
        "revision": max(row["revision"], number + 1),
        "missed": max(row["revision"] - number - 1, 0),
    }
    return {name: value for name, value in expected.items() if value != row.get(name, 0)}


def _end(row: Raw, number: int, after: Raw) -> Raw:
    """Return what must be set where another row follows."""
    begins, ends, follows = row["valid_from"], row.get("valid_to"), after["valid_from"]
    # Between a deletion and the next insert there is no state, and a lost one may have been there.
    may_leave_gap = row.get("deleted") or after["revision"] > number + 1
    if ends == follows or (may_leave_gap and ends is not None and begins < ends < follows):
        return {}
    return {"valid_to": follows}


def _last_end(row: Raw, exists: bool) -> Raw:
    """Return what must be set in the newest row."""
    begins, ends = row["valid_from"], row.get("valid_to")
    if ends is None and not exists:
        return {"valid_to": begins + MILLISECOND, "deleted": True}
    if ends is not None and ends <= begins:
        return {"valid_to": begins + MILLISECOND}
    return {} if "valid_to" in row else {"valid_to": None}


# -- repair ------------------------------------------------------------------------------------------


def repair(rules: HistoryRows, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Repair the rows of these documents. Returns the keys of those that changed."""
    changed = []
    for key in keys:
        if (yield from transact(lambda key=key: _repair(rules, key))):  # type: ignore[misc]
            changed.append(key)
    return changed


def repair_orphans(rules: HistoryRows) -> Plan[None]:
    """Repair what no document shows: rows of documents that are gone."""
    yield from repair(rules, (yield from _suspects(rules)))


def _repair(rules: HistoryRows, key: Any) -> Plan[bool]:
    # The worker must know what came before this, and what comes after.
    awaits = (yield from bump(rules, key)) if rules.maintain == "stream" else None
    images = yield from rules.target.targets.find(by_id(key))
    wrong = yield from _wrong_rows(rules, key, bool(images) or (yield from _exists(rules, key)))
    for row, changes in wrong:
        sets: Raw = {name: {"$literal": value} for name, value in changes.items()}
        if changes.get("deleted"):
            sets["valid_to"] = {"$max": [NOW, changes["valid_to"]]}
        yield from update_one(rules.rows_collection, by_id(row["_id"]), [{"$set": sets}])
    if not images:
        return bool(wrong)
    document, track = images[0].document, (yield from tracks_of(rules, [key]))[freeze(key)]
    is_recorded = yield from _same_state(rules, track.state, document)
    if not is_recorded:
        track.become(document, NOW)
        yield from store(rules, [track])
    if awaits is not None:
        yield from update_one(rules.rows_collection, {**rules.of(key), **OPEN}, {"$set": {"awaits": awaits}})
    return bool(wrong) or not is_recorded
