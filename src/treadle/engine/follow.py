"""Writes that do not come from a caller, with all that follows from them in other documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.engine.pages import by_ids
from treadle.engine.updates import follow_own
from treadle.engine.write_path import commit_changes
from treadle.graph.changes import Changes
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.plan import Plan, Raw
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze


def perform(
    graph: Graph, server: Capabilities, entry: ModelEntry[Any], store: Callable[[], Plan[list[Raw]]]
) -> Plan[int]:
    """Store documents in the current version, and let others follow; how many.

    `store` reads and writes in the transaction, and returns the documents before.
    """

    def body(changes: Changes) -> Plan[int]:
        befores = yield from store()
        keys = [each["_id"] for each in befores]
        if not keys:
            return 0
        now = yield from by_ids(entry.collection, keys)
        # The upgrade changed nothing that its own rules follow: values of a moment stay.
        afters = yield from follow_own(
            entry.kinds.root, [(now[freeze(key)], now[freeze(key)]) for key in keys]
        )
        yield from changes.add(entry, zip(befores, afters, strict=True))
        return len(befores)

    return (yield from commit_changes(graph, body))
