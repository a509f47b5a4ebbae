"""Trees of a thousand levels: loaded in pieces, removed in one look."""

from __future__ import annotations

from typing import Any

from pymongo.errors import OperationFailure

from tests.patterns.tree.forest import tree_of
from treadle import AncestorArray, Document, MaterializedPath, Store
from treadle.graph.graph import Graph
from treadle.patterns.tree.reads import outside_child
from treadle.plan.server_errors import translate


class Node(Document, collection="deep", tree=AncestorArray(parent="parent_id", ancestors="ancestors")):
    id: int
    parent_id: int | None = None
    ancestors: list[int] = []


def test_a_deep_load_goes_in_pieces(heard, constants):
    """Each commit holds no more ancestors than the server's cache takes; each node finds its parent."""
    database, listener = heard
    constants(tree_flat_max=5, tree_ancestors_max=60)
    store = Store(database, [Node])
    store.setup()
    listener.clear()
    chain = [Node(id=number, parent_id=number - 1 if number else None) for number in range(30)]
    stored = store.insert_many(list(reversed(chain)))
    assert list(reversed(range(30))) == [each.id for each in stored]
    assert list(range(29)) == store.get(Node, 29).ancestors
    # 435 ancestors in all.
    assert 8 <= listener.names.count("commitTransaction") <= 12
    listener.clear()
    store.insert_many([Node(id=number, parent_id=29) for number in range(100, 110)])
    assert 5 == listener.names.count("commitTransaction")
    assert [] == store.verify()


def test_what_the_cache_does_not_hold_is_told():
    error = OperationFailure("transaction is too large", 388)
    assert "transaction-too-large" == getattr(translate(error, "Node"), "code", None)


class Place(Document, collection="places", tree=MaterializedPath(path="path", segment="name")):
    name: str
    path: str = ""


def test_the_topmost_of_many_paths_are_found_in_one_pass():
    """2,000 levels; comparing each path with all of its prefixes took minutes."""
    tree = tree_of(Graph([Place]).entry(Place))
    names = [f"n{number}" for number in range(2_000)]
    paths = ["," + ",".join(names[: depth + 1]) + "," for depth in range(2_000)]
    nodes: list[dict[str, Any]] = [{"_id": number, "path": path} for number, path in enumerate(paths)]
    nodes += [{"_id": "other", "path": ",n00,"}, {"_id": "none", "path": None}]
    command = next(outside_child(tree, nodes))
    assert [{"path": {"$gt": ",n0,", "$lt": ",n0-"}}, {"path": {"$gt": ",n00,", "$lt": ",n00-"}}] == (
        command.arguments[0]["$or"]
    )
