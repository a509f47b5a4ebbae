"""Work that is still owed, written down before it can be forgotten.

An intent says which documents may be out of step. Doing it is recomputation
from the sources, so doing it twice is harmless, and `recover` does whatever a
crash left behind. There are two kinds:

- a *fan-out*: a source changed that has too many copies for one transaction.
  The intent is committed with the change; the copies follow in chunks, each a
  transaction that really writes the source, so that no older value can be
  written over a newer one.
- a *write* on a server without transactions: the intent comes before the
  write and names the keys that the document feeds before it, and goes when
  everything that the document feeds has been recomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pymongo.errors import OperationFailure

from treadle.maintenance.ledger import Ledger
from treadle.maintenance.react import UNBOUNDED, FanOut, copy_to, feeds_beyond, react
from treadle.pattern import REVISION
from treadle.plan import (
    Plan,
    Raw,
    by_id,
    delete_one,
    find,
    find_one,
    find_one_and_update,
    transact,
    update_one,
)
from treadle.topology import Topology

if TYPE_CHECKING:
    from treadle.graph import Graph
    from treadle.patterns.extended_reference import ReferenceRule

COLLECTION = "treadle.intents"
SET_ASIDE = "treadle.set_aside"
CHUNK = 1000
# Errors of one document that would stop all the others: too large, or refused by the validator.
POISON = frozenset({10334, 17419, 17420, 121})

log = logging.getLogger("treadle")


def is_poison(error: BaseException) -> bool:
    """Whether an error is about a single document rather than about the whole."""
    return isinstance(error, OperationFailure) and error.code in POISON


# -- fan-outs ---------------------------------------------------------------------------


def _fan_out_id(fan_out: FanOut) -> Raw:
    return {"kind": "fan-out", "rule": fan_out.rule.place.label, "key": fan_out.source_id}


def record(later: Sequence[FanOut], owner: str) -> Plan[None]:
    """Write the intents of fan-outs, in the transaction that makes them necessary."""
    for fan_out in later:
        # A second change of the same source starts the copying again.
        yield from update_one(
            COLLECTION,
            {"_id": _fan_out_id(fan_out)},
            {"$inc": {"n": 1}, "$set": {"after": None, "owner": owner}, "$currentDate": {"at": True}},
            upsert=True,
        )


def finish(graph: Graph, server: Topology, fan_out: FanOut) -> Plan[int]:
    """Make the copies of one source, chunk by chunk; how many documents were visited."""
    rule, key = fan_out.rule, fan_out.source_id
    intent = yield from find_one(COLLECTION, {"_id": _fan_out_id(fan_out)})
    if intent is None:
        return 0
    visited = 0
    last = intent.get("after")
    while True:
        chunk = yield from _next_chunk(rule, key, last)
        if not chunk:
            break
        visited += len(chunk)
        last = chunk[-1]
        yield from _copy_chunk(graph, server, fan_out, chunk, intent["n"])
    yield from delete_one(COLLECTION, {"_id": _fan_out_id(fan_out), "n": intent["n"]})
    return visited


def _next_chunk(rule: ReferenceRule, key: Any, last: Any) -> Plan[list[Any]]:
    condition: Raw = {rule.reference_path: {"$eq": key}}
    if last is not None:
        condition["_id"] = {"$gt": last}
    found = yield from find(rule.target.collection, condition, {"_id": 1}, sort=[("_id", 1)], limit=CHUNK)
    if not found and last is not None and rule.target.identity_shape.kind != "scalar":
        # A range ends where the type of the ids changes; an expression compares across types.
        condition["_id"] = {"$exists": True}
        condition["$expr"] = {"$gt": ["$_id", {"$literal": last}]}
        found = yield from find(rule.target.collection, condition, {"_id": 1}, sort=[("_id", 1)], limit=CHUNK)
    return [each["_id"] for each in found]


def _copy_chunk(graph: Graph, server: Topology, fan_out: FanOut, keys: list[Any], number: int) -> Plan[None]:
    """Copy to some targets; a document that cannot take the copy is set aside."""
    rule = fan_out.rule

    def attempt() -> Plan[None]:
        source = yield from find_one_and_update(
            rule.source.collection, by_id(fan_out.source_id), {"$inc": {REVISION: 1}}
        )
        if source is None:
            return
        ledger = Ledger()
        yield from copy_to(
            rule, fan_out.source_id, source, keys, feeds_beyond(rule.target, rule.level), ledger
        )
        yield from react(graph, server, ledger, copies_max=UNBOUNDED)
        yield from update_one(
            COLLECTION, {"_id": _fan_out_id(fan_out), "n": number}, {"$set": {"after": keys[-1]}}
        )

    try:
        yield from transact(attempt)
    except OperationFailure as error:
        if not is_poison(error):
            raise
        if len(keys) == 1:
            yield from set_aside(rule.place.label, rule.target.collection, keys[0], error)
            return
        middle = len(keys) // 2
        yield from _copy_chunk(graph, server, fan_out, keys[:middle], number)
        yield from _copy_chunk(graph, server, fan_out, keys[middle:], number)


def set_aside(label: str, collection: str, key: Any, error: OperationFailure) -> Plan[None]:
    """Note a document that could not be brought up to date, and go on."""
    reason = (error.details or {}).get("errmsg") or error.args[0]
    log.warning("%s: %s %r was set aside: %s", label, collection, key, str(reason)[:200])
    yield from update_one(
        SET_ASIDE,
        {"_id": {"rule": label, "collection": collection, "key": key}},
        {"$set": {"reason": str(reason)[:500]}, "$currentDate": {"at": True}},
        upsert=True,
    )


# -- recovery -------------------------------------------------------------------------------


def recover(
    graph: Graph, server: Topology, redo: Callable[[Raw], Plan[None]], is_over: Callable[[Raw], bool]
) -> Plan[int]:
    """Do whatever is still owed; how many intents there were.

    `redo` repeats the intent of a write; `is_over` says whether the process
    that wrote it can no longer be about to act on it.
    """
    done = 0
    rules = {rule.place.label: rule for entry in graph.entries.values() for rule in entry.references}
    for intent in (yield from find(COLLECTION, {})):
        kind = intent["_id"].get("kind")
        if kind == "fan-out":
            rule = rules.get(intent["_id"]["rule"])
            if rule is None:
                # Another application's models; it will see to it.
                continue
            yield from finish(graph, server, FanOut(rule, intent["_id"]["key"]))
        elif intent.get("collection") in graph.by_collection:
            yield from redo(intent)
            if is_over(intent):
                yield from delete_one(COLLECTION, {"_id": intent["_id"]})
        else:
            continue
        done += 1
    return done
