"""Reading trees of every representation: levels, order, cycles, limits, outdated nodes.

Covers: patterns/tree/calls, patterns/tree/tree, store/async_tree
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient

from tests.patterns.tree.forest import ALL, FOUR, Array, Listed, Parented, Pathed, names, plant, tree_of
from treadle import (
    AncestorArray,
    AsyncStore,
    DataError,
    Document,
    Limits,
    Nested,
    Store,
    UsageError,
    migration,
)
from treadle.patterns.tree import reads

SHAPE = {"r": {"a": {"a1": {"a2": {}}, "a3": {}}, "b": {"b1": {}}}, "s": {}}
BELOW = ["a", "a1", "a2", "a3", "b", "b1"]
EVERY_MODEL = pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)
EACH = pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)


def planted(run: Any, model: Any, limits: Limits | None = None) -> tuple[Any, dict[str, Any]]:
    store = run.store([model], limits=limits)
    store.setup()
    return store, plant(store, model, SHAPE)


def shape(nested: Nested[Any]) -> dict[str, Any]:
    below: dict[str, Any] = {}
    for each in nested.children:
        below |= shape(each)
    return {nested.node.name: below}


# -- several levels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("model", [Parented, Listed], ids=lambda model: model.__name__)
def test_the_levels_below_the_first_ones_are_all_found(run, model, levels, constants):
    """However many of them `$graphLookup` finds."""
    constants(tree_graph_levels=levels, tree_batch=2)
    store, ids = planted(run, model, Limits(find_page=2))
    tree = store.tree(model)
    depths = {name: tree.depth(ids[name]) for name in BELOW}
    for most in (None, 0, 1, 2, 3, 4):
        expected = [name for name in BELOW if most is None or depths[name] <= most]
        assert expected == sorted(names(tree.descendants(ids["r"], max_depth=most)))
        assert len(expected) == tree.count(ids["r"], max_depth=most)


@EVERY_MODEL
def test_a_subtree_as_one_structure(run, model, constants):
    constants(tree_batch=2, tree_nested_max=7)
    store, ids = planted(run, model, Limits(find_page=2))
    tree = store.tree(model)
    assert {"r": SHAPE["r"]} == shape(tree.nested(ids["r"]))
    assert ["b", "a"] == [each.node.name for each in tree.nested(ids["r"], sort="-name").children]
    assert {"r": {"a": {}, "b": {}}} == shape(tree.nested(ids["r"], max_depth=1))
    assert {"r": {}} == shape(tree.nested(ids["r"], max_depth=0))
    plant(store, model, {"one more": {}}, ids["b"])
    with pytest.raises(DataError, match="max_depth=") as caught:
        tree.nested(ids["r"])
    assert "tree-too-large" == caught.value.code


def test_descendants_beyond_the_memory_of_graph_lookup_still_stream(run, database):
    """The server gives up at 100 MB; then the levels are read batch by batch."""
    store, ids = planted(run, Parented)
    for number in range(9):
        database["parents"].insert_one({"name": f"{number}" * 12_000_000, "parent_id": ids["b"]})
    tree = store.tree(Parented)
    assert ["0", "1", "2"] == sorted(node.name[:1] for node in tree.descendants(ids["r"]))[:3]
    assert 15 == tree.count(ids["r"])
    with pytest.raises(DataError, match="AncestorArray") as caught:
        list(tree.descendants(ids["r"], sort="name"))
    assert "tree-too-large" == caught.value.code
    assert 16 == tree.remove(ids["r"], children="subtree")


# -- order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Parented, Array], ids=lambda model: model.__name__)
def test_siblings_come_in_the_order_that_is_asked_for(run, model):
    store = run.store([model])
    store.setup()
    tree = store.tree(model)
    top = tree.insert(model(name="top"))
    for name in ("b", "c", "a"):
        tree.insert(model(name=name), top.id)
    assert ["b", "c", "a"] == names(tree.children(top.id))
    assert ["a", "b", "c"] == names(tree.children(top.id, sort="name"))
    assert ["c", "b", "a"] == names(tree.children(top.id, sort=[("name", -1)]))
    assert ["c", "b", "a"] == names(tree.descendants(top.id, sort="-name"))
    store.insert_many([model(name="z"), model(name="y")])
    assert (["top", "z", "y"], ["z", "y", "top"]) == (names(tree.roots()), names(tree.roots(sort="-name")))


def test_siblings_come_from_the_range_and_not_from_the_index_that_has_their_order(run, database):
    """Left to itself, the server goes through the index on _id, that is through the whole tree."""
    store = run.store([Pathed])
    store.setup()
    top = store.insert(Pathed(name="top"))
    own = [f"n{number}" for number in range(150)]
    store.insert_many([Pathed(name=name, path=f",top,{name},") for name in own])
    store.insert_many([Pathed(name=f"other {number}") for number in range(600)])
    tree = tree_of(Store(database, [Pathed]).graph.entry(Pathed))
    for plan in (reads.children(tree, top.id, None), reads.descendants(tree, top.id, None, "-_id")):
        read = run(plan)
        cursor = database["paths"].find(*read.arguments).sort(read.options["sort"])
        assert cursor.explain()["executionStats"]["totalKeysExamined"] <= len(own) + 1
    assert own == names(store.tree(Pathed).children(top.id))
    assert own[::-1] == names(store.tree(Pathed).descendants(top.id, sort="-_id"))


def test_child_lists_are_read_in_their_own_order(run, database):
    store, ids = planted(run, Listed)
    database["lists"].update_one({"_id": ids["r"]}, {"$set": {"children": [ids["b"], ids["a"]]}})
    tree = store.tree(Listed)
    assert ["b", "a"] == names(tree.children(ids["r"]))
    assert ["b", "a"] == [each.node.name for each in tree.nested(ids["r"]).children]
    assert ["a", "b"] == names(tree.children(ids["r"], sort="name"))


# -- what other programs wrote -----------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 3])
@EACH
def test_a_cycle_gives_each_node_once(run, database, model, levels, constants):
    """Lists gave nodes of a cycle again and again, until the tree was taken for too deep."""
    constants(tree_graph_levels=levels, tree_batch=1)
    store, ids = planted(run, model)
    raw = database[model.__treadle__.collection]
    if model is Listed:
        raw.update_one({"_id": ids["a2"]}, {"$set": {"children": [ids["a"], ids["b1"]]}})
    elif model is not Pathed:
        raw.update_one({"_id": ids["a"]}, {"$set": {"parent_id": ids["a2"]}})
        raw.update_many({"_id": {"$in": [ids["a"], ids["a1"]]}}, {"$push": {"ancestors": ids["a2"]}})
    tree = store.tree(model)
    for node in ("r", "a", "a1"):
        for read in (tree.descendants(ids[node]), tree.descendants(ids[node], sort="name")):
            below = names(read)
            assert len(below) == len(set(below)) <= len(BELOW)
        assert tree.count(ids[node]) <= len(BELOW)
        assert shape(tree.nested(ids[node]))
        assert tree.depth(ids[node]) <= len(BELOW)


def test_nodes_without_a_list_are_leaves(run, database):
    store = run.store([Listed])
    store.setup()
    raw = database["lists"]
    tree = store.tree(Listed)
    for document in ({"name": "raw"}, {"name": "null", "children": None}):
        key = raw.insert_one(document, bypass_document_validation=True).inserted_id
        assert [] == names(tree.children(key)) == names(tree.descendants(key))
        child = tree.insert(Listed(name="child"), key)
        assert ["child"] == names(tree.children(key))
        assert 1 == tree.remove(child.id)


def test_a_list_that_is_none_is_named(run, database):
    store, ids = planted(run, Listed)
    database["lists"].update_one(
        {"_id": ids["b"]}, {"$set": {"children": "text"}}, bypass_document_validation=True
    )
    with pytest.raises(DataError, match="child list"):
        store.tree(Listed).count(ids["r"])


# -- refusals ----------------------------------------------------------------------------------------


@EACH
def test_a_missing_node_has_nothing_below_and_no_place(run, model):
    store, _ = planted(run, model)
    tree, lost = store.tree(model), ObjectId()
    assert [] == list(tree.children(lost)) == list(tree.descendants(lost))
    for call in (tree.ancestors, tree.path, tree.parent, tree.depth, tree.nested):
        with pytest.raises(DataError) as caught:
            call(lost)
        assert "tree-node-missing" == caught.value.code


def test_bad_arguments_are_refused_at_once(run):
    store, ids = planted(run, Parented)
    tree = store.tree(Parented)
    for call in (tree.children, tree.descendants, tree.depth, tree.ancestors, tree.path, tree.remove):
        with pytest.raises(UsageError) as caught:
            call({"$ne": None})
        assert "id-invalid" == caught.value.code
    for depth in (-1, 1.5, True, "2"):
        for call in (tree.descendants, tree.nested, tree.count):
            with pytest.raises(UsageError, match="max_depth"):
                call(ids["r"], max_depth=depth)
    with pytest.raises(UsageError, match="'refuse', 'subtree' or 'lift'"):
        tree.remove(ObjectId(), children="all")
    with pytest.raises(UsageError, match="no segment"):
        tree.rename(ObjectId(), "x")
    with pytest.raises(UsageError, match="the tree of Parented"):
        tree.insert(Array(name="x"))


class Moved(
    Document, collection="moved", version=2, tree=AncestorArray(parent="parent_id", ancestors="ancestors")
):
    id: int
    parent_id: int | None = None
    ancestors: list[int] = []


@migration(Moved, from_version=1, fields=("parent_id", "ancestors", "above"))
def rename_ancestors(document: dict[str, Any]) -> dict[str, Any]:
    document["ancestors"] = document.pop("above", [])
    document["parent_id"] = document["ancestors"][-1] if document["ancestors"] else None
    return document


def test_a_tree_is_not_read_while_outdated_nodes_hold_their_places_in_another_form(run, database):
    store = run.store([Moved])
    store.setup()
    database["moved"].insert_many([{"_id": 1, "above": []}, {"_id": 2, "above": [1]}])
    tree = store.tree(Moved)
    for read in (lambda: list(tree.children(1)), lambda: tree.ancestors(2), lambda: tree.count(1)):
        with pytest.raises(UsageError) as refused:
            read()
        assert "documents-outdated" == refused.value.code
    store.migrate(Moved)
    assert ([2], [1]) == ([each.id for each in tree.children(1)], [each.id for each in tree.ancestors(2)])


# -- asyncio -----------------------------------------------------------------------------------------


@EACH
def test_the_asyncio_shell_answers_alike(server, database, run, model):
    _, ids = planted(run, model)

    async def read() -> None:
        async with AsyncMongoClient(server.uri) as client:
            tree = AsyncStore(client[database.name], [model]).tree(model)
            assert {"b": {"b1": {}}} == shape(await tree.nested(ids["b"]))
            assert ["b"] == [node.name async for node in tree.children(ids["r"], sort="-name")][:1]
            assert BELOW == sorted(names(await tree.descendants(ids["r"])))

    asyncio.run(read())
