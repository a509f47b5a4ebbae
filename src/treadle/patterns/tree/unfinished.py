"""Pending work on large subtrees: it goes on chunk by chunk, each chunk in one transaction.

A node that cannot be written is passed over, so that neither the others nor
the next move wait for it. Work that cannot proceed is abandoned.
"""

from __future__ import annotations

from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine.copies import UNBOUNDED
from treadle.engine.propagate import propagate
from treadle.errors import DataError, UsageError
from treadle.graph.changes import Changes
from treadle.graph.graph import Graph
from treadle.graph.quarantine import set_aside
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import Tree
from treadle.patterns.tree.lifts import lift_some
from treadle.patterns.tree.moves import move_some
from treadle.patterns.tree.pace import Pace, is_about_one_node
from treadle.patterns.tree.removes import remove_some
from treadle.plan import Plan, by_id, find_one, transact
from treadle.plan.capabilities import Capabilities

# Nodes that a large move passes over because they cannot be written.
TREE_PASSED_MAX = 1_000

STEPS = {"move": move_some, "lift": lift_some, "remove": remove_some}


def finish(tree: Tree, graph: Graph, server: Capabilities) -> Plan[None]:
    """Finish the pending work of a tree; others may be doing the same."""
    work = yield from state.pending(tree)
    if work is None:
        return
    token, pace, ended = work["token"], Pace(tree.entry.limits.tree_move_max), False
    while not ended:
        try:
            ended = yield from transact(lambda: chunk(tree, graph, server, token, pace))
            pace.faster()
        except (DataError, UsageError, OperationFailure) as error:
            about_one = is_about_one_node(error)
            refused = not about_one and not isinstance(error, OperationFailure)
            # Without any that were tried, it is the node itself or one beside it.
            if (about_one and not pace.tried) or (refused and work["kind"] != "move"):
                yield from _abandon(tree, token, error)
                return
            if not pace.slower(error):
                yield from _pass_over(tree, token, pace.tried[0], error)


def chunk(tree: Tree, graph: Graph, server: Capabilities, token: Any, pace: Pace) -> Plan[bool]:
    """Do some of the pending work, in one transaction; whether that was the end of it."""
    pace.tried = []
    work = yield from state.resume(tree, token)
    if work is None:
        return True
    changes = Changes()
    step = yield from STEPS[work["kind"]](tree, work, pace, changes)
    yield from propagate(graph, changes, copies_max=UNBOUNDED)
    if step.ended:
        yield from state.end(tree, token, step.done)
    else:
        yield from state.progress(tree, token, step.after, step.done)
    return step.ended


def _pass_over(tree: Tree, token: Any, key: Any, error: Exception) -> Plan[None]:
    """Leave out a node that cannot be written."""
    work = yield from state.pending(tree)
    if work is None or work["token"] != token:
        return
    if len(work.get("passed") or []) >= TREE_PASSED_MAX:
        raise error
    yield from set_aside(tree.rules[0].place.label, tree.collection, key, error)
    path: str | None = None
    if tree.truth == "path":
        # Whatever is below it stays with it: by paths alone its parent could not be found again.
        node = yield from find_one(tree.collection, tree.living(by_id(key)), tree.projection)
        path = tree.get(node, "path")
    yield from state.pass_over(tree, token, key, path)


def _abandon(tree: Tree, token: Any, error: Exception) -> Plan[None]:
    """Give up work that would stop whoever comes next as well; its caller gets the reason."""
    # What the server says of a document may quote it, and has no place in a log.
    reason = f"error {error.code}" if isinstance(error, OperationFailure) else str(error)
    state.log.warning("%s: pending work on the tree was abandoned: %s", tree.entry.model.__name__, reason)
    yield from state.end(tree, token, stopped=reason)
