"""A path of nodes that is found, or created where it is missing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient

from tests.patterns.tree.forest import ALL, FOUR, Array, Deep, Parented, Pathed, names, plant
from treadle import AsyncStore, DataError, Store, UsageError


def nodes(model: Any, *path: str) -> list[Any]:
    return [
        model(id=100 + number, name=name) if model is Deep else model(name=name)
        for number, name in enumerate(path)
    ]


def opened(database: Any, model: Any) -> Any:
    store = Store(database, [model])
    store.setup()
    return store


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)
def test_what_is_there_is_found_and_the_rest_is_created(database, model):
    store = opened(database, model)
    tree = store.tree(model)
    ids = plant(
        store, model, {"r": {"a": {"a1": {}}, "b": {}}, "a": {}} if model is not Pathed else {"r": {"a": {}}}
    )
    found = tree.find_or_create_path(nodes(model, "r", "a", "new", "newer"), by="name")
    assert [ids["r"]] == [found[0].id]
    assert ["r", "a", "new", "newer"] == names(found)
    assert ["r", "a", "new"] == names(tree.ancestors(found[-1].id))
    before = store.count(model)
    again = tree.find_or_create_path(nodes(model, "r", "a", "new", "newer"), by="name")
    assert [each.id for each in found] == [each.id for each in again]
    below = tree.find_or_create_path(nodes(model, "new"), parent=found[1].id, by="name")
    assert [found[2].id] == [each.id for each in below]
    assert before == store.count(model)
    assert [] == tree.find_or_create_path([], by="name")
    assert [] == store.verify()


@pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)
def test_callers_that_race_get_the_same_nodes(database, model):
    store = opened(database, model)
    tree = store.tree(model)
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(
                lambda last: tree.find_or_create_path(nodes(model, "r", "a", f"leaf {last % 2}"), by="name"),
                range(8),
            )
        )
    assert 1 == len({each[1].id for each in made})
    assert 4 == store.count(model)
    assert [] == store.verify()


def test_a_path_is_found_by_its_segments_unless_told_otherwise(database):
    tree = opened(database, Pathed).tree(Pathed)
    assert ",r,a," == tree.find_or_create_path(nodes(Pathed, "r", "a"))[-1].path


def test_what_is_wrong_is_refused(database):
    store = opened(database, Parented)
    tree = store.tree(Parented)
    with pytest.raises(UsageError, match="needs by="):
        tree.find_or_create_path(nodes(Parented, "r"))
    with pytest.raises(UsageError, match="no field of Parented"):
        tree.find_or_create_path(nodes(Parented, "r"), by="nmae")
    with pytest.raises(UsageError, match="the tree of Parented"):
        tree.find_or_create_path(nodes(Array, "r"), by="name")
    with pytest.raises(DataError) as caught:
        tree.find_or_create_path(nodes(Parented, "r"), parent=ObjectId(), by="name")
    assert "tree-parent-missing" == caught.value.code
    assert 0 == store.count(Parented)


@pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)
def test_the_asyncio_shell_creates_too(server, database, model):
    opened(database, model)

    async def create() -> None:
        async with AsyncMongoClient(server.uri) as client:
            tree = AsyncStore(client[database.name], [model]).tree(model)
            found = await tree.find_or_create_path(nodes(model, "r", "a"), by="name")
            assert ["r"] == names(await tree.ancestors(found[-1].id))

    asyncio.run(create())
