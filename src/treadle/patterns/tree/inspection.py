"""Proof and repair of trees: circles, orphans, wrong arrays and paths, lists that disagree.

Everything is derived from the tree's truth: the parents, or the child lists,
or else the paths themselves. An orphan, and the node with the least id of a
circle, should be a root; nothing is ever deleted. Nodes are read page by page
and climbed from together, so a page costs about as many reads as the tree is
deep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import bson
from pymongo.errors import BulkWriteError, OperationFailure

from treadle.engine.ledger import Ledger
from treadle.engine.pages import page
from treadle.engine.react import UNBOUNDED, react
from treadle.engine.set_aside import set_aside
from treadle.errors import UsageError
from treadle.graph.gather import freeze
from treadle.graph.graph import Graph
from treadle.graph.reports import Finding, Progress, Report
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import Role, Tree
from treadle.patterns.tree.moves import begin, finish
from treadle.patterns.tree.placing import rewrite
from treadle.patterns.tree.segments import join, path_above, split
from treadle.plan import Plan, Raw, count_documents, find, transact, update_many
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import DUPLICATE_KEY, is_about_one_document
from treadle.query.comparison import same
from treadle.query.paths import value_at


def order_of(key: Any) -> bytes:
    """Something by which ids of any type have one order, the same in every process."""
    encoded: bytes = bson.encode({"": key}, codec_options=CODEC_OPTIONS)
    return encoded


class Climb:
    """Some nodes and all above them: who is whose parent, and where circles are to be cut."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.nodes: dict[Any, Raw] = {}
        # Per node (frozen id) the frozen id of its parent, by the truth; None for roots and orphans.
        self.parents: dict[Any, Any] = {}
        self.by_path: dict[str, Any] = {}
        # Who lists a node, where more than one does.
        self.claims: dict[Any, list[Any]] = {}
        self.cut: set[Any] = set()
        self._paths: dict[Any, str | None] = {}

    def add(self, nodes: Iterable[Raw]) -> None:
        for node in nodes:
            self.nodes.setdefault(freeze(node["_id"]), node)
            path = self.tree.get(node, "path")
            if isinstance(path, str):
                self.by_path.setdefault(path, freeze(node["_id"]))

    def above(self, key: Any) -> list[Any]:
        """The frozen ids above a node, root first, with circles cut."""
        chain: list[Any] = []
        parent = None if key in self.cut else self.parents.get(key)
        while parent is not None:
            chain.append(parent)
            parent = None if parent in self.cut else self.parents.get(parent)
        return chain[::-1]

    def parent(self, key: Any) -> Any:
        """The frozen id of the parent that a node should have."""
        return None if key in self.cut else self.parents.get(key)

    def path(self, key: Any) -> str | None:
        """The path that a node should have; None where a segment on the way is no segment."""
        if key not in self._paths:
            chain = [*self.above(key), key]
            path: str | None = None
            for each in chain:
                try:
                    path = join(path, self.tree.segment_of(self.nodes[each]))
                except UsageError:
                    path = None
                    break
            self._paths[key] = path
        return self._paths[key]

    def find_circles(self) -> None:
        """Decide where each circle is cut: at the node with the least id."""
        state: dict[Any, int] = {}
        for start in self.nodes:
            walked: list[Any] = []
            key: Any = start
            while key is not None and key not in state:
                state[key] = 1
                walked.append(key)
                key = self.parents.get(key)
            if key is not None and state.get(key) == 1 and key in walked:
                circle = walked[walked.index(key) :]
                self.cut.add(min(circle, key=lambda each: order_of(self.nodes[each]["_id"])))
            for each in walked:
                state[each] = 2


def climb(tree: Tree, documents: Sequence[Raw]) -> Plan[Climb]:
    """Read all that is above some nodes, level by level, all of them together."""
    known = Climb(tree)
    known.add(documents)
    pending = list(known.nodes)
    while pending:
        if tree.truth == "parent":
            found = yield from _parents_by_id(known, pending)
        elif tree.truth == "path":
            found = yield from _parents_by_path(known, pending)
        else:
            found = yield from _parents_by_list(known, pending)
        new = [freeze(each["_id"]) for each in found if freeze(each["_id"]) not in known.nodes]
        known.add(found)
        _link(known, pending)
        pending = list(dict.fromkeys(new))
    known.find_circles()
    return known


def _link(known: Climb, keys: Sequence[Any]) -> None:
    """Note the parents of nodes, now that these are known."""
    tree = known.tree
    for key in keys:
        node = known.nodes[key]
        parent: Any = None
        if tree.truth == "parent":
            stated = tree.get(node, "parent")
            parent = None if stated is None else freeze(stated)
        elif tree.truth == "path":
            parent = known.by_path.get(path_above(tree.get(node, "path") or "") or "")
        else:
            claims = known.claims.get(key, [])
            parent = min(claims, key=lambda each: order_of(known.nodes[each]["_id"]), default=None)
        known.parents[key] = parent if parent in known.nodes else None


