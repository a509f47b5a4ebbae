"""Events of durable counters: stored first, then added up and moved to their documents.

Any number of flushers may do so at once; what they take is added and deleted
in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bson import ObjectId
from pymongo.errors import ConnectionFailure, DuplicateKeyError, OperationFailure

from treadle.engine.ledger import Ledger
from treadle.engine.work import Work
from treadle.errors import UsageError
from treadle.graph.calls import Sums
from treadle.graph.graph import Graph
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.fields import CounterFields
from treadle.patterns.approximation.flush import apply, culprits, plain
from treadle.plan import Plan, Raw, aggregate, delete_many, find, insert_one
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze

# Whatever else lies in the collection is not ours, and must not stop what is.
WELL_FORMED: Raw = {"d": {"$type": "array", "$not": {"$elemMatch": {"n": {"$not": {"$type": "number"}}}}}}


def record(rule: CounterFields, sums: Sums) -> Plan[None]:
    """Store amounts as events, so that a crash does not lose them."""
    items = [{"k": to_bson(key, []), "n": to_bson(rule.number(n), [])} for key, n in sums.items()]
    most = rule.limits.counter_amounts_max
    for start in range(0, len(items), most):
        yield from _insert_once(rule, {"_id": ObjectId(), "d": items[start : start + most]})


def _insert_once(rule: CounterFields, event: Raw) -> Plan[None]:
    """Insert under an id that was chosen here; again where nobody knows whether it was."""
    most = rule.limits.counter_attempts_max
    for attempt in range(most):
        try:
            yield from insert_one(rule.buffer_collection, event)
            return
        except DuplicateKeyError:
            if attempt:
                return
            raise
        except ConnectionFailure:
            if attempt + 1 == most:
                raise


class Drain(Work[tuple[int, dict[Any, Any], dict[Any, Any]]]):
    """A part of the buffered events, added and deleted: how many, the sums, and what could not be added."""

    shows_document = False

    def __init__(self, rule: CounterFields, left_out: Sums | None = None) -> None:
        self.rule = rule
        self.entry = rule.target
        # Amounts of keys that are known to be unfit go with their events.
        self.left_out = set(left_out or ())
        # Where one stands in the way there may be more, each of which is a new attempt.
        limits = rule.limits
        self.events_max = limits.counter_events_again_max if self.left_out else limits.counter_events_max
        self.sums: dict[Any, Any] = {}

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[Any]:
        events = yield from find(
            self.rule.buffer_collection, WELL_FORMED, sort=[("_id", 1)], limit=self.events_max
        )
        if not events:
            return 0, {}, {}
        taken: list[Any] = []
        self.sums = {}
        refused: dict[Any, Any] = {}
        for event in events:
            taken.append(event["_id"])
            add_up(self.rule, self.sums, refused, event)
            if len(self.sums) >= self.rule.limits.counter_chunk:
                break
        refused.update({key: n for key, n in self.sums.items() if key in self.left_out})
        sums = {key: n for key, n in self.sums.items() if n and key not in self.left_out}
        # Deleted first, so that two flushers meet before either has added anything.
        yield from delete_many(self.rule.buffer_collection, {"_id": {"$in": taken}})
        missing = yield from apply(self.rule, sums, ledger)
        return len(taken), sums, self.rule.joined([missing, refused])


def drain(
    rule: CounterFields,
    commit: Callable[[Drain], Plan[tuple[int, Sums, Sums]]],
    note: Callable[[Sums, Sums], None],
) -> Plan[None]:
    """Move everything that is buffered; `note` receives what was added, and what could not be."""
    left_out: dict[Any, Any] = {}
    for _ in range(rule.limits.counter_parts_max):
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
