"""The order of siblings: sorted by a declared field, or at an index in the list of their parent."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from tests.patterns.tree.forest import FOUR, Listed, names, plant
from treadle import (
    AncestorArray,
    ChildReferences,
    DeclarationError,
    Document,
    ParentReference,
    Store,
    UsageError,
)

STEPS = 60
RACES = 8


def test_siblings_can_be_sorted_by_a_field(run):
    class Tag(
        Document, collection="tags", tree=ParentReference(parent="parent_id", sort=["-weight", "name"])
    ):
        id: int
        name: str
        weight: int = 0
        parent_id: int | None = None

    store = run.store([Tag])
    store.setup()
    tree = store.tree(Tag)
    tree.insert(Tag(id=1, name="root"))
    for key, name, weight in ((2, "b", 1), (3, "a", 1), (4, "c", 5)):
        tree.insert(Tag(id=key, name=name, weight=weight), parent=1)
    assert [4, 3, 2] == [each.id for each in list(tree.children(1))]
    assert [4, 3, 2] == [each.node.id for each in tree.nested(1).children]
    assert [2, 3, 4] == [each.id for each in list(tree.children(1, sort="_id"))]


def test_child_lists_take_no_sort():
    class Node(Document, collection="nodes", tree=ChildReferences(children="children", sort="name")):
        id: int
        name: str = ""
        children: list[int] = []

    with pytest.raises(DeclarationError, match="tree-declaration"):
        Store.local([Node])


@pytest.mark.quick
def test_an_index_says_where_in_the_list_a_node_goes(run):
    store = run.store([Listed])
    store.setup()
    tree = store.tree(Listed)
    ids = plant(store, Listed, {"r": {"a": {}, "b": {}, "c": {}}, "s": {"x": {}}})
    for name, at in (("first", 0), ("middle", 2), ("last", 99)):
        ids[name] = tree.insert(Listed(name=name), ids["r"], at=at).id
    assert ["first", "a", "middle", "b", "c", "last"] == names(tree.children(ids["r"]))
    tree.move(ids["c"], ids["r"], at=0)
    tree.move(ids["first"], ids["r"], at=5)
    tree.move(ids["x"], ids["r"], at=1)
    assert ["c", "x", "a", "middle", "b", "last", "first"] == names(tree.children(ids["r"]))
    # With the parent that it has and no index, a node stays where it is.
    tree.move(ids["c"], ids["r"])
    assert "c" == names(tree.children(ids["r"]))[0]
    assert [] == names(tree.children(ids["s"]))
    assert [] == store.verify()


def test_a_random_history_of_indexes_gives_the_order_of_a_list(run):
    store = run.store([Listed])
    store.setup()
    tree, chance = store.tree(Listed), random.Random(27)
    parents = [store.insert(Listed(name=name)).id for name in "pq"]
    lists: dict[Any, list[Any]] = {parent: [] for parent in parents}
    for step in range(STEPS):
        parent, at = chance.choice(parents), chance.choice([None, 0, 1, 3, 2**40])
        present = [child for children in lists.values() for child in children]
        if not present or chance.random() < 0.4:
            child = tree.insert(Listed(name=str(step)), parent, at=at).id
        else:
            child = chance.choice(present)
            tree.move(child, parent, at=at)
            if at is None and child in lists[parent]:
                continue
            next(each for each in lists.values() if child in each).remove(child)
        lists[parent].insert(len(lists[parent]) if at is None else at, child)
    assert all(lists.values())
    assert lists == {parent: [each.id for each in list(tree.children(parent))] for parent in parents}
    assert [] == store.verify()


def test_racing_writers_lose_no_child(server, database):
    uri = server.uri.replace("/?", f"/{database.name}?")
    stores = [Store.open(uri, [Listed]) for _ in range(3)]
    stores[0].setup()
    ids = plant(stores[0], Listed, {"r": {"a": {}, "b": {}, "c": {}}})

    def work(store: Store, seed: int) -> None:
        chance = random.Random(seed)
        for count in range(RACES):
            if chance.random() < 0.5:
                store.tree(Listed).insert(Listed(name=f"{seed} {count}"), ids["r"], at=chance.randrange(3))
            else:
                store.tree(Listed).move(ids[chance.choice("abc")], ids["r"], at=chance.randrange(5))

    threads = [threading.Thread(target=work, args=(store, seed + 1)) for seed, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listed = stores[0].get(Listed, ids["r"]).children
    assert 3 < len(listed) == len(set(listed)) == stores[0].count(Listed) - 1
    assert [] == stores[0].verify()
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    "model", [each for each in FOUR if each is not Listed], ids=lambda model: model.__name__
)
def test_an_index_needs_child_lists(run, model):
    store = run.store([model])
    store.setup()
    ids = plant(store, model, {"r": {"a": {}}})
    with pytest.raises(UsageError, match="tree-order"):
        store.tree(model).insert(model(name="b"), ids["r"], at=0)
    with pytest.raises(UsageError, match="tree-order"):
        store.tree(model).move(ids["a"], ids["r"], at=0)
    assert ["a"] == names(store.tree(model).children(ids["r"]))


@pytest.mark.parametrize("at", [-1, 1.0, True, "first"])
def test_an_index_that_is_none_is_refused(run, at):
    store = run.store([Listed])
    store.setup()
    ids = plant(store, Listed, {"r": {"a": {}}})
    with pytest.raises(UsageError, match="first child is at=0"):
        store.tree(Listed).insert(Listed(name="b"), ids["r"], at=at)
    with pytest.raises(UsageError, match="tree-order"):
        store.tree(Listed).move(ids["a"], None, at=0)
    assert ["r"] == names(store.tree(Listed).roots())


@pytest.mark.parametrize("option", ["order", "depth", "within"])
def test_unknown_options_are_refused_as_ever(option):
    with pytest.raises(TypeError, match=option):
        AncestorArray(parent="parent_id", ancestors="ancestors", **{option: "name"})


def test_the_same_list_is_followed_by_arrays(run):
    """Where arrays follow from child lists, an index changes the list alone."""

    class Both(
        Document,
        collection="both",
        tree=[
            ChildReferences(children="children"),
            AncestorArray(parent="parent_id", ancestors="ancestors"),
        ],
    ):
        id: int
        children: list[int] = []
        parent_id: int | None = None
        ancestors: list[int] = []

    store = run.store([Both])
    store.setup()
    tree = store.tree(Both)
    tree.insert(Both(id=1))
    for key in (2, 3, 4):
        tree.insert(Both(id=key), 1, at=0)
    tree.move(2, 1, at=0)
    assert [2, 4, 3] == store.get(Both, 1).children
    assert [1] == store.get(Both, 4).ancestors
    assert [] == store.verify()
