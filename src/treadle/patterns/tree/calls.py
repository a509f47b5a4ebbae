"""The calls on the tree of one model: ids in, models out."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from treadle.engine.inserts import Insert
from treadle.engine.queries import refuse_changed
from treadle.engine.write_path import WritePath
from treadle.errors import UsageError
from treadle.graph.calls import Children
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Nested
from treadle.graph.rule import Rule
from treadle.model.document import Document
from treadle.model.text import quote
from treadle.patterns.tree import reads
from treadle.patterns.tree.inserts import Stated
from treadle.patterns.tree.moves import Move
from treadle.patterns.tree.reads import NodeReader, SubtreeReader
from treadle.patterns.tree.removes import remove
from treadle.patterns.tree.tree import Tree
from treadle.plan import Plan, Raw, Read
from treadle.query.filters import Sort

D = TypeVar("D", bound=Document)
R = TypeVar("R")


class TreeCalls(Generic[D]):
    """The calls on one tree, as plans and as readers of streams."""

    def __init__(self, tree: Tree, rule: Rule, write_path: WritePath) -> None:
        self._tree = tree
        self._rule = rule
        self._entry = tree.entry
        self._write_path = write_path

    # -- reading -------------------------------------------------------------------------------------

    def _read(self, plan: Plan[R]) -> Plan[R]:
        """Read, unless outdated nodes hold their places in another form."""
        yield from refuse_changed(self._entry, "a read of the tree", self._tree.representation.fields)
        return (yield from plan)

    def _nodes(self, plan: Plan[Read | None]) -> NodeReader[D]:
        return NodeReader(self._tree, self._read(plan))

    def _models(self, plan: Plan[list[Raw]]) -> Plan[list[D]]:
        return [self._entry.codec.load(node) for node in (yield from self._read(plan))]

    def roots(self, sort: Sort | None) -> NodeReader[D]:
        return self._nodes(reads.roots(self._tree, sort))

    def children(self, id: Any, sort: Sort | None) -> NodeReader[D]:
        return self._nodes(reads.children(self._tree, self._entry.ids.encode(id), sort))

    def descendants(self, id: Any, max_depth: int | None, sort: Sort | None) -> NodeReader[D]:
        tree, key = self._tree, self._entry.ids.encode(id)
        _check_depth(max_depth)
        if tree.representation.is_ranged or sort is not None or max_depth in (0, 1):
            return self._nodes(reads.descendants(tree, key, max_depth, sort))
        levels: SubtreeReader[D] = SubtreeReader(tree, key, max_depth, self._read)
        return levels

    def nested(self, id: Any, max_depth: int | None, sort: Sort | None) -> Plan[Nested[D]]:
        _check_depth(max_depth)
        load = self._entry.codec.load
        return self._read(reads.nested(self._tree, self._entry.ids.encode(id), max_depth, sort, load))

    def ancestors(self, id: Any) -> Plan[list[D]]:
        return (yield from self.path(id))[:-1]

    def path(self, id: Any) -> Plan[list[D]]:
        return self._models(reads.path(self._tree, self._entry.ids.encode(id)))

    def parent(self, id: Any) -> Plan[D | None]:
        above = yield from self.ancestors(id)
        return above[-1] if above else None

    def depth(self, id: Any) -> Plan[int]:
        return self._read(reads.depth(self._tree, self._entry.ids.encode(id)))

    def count(self, id: Any, max_depth: int | None) -> Plan[int]:
        _check_depth(max_depth)
        key = None if id is None else self._entry.ids.encode(id)
        return self._read(reads.count(self._tree, key, max_depth))

    # -- writing -------------------------------------------------------------------------------------

    def insert(self, node: D, parent: Any, at: int | None) -> Plan[D]:
        kinds = [each.model for each in [self._entry, *self._entry.kinds.below]]
        if type(node) not in kinds:
            raise UsageError(
                f"this is the tree of {self._tree.name}; it takes no {type(node).__name__}",
                code="model-unknown",
            )
        self._check_index(at, parent)
        stated = Stated(at=at) if parent is None else Stated(self._entry.ids.encode(parent), at)
        entry: ModelEntry[D] = self._write_path.graph.entry(type(node))
        write: Insert[D] = Insert(entry, [node], {self._rule: [stated]})
        (stored,) = yield from self._write_path.execute(write)
        return stored

    def move(self, id: Any, parent: Any, at: int | None) -> Plan[D]:
        self._check_index(at, parent)
        write: Move[D] = Move(self._tree, id, parent=parent, at=at)
        return (yield from self._write_path.execute(write))

    def rename(self, id: Any, segment: str) -> Plan[D]:
        write: Move[D] = Move(self._tree, id, segment=segment)
        return (yield from self._write_path.execute(write))

    def remove(self, id: Any, children: Children) -> Plan[int]:
        return remove(self._write_path, self._tree, id, children)

    def _check_index(self, at: Any, parent: Any) -> None:
        """Refuse an index among siblings that have no order, or that is not one."""
        if at is None:
            return
        wrong = None
        if self._tree.lists is None:
            wrong = (
                f"the children of a {self._tree.name} have no order of their own, so at={quote(at)} means "
                "nothing; declare tree=ChildReferences(…), or store a number and read with sort="
            )
        elif parent is None:
            wrong = f"roots are in no list, so at={quote(at)} means nothing; give a parent"
        elif not isinstance(at, int) or isinstance(at, bool) or at < 0:
            wrong = f"at={quote(at)} is not an index; the first child is at=0"
        if wrong is not None:
            raise UsageError(wrong, code="tree-order")


def _check_depth(max_depth: Any) -> None:
    is_whole = isinstance(max_depth, int) and not isinstance(max_depth, bool)
    if max_depth is not None and not (is_whole and max_depth >= 0):
        raise UsageError(
            f"max_depth={quote(max_depth)} is not a whole number from 0; 1 means children",
            code="filter-invalid",
        )
