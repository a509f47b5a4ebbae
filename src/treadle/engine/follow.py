"""Writes that do not come from a caller, with all that follows from them in other documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.engine.commit import Commit
from treadle.engine.ledger import Ledger
from treadle.engine.pages import by_ids
from treadle.engine.writes import follow_own
from treadle.graph.change import Change
from treadle.graph.gather import freeze
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, bulk_write
from treadle.plan.capabilities import Capabilities

Attempt = Callable[[], "Plan[tuple[list[Raw], list[Any], dict[Any, str]]]"]


def perform(
    graph: Graph, server: Capabilities, entry: Entry[Any], attempt: Attempt
) -> Plan[tuple[dict[Any, str], int]]:
    """Do the writes that `attempt` decides on, and let others follow; its failures, and how many it wrote.

    `attempt` reads, and returns the documents before, their writes, and what
    cannot be written.
    """

    def body(ledger: Ledger) -> Plan[tuple[dict[Any, str], int]]:
        befores, writes, failures = yield from attempt()
        if not writes:
            return failures, 0
        keys = [each["_id"] for each in befores]
        yield from ledger.note_before(entry.root, keys)
        result = yield from bulk_write(entry.collection, writes, ordered=False)
        now = yield from by_ids(entry.collection, keys)
        pairs = [(before, now[freeze(before["_id"])]) for before in befores if freeze(before["_id"]) in now]
        # By their kind after the write: a migration may give one to documents that had none.
        afters = yield from follow_own(entry.root, pairs)
        for (before, _), after in zip(pairs, afters, strict=True):
            ledger.add(Change(entry.collection, before["_id"], before, after))
        return failures, result.matched_count

    return (yield from Commit(graph, server).follow(body))
