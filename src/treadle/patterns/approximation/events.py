"""Events of durable counters: stored first, then added up and moved to their documents.

Any number of flushers may do so at once; what they take is added and deleted
in one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bson import ObjectId
from pymongo.errors import ConnectionFailure, DuplicateKeyError

from treadle.engine.ledger import Ledger
from treadle.engine.work import Work
from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.fields import CounterFields
from treadle.patterns.approximation.flush import Sums, apply, plain, stored
from treadle.plan import Plan, Raw, aggregate, delete_many, find, insert_one
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze

# Whatever else lies in the collection is not ours, and must not stop what is.
WELL_FORMED: Raw = {"d": {"$type": "array", "$not": {"$elemMatch": {"n": {"$not": {"$type": "number"}}}}}}


def record(rule: CounterFields, sums: Sums) -> Plan[None]:
    """Store amounts as events, so that a crash does not lose them."""
    assert rule.buffer_collection is not None
    items = [{"k": to_bson(key, []), "n": to_bson(rule.number(n), [])} for key, n in sums.items()]
    most = rule.target.limits.counter_amounts_max
    for start in range(0, len(items), most):
        event = {"_id": ObjectId(), "d": items[start : start + most]}
        yield from _insert_once(rule.buffer_collection, event, rule.target.limits.counter_attempts_max)


def _insert_once(collection: str, event: Raw, most: int) -> Plan[None]:
    """Insert under an id that was chosen here; again where nobody knows whether it was."""
    for attempt in range(most):
        try:
            yield from insert_one(collection, event)
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
        limits = rule.target.limits
        self.events_max = limits.counter_events_again_max if self.left_out else limits.counter_events_max
        self.sums: dict[Any, Any] = {}

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[Any]:
        assert self.rule.buffer_collection is not None
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
            if len(self.sums) >= self.entry.limits.counter_chunk:
                break
        refused.update({key: n for key, n in self.sums.items() if key in self.left_out})
        sums = {key: n for key, n in self.sums.items() if n and key not in self.left_out}
        # Deleted first, so that two flushers meet before either has added anything.
        yield from delete_many(self.rule.buffer_collection, {"_id": {"$in": taken}})
        missing = yield from apply(self.rule, sums, ledger)
        return len(taken), sums, joined(self.rule, [missing, refused])

    def result(self, outcome: Any) -> Any:
        return outcome


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


def joined(rule: CounterFields, parts: Sequence[Sums]) -> dict[Any, Any]:
    """Several sums as one."""
    total: dict[Any, Any] = {}
    for sums in parts:
        for key, n in sums.items():
            total[key] = rule.plus(total.get(key, 0), n)
    return total


def buffered(rule: CounterFields, key: Any = None) -> Plan[dict[Any, Any]]:
    """What waits in the durable buffer, of all writers; of one key, if one is given."""
    assert rule.buffer_collection is not None
    stages: list[Raw] = [{"$unwind": "$d"}, {"$group": {"_id": "$d.k", "n": {"$sum": "$d.n"}}}]
    if key is not None:
        wanted = {"d.k": {"$eq": to_bson(key, [])}}
        stages = [{"$match": wanted}, stages[0], {"$match": wanted}, stages[1]]
    rows = yield from aggregate(rule.buffer_collection, stages, allowDiskUse=True)
    return {_key(rule, row["_id"])[0]: plain(row["n"]) for row in rows if plain(row["n"])}


def stored_and_buffered(rule: CounterFields, key: Any) -> Plan[tuple[Any, Any]]:
    """Both at one moment, where the caller provides one."""
    value = yield from stored(rule, key)
    waiting = yield from buffered(rule, key)
    return value, waiting.get(key, 0)
