"""A subtree as one nested structure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient

from tests.patterns.tree.forest import ALL, FOUR, Array, Listed, Parented, plant
from treadle import AsyncStore, DataError, Limits, Nested, Store, UsageError

SHAPE = {"r": {"a": {"a1": {"a2": {}}, "a3": {}}, "b": {"b1": {}}}, "s": {}}


def planted(database: Any, model: Any, limits: Limits | None = None) -> tuple[Any, dict[str, Any]]:
    store = Store(database, [model], limits=limits)
    store.setup()
    return store, plant(store, model, SHAPE)


def shape(nested: Nested[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in nested.children:
        found |= shape(each)
    return {nested.node.name: found}


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)
def test_a_subtree_as_one_structure(database, model, constants):
    constants(tree_batch=2, tree_nested_max=7)
    store, ids = planted(database, model, Limits(find_page=2))
    tree = store.tree(model)
    assert {"r": SHAPE["r"]} == shape(tree.nested(ids["r"]))
    assert ["b", "a"] == [each.node.name for each in tree.nested(ids["r"], sort="-name").children]
    assert {"r": {"a": {}, "b": {}}} == shape(tree.nested(ids["r"], max_depth=1))
    assert {"r": {}} == shape(tree.nested(ids["r"], max_depth=0))
    plant(store, model, {"one more": {}}, ids["b"])
    with pytest.raises(DataError, match="max_depth=") as caught:
        tree.nested(ids["r"])
    assert "tree-too-large" == caught.value.code


def test_child_lists_keep_their_own_order(database):
    store, ids = planted(database, Listed)
    database.lists.update_one({"_id": ids["r"]}, {"$set": {"children": [ids["b"], ids["a"]]}})
    assert ["b", "a"] == [each.node.name for each in store.tree(Listed).nested(ids["r"]).children]


@pytest.mark.parametrize("model", [Array, Parented], ids=lambda model: model.__name__)
def test_a_cycle_is_cut(database, model):
    store, ids = planted(database, model)
    cycle = {"parent_id": ids["a2"], **({"ancestors": [ids["a1"], ids["a2"]]} if model is Array else {})}
    database[model.__treadle__.collection].update_one({"_id": ids["a1"]}, {"$set": cycle})
    assert {"a1": {"a2": {}}} == shape(store.tree(model).nested(ids["a1"]))


@pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)
def test_a_missing_node_and_a_wrong_depth_are_refused(database, model):
    store, ids = planted(database, model)
    tree = store.tree(model)
    with pytest.raises(DataError) as caught:
        tree.nested(ObjectId())
    assert "tree-node-missing" == caught.value.code
    with pytest.raises(UsageError, match="max_depth"):
        tree.nested(ids["a"], max_depth=-1)


@pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)
def test_the_asyncio_shell_answers_alike(server, database, model):
    _, ids = planted(database, model)

    async def read() -> None:
        async with AsyncMongoClient(server.uri) as client:
            tree = AsyncStore(client[database.name], [model]).tree(model)
            assert {"b": {"b1": {}}} == shape(await tree.nested(ids["b"]))

    asyncio.run(read())
