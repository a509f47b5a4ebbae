"""Pending fan-outs: a source changed that has too many copies for one transaction.

The intent is committed with the change; the copies follow in chunks, each a
transaction that really writes the source, so that no older value can be
written over a newer one. Copying is idempotent: `recover` finishes what a
crash has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.engine.copies import UNBOUNDED, FanOut, copy_to, differing_copies, read_cards
from treadle.engine.pages import next_ids
from treadle.engine.propagate import propagate
from treadle.engine.salvage import salvage
from treadle.graph.changes import Changes
from treadle.graph.derived import copies_in
from treadle.graph.graph import Graph
from treadle.graph.quarantine import set_aside
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, delete_one, find, find_one_and_update, transact, update_one
from treadle.plan.decoding import Unreadable
from treadle.plan.server_errors import is_about_one_document
from treadle.query.keys import freeze

COLLECTION = "treadle.intents"
log = get_logger(__name__)


def _fan_out_id(fan_out: FanOut) -> Raw:
    return {"kind": "fan-out", "rule": fan_out.rule.place.label, "key": fan_out.key}


def record(later: Sequence[FanOut]) -> Plan[list[Raw]]:
    """Write the intents of fan-outs, in the transaction that makes them necessary."""
    intents = []
    for fan_out in later:
        # A second change of the same source starts the copying again.
        intent = yield from find_one_and_update(
            COLLECTION,
            {"_id": _fan_out_id(fan_out)},
            {"$inc": {"n": 1}, "$set": {"after": None}, "$currentDate": {"at": True}},
            upsert=True,
        )
        assert intent is not None
        intents.append(intent)
    return intents


def finish(graph: Graph, fan_out: FanOut, intent: Raw) -> Plan[None]:
    """Update the copies of one source, chunk by chunk, and delete the intent.

    A source that cannot be copied at all is quarantined, and its intent is
    deleted too: a retry of the source updates the copies.
    """
    try:
        yield from _copy_all(graph, fan_out, intent)
    except Exception as error:
        if not is_about_one_document(error):
            raise
        rule = fan_out.rule
        yield from set_aside(rule.place.label, rule.source.collection, fan_out.key, error)
    yield from delete_one(COLLECTION, {"_id": _fan_out_id(fan_out), "n": intent["n"]})


def _copy_all(graph: Graph, fan_out: FanOut, intent: Raw) -> Plan[None]:
    rule, last = fan_out.rule, intent.get("after")
    # Of the source as it is now: a later change of it has its own intent.
    cards = yield from read_cards(rule, [fan_out.key])
    referring = rule.targets_of([fan_out.key])
    for card in cards.values():
        # Correct copies are passed over without a transaction.
        referring = {**referring, **differing_copies(rule, card)}
    size = rule.target.limits.fan_out_chunk
    while ids := (yield from next_ids(rule.target, referring, last, size)):
        yield from _copy_chunk(graph, fan_out, ids, intent["n"])
        last = ids[-1]


def _copy_chunk(graph: Graph, fan_out: FanOut, ids: Sequence[Any], number: int) -> Plan[None]:
    """Update the copies in some targets; a target that cannot be written is quarantined."""
    rule = fan_out.rule
    progress = {"_id": _fan_out_id(fan_out), "n": number}

    def copy(some: Sequence[Any]) -> Plan[None]:
        cards = yield from read_cards(rule, [fan_out.key], written=True)
        if not cards and rule.copied.keep:
            return
        changes = Changes()
        # Without a card the source was archived, and is not counted there.
        card = cards.get(freeze(fan_out.key))
        yield from copy_to(rule, fan_out.key, card, {"_id": {"$in": list(some)}}, changes)
        yield from propagate(graph, changes, copies_max=UNBOUNDED)
        yield from update_one(COLLECTION, progress, {"$set": {"after": some[-1]}})

    def attempt(some: Sequence[Any]) -> Plan[list[None]]:
        yield from transact(lambda: copy(some))
        return []

    try:
        yield from attempt(ids)
    except Exception as error:
        if not is_about_one_document(error) or _is_of_source(fan_out, error):
            raise
        yield from salvage(rule.place.label, rule.target.collection, ids, attempt, reason=error)


def _is_of_source(fan_out: FanOut, error: Exception) -> bool:
    """Whether the source itself cannot be read, so that no copy can be made."""
    return isinstance(error, Unreadable) and error.holds(fan_out.rule.source.collection, fan_out.key)


# -- recovery -------------------------------------------------------------------------------


def recover(graph: Graph) -> Plan[int]:
    """Finish the pending fan-outs. Returns the number of them."""
    done = 0
    rules = {rule.place.label: rule for entry in graph.entries.values() for rule in copies_in(entry)}
    for intent in (yield from find(COLLECTION, {"_id.kind": "fan-out"})):
        # A rule that is not known here is another application's, which finishes its own.
        rule = rules.get(intent["_id"]["rule"])
        if rule is not None:
            yield from finish(graph, FanOut(rule, intent["_id"]["key"]), intent)
            done += 1
    return done