def _parents_by_id(known: Climb, keys: Sequence[Any]) -> Plan[list[Raw]]:
    tree = known.tree
    wanted = {
        freeze(parent): parent for key in keys if (parent := tree.get(known.nodes[key], "parent")) is not None
    }
    missing = [parent for frozen, parent in wanted.items() if frozen not in known.nodes]
    if not missing:
        return []
    return (yield from find(tree.entry.collection, {"_id": {"$in": missing}}, tree.projection))


def _parents_by_path(known: Climb, keys: Sequence[Any]) -> Plan[list[Raw]]:
    tree = known.tree
    paths = {path_above(tree.get(known.nodes[key], "path") or "") for key in keys}
    missing = sorted(path for path in paths if path is not None and path not in known.by_path)
    if not missing:
        return []
    return (yield from find(tree.entry.collection, {tree.roles["path"]: {"$in": missing}}, tree.projection))


def _parents_by_list(known: Climb, keys: Sequence[Any]) -> Plan[list[Raw]]:
    tree = known.tree
    ids = [known.nodes[key]["_id"] for key in keys]
    found = yield from find(tree.entry.collection, {tree.roles["children"]: {"$in": ids}}, tree.projection)
    among = set(keys)
    for parent in found:
        for child in {freeze(each) for each in tree.get(parent, "children") or []} & among:
            claims = known.claims.setdefault(child, [])
            if freeze(parent["_id"]) not in claims:
                claims.append(freeze(parent["_id"]))
    return found


# -- what should be --------------------------------------------------------------------------------


def expected(tree: Tree, documents: Sequence[Raw]) -> Plan[list[Raw]]:
    """Per node the value that each of the tree's fields should have, by stored path."""
    known = yield from climb(tree, documents)
    lists = yield from _expected_lists(known, documents)
    wanted: list[Raw] = []
    for document in documents:
        key = freeze(document["_id"])
        values: Raw = {}
        if tree.parent is not None:
            parent = known.parent(key)
            values[tree.parent] = None if parent is None else known.nodes[parent]["_id"]
        if tree.ancestors is not None:
            values[tree.ancestors] = [known.nodes[each]["_id"] for each in known.above(key)]
        if tree.path is not None and tree.segment is not None:
            path = known.path(key)
            values[tree.path] = tree.get(document, "path") if path is None else path
            try:
                tree.segment_of(document)
            except UsageError:
                # Only a person can say what it should be called.
                values[tree.segment] = None
        if tree.children is not None:
            values[tree.children] = lists[key]
        wanted.append(values)
    return wanted


def _expected_lists(known: Climb, documents: Sequence[Raw]) -> Plan[dict[Any, list[Any]]]:
    """The child list that each node should have."""
    tree = known.tree
    if tree.children is None:
        return {}
    keys = [document["_id"] for document in documents]
    if tree.truth == "children":
        listed = [child for document in documents for child in tree.get(document, "children") or []]
        found = yield from find(tree.entry.collection, {"_id": {"$in": listed}}, tree.projection)
        below = yield from climb(tree, found)
        rightful = {key: below.parent(key) for key in below.nodes}
    else:
        found = yield from find(
            tree.entry.collection, {tree.roles["parent"]: {"$in": keys}}, tree.projection, sort=[("_id", 1)]
        )
        rightful = {
            freeze(each["_id"]): freeze(tree.get(each, "parent"))
            for each in found
            if freeze(each["_id"]) not in known.cut
        }
    lists: dict[Any, list[Any]] = {}
    for document in documents:
        own = freeze(document["_id"])
        order = [*(tree.get(document, "children") or [])]
        if tree.truth != "children":
            order += [each["_id"] for each in found]
        each_once = {freeze(child): child for child in reversed(order)}
        lists[own] = [child for key, child in reversed(each_once.items()) if rightful.get(key) == own]
    return lists


