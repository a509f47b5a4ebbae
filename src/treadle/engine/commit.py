"""Several writes in one transaction, with what they do to other documents done once.

`commit` runs the bodies of the works one after another, then lets every
affected target follow, then commits. Fan-outs that are too large for one
transaction leave an intent in it and are finished afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine import intents, standalone
from treadle.engine.ledger import Ledger
from treadle.engine.react import UNBOUNDED, FanOut, react
from treadle.engine.writes import Work
from treadle.graph.graph import Graph
from treadle.plan import Plan, Raw, find, transact
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze


def commit(
    graph: Graph,
    server: Capabilities,
    works: Sequence[Work[Any]],
    *,
    owner: str,
    is_dead: Callable[[str], bool],
    left: Callable[[], None],
) -> Plan[list[Any]]:
    """The outcomes of the works, all committed together.

    `left` is called where something could not be finished and waits for
    `recover` to do it. Without transactions each work stands for itself, and
    an outcome may be `standalone.Failed`.
    """
    if not server.transactions:
        return (yield from standalone.commit(graph, server, works, owner, is_dead, left))
    grouped = merge(works)

    def attempt(copies_max: int | None = None) -> Plan[tuple[list[Any], list[tuple[FanOut, Raw]]]]:
        ledger = Ledger()
        outcomes = []
        for work in grouped:
            outcomes.append((yield from work.body(graph, server, ledger)))
        later = yield from react(graph, server, ledger, copies_max=copies_max)
        owed = yield from intents.record(later, owner)
        return (yield from _as_they_are_now(grouped, outcomes)), list(zip(later, owed, strict=True))

    try:
        outcomes, owed = yield from transact(attempt)
    except OperationFailure as error:
        if not intents.is_poison(error):
            raise
        # One copy cannot be written. Make the copies afterwards, where it can be set aside.
        outcomes, owed = yield from transact(lambda: attempt(0))
    for fan_out, intent in owed:
        try:
            yield from intents.finish(graph, server, fan_out, intent)
        except Exception as error:
            # The writes are committed and the intent with them; they must not seem to have failed.
            intents.log.warning("%s: copies are owed: %s", fan_out.rule.place.label, error)
            left()
    return split(works, grouped, outcomes)


def inside(graph: Graph, server: Capabilities, work: Work[Any]) -> Plan[Any]:
    """One work inside the caller's own transaction, with nothing left for later."""
    ledger = Ledger()
    outcome = yield from work.body(graph, server, ledger)
    yield from react(graph, server, ledger, copies_max=UNBOUNDED)
    return (yield from _as_they_are_now([work], [outcome]))[0]


def _as_they_are_now(works: Sequence[Work[Any]], outcomes: Sequence[Any]) -> Plan[list[Any]]:
    """Read documents again that a write may have reached by way of others."""
    final = []
    for work, outcome in zip(works, outcomes, strict=True):
        documents = [outcome] if isinstance(outcome, dict) else outcome
        if not work.shows_document or not isinstance(documents, list) or not work.entry.loops:
            final.append(outcome)
            continue
        keys = [each["_id"] for each in documents]
        found = yield from find(work.entry.collection, {"_id": {"$in": keys}})
        by_key = {freeze(each["_id"]): each for each in found}
        again = [by_key.get(freeze(key), each) for key, each in zip(keys, documents, strict=True)]
        final.append(again[0] if isinstance(outcome, dict) else again)
    return final


def merge(works: Sequence[Work[Any]]) -> list[Work[Any]]:
    """Inserts of one model, or additions to one array, that follow each other become one."""
    merged: list[Work[Any]] = []
    for work in works:
        last = merged[-1] if merged else None
        if last is not None and last.joins(work):
            joining: Any = last
            merged[-1] = joining.joined(work)
        else:
            merged.append(work)
    return merged


def split(works: Sequence[Work[Any]], grouped: Sequence[Work[Any]], outcomes: Sequence[Any]) -> list[Any]:
    """The outcome of each work, from those of the merged ones."""
    separate: list[Any] = []
    remaining = iter(works)
    for group, outcome in zip(grouped, outcomes, strict=True):
        total = getattr(group, "size", None)
        if total is None:
            next(remaining)
            separate.append(outcome)
            continue
        taken = 0
        while taken < total:
            work: Any = next(remaining)
            separate.append(outcome[taken : taken + work.size])
            taken += work.size
    return separate
