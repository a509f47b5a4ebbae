"""The rule of a tree: what the rest of Treadle asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pymongo import ASCENDING, IndexModel

from treadle.engine.document_layout import DocumentLayout
from treadle.engine.write_path import WritePath
from treadle.graph.batch import Batch
from treadle.graph.calls import HierarchyRule
from treadle.graph.changes import Changes
from treadle.graph.graph import graph_of
from treadle.graph.layout import Layout
from treadle.graph.outcomes import Finding
from treadle.graph.owned import Owned
from treadle.graph.rule import TRANSACTIONS, Needs, Place, Reads, Storage
from treadle.patterns.tree import inserts, verify
from treadle.patterns.tree.calls import TreeCalls
from treadle.patterns.tree.inserts import Stated, TreeLayout
from treadle.patterns.tree.tree import Tree
from treadle.patterns.tree.writes import segment_error, upgrade_nodes
from treadle.plan import Plan, Raw
from treadle.query.keys import freeze


class TreeRule(HierarchyRule):
    """The tree of one model."""

    across_shards = False

    def __init__(self, place: Place, pattern: str, tree: Tree) -> None:
        super().__init__(place)
        self.pattern = pattern
        self.tree = tree
        self.path = tree.representation.fields[0]
        # A node goes only with or after its children.
        self.deletes_together = (
            ", and nodes of a tree are deleted together; use "
            f"store.tree({tree.name}).remove(id, children='subtree'), which goes in steps"
        )

    # -- declarations ------------------------------------------------------------------------------------

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Transactions, because a move and what it changes happen together; and what finds the ancestors."""
        if self.tree.paths is not None:
            return TRANSACTIONS
        return {**TRANSACTIONS, "graph_lookups": "declare tree=MaterializedPath(…) alone, which needs none"}

    def reads(self) -> Reads:
        return {self.target.collection: {"_id"}}

    def owns(self) -> Sequence[Owned]:
        representation, tree = self.tree.representation, f"store.tree({self.tree.name})"
        advice = f"; move the node with {tree}.move(id, parent)"
        rename = f"; the paths below it follow from it: rename the node with {tree}.rename(id, segment)"
        by_caller = (representation.parent, representation.segment)
        return [
            Owned(
                path,
                rename if path == representation.segment else advice,
                insert_may_set=path in by_caller,
                shared=True,
            )
            for path in representation.fields
        ]

    def storage(self) -> Storage:
        representation = self.tree.representation
        # With the id, so that pages of descendants and siblings come in order from the index.
        keys = [[(path, ASCENDING), ("_id", ASCENDING)] for path in representation.indexed]
        unique = []
        if representation.path is not None:
            # Not of nodes that have no path yet.
            pathed = self.tree.active({representation.path: {"$gt": ""}})
            index = IndexModel(
                [(representation.path, ASCENDING)], unique=True, partialFilterExpression=pathed
            )
            unique.append(index)
        explain = partial(segment_error, self.tree)
        return Storage([(self.target, IndexModel(each)) for each in keys], unique, explain)

    def layout(self, default: Layout[Any] | None) -> Layout[Any] | None:
        return TreeLayout(self, self.tree, default) if isinstance(default, DocumentLayout) else None

    def calls(self, write_path: WritePath) -> TreeCalls[Any]:
        return TreeCalls(self.tree, self, write_path)

    # -- writes of nodes ---------------------------------------------------------------------------------

    def _stated(self, batch: Batch, nodes: Sequence[Raw]) -> list[Stated]:
        """Return where a caller wants new nodes."""
        given: Mapping[Any, Stated] = batch.given.get(self, {})
        return [given.get(freeze(node["_id"]), Stated()) for node in nodes]

    def needs_commit(self, batch: Batch | None) -> bool:
        if batch is None or len(batch.new) < len(batch.pairs):
            return True
        return not inserts.stands_alone(self.tree, batch.new, self._stated(batch, batch.new))

    def before(self, batch: Batch, changes: Changes) -> Plan[None]:
        scope = self.target.targets
        for before, after in batch.staying(scope):
            inserts.check_replacement(self.tree, before, after)
        if leaving := batch.leaving(scope):
            yield from inserts.before_deletion(self.tree, leaving)
        if entering := batch.entering(scope):
            yield from self._place(batch, entering, changes)

    def _place(self, batch: Batch, nodes: list[Raw], changes: Changes) -> Plan[None]:
        """Give nodes their place, new ones and those that are restored."""
        stated = self._stated(batch, nodes)
        if self._reads_outdated() and not inserts.stands_alone(self.tree, nodes, stated):
            yield from upgrade_nodes(self.tree, changes)
        if batch.new:
            placement = yield from inserts.place(self.tree, nodes, stated)
            batch.order = placement.order
        else:
            (node,) = nodes
            placement = yield from inserts.restore_place(self.tree, node)
        batch.notes[self] = placement

    def _reads_outdated(self) -> bool:
        """Whether outdated parents must be upgraded: their places differ, or they are updated."""
        return self.tree.lists is not None or self.target.targets.splits({}, self.tree.representation.fields)

    def after(self, batch: Batch, changes: Changes) -> Plan[None]:
        scope = self.target.targets
        if batch.entering(scope):
            yield from inserts.list_children(self.tree, batch.notes[self], changes)
        if leaving := batch.leaving(scope):
            yield from inserts.unlist(self.tree, [each["_id"] for each in leaving], changes)

    # -- verify and repair -------------------------------------------------------------------------------

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        return (yield from verify.findings(self.tree, self.pattern, page)) if page else []

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        if not keys:
            return []
        return (yield from verify.repair(graph_of(self), self.tree, self.place.label, keys))
