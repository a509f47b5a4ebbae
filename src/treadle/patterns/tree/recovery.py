"""Ending the moves and removals that a crash left half done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine import standalone
from treadle.engine.lease import acquire, release
from treadle.errors import DataError
from treadle.graph.graph import Graph
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import Tree
from treadle.patterns.tree.moves import finish
from treadle.patterns.tree.placing import settle_first
from treadle.plan import Plan, find
from treadle.plan.capabilities import Capabilities

log = logging.getLogger("treadle")


def recover(graph: Graph, server: Capabilities, owner: str, is_dead: Callable[[str], bool]) -> Plan[int]:
    """End what is owed in the trees of these models; how many such things there were."""
    trees = {entry.collection: entry.tree for entry in graph.entries.values() if entry.tree is not None}
    if not trees:
        return 0
    condition = {"_id": {"$in": list(trees)}, "owed": {"$exists": True}}
    owing = yield from find(state.COLLECTION, condition, {"_id": 1})
    for each in owing:
        tree: Tree = trees[each["_id"]]
        try:
            if server.transactions:
                yield from finish(tree, graph, server)
            else:
                yield from _under_lease(tree, graph, server, owner, is_dead)
        except (DataError, OperationFailure) as error:
            log.warning("what is owed in the tree of %s could not be done: %s", each["_id"], error)
    return len(owing)


def _under_lease(
    tree: Tree, graph: Graph, server: Capabilities, owner: str, is_dead: Callable[[str], bool]
) -> Plan[Any]:
    token = yield from acquire(standalone.LEASE, owner, standalone.LEASE_SECONDS, is_dead)
    ledger = standalone.IntentLedger(owner)
    try:
        yield from settle_first(tree, ledger)
        yield from standalone.settle(graph, server, ledger)
    except Exception:
        yield from release(standalone.LEASE, token)
        raise
    yield from release(standalone.LEASE, token)
