"""The calls on the tree of one model: ids in, models out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from pymongo.errors import OperationFailure, PyMongoError

from treadle.engine.inserts import Insert
from treadle.engine.queries import refuse_changed
from treadle.engine.write_path import WritePath
from treadle.errors import UsageError
from treadle.graph.calls import Children
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Nested
from treadle.model.document import Document
from treadle.model.text import quote
from treadle.patterns.tree import reads, state
from treadle.patterns.tree.fields import UNSTATED, Stated, Tree
from treadle.patterns.tree.moves import Move
from treadle.patterns.tree.nested import nested
from treadle.patterns.tree.reads import Pending, Stream
from treadle.patterns.tree.removes import Remove
from treadle.patterns.tree.unfinished import finish
from treadle.plan import Plan, Raw, Read, outside, server_facts
from treadle.plan.server_errors import GRAPH_LOOKUP_TOO_LARGE
from treadle.query.filters import Sort

D = TypeVar("D", bound=Document)
R = TypeVar("R")


class Nodes(Generic[D]):
    """The nodes of a stream, which takes one read, or one for each batch of parents."""

    def __init__(self, tree: Tree, plan: Plan[Stream]) -> None:
        self._tree = tree
        self.page = tree.entry.limits.find_page
        self._plan = plan
        self._pending: Pending | None = None
        # Whether the read under way is the first one of a stream in batches.
        self._is_first = True

    def first(self) -> Plan[Read | None]:
        """The first read; None where there are no nodes."""
        stream = yield from self._plan
        if isinstance(stream, list):
            return None
        if isinstance(stream, Read):
            return stream
        self._pending = Pending(stream)
        return stream.read

    def instead(self, error: OperationFailure) -> Read:
        """What to read where `$graphLookup` has not enough memory."""
        if error.code != GRAPH_LOOKUP_TOO_LARGE:
            raise error
        if self._pending is None:
            raise reads.too_large(self._tree) from None
        self._is_first = False
        return self._pending.anew()

    def take(self, raws: list[Raw]) -> Iterable[D]:
        """The nodes of a page; what is below them is read later."""
        if self._pending is not None:
            (self._pending.add_first if self._is_first else self._pending.add)(raws)
        return map(self._tree.entry.codec.load, raws)

    def next(self) -> Read | None:
        """The next read; None at the end."""
        self._is_first = False
        return None if self._pending is None else self._pending.next()


class TreeHandle(Generic[D]):
    """The tree of one model."""

    def __init__(self, tree: Tree, write_path: WritePath) -> None:
        self._tree = tree
        self._entry = tree.entry
        self._write_path = write_path

    # -- reading -------------------------------------------------------------------------------------

    def _read(self, plan: Plan[R]) -> Plan[R]:
        """Read places in the tree, unless outdated nodes hold theirs in another form."""
        yield from refuse_changed(self._entry, "a read of the tree", self._tree.roles.values())
        return (yield from plan)

    def _nodes(self, plan: Plan[Stream]) -> Nodes[D]:
        return Nodes(self._tree, self._read(plan))

    def roots(self, sort: Sort | None) -> Nodes[D]:
        return self._nodes(reads.roots(self._tree, sort))

    def children(self, id: Any, sort: Sort | None) -> Nodes[D]:
        return self._nodes(reads.children(self._tree, self._entry.ids.encode(id), sort))

    def descendants(self, id: Any, max_depth: int | None, sort: Sort | None) -> Nodes[D]:
        reads.check_depth(max_depth)
        key = self._entry.ids.encode(id)
        return self._nodes(reads.descendants(self._tree, key, max_depth, sort))

    def nested(self, id: Any, max_depth: int | None, sort: Sort | None) -> Plan[Nested[D]]:
        reads.check_depth(max_depth)
        load = self._entry.codec.load
        return self._read(nested(self._tree, self._entry.ids.encode(id), max_depth, sort, load))

    def ancestors(self, id: Any) -> Plan[list[D]]:
        raws = yield from self._read(reads.ancestors(self._tree, self._entry.ids.encode(id)))
        return [self._entry.codec.load(raw) for raw in raws]

    def path(self, id: Any) -> Plan[list[D]]:
        raws = yield from self._read(reads.path(self._tree, self._entry.ids.encode(id)))
        return [self._entry.codec.load(raw) for raw in raws]

    def parent(self, id: Any) -> Plan[D | None]:
        above = yield from self.ancestors(id)
        return above[-1] if above else None

    def depth(self, id: Any) -> Plan[int]:
        return self._read(reads.depth(self._tree, self._entry.ids.encode(id)))

    def count(self, id: Any, max_depth: int | None) -> Plan[int]:
        key = None if id is None else self._entry.ids.encode(id)
        return self._read(reads.count(self._tree, key, max_depth))

    # -- writing -------------------------------------------------------------------------------------

    def insert(self, node: D, parent: Any, at: int | None) -> Plan[D]:
        self._check(node)
        self._check_index(at, parent)
        stated = Stated(UNSTATED if parent is None else self._entry.ids.encode(parent), at)
        entry: ModelEntry[D] = self._write_path.graph.entry(type(node))
        work: Insert[D] = Insert(entry, [node], {self._tree.rules[0]: [stated]})
        (stored,) = yield from self._write_path.execute(work)
        return stored

    def _check(self, node: D) -> None:
        model = self._entry.model
        kinds = [each.model for each in [self._entry, *self._entry.kinds.below]]
        if type(node) not in kinds:
            raise UsageError(
                f"this is the tree of {model.__name__}; it takes no {type(node).__name__}",
                code="model-unknown",
            )

    def _check_index(self, at: Any, parent: Any) -> None:
        """Refuse an index among siblings that have no order, or that is not one."""
        if at is None:
            return
        name = self._entry.model.__name__
        if self._tree.truth != "children":
            raise UsageError(
                f"the children of a {name} have no order of their own, so at={quote(at)} means nothing; "
                "declare tree=ChildReferences(…), or store a number and read with sort=",
                code="tree-order",
            )
        if parent is None:
            raise UsageError(
                f"roots are in no list, so at={quote(at)} means nothing; give a parent", code="tree-order"
            )
        if not isinstance(at, int) or isinstance(at, bool) or at < 0:
            raise UsageError(f"at={quote(at)} is not an index; the first child is at=0", code="tree-order")

    def move(self, id: Any, parent: Any, at: int | None) -> Plan[D]:
        self._check_index(at, parent)
        return (yield from self._move(id, parent=parent, at=at))

    def rename(self, id: Any, segment: str) -> Plan[D]:
        return (yield from self._move(id, segment=segment))

    def _move(self, id: Any, **to: Any) -> Plan[D]:
        work: Move[D] = Move(self._tree, id, **to)
        node = yield from self._write_path.execute(work)
        if work.token is not None:
            yield from self._finish()
        return node

    def remove(self, id: Any, children: Children) -> Plan[int]:
        work = Remove(self._tree, id, children)
        removed = yield from self._write_path.execute(work)
        if work.token is None:
            return removed
        yield from self._finish()
        # It went in chunks, which others may have helped with.
        return (yield from outside(lambda: state.outcome(self._tree, work.token)))

    def _finish(self) -> Plan[None]:
        """Do the rest of a large move or removal, in chunks."""
        server = yield from server_facts()
        try:
            yield from outside(lambda: finish(self._tree, self._write_path.graph, server))
        except PyMongoError as error:
            # Its beginning is committed, and the rest as pending; it must not seem to have failed.
            state.log.warning("%s: a large move is pending: %s", self._entry.model.__name__, error)
            self._write_path.unfinished = True
