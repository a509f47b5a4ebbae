"""Writes and reads of counters: batches from memory, and what all buffers have in common.

Rules:

1. A batch is written once, whatever is lost on the way: its number is noted in
   the same transaction (`treadle.batches`, one document per writer), and a
   batch whose outcome is unknown is written again under the same number.
2. Buffered events are added and deleted in one transaction. Two flushers that
   take the same ones conflict, and one of them starts again.
3. The amounts of ids that no document has are returned and logged.
4. An amount that cannot be added does not stop the others. It is returned with those.

The events of durable counters are in `events.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bson import ObjectId
from pymongo import UpdateOne
from pymongo.errors import DuplicateKeyError, OperationFailure

from treadle.engine.documents import revisions
from treadle.engine.pages import by_ids
from treadle.engine.references import follow_own
from treadle.engine.updates import concerns, may_upgrade
from treadle.engine.version_upgrade import upgrade_possible, upgraded
from treadle.graph.calls import Sums
from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.graph.write import Write
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.fields import CounterFields
from treadle.plan import (
    Plan,
    Raw,
    bulk_write,
    find,
    find_one,
    find_one_and_update,
    update_one,
)
from treadle.plan.server_errors import (
    BAD_VALUE,
    POISON,
    TYPE_MISMATCH,
    codes_of,
    is_about_one_document,
    is_transient,
    refusals,
)
from treadle.query.keys import freeze
from treadle.query.paths import value_at

LEDGER = "treadle.batches"
# Nothing can be added to what the document holds: no number, or the sum would be too large.
REFUSALS = POISON | {TYPE_MISMATCH, BAD_VALUE}
INT_MAX = 2**63


# -- adding to documents ------------------------------------------------------------------------


def apply(rule: CounterFields, sums: Sums, changes: Changes) -> Plan[dict[Any, Any]]:
    """Add amounts to their documents; those whose document does not exist."""
    entry = rule.target
    followed = concerns(entry, _written(rule)) or may_upgrade(entry)
    befores: list[Raw] = []
    if followed:
        befores = yield from find(entry.collection, rule.where_any(sums))
    stuck: dict[Any, Any] = {}
    if entry.versions.is_versioned:
        stuck = yield from _bring_up(rule, sums, changes)
        sums = {key: n for key, n in sums.items() if key not in stuck}
    if rule.declared.upsert:
        yield from _make(rule, sums)
    operations = [UpdateOne(rule.where(key), rule.increment(n)) for key, n in sums.items()]
    matched, most = 0, rule.limits.counter_chunk
    for start in range(0, len(operations), most):
        result = yield from bulk_write(entry.collection, operations[start : start + most], ordered=False)
        matched += result.matched_count
    if followed:
        yield from _follow(entry, befores, changes)
    missing = (yield from _missing(rule, sums)) if matched < len(sums) else {}
    return {**missing, **stuck}


def _written(rule: CounterFields) -> set[str]:
    """The paths that adding to a counter writes."""
    return {*(owned.path for owned in rule.owns()), *revisions(rule.target)}


def _bring_up(rule: CounterFields, sums: Sums, changes: Changes) -> Plan[dict[Any, Any]]:
    """Bring documents to the current version, for in an older one the number may have another name.

    The amounts of those that cannot be: they must not stop the others.
    """
    keys, left, most = list(sums), [], rule.limits.upgrade_chunk
    for start in range(0, len(keys), most):
        within = rule.where_any(keys[start : start + most])
        upgraded = yield from upgrade_possible(rule.target, within, changes)
        failed = {freeze(key) for key, _ in upgraded.failed}
        left += [each for each in upgraded.given if freeze(each["_id"]) in failed]
    return rule.of_documents(sums, left)


def _make(rule: CounterFields, sums: Sums) -> Plan[None]:
    """Make the documents that are not there yet, with a count of zero."""
    operations = []
    for key in (yield from _missing(rule, sums)):
        beginning = {"$setOnInsert": {**rule.beginning(key), rule.path: rule.zero}}
        operations.append(UpdateOne(rule.where(key), beginning, upsert=True))
    if operations:
        yield from bulk_write(rule.target.collection, operations, ordered=False)


def _follow(entry: ModelEntry, befores: Sequence[Raw], changes: Changes) -> Plan[None]:
    """Let formulas and other documents follow the new counts."""
    if not befores:
        return
    afters = yield from by_ids(entry.collection, [each["_id"] for each in befores])
    pairs = [(each, afters[freeze(each["_id"])]) for each in befores if freeze(each["_id"]) in afters]
    # Its own references are the same in another version, whatever their names were.
    own = [(after if entry.versions.is_outdated(before) else before, after) for before, after in pairs]
    finals = yield from follow_own(entry, own)
    yield from changes.add(entry, zip([before for before, _ in pairs], finals, strict=True))


def _missing(rule: CounterFields, sums: Sums) -> Plan[dict[Any, Any]]:
    """The amounts that no document is there for."""
    documents = yield from find(rule.target.collection, rule.where_any(sums), {rule.by_path: 1})
    known = rule.of_documents(sums, documents)
    return {key: n for key, n in sums.items() if key not in known}


def culprits(rule: CounterFields, sums: Sums, error: BaseException) -> Plan[dict[Any, Any]]:
    """The amounts that stand in the way of the others; none where the error is not about a document.

    A document that holds no number, that its validator refuses with the new
    one, or whose number would grow too large. In a transaction the server
    names one at a time.
    """
    if isinstance(error, OverflowError):
        return {key: n for key, n in sums.items() if abs(n) >= INT_MAX}
    if not is_refusal(error):
        return {}
    no_number = {rule.path: {"$exists": True, "$not": {"$type": "number"}}}
    condition = {**rule.where_any(sums), **no_number}
    bad = rule.of_documents(sums, (yield from find(rule.target.collection, condition, {rule.by_path: 1})))
    named = {freeze(key) for each in refusals(error) for key in _named(rule, each)}
    bad.update({key: n for key, n in sums.items() if freeze(to_bson(key, [])) in named})
    return bad


def is_refusal(error: BaseException) -> bool:
    """Whether an error is about a document to which an amount cannot be added, or about the amount."""
    if isinstance(error, OverflowError):
        return True
    if not isinstance(error, OperationFailure) or isinstance(error, DuplicateKeyError):
        return False
    if is_transient(error):
        return False
    return bool(codes_of(error) & REFUSALS) or is_about_one_document(error)


def _named(rule: CounterFields, refusal: Raw) -> list[Any]:
    """The key of the very update that was refused, if it was one of ours."""
    operation = refusal.get("op") or {}
    update = operation.get("u")
    ours = isinstance(update, dict) and (rule.path in update.get("$inc", {}) or "$setOnInsert" in update)
    condition = (operation.get("q") or {}).get(rule.by_path) if ours else None
    return [condition["$eq"]] if isinstance(condition, dict) and "$eq" in condition else []


# -- from memory -----------------------------------------------------------------------------------


class Flush(Write[dict[Any, Any]]):
    """One batch of a writer; the amounts that could not be added."""

    shows_document = False

    def __init__(self, rule: CounterFields, sums: Sums, writer: ObjectId, number: int) -> None:
        self.rule = rule
        self.entry = rule.target
        self.sums = sums
        self.writer = writer
        self.number = number

    def apply(self, changes: Changes) -> Plan[dict[Any, Any]]:
        noted = {"$set": {"n": self.number}, "$currentDate": {"at": True}}
        before = yield from find_one_and_update(
            LEDGER, {"_id": self.writer}, noted, after=False, upsert=True, projection={"n": 1}
        )
        if before is not None and before["n"] >= self.number:
            # It was committed after all. Which ids were missing is asked again.
            return (yield from _missing(self.rule, self.sums))
        return (yield from apply(self.rule, self.sums, changes))


def was_added(writer: ObjectId, number: int) -> Plan[bool]:
    """Whether a batch whose outcome is unknown was committed."""
    noted = yield from find_one(LEDGER, {"_id": writer}, {"n": 1})
    return noted is not None and noted["n"] >= number


# -- sampled -----------------------------------------------------------------------------------------


class Sample(Write[bool]):
    """One event that stands for many; whether its document exists."""

    shows_document = False

    def __init__(self, rule: CounterFields, key: Any, n: Any) -> None:
        self.rule = rule
        self.entry = rule.target
        self.sums = {key: n}
        self._alone = not (concerns(self.entry, _written(rule)) or may_upgrade(self.entry))

    def command(self) -> Plan[bool] | None:
        return self._add(Changes()) if self._alone else None

    def apply(self, changes: Changes) -> Plan[bool]:
        return (yield from self._add(changes))

    def _add(self, changes: Changes) -> Plan[bool]:
        if self._alone and not (self.rule.declared.upsert or self.entry.versions.is_versioned):
            ((key, n),) = self.sums.items()
            update = self.rule.increment(n)
            return bool(
                (yield from update_one(self.entry.collection, self.rule.where(key), update)).matched_count
            )
        return not (yield from apply(self.rule, self.sums, changes))


# -- reading -------------------------------------------------------------------------------------------


def plain(stored: Any) -> Any:
    """A stored number as Python's own."""
    return stored.to_decimal() if hasattr(stored, "to_decimal") else stored


def stored(rule: CounterFields, key: Any) -> Plan[Any]:
    """The stored number; None where there is no document."""
    entry = rule.target
    projection = None if entry.versions.is_versioned else {rule.path: 1}
    document = yield from find_one(entry.collection, rule.where(key), projection)
    if document is None:
        return None
    (document,) = yield from upgraded(entry, [document])
    return rule.number(plain(value_at(document, rule.path) or 0))
