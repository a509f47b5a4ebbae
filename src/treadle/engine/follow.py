"""Writes that do not come from a caller, with all that follows from them in other documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pymongo.errors import OperationFailure

from treadle.engine import standalone
from treadle.engine.ledger import Ledger
from treadle.engine.react import UNBOUNDED, react
from treadle.engine.writes import follow_own
from treadle.graph.change import Change
from treadle.graph.gather import freeze
from treadle.model.storable import ENCODING_ERRORS
from treadle.plan import Plan, Raw, bulk_write, find, transact
from treadle.plan.capabilities import Capabilities

if TYPE_CHECKING:
    from treadle.graph.graph import Entry, Graph

Attempt = Callable[[], "Plan[tuple[list[Raw], list[Any], dict[Any, str]]]"]


def perform(
    graph: Graph, server: Capabilities, entry: Entry[Any], attempt: Attempt
) -> Plan[tuple[dict[Any, str], int]]:
    """Do the writes that `attempt` decides on, and let others follow; its failures, and how many it wrote.

    `attempt` reads, and returns the documents before, their writes, and what
    cannot be written. Without transactions each write is guarded by itself,
    and what it feeds is recomputed under an intent.
    """

    def follow() -> Plan[tuple[dict[Any, str], int]]:
        ledger = Ledger()
        outcome = yield from _inside(entry, attempt, ledger)
        yield from react(graph, server, ledger, copies_max=UNBOUNDED)
        return outcome

    # What follows is found by differences in a transaction, by intents elsewhere.
    if server.transactions:
        return (yield from transact(follow))
    ledger = standalone.IntentLedger("migrate")
    try:
        outcome = yield from _inside(entry, attempt, ledger)
    except (OperationFailure, *ENCODING_ERRORS):
        # Some of the writes may have been done; what they feed is recomputed all the same.
        yield from standalone.settle(graph, server, ledger)
        raise
    yield from standalone.settle(graph, server, ledger)
    return outcome


def _inside(entry: Entry[Any], attempt: Attempt, ledger: Ledger) -> Plan[tuple[dict[Any, str], int]]:
    befores, writes, failures = yield from attempt()
    if not writes:
        return failures, 0
    keys = [each["_id"] for each in befores]
    yield from ledger.note_before(entry.root, keys)
    result = yield from bulk_write(entry.collection, writes, ordered=False)
    found = {
        freeze(each["_id"]): each for each in (yield from find(entry.collection, {"_id": {"$in": keys}}))
    }
    pairs = [(before, found[freeze(before["_id"])]) for before in befores if freeze(before["_id"]) in found]
    # By their kind after the write: a migration may give one to documents that had none.
    afters = yield from _followed(entry, pairs)
    for (before, _), after in zip(pairs, afters, strict=True):
        ledger.add(Change(entry.collection, before["_id"], before, after))
    return failures, result.matched_count


def _followed(entry: Entry[Any], pairs: list[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
    by_key: dict[Any, Raw] = {}
    for exact, group in entry.root.by_class([(after, before) for before, after in pairs]):
        same = [(before, after) for after, before in group]
        for after in (yield from follow_own(exact, same)):
            by_key[freeze(after["_id"])] = after
    return [by_key[freeze(after["_id"])] for _, after in pairs]
