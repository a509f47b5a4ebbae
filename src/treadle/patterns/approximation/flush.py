"""Writes and reads of counters: batches from memory, and what all buffers have in common.

Rules:

1. A batch is written once, whatever is lost on the way: its number is noted in
   the same transaction (`treadle.batches`, one document per writer), and a
   batch whose outcome is unknown is written again under the same number.
2. Buffered events are added and deleted in one transaction. Two flushers that
   take the same ones conflict, and one of them starts again.
3. Ids that no document has are told, and their amounts are returned.
4. An amount that cannot be added does not stop the others. It is told like those.
5. Without transactions each document carries the mark of the batch until the
   batch is over, so that it is not added twice.

The events of durable counters are in `events.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bson import ObjectId
from pymongo import UpdateOne
from pymongo.errors import DuplicateKeyError, OperationFailure, PyMongoError

from treadle.engine import lazy
from treadle.engine.ledger import Ledger
from treadle.engine.set_aside import log
from treadle.engine.work import Work
from treadle.engine.writes import concerns, follow_own, may_upgrade, speaks_of_current
from treadle.errors import UsageError
from treadle.graph.change import Change
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry
from treadle.model.bson_types import RESERVED, to_bson
from treadle.patterns.approximation.fields import CounterFields
from treadle.plan import (
    Plan,
    Raw,
    bulk_write,
    delete_one,
    find,
    find_one,
    find_one_and_update,
    update_many,
    update_one,
)
from treadle.plan.capabilities import Capabilities
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
MARKS = f"{RESERVED}.batches"
# Nothing can be added to what the document holds: no number, or the sum would be too large.
REFUSALS = POISON | {TYPE_MISMATCH, BAD_VALUE}
INT_MAX = 2**63

Sums = Mapping[Any, Any]


def rule_named(entry: Entry[Any], field: str) -> CounterFields:
    """The counter that a caller named by its Python path."""
    for rule in entry.having(CounterFields):
        if field == rule.python_path:
            if rule.declared.upsert:
                _check_upsert(rule)
            return rule
    known = ", ".join(repr(rule.python_path) for rule in entry.having(CounterFields)) or "none"
    raise UsageError(
        f"{entry.model.__name__} has no counter {field!r}; it has {known}: declare it as "
        "Annotated[int, Approximate(every=…)]",
        code="counter-unknown",
    )


def _check_upsert(rule: CounterFields) -> None:
    entry = rule.target
    others = [each for each in entry.rules if not isinstance(each, CounterFields)]
    if others or entry.feeds:
        raise UsageError(
            f"{rule.place.label} has upsert=True, but {entry.model.__name__} takes part in other patterns, "
            "which a document made by a counter would go past; insert the documents first, without upsert=",
            code="upsert-incomplete",
        )


# -- adding to documents ------------------------------------------------------------------------


def apply(rule: CounterFields, sums: Sums, ledger: Ledger, mark: str | None = None) -> Plan[dict[Any, Any]]:
    """Add amounts to their documents; those whose document does not exist.

    A document that carries `mark` is passed over, and marked otherwise.
    """
    entry = rule.target
    followed = concerns(entry, rule.maintained() | rule.stamps()) or may_upgrade(entry)
    keys = [to_bson(key, []) for key in sums]
    of_keys = {rule.by_path: {"$in": keys}}
    befores: list[Raw] = []
    if followed:
        befores = yield from find(entry.collection, of_keys)
        yield from ledger.note_before(entry, [each["_id"] for each in befores])
    stuck: dict[Any, Any] = {}
    if speaks_of_current(entry):
        stuck = yield from _bring_up(rule, keys, sums)
        sums = {key: n for key, n in sums.items() if key not in stuck}
    if rule.declared.upsert:
        yield from _make(rule, sums)
    operations = []
    for key, n in sums.items():
        condition, update = rule.where(key), rule.increment(n)
        if mark is not None:
            condition[f"{MARKS}.{mark}"] = {"$exists": False}
            update["$set"] = {f"{MARKS}.{mark}": True}
        operations.append(UpdateOne(condition, update))
    matched = 0
    most = entry.limits.counter_chunk
    for start in range(0, len(operations), most):
        result = yield from bulk_write(entry.collection, operations[start : start + most], ordered=False)
        matched += result.matched_count
    if followed:
        yield from _follow(entry, befores, ledger)
    missing = (yield from _missing(rule, sums, of_keys)) if matched < len(sums) else {}
    return {**missing, **stuck}


def _bring_up(rule: CounterFields, keys: Sequence[Any], sums: Sums) -> Plan[dict[Any, Any]]:
    """Bring documents to the current version, for in an older one the number may have another name.

    The amounts of those that cannot be: they must not stop the others.
    """
    bad: set[Any] = set()
    most = rule.target.limits.upgrade_chunk
    for start in range(0, len(keys), most):
        within = {rule.by_path: {"$in": keys[start : start + most]}}
        left = yield from lazy.bring_up_but(rule.target, within)
        bad |= {freeze(value_at(raw, rule.by_path)) for raw in left}
    return {key: n for key, n in sums.items() if freeze(to_bson(key, [])) in bad}


def _make(rule: CounterFields, sums: Sums) -> Plan[None]:
    """Make the documents that are not there yet, with a count of zero."""
    keys = [to_bson(key, []) for key in sums]
    there = yield from find(rule.target.collection, {rule.by_path: {"$in": keys}}, {rule.by_path: 1})
    known = {freeze(value_at(each, rule.by_path)) for each in there}
    operations = [
        UpdateOne(
            rule.where(key), {"$setOnInsert": {**rule.beginning(key), rule.path: rule.zero}}, upsert=True
        )
        for key in sums
        if freeze(to_bson(key, [])) not in known
    ]
    if operations:
        yield from bulk_write(rule.target.collection, operations, ordered=False)


def _follow(entry: Entry[Any], befores: Sequence[Raw], ledger: Ledger) -> Plan[None]:
    """Let formulas and other documents follow the new counts."""
    if not befores:
        return
    found = yield from find(entry.collection, {"_id": {"$in": [each["_id"] for each in befores]}})
    afters = {freeze(each["_id"]): each for each in found}
    pairs = [(each, afters[freeze(each["_id"])]) for each in befores if freeze(each["_id"]) in afters]
    # Its own references are the same in another version, whatever their names were.
    own = [(after if lazy.is_stale(entry, before) else before, after) for before, after in pairs]
    finals = yield from follow_own(entry, own)
    for (before, _), after in zip(pairs, finals, strict=True):
        ledger.add(Change(entry.collection, before["_id"], before, after))


def _missing(rule: CounterFields, sums: Sums, of_keys: Raw) -> Plan[dict[Any, Any]]:
    there = yield from find(rule.target.collection, of_keys, {rule.by_path: 1})
    known = {freeze(value_at(each, rule.by_path)) for each in there}
    return {key: n for key, n in sums.items() if freeze(to_bson(key, [])) not in known}


def unfit(rule: CounterFields, sums: Sums) -> Plan[dict[Any, Any]]:
    """The amounts whose document holds something else than a number."""
    wrong = {
        rule.by_path: {"$in": [to_bson(key, []) for key in sums]},
        rule.path: {"$exists": True, "$not": {"$type": "number"}},
    }
    there = yield from find(rule.target.collection, wrong, {rule.by_path: 1})
    bad = {freeze(value_at(each, rule.by_path)) for each in there}
    return {key: n for key, n in sums.items() if freeze(to_bson(key, [])) in bad}


def culprits(rule: CounterFields, sums: Sums, error: BaseException) -> Plan[dict[Any, Any]]:
    """The amounts that stand in the way of the others; none where the error is not about a document.

    A document that holds no number, that its validator refuses with the new
    one, or whose number would grow too large. In a transaction the server
    tells of one at a time.
    """
    if isinstance(error, OverflowError):
        return {key: n for key, n in sums.items() if abs(n) >= INT_MAX}
    if not is_refusal(error):
        return {}
    bad = yield from unfit(rule, sums)
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


class Flush(Work[dict[Any, Any]]):
    """One batch of a writer; the amounts that could not be added."""

    shows_document = False

    def __init__(self, rule: CounterFields, sums: Sums, writer: ObjectId, number: int) -> None:
        self.rule = rule
        self.entry = rule.target
        self.sums = sums
        self.writer = writer
        self.number = number
        # Whether documents carry its mark, so that parts of it may have been added.
        self.marks = False

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[dict[Any, Any]]:
        # A note in another document cannot be written together with the amounts without a transaction.
        self.marks = not server.transactions
        if self.marks:
            return (yield from apply(self.rule, self.sums, ledger, self.mark))
        noted = {"$set": {"n": self.number}, "$currentDate": {"at": True}}
        before = yield from find_one_and_update(
            LEDGER, {"_id": self.writer}, noted, after=False, upsert=True, projection={"n": 1}
        )
        if before is not None and before["n"] >= self.number:
            # It was committed after all. Which ids were missing is asked again.
            of_keys = {self.rule.by_path: {"$in": [to_bson(key, []) for key in self.sums]}}
            return (yield from _missing(self.rule, self.sums, of_keys))
        return (yield from apply(self.rule, self.sums, ledger))

    @property
    def mark(self) -> str:
        return f"{self.writer}_{self.number}"

    def result(self, outcome: dict[Any, Any]) -> dict[Any, Any]:
        return outcome


def unmark(work: Flush) -> Plan[None]:
    """Take the marks of a batch away that is known to be over; one that stays does no harm."""
    if not work.marks:
        return
    rule, name = work.rule, f"{MARKS}.{work.mark}"
    of_keys = {rule.by_path: {"$in": [to_bson(key, []) for key in work.sums]}, name: {"$exists": True}}
    try:
        yield from update_many(rule.target.collection, of_keys, {"$unset": {name: ""}})
    except PyMongoError as error:
        log.warning("%s: the marks of a batch stay: %s", rule.place.label, error)


def was_added(work: Flush, key: Any) -> Plan[bool]:
    """Whether a batch whose outcome is unknown has reached one document."""
    noted = yield from find_one(LEDGER, {"_id": work.writer}, {"n": 1})
    if noted is not None and noted["n"] >= work.number:
        return True
    marked = {**work.rule.where(key), f"{MARKS}.{work.mark}": {"$exists": True}}
    return (yield from find_one(work.entry.collection, marked, {"_id": 1})) is not None


def forget(writer: ObjectId) -> Plan[None]:
    """A writer has ended in order; nobody will ask for its batches."""
    yield from delete_one(LEDGER, {"_id": writer})


# -- sampled -----------------------------------------------------------------------------------------


class Sample(Work[bool]):
    """One event that stands for many; whether its document exists."""

    shows_document = False

    def __init__(self, rule: CounterFields, key: Any, n: Any) -> None:
        self.rule = rule
        self.entry = rule.target
        self.sums = {key: n}
        self._alone = not (concerns(self.entry, rule.maintained() | rule.stamps()) or may_upgrade(self.entry))

    @property
    def alone(self) -> bool:
        return self._alone

    def direct(self) -> Plan[bool]:
        return (yield from self._add(Ledger()))

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[bool]:
        return (yield from self._add(ledger))

    def _add(self, ledger: Ledger) -> Plan[bool]:
        if self._alone and not (self.rule.declared.upsert or speaks_of_current(self.entry)):
            ((key, n),) = self.sums.items()
            update = self.rule.increment(n)
            return bool(
                (yield from update_one(self.entry.collection, self.rule.where(key), update)).matched_count
            )
        return not (yield from apply(self.rule, self.sums, ledger))

    def result(self, outcome: bool) -> bool:
        return outcome


# -- reading -------------------------------------------------------------------------------------------


def plain(stored: Any) -> Any:
    """A stored number as Python's own."""
    return stored.to_decimal() if hasattr(stored, "to_decimal") else stored


def stored(rule: CounterFields, key: Any) -> Plan[Any]:
    """The stored number; None where there is no document."""
    entry = rule.target
    shown = None if entry.versioned else {rule.path: 1}
    found = yield from find_one(entry.collection, rule.where(key), shown)
    if found is None:
        return None
    if entry.versioned and lazy.is_stale(entry, found):
        (found,) = yield from lazy.in_memory(entry, [found])
    value = value_at(found, rule.path)
    return rule.number(plain(value)) if value is not None else rule.number(0)
