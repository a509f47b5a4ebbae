"""Trees, as the rest of Treadle asks for them.

A model may declare several representations. All share one `Tree`; the first
of them leads, and answers for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pymongo.errors import OperationFailure

from treadle.engine.document_layout import DocumentLayout
from treadle.engine.write_path import WritePath
from treadle.errors import DataError, DeclarationError
from treadle.graph.batch import Batch
from treadle.graph.calls import HierarchyRule
from treadle.graph.changes import Changes
from treadle.graph.graph import graph_of
from treadle.graph.layout import Layout
from treadle.graph.outcomes import Finding
from treadle.graph.rule import TRANSACTIONS, Due, Models, Needs, Pattern, Place, Storage
from treadle.patterns.tree import inspection, placing, state
from treadle.patterns.tree.fields import UNSTATED, Role, Stated, Tree, TreePlace, TreeRule
from treadle.patterns.tree.handle import TreeHandle
from treadle.patterns.tree.layout import TreeLayout
from treadle.patterns.tree.rewriting import segment_error
from treadle.patterns.tree.unfinished import finish
from treadle.plan import Plan, Raw, server_facts
from treadle.query.filters import Sort
from treadle.query.keys import freeze


@dataclass(frozen=True, kw_only=True)
class TreePattern(Pattern):
    """The base of the four declarations; `sort` is how siblings are read unless a call says otherwise."""

    keyword: ClassVar[str | None] = "tree"

    sort: Sort | None = None

    def roles(self) -> dict[Role, str]:
        """The Python name of the field of each role."""
        raise NotImplementedError  # pragma: no cover

    def bind(self, place: Place, graph: Models) -> NodeRule:
        """Check the fields; the rule that keeps them right."""
        settings = place.entry.model.__treadle__
        others = [
            keyword
            for keyword, declared in settings.patterns.items()
            if keyword != "tree" and not all(each.beside for each in declared)
        ]
        if place.entry.kinds.above:
            raise DeclarationError(
                f"{place.entry.model.__name__} has tree=, and is a kind of "
                f"{place.entry.kinds.root.model.__name__}; a tree has nodes of all kinds of its collection: "
                "declare it there",
                code="tree-declaration",
            )
        for keyword in others:
            raise DeclarationError(
                f"{place.entry.model.__name__} has tree= and {keyword}=; a tree's nodes are plain documents "
                "of one model: drop one of the two, or keep the tree in a collection of its own",
                code="tree-declaration",
            )
        known = place.entry.rules.of_type(TreeRule)
        rule = NodeRule(TreePlace(place.entry, place.owner, (), place.field, "tree"), graph, self.roles())
        rule.pattern = self.pattern
        # A node goes only with or after its children.
        rule.deletes_together = (
            ", and nodes of a tree are deleted together; use "
            f"store.tree({place.entry.model.__name__}).remove(id, children='subtree'), which goes in chunks"
        )
        rule.tree = known[0].tree if known else Tree(place.entry)
        rule.tree.add(rule)
        rule.tree.finish = rule.finish
        rule.tree.sort_by(self.sort, rule.place.label)
        return rule


class NodeRule(TreeRule, HierarchyRule):
    """One representation of a tree."""

    across_shards = False

    def calls(self, write_path: WritePath) -> TreeHandle[Any]:
        return TreeHandle(self.tree, write_path)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Transactions, because a move and what it rewrites happen together; and what finds the ancestors."""
        if self.tree.truth == "path":
            return TRANSACTIONS
        return {**TRANSACTIONS, "graph_lookups": "declare tree=MaterializedPath(…) alone, which needs none"}

    @property
    def _leads(self) -> bool:
        return self.tree.declares(self)

    def storage(self) -> Storage:
        own = super().storage()
        if not self._leads:
            return own
        return own._replace(unique=self.tree.unique_indexes(), explain=partial(segment_error, self.tree))

    def layout(self, default: Layout[Any] | None) -> Layout[Any] | None:
        if not self._leads or not isinstance(default, DocumentLayout):
            return None
        return TreeLayout(self, default)

    # -- writes of nodes -------------------------------------------------------------------------

    def _stated(self, batch: Batch, nodes: Sequence[Raw]) -> list[Any]:
        """Where each new node goes, if that is not for its own fields to say."""
        given = batch.given.get(self, {})
        stated = [given.get(freeze(node["_id"]), UNSTATED) for node in nodes]
        return [each.parent if isinstance(each, Stated) else each for each in stated]

    def _indexes(self, batch: Batch) -> dict[Any, int]:
        """By frozen id the index among its siblings at which a caller wants a new node."""
        given = batch.given.get(self, {})
        return {
            key: each.at for key, each in given.items() if isinstance(each, Stated) and each.at is not None
        }

    def needs_commit(self, batch: Batch | None) -> bool:
        if not self._leads:
            return False
        if batch is None or len(batch.new) < len(batch.pairs):
            return True
        return not placing.stands_alone(self.tree, batch.new, self._stated(batch, batch.new))

    def before(self, batch: Batch, changes: Changes) -> Plan[None]:
        if not self._leads:
            return
        scope = self.target.targets
        for before, after in batch.staying(scope):
            placing.check_replacement(self.tree, before, after)
        if leaving := batch.leaving(scope):
            yield from placing.before_deletion(self.tree, leaving)
            yield from placing.remember_parents(self.tree, leaving)
        if entering := batch.entering(scope):
            yield from self._place(batch, entering, changes)

    def _place(self, batch: Batch, nodes: list[Raw], changes: Changes) -> Plan[None]:
        """Give nodes their place, new ones and those that were deleted softly."""
        if self.target.versions.is_versioned:
            yield from state.bring_up(self.tree, changes)
        if batch.new:
            placement = yield from placing.place(self.tree, nodes, self._stated(batch, nodes))
            batch.order = placement.order
        else:
            (node,) = nodes
            placement = yield from placing.replant(self.tree, node)
        batch.notes[self] = placement

    def after(self, batch: Batch, changes: Changes) -> Plan[None]:
        if not self._leads:
            return
        scope = self.target.targets
        if batch.entering(scope):
            yield from placing.list_children(self.tree, batch.notes[self], changes, self._indexes(batch))
        if leaving := batch.leaving(scope):
            yield from placing.unlist(self.tree, [each["_id"] for each in leaving], changes)

    # -- large moves ---------------------------------------------------------------------------------

    def finish(self) -> Plan[None]:
        """Finish a move or a removal that goes in chunks."""
        yield from finish(self.tree, graph_of(self), (yield from server_facts()))

    def run_due(self, work: Due) -> Plan[int]:
        """Finish the moves and removals that a crash interrupted."""
        if not self._leads or work.kind != "recover" or (yield from state.pending(self.tree)) is None:
            return 0
        try:
            yield from self.finish()
        except (DataError, OperationFailure) as error:
            collection = self.target.collection
            state.log.warning("a move in the tree of %s is still pending: %s", collection, error)
        return 1

    # -- proof and repair ------------------------------------------------------------------------------

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        return (yield from inspection.examine(self.tree, page)) if page and self._leads else []

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        if not keys or not self._leads:
            return []
        server = yield from server_facts()
        return (yield from inspection.mend_tree(graph_of(self), server, self.tree, keys))
