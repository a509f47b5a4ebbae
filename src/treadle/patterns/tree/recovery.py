"""Ending the moves and removals that a crash left half done."""

from __future__ import annotations

from pymongo.errors import OperationFailure

from treadle.errors import DataError
from treadle.graph.graph import Graph
from treadle.patterns.tree import state
from treadle.patterns.tree.moves import finish
from treadle.plan import Plan, find
from treadle.plan.capabilities import Capabilities


def recover(graph: Graph, server: Capabilities) -> Plan[int]:
    """End what is owed in the trees of these models; how many such things there were."""
    trees = {entry.collection: entry.tree for entry in graph.entries.values() if entry.tree is not None}
    if not trees:
        return 0
    condition = {"_id": {"$in": list(trees)}, "owed": {"$exists": True}}
    owing = yield from find(state.COLLECTION, condition, {"_id": 1})
    for each in owing:
        try:
            yield from finish(trees[each["_id"]], graph, server)
        except (DataError, OperationFailure) as error:
            state.log.warning("what is owed in the tree of %s could not be done: %s", each["_id"], error)
    return len(owing)
