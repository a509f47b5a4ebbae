"""Moving and renaming, in one transaction: the node, the lists of its parents, and all nodes below it.

A move locks the tree, and then checks that the new parent is not below the
node. It goes by the links, since arrays and paths may be wrong.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from treadle.engine.documents import as_written, stamp_expressions, translated
from treadle.engine.pipelines import update_pipeline
from treadle.engine.references import follow_own
from treadle.errors import DataError, UsageError
from treadle.graph.changes import Changes
from treadle.graph.write import Write
from treadle.model.document import Document
from treadle.patterns.tree.inserts import UNSTATED
from treadle.patterns.tree.paths import check_segment
from treadle.patterns.tree.reads import lineage, parent_id
from treadle.patterns.tree.tree import Tree
from treadle.patterns.tree.writes import (
    is_followed,
    lock_node,
    lock_parents,
    update_all,
    update_each,
    with_line,
)
from treadle.plan import Plan, Raw, by_id, find_one_and_update
from treadle.query.keys import is_among, same_key
from treadle.query.paths import put, value_at

# The bound of `Limits.tree_move_max` was measured on two cores that other programs kept busy: 10,000 nodes
# took 0.5 s of the server's processor, 100,000 took 7 to 10 s and 26 s in all, and 200,000 were not done when
# the server ended the transaction after 60 s. Where something follows from each node, each is read before and
# after: 10,000 took 0.5 to 0.9 s of the server's processor and as much of the client's, with 40 MB of memory.
FOLLOWED_MOVE_MAX = 10_000

D = TypeVar("D", bound=Document)


class Move(Write[D]):
    """A node, and all below it, under another parent, at another index or with another segment."""

    def __init__(
        self, tree: Tree, key: Any, parent: Any = UNSTATED, segment: Any = UNSTATED, at: int | None = None
    ) -> None:
        self.entry = tree.entry
        self.tree = tree
        self.key = tree.entry.ids.encode(key)
        self.parent = parent if parent is UNSTATED or parent is None else tree.entry.ids.encode(parent)
        self.segment = segment
        self.at = at
        field = tree.representation.segment
        if segment is not UNSTATED:
            if field is None:
                raise UsageError(
                    f"{tree.name} has no segment to rename; only MaterializedPath has one",
                    code="tree-segment-invalid",
                )
            check_segment(segment, f"{tree.name}.{field}")

    def apply(self, changes: Changes) -> Plan[Raw]:
        tree = self.tree
        node = yield from lock_node(tree, self.key, changes)
        old = yield from parent_id(tree, node)
        new = old if self.parent is UNSTATED else self.parent
        # Ids of two types may be equal, and are not the same.
        stays = same_key(new, old) and type(new) is type(old)
        if stays and not self._renames(node):
            if self.at is not None:
                yield from self._list(new, changes)
            return node
        if new is not None and not stays:
            yield from self._refuse_cycle(new)
        after = yield from self._store(node, new, changes)
        if not stays:
            yield from self._unlist(old, changes)
            yield from self._list(new, changes)
        yield from self._store_below(node, after, changes)
        return after

    def _renames(self, node: Raw) -> bool:
        field = self.tree.representation.segment
        return self.segment is not UNSTATED and field is not None and value_at(node, field) != self.segment

    def _refuse_cycle(self, parent: Any) -> Plan[None]:
        try:
            chain = yield from lineage(self.tree, parent)
        except DataError as error:
            if error.code == "tree-node-missing":
                raise self.tree.parent_missing(parent) from None
            raise
        if is_among(self.key, [each["_id"] for each in chain]):
            place = "the node itself" if same_key(parent, self.key) else "below it"
            raise UsageError(
                f"{self.tree.name} {self.key!r} cannot be moved below {parent!r}, which is {place}; a tree "
                "has no cycles",
                code="tree-cycle",
            )

    def _store(self, before: Raw, parent_key: Any, changes: Changes) -> Plan[Raw]:
        """Store the node itself in its new place. Returns the node after."""
        tree, entry = self.tree, self.entry
        parent: Raw | None = None
        if parent_key is not None:
            (locked,) = (yield from lock_parents(tree, [parent_key])).values()
            parent = yield from with_line(tree, locked)
        node, values = copy.deepcopy(before), Raw()
        if tree.representation.segment is not None and self.segment is not UNSTATED:
            put(node, tree.representation.segment, self.segment)
            values[tree.representation.segment] = self.segment
        values |= tree.representation.place(node, parent)
        sets = {path: {"$literal": value} for path, value in values.items()} | stamp_expressions(entry)
        with translated(tree.name, [values], entry):
            after = yield from find_one_and_update(
                tree.collection, by_id(self.key), update_pipeline(entry, sets, {})
            )
        assert after is not None
        (after,) = yield from follow_own(entry, [(before, after)])
        yield from changes.add(entry, [(before, after)])
        return after

    def _unlist(self, parent: Any, changes: Changes) -> Plan[None]:
        if self.tree.lists is not None and parent is not None:
            yield from update_each(self.tree, [(parent, self.tree.lists.removed([self.key]))], changes)

    def _list(self, parent: Any, changes: Changes) -> Plan[None]:
        lists = self.tree.lists
        if lists is not None and parent is not None:
            sets = lists.appended([self.key]) if self.at is None else lists.inserted(self.key, self.at)
            yield from update_each(self.tree, [(parent, sets)], changes)

    def _store_below(self, before: Raw, after: Raw, changes: Changes) -> Plan[None]:
        """Give all nodes below the lines that follow from the node's."""
        below = self.tree.representation.below(before)
        if below is not None:
            sets = self.tree.representation.follow(before, after)
            yield from refuse_too_many(self.tree, below, sets)
            yield from update_all(self.tree, below, sets, changes)

    def result(self, outcome: Raw) -> D:
        moved: D = as_written(self.entry, copy.deepcopy(outcome))
        return moved


def refuse_too_many(tree: Tree, condition: Raw, sets: Raw) -> Plan[None]:
    """Refuse to change more nodes than one transaction takes."""
    most = tree.entry.limits.tree_move_max
    if is_followed(tree, sets):
        most = min(most, FOLLOWED_MOVE_MAX)
    if (yield from tree.find(condition, {"_id": 1}, skip=most, limit=1)):
        raise DataError(
            f"more than {most:,} nodes of {tree.name} are below this one, and one transaction changes no "
            "more; move, rename or remove its children first, one after another",
            code="tree-move-too-large",
        )
