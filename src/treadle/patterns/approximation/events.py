"""Events of durable counters: stored first, then added up and moved to their documents.

Any number of flushers may do so at once; what they take is added and deleted
in one transaction, which also notes in `treadle.batches` up to which number
the events of each writer are moved. A writer numbers its events, stores one
after another, and does not begin the next before the last is stored or given
up. So it can tell whether an event that it stores again was moved meanwhile;
and one that arrives a second time, when it was moved already, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bson import ObjectId
from pymongo import UpdateOne
from pymongo.errors import ConnectionFailure, DuplicateKeyError, OperationFailure, PyMongoError

from treadle.errors import TreadleError, UsageError
from treadle.graph.calls import Sums, Waiting
from treadle.graph.changes import Changes
from treadle.graph.write import Write
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.fields import CounterFields
from treadle.patterns.approximation.flush import LEDGER, apply, culprits, plain
from treadle.plan import Plan, Raw, aggregate, bulk_write, delete_many, find, insert_one, transact
from treadle.query.keys import freeze

# Attempts at a write that met another writer or lost its connection.
COUNTER_ATTEMPTS_MAX = 3
# Parts of a durable buffer that one flush moves.
COUNTER_PARTS_MAX = 10_000
# The same, after one was refused.
COUNTER_EVENTS_AGAIN_MAX = 20
# Amounts in one buffered event.
COUNTER_AMOUNTS_MAX = 1_000

# Whatever else lies in the collection is not ours, and must not stop what is.
WELL_FORMED: Raw = {"d": {"$type": "array", "$not": {"$elemMatch": {"n": {"$not": {"$type": "number"}}}}}}


def record(rule: CounterFields, sums: Sums, waiting: Waiting) -> Plan[None]:
    """Store amounts as events, so that a crash does not lose them."""
    items = [{"k": to_bson(key, []), "n": to_bson(rule.number(n), [])} for key, n in sums.items()]
    most = COUNTER_AMOUNTS_MAX
    for start in range(0, len(items), most):
        # In this order, so that a writer's events are read by their numbers. The last part tells the time.
        identity = {"w": waiting.writer, "n": waiting.next_number(), "t": ObjectId()}
        yield from _insert_once(rule, {"_id": identity, "d": items[start : start + most]})


def _insert_once(rule: CounterFields, event: Raw) -> Plan[None]:
    """Insert under an id that was chosen here; again where nobody knows whether it was."""

    def insert_unless_moved() -> Plan[None]:
        if not (yield from _moved([event])):
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


def _moved(events: Sequence[Raw]) -> Plan[list[Any]]:
    """The ids of events that a flusher has moved before."""
    numbered = [each["_id"] for each in events if _is_numbered(each["_id"])]
    writers = {each["w"] for each in numbered}
    rows = (yield from find(LEDGER, {"_id": {"$in": list(writers)}}, {"n": 1})) if writers else []
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
        yield from bulk_write(LEDGER, operations, ordered=False)


def _is_numbered(identity: Any) -> bool:
    """Whether this is the id of an event that a writer numbered, and not somebody else's."""
    return isinstance(identity, dict) and list(identity) == ["w", "n", "t"]


class Drain(Write[tuple[int, dict[Any, Any], dict[Any, Any]]]):
    """A part of the buffered events, added and deleted: how many, the sums, and what could not be added."""

    shows_document = False

    def __init__(self, rule: CounterFields, left_out: Sums | None = None) -> None:
        self.rule = rule
        self.entry = rule.target
        # Amounts of keys that are known to be unfit go with their events.
        self.left_out = set(left_out or ())
        # Where one stands in the way there may be more, each of which is a new attempt.
        limits = rule.limits
        self.events_max = COUNTER_EVENTS_AGAIN_MAX if self.left_out else limits.counter_events_max
        self.sums: dict[Any, Any] = {}

    def apply(self, changes: Changes) -> Plan[Any]:
        events = yield from find(
            self.rule.buffer_collection, WELL_FORMED, sort=[("_id", 1)], limit=self.events_max
        )
        if not events:
            return 0, {}, {}
        moved = yield from _moved(events)
        taken: list[Raw] = []
        self.sums = {}
        refused: dict[Any, Any] = {}
        for event in events:
            taken.append(event)
            if event["_id"] not in moved:
                add_up(self.rule, self.sums, refused, event)
            if len(self.sums) >= self.rule.limits.counter_chunk:
                break
        refused.update({key: n for key, n in self.sums.items() if key in self.left_out})
        sums = {key: n for key, n in self.sums.items() if n and key not in self.left_out}
        # Deleted first, so that two flushers meet before either has added anything.
        yield from delete_many(self.rule.buffer_collection, {"_id": {"$in": [each["_id"] for each in taken]}})
        yield from _note_moved(taken)
        missing = yield from apply(self.rule, sums, changes)
        return len(taken), sums, self.rule.joined([missing, refused])


def drain(
    rule: CounterFields,
    commit: Callable[[Drain], Plan[tuple[int, Sums, Sums]]],
    note: Callable[[Sums, Sums], None],
) -> Plan[None]:
    """Move everything that is buffered; `note` receives what was added, and what could not be."""
    left_out: dict[Any, Any] = {}
    for _ in range(COUNTER_PARTS_MAX):
        work = Drain(rule, left_out)
        try:
            events, sums, refused = yield from commit(work)
        except (OperationFailure, OverflowError) as error:
            bad = yield from culprits(rule, work.sums, error)
            if not bad or bad.keys() <= left_out.keys():
                raise
            left_out |= bad
            continue
        note(sums, refused)
        if not events:
            break


def add_up(rule: CounterFields, sums: dict[Any, Any], refused: dict[Any, Any], event: Raw) -> None:
    """Add the amounts of one buffered event to sums; under a key that can be no document's, to `refused`."""
    for amount in event["d"]:
        if not isinstance(amount, dict):
            continue
        key, fits = _key(rule, amount.get("k"))
        into = sums if fits else refused
        into[key] = rule.plus(into.get(key, 0), plain(amount["n"]))


def _key(rule: CounterFields, stored: Any) -> tuple[Any, bool]:
    """A buffered key, and whether the model allows it: it may have been declared otherwise once."""
    try:
        return rule.key(stored), True
    except UsageError:
        return freeze(stored), False


def buffered(rule: CounterFields, key: Any = None) -> Plan[dict[Any, Any]]:
    """What waits in the durable buffer, of all writers; of one key, if one is given."""
    stages: list[Raw] = [{"$unwind": "$d"}, {"$group": {"_id": "$d.k", "n": {"$sum": "$d.n"}}}]
    if key is not None:
        of_key = {"$match": {"d.k": {"$eq": to_bson(key, [])}}}
        stages = [of_key, stages[0], of_key, stages[1]]
    rows = yield from aggregate(rule.buffer_collection, stages, allowDiskUse=True)
    return {_key(rule, row["_id"])[0]: plain(row["n"]) for row in rows if plain(row["n"])}
