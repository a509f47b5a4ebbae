"""Removing nodes: alone, with their subtrees in steps, or with their children lifted."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import pytest

from tests.patterns.tree.forest import FOUR, Array, Listed, Parented, Pathed, PathedUp, names, plant
from treadle import (
    ChildReferences,
    DataError,
    Document,
    ExtendedReference,
    Id,
    Limits,
    MaterializedPath,
    PartlyDone,
    UsageError,
)
from treadle.patterns.tree.removes import RemoveSubtree

SHAPE = {"r": {"old": {"x": {"x1": {"x11": {}}, "x2": {"x21": {}}, "x3": {}}}, "new": {"n1": {}}}}
EACH = pytest.mark.parametrize("model", [*FOUR, PathedUp], ids=lambda model: model.__name__)


def planted(run: Any, *models: Any, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    store = run.store(list(models), **options)
    store.setup()
    return store, store.tree(models[0]), plant(store, models[0], SHAPE)


# -- subtrees ----------------------------------------------------------------------------------------


@EACH
def test_a_large_subtree_goes_in_steps_from_its_leaves(run, database, model, constants, monkeypatch):
    """After each step what is left is a tree."""
    constants(tree_remove_step=2)
    store, tree, ids = planted(run, model)
    steps, execute = [], store.write_path.execute

    def look(write: Any) -> Any:
        removed = yield from execute(write)
        if isinstance(write, RemoveSubtree):
            steps.append((removed, (yield from _findings(store, model))))
        return removed

    monkeypatch.setattr(store.write_path, "execute", look)
    assert 7 == tree.remove(ids["old"], children="subtree") == sum(removed for removed, _ in steps)
    assert len(steps) >= 4
    assert all(removed <= 2 and findings == [] for removed, findings in steps)
    assert {"r", "new", "n1"} == set(names(store.find(model)))
    assert [] == store.verify()


def _findings(store: Any, model: Any) -> Any:
    entry = store.graph.entry(model)
    (rule,) = entry.rules
    nodes = yield from rule.tree.find({})
    return (yield from rule.verify(nodes))


@EACH
def test_a_transaction_of_the_caller_removes_all_at_once(run, model, constants):
    constants(tree_remove_step=2)
    store, tree, ids = planted(run, model)
    with pytest.raises(ZeroDivisionError), store.transaction() as session:
        assert 7 == tree.remove(ids["old"], children="subtree", session=session)
        raise ZeroDivisionError
    assert (10, []) == (store.count(model), store.verify())


class Shop(Document, collection="shops"):
    node_id: Id
    name: Annotated[
        str | None, ExtendedReference("Parented", by="node_id", field="name", on_delete="restrict")
    ] = None


@pytest.mark.parametrize("late", [False, True], ids=["before", "between"])
def test_a_node_that_must_stay_stops_a_large_removal_and_nothing_else(run, late, constants, monkeypatch):
    """Before the first step, or, where the reference came later, as soon as it is met."""
    constants(tree_remove_step=2)
    if late:
        monkeypatch.setattr(RemoveSubtree, "_refuse_restricted", lambda self: iter(()))
    store, tree, ids = planted(run, Parented, Shop)
    shop = store.insert(Shop(node_id=ids["x2"]))
    with pytest.raises(PartlyDone if late else DataError, match="refers to it") as caught:
        tree.remove(ids["old"], children="subtree")
    left = set(names(store.find(Parented)))
    assert {"r", "old", "x", "x2", "new", "n1"} <= left
    assert (10 - len(left) if late else None) == getattr(caught.value, "done", None)
    assert [] == store.verify()
    tree.move(ids["n1"], ids["r"])
    store.delete(Shop, shop.id)
    tree.remove(ids["old"], children="subtree")
    assert {"r", "new", "n1"} == set(names(store.find(Parented)))


@pytest.mark.parametrize("step", [2, 1000], ids=["steps", "whole"])
@pytest.mark.parametrize("model", [Parented, Listed, Array], ids=lambda model: model.__name__)
def test_a_removal_in_a_cycle_comes_to_an_end(run, database, model, step, constants):
    constants(tree_remove_step=step)
    store = run.store([model])
    store.setup()
    ids = plant(store, model, {"r": {"a": {"b": {"c": {"d": {}}}}}})
    raw = database[model.__treadle__.collection]
    if model is Listed:
        raw.update_one({"_id": ids["r"]}, {"$set": {"children": []}})
        raw.update_one({"_id": ids["d"]}, {"$set": {"children": [ids["a"]]}})
    else:
        raw.update_one({"_id": ids["a"]}, {"$set": {"parent_id": ids["d"]}})
    tree = store.tree(model)
    if step > 2:
        assert 4 == tree.remove(ids["a"], children="subtree")
    else:
        with pytest.raises(DataError, match=r"each other's ancestors.*repair"):
            tree.remove(ids["a"], children="subtree")
    tree.insert(model(name="late"), ids["r"])
    store.repair()
    assert [] == store.verify()


class Product(Document, collection="products"):
    node_id: Id | None = None
    name: Annotated[
        str | None, ExtendedReference(Parented, by="node_id", field="name", on_delete="clear")
    ] = None


@pytest.mark.parametrize("how", ["remove", "delete", "subtree"])
def test_a_node_to_which_very_many_refer(run, database, how):
    """It can be removed, in chunks; with a whole subtree it is refused."""
    store, tree, ids = planted(run, Parented, Product, limits=Limits(cascade_max=20))
    store.insert_many([Product(node_id=ids["x3"]) for _ in range(50)])
    if how == "subtree":
        with pytest.raises(UsageError) as raised:
            tree.remove(ids["x"], children="subtree")
        assert "cascade-too-large" == raised.value.code
    else:
        (tree.remove if how == "remove" else lambda key: store.delete(Parented, key))(ids["x3"])
        assert 0 == database.products.count_documents({"node_id": ids["x3"]})
    assert [] == store.verify()


# -- lifts -------------------------------------------------------------------------------------------


@EACH
def test_lifted_children_keep_what_is_below_them(run, model):
    store, tree, ids = planted(run, model)
    assert 1 == tree.remove(ids["x"], children="lift")
    assert ["x1", "x2", "x3"] == names(tree.children(ids["old"]))
    assert ["r", "old", "x1"] == names(tree.ancestors(ids["x11"]))
    assert 1 == tree.remove(ids["r"], children="lift")
    assert {"old", "new"} == set(names(tree.roots()))
    assert [] == store.verify()


def test_lifted_children_take_the_place_of_their_parent_in_the_list(run):
    store = run.store([Listed])
    store.setup()
    ids = plant(store, Listed, {"r": {"a": {}, "b": {"b1": {}, "b2": {}}, "c": {}}})
    store.tree(Listed).remove(ids["b"], children="lift")
    assert ["a", "b1", "b2", "c"] == names(store.tree(Listed).children(ids["r"]))


@pytest.mark.parametrize("model", [Pathed, PathedUp], ids=lambda model: model.__name__)
def test_a_child_that_is_called_as_its_parent_can_take_its_place(run, model):
    """Also where nodes below it are called so, whose paths follow one after another."""
    store = run.store([model])
    store.setup()
    tree = store.tree(model)
    parent, key = tree.insert(model(name="r")).id, None
    # Ids in the reverse order, in which the server might go through them.
    chain = [model(name="a") for _ in range(5)][::-1]
    for node in chain:
        parent = tree.insert(node, parent).id
    key = tree.insert(model(name="leaf"), parent).id
    assert 1 == tree.remove(chain[0].id, children="lift")
    assert ",r,a,a,a,a,leaf," == store.get(model, key).path
    other = plant(store, model, {"t": {"u": {"v": {}}, "v": {}}})
    with pytest.raises(DataError, match="siblings"):
        tree.remove(other["u"], children="lift")
    assert [] == store.verify()


class Kept(
    Document, collection="kept", soft_delete="gone", tree=MaterializedPath(path="path", segment="name")
):
    name: str
    path: str = ""
    gone: dt.datetime | None = None


class KeptList(Document, collection="kept_lists", soft_delete="gone", tree=ChildReferences("children")):
    name: str
    children: list[Id] = []
    gone: dt.datetime | None = None


@pytest.mark.parametrize("model", [Kept, KeptList], ids=lambda model: model.__name__)
def test_a_node_whose_children_were_lifted_is_restored_below_its_parent(run, model):
    """It came back as a root: the lift took its path, or its place in the list, before its parent was noted."""
    store, tree, ids = planted(run, model)
    tree.remove(ids["x"], children="lift")
    store.restore(model, ids["x"])
    assert ["r", "old", "x"] == names(tree.path(ids["x"]))
    assert [] == names(tree.children(ids["x"]))
    assert [] == store.verify()
