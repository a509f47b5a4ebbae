"""Trees, as the rest of Treadle asks for them.

A model may declare several representations. All share one `Tree`; the first
of them leads, and answers for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pymongo import IndexModel
from pymongo.errors import OperationFailure

from treadle.engine.checked import checked
from treadle.engine.protocol import WriteProtocol
from treadle.errors import DataError, DeclarationError, InvalidValue, UsageError
from treadle.graph.calls import ALL, HierarchyRule
from treadle.graph.change import NOT_GIVEN, Batch, Changes
from treadle.graph.derived import FormulaRule
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding
from treadle.graph.pattern import TRANSACTIONS, Models, Pattern, Place, Rule
from treadle.model.shown import quoted
from treadle.patterns.tree import apart, inspection, order, placing, rewriting, state
from treadle.patterns.tree.bulk import in_pieces
from treadle.patterns.tree.fields import UNSTATED, Role, Tree, TreePlace, TreeRule
from treadle.patterns.tree.handle import TreeHandle
from treadle.patterns.tree.order import Stated
from treadle.patterns.tree.segments import SEPARATOR
from treadle.patterns.tree.unfinished import finish
from treadle.plan import Plan, Raw, find
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze
from treadle.query.safety import Sort, clean_update


@dataclass(frozen=True, kw_only=True)
class TreePattern(Pattern):
    """The base of the four declarations.

    `order` names an int field by which siblings are in an order of their own;
    `sort` a sort by which they are read. `depth` names an int field that holds
    how many nodes are above. `within` names a field that keeps several trees of
    one collection apart.
    """

    keyword: ClassVar[str | None] = "tree"

    order: str | None = None
    sort: Sort | None = None
    depth: str | None = None
    within: str | None = None

    def roles(self) -> dict[Role, str]:
        """The Python name of the field of each role."""
        raise NotImplementedError  # pragma: no cover

    def bind(self, place: Place, graph: Models) -> NodeRule:
        """Check the fields; the rule that keeps them right."""
        settings = place.entry.settings
        others = [
            keyword
            for keyword, declared in settings.patterns.items()
            if keyword != "tree" and not all(each.beside for each in declared)
        ]
        if place.entry.above:
            raise DeclarationError(
                f"{place.entry.model.__name__} has tree=, and is a kind of "
                f"{place.entry.root.model.__name__}; a tree has nodes of all kinds of its collection: "
                "declare it there",
                code="tree-declaration",
            )
        for keyword in others:
            raise DeclarationError(
                f"{place.entry.model.__name__} has tree= and {keyword}=; a tree's nodes are plain documents "
                "of one model: drop one of the two, or keep the tree in a collection of its own",
                code="tree-declaration",
            )
        known = place.entry.having(TreeRule)
        rule = NodeRule(TreePlace(place.entry, place.owner, (), place.field, "tree"), graph, self.roles())
        rule.pattern = self.pattern
        rule.tree = known[0].tree if known else Tree(place.entry)
        rule.tree.add(rule)
        rule.tree.separate(self.within, rule.place.label)
        rule.tree.arrange(self.order, self.sort, rule.place.label)
        if self.depth is not None:
            rule.depth = _depth(rule, self.depth)
        return rule


def _depth(rule: NodeRule, name: str) -> FormulaRule:
    """The rule that stores how many nodes are above: it follows from the ancestors, or from the path."""
    entry, tree, label = rule.target, rule.tree, rule.place.label
    field = entry.codec.by_name.get(name)
    if field is None or field.shape.kind != "scalar" or field.shape.python is not int:
        raise DeclarationError(
            f"{label} has depth={name!r}, which is no int field of {entry.model.__name__}",
            code="tree-field-type" if field is not None else "tree-field-missing",
        )
    if tree.ancestors is not None:
        array = f"${tree.ancestors}"
        depth: Raw = {"$cond": [{"$isArray": array}, {"$size": array}, None]}
    elif tree.path is not None:
        path = f"${tree.path}"
        parts = {"$subtract": [{"$size": {"$split": [path, SEPARATOR]}}, 3]}
        depth = {"$cond": [{"$gt": [path, ""]}, parts, None]}
    else:
        raise DeclarationError(
            f"{label} has depth={name!r}, but its nodes hold neither ancestors nor a path, so that a move "
            "does not write the nodes below; use AncestorArray or MaterializedPath",
            code="tree-declaration",
        )
    own = FormulaRule(Place(entry, entry.codec, (), field), depth)
    own.pattern = rule.pattern
    return own


class NodeRule(TreeRule, HierarchyRule):
    """One representation of a tree."""

    across_shards = False
    # What stores how deep a node is.
    depth: FormulaRule | None = None

    # A node goes only with or after its children.
    deletes_together = True

    def calls(self, protocol: WriteProtocol, within: Any = ALL) -> TreeHandle[Any]:
        return TreeHandle(self.tree if within is ALL else self._confined(within), protocol)

    def _confined(self, value: Any) -> Tree:
        tree, name = self.tree, self.target.model.__name__
        if tree.within is None:
            raise UsageError(
                f"{name} is one tree; declare which field keeps several apart, such as "
                'tree=AncestorArray(…, within="tenant_id")',
                code="tree-apart",
            )
        stated = clean_update(self.target.codec, {"$set": {tree.within: value}})
        try:
            update: Any = checked(self.target, stated).update
        except InvalidValue as error:
            raise UsageError(
                f"store.tree({name}, within={quoted(value)}): {name}.{tree.within} cannot be that",
                code="tree-apart",
            ) from error
        return tree.confine(update["$set"][tree.within])

    @property
    def needs(self) -> Mapping[str, str]:  # type: ignore[override]
        """Transactions, because a move and what it rewrites happen together; and what finds the ancestors."""
        if self.tree.truth == "path":
            return TRANSACTIONS
        return {**TRANSACTIONS, "graph_lookups": "declare tree=MaterializedPath(…) alone, which needs none"}

    def companions(self) -> list[Rule]:
        return [] if self.depth is None else [self.depth]

    @property
    def _leads(self) -> bool:
        return self.tree.declares(self)

    def unique_indexes(self) -> list[IndexModel]:
        return self.tree.unique_indexes() if self._leads else []

    # -- writes of nodes -------------------------------------------------------------------------

    def _stated(self, batch: Batch) -> list[Any]:
        """Where each new node goes, if that is not for its own fields to say."""
        given = batch.given.get(self) or [NOT_GIVEN] * len(batch.raws)
        plain = [each.parent if isinstance(each, Stated) else each for each in given]
        return [UNSTATED if each is NOT_GIVEN else each for each in plain]

    def _spots(self, batch: Batch) -> dict[Any, order.Spot]:
        """Where among its siblings each new node goes, if its caller says so."""
        given = zip(batch.raws, batch.given.get(self) or (), strict=False)
        return {
            freeze(raw["_id"]): each.spot
            for raw, each in given
            if isinstance(each, Stated) and each.spot is not None
        }

    def _settle(self, batch: Batch) -> None:
        """Put new nodes into the tree that their caller names."""
        for raw, each in zip(batch.raws, batch.given.get(self) or (), strict=False):
            if isinstance(each, Stated) and each.within is not UNSTATED:
                apart.settle(self.tree, raw, each.within)

    def inserts_alone(self, batch: Batch) -> bool:
        if not self._leads:
            return True
        self._settle(batch)
        return placing.stands_alone(self.tree, batch.raws, self._stated(batch))

    def before_insert(self, batch: Batch, changes: Changes) -> Plan[Any]:
        if not self._leads:
            return None
        if self.target.versioned:
            yield from state.bring_up(self.tree, changes)
        self._settle(batch)
        whole, spots = placing.Placement([]), self._spots(batch)
        for share in (yield from apart.divide(self.tree, batch.raws, self._stated(batch))):
            placement = yield from placing.place(*share)
            if self.tree.order is not None:
                own, parents = share.tree, placement.parents
                yield from order.place_all(own, placement.order, parents, spots, changes)
            whole.add(placement)
        batch.order = whole.order
        return whole

    def after_insert(self, batch: Batch, state: Any, changes: Changes) -> Plan[None]:
        if self._leads:
            yield from placing.list_children(self.tree, state, changes)

    def in_pieces(self, documents: Sequence[Any], most: int) -> Plan[list[tuple[list[Any], list[Any]]]]:
        return in_pieces(self.tree, documents, most)

    def before_replace(self, before: Raw, after: Raw) -> None:
        if self._leads:
            placing.check_replacement(self.tree, before, after)

    def before_delete(self, documents: Sequence[Raw], changes: Changes) -> Plan[None]:
        for own, nodes in apart.grouped(self.tree, documents) if self._leads else ():
            yield from placing.before_deletion(own, nodes)
            yield from placing.bury(own, nodes, changes)

    def before_restore(self, document: Raw, changes: Changes) -> Plan[Any]:
        if not self._leads:
            return None
        own = self.tree.of(document)
        placement = yield from placing.replant(own, document)
        if own.order is not None:
            # Behind the siblings that it has now.
            yield from order.place_all(own, placement.order, placement.parents, {}, changes)
        return placement

    def after_restore(self, state: Any, changes: Changes) -> Plan[None]:
        if self._leads:
            yield from placing.list_children(self.tree, state, changes)

    def after_delete(self, keys: Sequence[Any], changes: Changes) -> Plan[None]:
        if self._leads:
            yield from placing.unlist(self.tree, keys, changes)

    def too_many(self, most: int) -> UsageError:
        return placing.too_many(self.target, most)

    def translate(self, error: Exception) -> Exception | None:
        """The clear error where two siblings would have the same segment."""
        return rewriting.segment_error(self.tree, error) if self._leads else None

    # -- large moves ---------------------------------------------------------------------------------

    def give_way(self, graph: Graph, server: Capabilities) -> Plan[None]:
        for own in (yield from state.unfinished(self.tree)):
            yield from finish(own, graph, server)

    def recover(
        self, graph: Graph, server: Capabilities, owner: str, is_dead: Callable[[str], bool]
    ) -> Plan[int]:
        """Finish the moves and removals that a crash left half done."""
        pending = (yield from state.unfinished(self.tree)) if self._leads else []
        for own in pending:
            try:
                yield from finish(own, graph, server)
            except (DataError, OperationFailure) as error:
                collection = self.target.collection
                state.log.warning("a move in the tree of %s is still pending: %s", collection, error)
        return len(pending)

    # -- proof and repair ------------------------------------------------------------------------------

    def examine(self, documents: Sequence[Raw]) -> Plan[list[Finding]]:
        if not self._leads:
            return []
        findings: list[Finding] = []
        for own, nodes in apart.grouped(self.tree, documents):
            findings += yield from inspection.examine(own, nodes)
            findings += yield from order.examine(own, nodes)
        return findings

    def mend(self, graph: Graph, server: Capabilities, keys: Sequence[Any]) -> Plan[list[Any]]:
        if not self._leads or self.tree.within is None:
            return (yield from inspection.mend_tree(graph, server, self.tree, keys)) if self._leads else []
        chosen = self.tree.living({"_id": {"$in": list(keys)}})
        nodes = yield from find(self.target.collection, chosen, {self.tree.within: 1})
        changed: list[Any] = []
        for own, some in apart.grouped(self.tree, nodes):
            changed += yield from inspection.mend_tree(graph, server, own, [each["_id"] for each in some])
        return changed
