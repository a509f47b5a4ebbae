"""Finding a path of nodes from the root down, and creating what is missing of it.

Whoever creates a part of a path shuts out all others who do, and all moves
(`state.py`). So callers that race for one path end with the same nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.engine.checked import as_written
from treadle.engine.inserts import Insert
from treadle.engine.ledger import Ledger
from treadle.engine.work import Work
from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.model.document import Document
from treadle.patterns.tree import apart, reads, state
from treadle.patterns.tree.fields import UNSTATED, Tree, parent_missing
from treadle.patterns.tree.order import Stated
from treadle.patterns.tree.walks import narrowed
from treadle.plan import Plan, Raw, Read
from treadle.plan.capabilities import Capabilities
from treadle.query.paths import value_at

D = TypeVar("D", bound=Document)


class CreatePath(Work[list[D]]):
    """Nodes, each below the one before it; those that are there already are not created."""

    def __init__(self, tree: Tree, nodes: Sequence[D], parent: Any, by: str | None) -> None:
        entry = self.entry = tree.entry
        self.tree = tree
        self.nodes = list(nodes)
        self.parent = None if parent is None else entry.identity(parent)
        self._keys = [entry.identity(node.id) for node in self.nodes]
        field = tree.segment if by is None else _stored(tree, by)
        if field is None:
            raise UsageError(
                f"find_or_create_path() needs by=: the field that tells a {entry.model.__name__} from its "
                "siblings",
                code="filter-invalid",
            )
        raws = self._raws = crud.dump_all(entry, self.nodes, [])
        self._chosen: list[Raw] = [{field: {"$eq": value_at(raw, field)}} for raw in raws]

    def find(self) -> Plan[list[Raw]]:
        """The nodes of the path that are there."""
        found: list[Raw] = []
        parent = self.parent
        tree = yield from self._own()
        for condition in self._chosen:
            stream = yield from reads.roots(tree) if parent is None else reads.children(tree, parent)
            rows = (yield narrowed(stream, condition, limit=1)) if isinstance(stream, Read) else []
            if not rows:
                break
            found.append(rows[0])
            parent = rows[0]["_id"]
        return found

    def _own(self) -> Plan[Tree]:
        """The one tree that the path is in: its parent's, or the one that its nodes name."""
        tree = self.tree
        if tree.within is None:
            return tree
        if self.parent is not None:
            held = yield from reads.nodes_by_key(tree, [self.parent], tree.projection)
            if not held:
                raise (yield from apart.absent(tree, self.parent, parent_missing(tree, self.parent)))
            (node,) = held.values()
            tree = tree.of(node)
        named = [raw for raw in self._raws if value_at(raw, self.tree.within or "") is not None]
        if not tree.confined:
            tree = tree.of(named[0]) if named else tree.confine(None)
        for raw in named:
            apart.settle(tree, raw, tree.value)
        return tree

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[list[Raw]]:
        tree = yield from self._own()
        yield from state.lock_idle(tree)
        yield from state.bring_up(tree, ledger)
        found = yield from self.find()
        number = len(found)
        if number == len(self.nodes):
            return found
        above = found[-1]["_id"] if found else self.parent
        parents: list[Any] = [UNSTATED if above is None else above, *self._keys[number:-1]]
        if tree.confined:
            parents = [Stated(each, None, tree.value) for each in parents]
        insert: Insert[D] = Insert(self.entry, self.nodes[number:], {self.tree.rules[0]: parents})
        return [*found, *(yield from insert.body(graph, server, ledger))]

    def result(self, outcome: list[Raw]) -> list[D]:
        return [as_written(self.entry, copy.deepcopy(raw)) for raw in outcome]


def _stored(tree: Tree, by: str) -> str:
    field = tree.entry.codec.by_name.get(by)
    if field is None:
        raise UsageError(
            f"find_or_create_path() has by={by!r}, which is no field of {tree.entry.model.__name__}",
            code="filter-invalid",
        )
    return field.stored
