"""A subtree in its order: walks, leaves, siblings, common ancestors, and the subtree as one structure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient

from tests.patterns.tree.forest import ALL, FOUR, SMALL, Array, Listed, Parented, names, plant
from treadle import AsyncStore, DataError, Limits, Nested, Store, UsageError

SHAPE = {"r": {"a": {"a1": {"a2": {}}, "a3": {}}, "b": {"b1": {}}}, "s": {}}
every = pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)


def planted(database: Any, model: Any, limits: Limits | None = None) -> tuple[Any, dict[str, Any]]:
    store = Store(database, [model], limits=limits)
    store.setup()
    return store, plant(store, model, SHAPE)


def shape(nested: Nested[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in nested.children:
        found |= shape(each)
    return {nested.node.name: found}


@every
def test_a_walk_goes_depth_first_or_level_by_level(database, model):
    store, ids = planted(database, model, Limits(tree_batch=2, find_page=2))
    tree = store.tree(model)
    assert ["r", "a", "a1", "a2", "a3", "b", "b1"] == names(tree.walk(ids["r"]))
    assert ["r", "a", "b", "a1", "a3", "b1", "a2"] == names(tree.walk(ids["r"], order="breadth"))
    assert ["r", "b", "b1", "a", "a3", "a1", "a2"] == names(tree.walk(ids["r"], sort="-name"))
    assert ["r", "a", "a1", "a3", "b", "b1"] == names(tree.walk(ids["r"], max_depth=2))
    assert ["r"] == names(tree.walk(ids["r"], max_depth=0))
    assert ["r", "a", "a1", "a2", "a3", "b", "b1", "s"] == names(tree.walk())
    assert ["s", "r", "b", "a"] == names(tree.walk(order="breadth", max_depth=1, sort="-name"))


@every
def test_leaves_siblings_and_common_ancestors(database, model):
    store, ids = planted(database, model, Limits(tree_batch=2))
    tree = store.tree(model)
    assert ["a2", "a3", "b1"] == names(tree.leaves(ids["r"]))
    assert ["s"] == names(tree.leaves(ids["s"]))
    assert ["s", "b1", "a3", "a2"] == names(tree.leaves(sort="-name"))
    assert ["a3"] == names(tree.siblings(ids["a1"]))
    assert ["s"] == names(tree.siblings(ids["r"]))
    assert [] == names(tree.siblings(ids["b1"]))
    for one, other, common in (("a2", "a3", "a"), ("a2", "b1", "r"), ("a", "a2", "a"), ("b", "b", "b")):
        assert common == tree.common_ancestor(ids[one], ids[other]).name
    assert "r" == tree.common_ancestor(ids["a2"], ids["a3"], ids["b"]).name
    assert tree.common_ancestor(ids["a"], ids["s"]) is None


@every
def test_a_subtree_as_one_structure(database, model):
    store, ids = planted(database, model, Limits(tree_batch=2, find_page=2, tree_nested_max=7))
    tree = store.tree(model)
    assert {"r": SHAPE["r"]} == shape(tree.nested(ids["r"]))
    assert ["b", "a"] == [each.node.name for each in tree.nested(ids["r"], sort="-name").children]
    assert {"r": {"a": {}, "b": {}}} == shape(tree.nested(ids["r"], max_depth=1))
    plant(store, model, {"one more": {}}, ids["b"])
    with pytest.raises(DataError, match="max_depth=") as caught:
        tree.nested(ids["r"])
    assert "tree-too-large" == caught.value.code


def test_child_lists_are_walked_in_their_own_order(database):
    store, ids = planted(database, Listed)
    database.lists.update_one({"_id": ids["r"]}, {"$set": {"children": [ids["b"], ids["a"]]}})
    assert ["r", "b", "b1", "a", "a1", "a2", "a3"] == names(store.tree(Listed).walk(ids["r"]))


@pytest.mark.parametrize("model", [Array, Parented], ids=lambda model: model.__name__)
def test_a_walk_through_a_cycle_ends(database, model):
    store, ids = planted(database, model)
    cycle = {"parent_id": ids["a2"], **({"ancestors": [ids["a1"], ids["a2"]]} if model is Array else {})}
    database[model.__treadle__.collection].update_one({"_id": ids["a1"]}, {"$set": cycle})
    tree = store.tree(model)
    assert ["a1", "a2"] == names(tree.walk(ids["a1"]))
    assert {"a1": {"a2": {}}} == shape(tree.nested(ids["a1"]))


@pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)
def test_what_is_wrong_is_refused(database, model):
    store, ids = planted(database, model)
    tree = store.tree(model)
    missing = ObjectId()
    calls = (
        lambda: tree.siblings(missing).to_list(),
        lambda: tree.leaves(missing).to_list(),
        lambda: tree.walk(missing).to_list(),
        lambda: tree.nested(missing),
        lambda: tree.common_ancestor(ids["a"], missing),
    )
    for call in calls:
        with pytest.raises(DataError) as caught:
            call()
        assert "tree-node-missing" == caught.value.code
    with pytest.raises(UsageError, match="'depth' or 'breadth'"):
        tree.walk(ids["a"], order="preorder")
    with pytest.raises(UsageError, match="max_depth"):
        tree.walk(ids["a"], max_depth=-1)
    with pytest.raises(UsageError, match="one or more"):
        tree.common_ancestor()


@pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)
def test_the_asyncio_shell_answers_alike(server, database, model):
    _, ids = planted(database, model)

    async def read() -> None:
        async with AsyncMongoClient(server.uri) as client:
            tree = AsyncStore(client[database.name], [model]).tree(model)
            assert ["r", "a", "b"] == names(await tree.walk(ids["r"], max_depth=1))
            assert ["a2", "a3"] == [node.name async for node in tree.leaves(ids["a"])]
            assert ["b"] == names(await tree.siblings(ids["a"]))
            assert {"b": {"b1": {}}} == shape(await tree.nested(ids["b"]))
            common = await tree.common_ancestor(ids["a2"], ids["b"])
            assert common is not None
            assert "r" == common.name
            assert 1 == await tree.remove(ids["a"], children="root")
            assert ["r", "a1", "a3", "s"] == names(await tree.roots(sort="_id"))

    asyncio.run(read())


@every
@pytest.mark.parametrize("limits", [None, SMALL], ids=["at once", "in chunks"])
def test_children_of_a_removed_node_become_roots(database, model, limits):
    store, ids = planted(database, model, limits)
    plant(store, model, {"a4": {"a5": {}, "a6": {}}}, ids["a1"])
    tree = store.tree(model)
    assert 1 == tree.remove(ids["a"], children="root")
    assert [] == store.verify()
    assert ["a1", "a3", "r", "s"] == names(tree.roots(sort="name"))
    assert ["r", "b", "b1"] == names(tree.walk(ids["r"]))
    assert {"a1": {"a2": {}, "a4": {"a5": {}, "a6": {}}}} == shape(tree.nested(ids["a1"]))
    assert ["a1"] == names(tree.ancestors(ids["a2"]))
    assert 1 == tree.remove(ids["r"], children="root")
    assert ["a1", "a3", "b", "s"] == names(tree.roots(sort="name"))
    assert [] == store.verify()
