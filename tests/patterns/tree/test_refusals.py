"""Tree writes that the server, a validator or a limit refuses: they are told, and stop nothing else.

Covers: patterns/tree/layout
"""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field
from pymongo import MongoClient
from pymongo.errors import DuplicateKeyError

from tests.patterns.tree.forest import SMALL, Listed, Parented, names, plant
from treadle import (
    AncestorArray,
    ChildReferences,
    DataError,
    Document,
    ExtendedReference,
    Id,
    Limits,
    MaterializedPath,
    Store,
    UsageError,
    migration,
)

CHAIN = {"r": {"old": {"x": {"x1": {"x11": {}}, "x2": {}, "x3": {}}}, "new": {}}}


@pytest.fixture
def opened(server):
    """A store of these models, and its database."""
    clients = []

    def open_on(*models: type[Document], limits: Limits | None = None) -> tuple[Any, Any]:
        client: MongoClient[Any] = MongoClient(server.uri)
        client.drop_database("trees_refused")
        clients.append(client)
        store = Store(client["trees_refused"], list(models), limits=limits)
        store.setup()
        return store, client["trees_refused"]

    yield open_on
    for client in clients:
        client.drop_database("trees_refused")
        client.close()


def spoil(database: Any, collection: str, name: str) -> None:
    """Make a node invalid, so that the server refuses every write of it."""
    spoilt = [{"q": {"name": name}, "u": {"$set": {"weight": 11}}}]
    database.command("update", collection, bypassDocumentValidation=True, updates=spoilt)


def heal(database: Any, collection: str) -> None:
    database[collection].update_many({"weight": 11}, {"$set": {"weight": 1}})


class Heavy(
    Document,
    collection="heavy",
    validation="strict",
    tree=AncestorArray(parent="parent_id", ancestors="ancestors"),
):
    name: str
    weight: Annotated[int, Field(le=10)] = 1
    parent_id: Id | None = None
    ancestors: list[Id] = []


class HeavyPath(
    Document,
    collection="heavy_paths",
    validation="strict",
    tree=MaterializedPath(path="path", segment="name"),
):
    name: str
    weight: Annotated[int, Field(le=10)] = 1
    path: str = ""


def test_a_node_that_cannot_be_written_is_lifted_another_time(opened):
    store, database = opened(Heavy, limits=SMALL)
    ids = plant(store, Heavy, CHAIN)
    tree = store.tree(Heavy)
    spoil(database, "heavy", "x")
    with pytest.raises(DataError) as raised:
        tree.remove(ids["x"], children="lift")
    assert "tree-remove-stopped" == raised.value.code
    tree.move(ids["new"], ids["old"])
    Store(database, [Heavy])
    heal(database, "heavy")
    store.repair()
    assert [] == store.verify()


def test_repair_goes_on_past_a_node_that_cannot_be_written(opened):
    store, database = opened(Heavy, limits=SMALL)
    ids = plant(store, Heavy, CHAIN)
    for name in ("x1", "x3"):
        database.heavy.update_one({"name": name}, {"$set": {"ancestors": []}})
    spoil(database, "heavy", "x1")
    store.repair()
    assert {ids["x1"]} == {each.document_id for each in store.verify() if each.path == "ancestors"}
    heal(database, "heavy")
    store.repair()
    assert [] == store.verify()


@pytest.mark.parametrize("lift", [False, True], ids=["move", "lift"])
def test_what_is_below_a_path_that_stays_keeps_its_parent(opened, lift):
    store, database = opened(HeavyPath, limits=SMALL)
    ids = plant(store, HeavyPath, CHAIN)
    tree = store.tree(HeavyPath)
    spoil(database, "heavy_paths", "x1")
    if lift:
        with pytest.raises(DataError):
            tree.remove(ids["x"], children="lift")
    else:
        tree.move(ids["x"], ids["new"])
    heal(database, "heavy_paths")
    store.repair()
    assert ["x1"] == names(tree.ancestors(ids["x11"]))[-1:]


class Shallow(
    Document,
    collection="shallow",
    validation="strict",
    tree=[
        ChildReferences(children="children"),
        AncestorArray(parent="parent_id", ancestors="ancestors"),
    ],
):
    name: str
    children: list[Id] = []
    parent_id: Id | None = None
    ancestors: Annotated[list[Id], Field(max_length=3)] = []


def test_a_refused_move_is_not_made_later_and_stops_nobody(opened):
    store, database = opened(Shallow)
    ids = plant(store, Shallow, {"a": {"b": {"c": {"d": {}}}}, "e": {}, "f": {}})
    tree = store.tree(Shallow)
    with pytest.raises(DataError):
        tree.move(ids["e"], ids["d"])
    assert [] == names(tree.children(ids["d"]))
    tree.move(ids["f"], ids["c"])
    Store(database, [Shallow])
    assert {"a", "e"} == set(names(tree.roots()))
    assert [] == store.verify()


def test_a_refused_insert_lists_no_node_a_second_time(opened):
    store, database = opened(Listed)
    ids = plant(store, Listed, {"x": {"p": {}}, "q": {}})
    tree = store.tree(Listed)
    for parent in ("p", "q"):
        with pytest.raises(DuplicateKeyError):
            tree.insert(Listed(id=ids["x"], name="x"), ids[parent])
    tree.insert(Listed(name="y"), ids["q"])
    Store(database, [Listed])
    assert ["y"] == names(tree.children(ids["q"]))
    assert [] == names(tree.children(ids["p"]))
    assert [] == store.verify()


class Product(Document, collection="products"):
    node_id: Id | None = None
    name: Annotated[
        str | None, ExtendedReference(Parented, by="node_id", field="name", on_delete="clear")
    ] = None


@pytest.mark.parametrize("plain", [False, True], ids=["remove", "delete"])
def test_a_node_to_which_very_many_refer_can_be_removed(opened, plain):
    store, database = opened(Parented, Product, limits=Limits(cascade_max=20))
    ids = plant(store, Parented, {"r": {"x": {}}})
    store.insert_many([Product(node_id=ids["x"]) for _ in range(50)])
    if plain:
        store.delete(Parented, ids["x"])
    else:
        store.tree(Parented).remove(ids["x"])
    assert 0 == database.products.count_documents({"node_id": ids["x"]})
    Store(database, [Parented, Product])
    assert [] == store.verify()


def test_a_subtree_to_which_very_many_refer_is_refused(opened):
    store, _ = opened(Parented, Product, limits=Limits(cascade_max=20))
    ids = plant(store, Parented, {"r": {"x": {}}})
    store.insert_many([Product(node_id=ids["x"]) for _ in range(50)])
    with pytest.raises(UsageError) as raised:
        store.tree(Parented).remove(ids["r"], children="subtree")
    assert "cascade-too-large" == raised.value.code
    assert [] == store.verify()


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
