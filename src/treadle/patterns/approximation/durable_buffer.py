"""Events of durable counters: stored first, then added to their documents by any flusher.

What a flusher takes is added and deleted in one transaction, which also notes
in `treadle.batches` up to which number the events of each writer are moved. A
writer numbers its events, stores one after another, and does not begin the
next before the last is stored or given up. So it can tell whether an event
that it stores again was moved since; and an event that arrives a second time,
after it was moved, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from bson import ObjectId
from pymongo import UpdateOne
from pymongo.errors import ConnectionFailure, DuplicateKeyError, OperationFailure, PyMongoError

from treadle.errors import TreadleError, UsageError
from treadle.graph.calls import Sums, Waiting
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.add_amounts import BATCHES, AddAmounts, Added, Claim, find_refused
from treadle.patterns.approximation.counter_field import CounterField
from treadle.plan import Plan, Raw, aggregate, bulk_write, delete_many, find, insert_one, transact
from treadle.query.keys import freeze

# Attempts to store an event whose writer lost its connection.
COUNTER_ATTEMPTS_MAX = 3
# Parts of a durable buffer that one flush moves.
COUNTER_PARTS_MAX = 10_000
# Events that a flush moves at a time after it was refused: each further refusal is a new attempt.
COUNTER_EVENTS_AGAIN_MAX = 20
# Amounts in one buffered event.
COUNTER_AMOUNTS_MAX = 1_000

# Other documents in the collection are left alone.
WELL_FORMED: Raw = {"d": {"$type": "array", "$not": {"$elemMatch": {"n": {"$not": {"$type": "number"}}}}}}


# -- storing -----------------------------------------------------------------------------------------


def store_events(rule: CounterField, amounts: Sums, waiting: Waiting) -> Plan[None]:
    """Store amounts as events, so that a crash does not lose them."""
    items = [{"k": to_bson(key, []), "n": to_bson(rule.number(n), [])} for key, n in amounts.items()]
    for start in range(0, len(items), COUNTER_AMOUNTS_MAX):
        # In this order, so that a writer's events are read by their numbers. The last part tells the time.
        identity = {"w": waiting.writer, "n": waiting.next_number(), "t": ObjectId()}
        yield from _insert_once(rule, {"_id": identity, "d": items[start : start + COUNTER_AMOUNTS_MAX]})


def _insert_once(rule: CounterField, event: Raw) -> Plan[None]:
    """Insert an event under its own id, again where it is unknown whether it was stored."""

    def insert_unless_moved() -> Plan[None]:
        if not (yield from _find_moved([event])):
            yield from insert_one(rule.buffer_collection, event)

    try:
        yield from insert_one(rule.buffer_collection, event)
        return
    except ConnectionFailure as error:
        lost = error
    for _ in range(1, COUNTER_ATTEMPTS_MAX):
        try:
            return (yield from transact(insert_unless_moved))
        except DuplicateKeyError:
            return
        except ConnectionFailure:
            continue
        except (PyMongoError, TreadleError):
            break
    # The first error: a later one may say for certain that nothing was stored, and means its own attempt.
    raise lost


def _find_moved(events: Sequence[Raw]) -> Plan[list[Any]]:
    """Return the ids of events that a flusher has moved before."""
    numbered = [each["_id"] for each in events if _is_numbered(each["_id"])]
    writers = {each["w"] for each in numbered}
    rows = (yield from find(BATCHES, {"_id": {"$in": list(writers)}}, {"n": 1})) if writers else []
    last = {row["_id"]: row["n"] for row in rows}
    return [each for each in numbered if each["n"] <= last.get(each["w"], 0)]


def _note_moved(events: Sequence[Raw]) -> Plan[None]:
    # In the order of their numbers, so that the last one of each writer stays.
    last = {each["_id"]["w"]: each["_id"]["n"] for each in events if _is_numbered(each["_id"])}
    operations = [
        UpdateOne({"_id": writer}, {"$max": {"n": number}, "$currentDate": {"at": True}}, upsert=True)
        for writer, number in last.items()
    ]
    if operations:
        yield from bulk_write(BATCHES, operations, ordered=False)


def _is_numbered(identity: Any) -> bool:
    """Whether this is the id of an event that a writer numbered."""
    return isinstance(identity, dict) and list(identity) == ["w", "n", "t"]


# -- moving ------------------------------------------------------------------------------------------


def claim_events(rule: CounterField, events_max: int) -> Plan[Claim]:
    """Claim the first events by deleting them."""
    events = yield from find(rule.buffer_collection, WELL_FORMED, sort=[("_id", 1)], limit=events_max)
    if not events:
        return Claim({})
    moved = yield from _find_moved(events)
    amounts: dict[Any, Any] = {}
    refused: dict[Any, Any] = {}
    taken: list[Raw] = []
    for event in events:
        taken.append(event)
        if event["_id"] not in moved:
            _add_event(rule, amounts, refused, event)
        if len(amounts) >= rule.limits.counter_chunk:
            break
    # Before anything is added, so that two flushers conflict early.
    yield from delete_many(rule.buffer_collection, {"_id": {"$in": [each["_id"] for each in taken]}})
    yield from _note_moved(taken)
    return Claim(amounts, refused, events=len(taken))


def _add_event(rule: CounterField, amounts: dict[Any, Any], refused: dict[Any, Any], event: Raw) -> None:
    """Add the amounts of one event; those under keys that no document can have to `refused`."""
    for amount in event["d"]:
        if isinstance(amount, dict):
            key, fits = _load_key(rule, amount.get("k"))
            into = amounts if fits else refused
            into[key] = rule.plus(into.get(key, 0), rule.load(amount["n"]))


def _load_key(rule: CounterField, stored: Any) -> tuple[Any, bool]:
    """Return a buffered key, and whether the model allows it: it may have been declared otherwise once."""
    try:
        return rule.key(stored), True
    except UsageError:
        return freeze(stored), False


def flush_events(
    rule: CounterField, commit: Callable[[AddAmounts], Plan[Added]], note: Callable[[Added], None]
) -> Plan[None]:
    """Move everything that is buffered, one commit for each part; `note` gets what became of it."""
    refused: Collection[Any] = frozenset()
    for _ in range(COUNTER_PARTS_MAX):
        events_max = COUNTER_EVENTS_AGAIN_MAX if refused else rule.limits.counter_events_max
        write = AddAmounts(rule, partial(claim_events, rule, events_max), refused)
        try:
            added = yield from commit(write)
        except (OperationFailure, OverflowError) as error:
            found = find_refused(rule, write.amounts, error)
            if not found:
                raise
            # Their amounts are deleted with their events.
            refused = {*refused, *found}
            continue
        note(added)
        if not added.events:
            break


# -- reading -----------------------------------------------------------------------------------------


def event_stages(condition: Raw) -> list[Raw]:
    """Return the stages that give key `_id` and sum `n` of the events that a flush would add."""
    is_moved = {"$lte": ["$_id.n", {"$ifNull": [{"$first": "$batch.n"}, 0]}]}
    batch = {"from": BATCHES, "localField": "_id.w", "foreignField": "_id", "as": "batch"}
    return [
        {"$match": {**WELL_FORMED, **condition}},
        {"$lookup": batch},
        {"$match": {"$expr": {"$not": [{"$and": [{"$isNumber": "$_id.n"}, is_moved]}]}}},
        {"$unwind": "$d"},
        {"$group": {"_id": "$d.k", "n": {"$sum": "$d.n"}}},
    ]


def read_buffered(rule: CounterField, key: Any = None) -> Plan[dict[Any, Any]]:
    """Return what is buffered by all writers; of one key, if one is given."""
    condition = {} if key is None else {"d.k": {"$eq": to_bson(key, [])}}
    rows = yield from aggregate(rule.buffer_collection, event_stages(condition), allowDiskUse=True)
    sums = {_load_key(rule, row["_id"])[0]: rule.load(row["n"]) for row in rows}
    return {each: n for each, n in sums.items() if n}