def examine(tree: Tree, documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """The findings in these nodes."""
    findings = []
    wanted = yield from expected(tree, documents)
    for document, values in zip(documents, wanted, strict=True):
        for path, right in values.items():
            stored = value_at(document, path)
            if not _same(stored, right):
                findings.append(
                    Finding(
                        tree.pattern_of(_role(tree, path)),
                        tree.entry.model.__name__,
                        document["_id"],
                        path,
                        stored,
                        right,
                    )
                )
    return findings


def _same(stored: Any, right: Any) -> bool:
    if isinstance(stored, list) and isinstance(right, list):
        # Ids: not equal just because their numbers are.
        return [freeze(each) for each in stored] == [freeze(each) for each in right]
    return same(stored, right)


def _role(tree: Tree, path: str) -> Role:
    return next(role for role, stored in tree.roles.items() if stored == path)


def verify_tree(server: Capabilities, tree: Tree, report: Report | None = None) -> Plan[list[Finding]]:
    """All findings in a tree; what looks wrong is looked at again, at one moment."""
    findings: list[Finding] = []
    total = (yield from count_documents(tree.entry.collection, {})) if report else 0
    done = 0
    last: list[Any] | None = None
    while documents := (yield from page(tree.entry, last, tree.entry.limits.verify_page)):
        last = [documents[-1]["_id"]]
        suspects = yield from examine(tree, documents)
        if suspects:
            findings.extend((yield from _look_again(tree, suspects)))
        done += len(documents)
        if report:
            report(Progress(tree.entry.model.__name__, done, max(total, done)))
    return findings


def _look_again(tree: Tree, suspects: Sequence[Finding]) -> Plan[list[Finding]]:
    keys = list({freeze(each.document_id): each.document_id for each in suspects}.values())

    def look() -> Plan[list[Finding]]:
        documents = yield from find(tree.entry.collection, {"_id": {"$in": keys}}, tree.projection)
        return (yield from examine(tree, documents))

    return (yield from transact(look))


# -- mending ---------------------------------------------------------------------------------------


def mend_tree(graph: Graph, server: Capabilities, tree: Tree, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Give nodes what the truth says; the ids of those that changed."""
    try:
        return (yield from _mend_between_moves(graph, server, tree, keys))
    except OperationFailure as error:
        taken = isinstance(error, BulkWriteError) or error.code == DUPLICATE_KEY
        if not (taken or is_about_one_document(error)):
            raise
        if len(keys) == 1:
            # Two siblings with one segment, or a node that cannot be written: a person must see to it.
            yield from set_aside(tree.rules[0].place.label, tree.entry.collection, keys[0], error)
            return []
    middle = len(keys) // 2
    first = yield from mend_tree(graph, server, tree, keys[:middle])
    return [*first, *(yield from mend_tree(graph, server, tree, keys[middle:]))]


def _mend_between_moves(
    graph: Graph, server: Capabilities, tree: Tree, keys: Sequence[Any]
) -> Plan[list[Any]]:
    """Mend in a transaction; not while a large move is half done, of which paths alone cannot tell."""
    for _ in range(tree.entry.limits.tree_attempts_max):
        yield from finish(tree, graph, server)
        try:
            return (yield from transact(lambda: _mend(graph, server, tree, keys)))
        except state.TreeBusy:
            continue
    raise state.TreeBusy(tree)  # pragma: no cover


def _mend(graph: Graph, server: Capabilities, tree: Tree, keys: Sequence[Any]) -> Plan[list[Any]]:
    # A move meanwhile would make stale what is derived here.
    yield from begin(tree)
    ledger = Ledger()
    documents = yield from find(tree.entry.collection, {"_id": {"$in": list(keys)}}, tree.projection)
    wanted = yield from expected(tree, documents)
    updates: list[tuple[Any, Raw]] = []
    repathed: list[Any] = []
    for document, values in zip(documents, wanted, strict=True):
        sets = {
            path: {"$literal": right}
            for path, right in values.items()
            if path != tree.segment and not _same(value_at(document, path), right)
        }
        if sets:
            updates.append((document["_id"], sets))
            if tree.path in sets and split(tree.get(document, "path")) is not None:
                repathed.append(document["_id"])
    if repathed:
        # Two nodes may have each other's path, which must be free first.
        yield from update_many(
            tree.entry.collection, {"_id": {"$in": repathed}}, {"$set": {tree.roles["path"]: ""}}
        )
    yield from rewrite(tree, updates, ledger)
    yield from react(graph, server, ledger, copies_max=UNBOUNDED)
    return [key for key, _ in updates]


def rebuild_tree(graph: Graph, server: Capabilities, tree: Tree, report: Report | None = None) -> Plan[int]:
    """Derive a whole tree's fields from its truth, while writers go on; how many nodes there are.

    What is right already is only read, so that a run after an interrupted
    one soon comes to where that one was.
    """
    total = (yield from count_documents(tree.entry.collection, {})) if report else 0
    done = 0
    last: list[Any] | None = None
    while documents := (yield from page(tree.entry, last, tree.entry.limits.verify_page)):
        last = [documents[-1]["_id"]]
        wrong = {freeze(each.document_id): each.document_id for each in (yield from examine(tree, documents))}
        if wrong:
            yield from mend_tree(graph, server, tree, list(wrong.values()))
        done += len(documents)
        if report:
            report(Progress(tree.entry.model.__name__, done, max(total, done)))
    return done
