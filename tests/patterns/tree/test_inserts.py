"""New, deleted and replaced nodes: plain writes, bulk loads, places in child lists."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from bson import ObjectId
from pymongo.errors import DuplicateKeyError

from tests.kit.command_log import CommandLog
from tests.patterns.tree.forest import (
    FOUR,
    Array,
    Deep,
    Listed,
    Parented,
    Pathed,
    PathedUp,
    Place,
    names,
    plant,
)
from treadle import AncestorArray, DataError, Document, Limits, Store, UsageError, migration

SHAPE = {"electronics": {"computers": {"laptops": {"gaming": {}}}, "phones": {}}, "books": {}}


@pytest.fixture
def open_store(run):
    def make(*models: Any, **options: Any) -> Any:
        store = run.store(list(models), **options)
        store.setup()
        return store

    return make


def refused(act: Any, code: str, error: Any = UsageError) -> str:
    with pytest.raises(error) as caught:
        act()
    assert code == caught.value.code
    return str(caught.value)


# -- plain writes ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_plain_insert_fills_what_follows_from_the_parent(open_store):
    store = open_store(Array)
    ids = plant(store, Array, SHAPE)
    stored = store.insert(Array(name="tablets", parent_id=ids["computers"], ancestors=[ObjectId()]))
    assert [ids["electronics"], ids["computers"]] == stored.ancestors
    assert stored == store.get(Array, stored.id)
    lost = Array(name="lost", parent_id=ObjectId())
    refused(lambda: store.insert(lost), "tree-parent-missing", DataError)
    assert 0 == store.count(Array, {"name": "lost"})
    store = open_store(PathedUp)
    ids = plant(store, PathedUp, SHAPE)
    stored = store.insert(PathedUp(name="new", parent_id=ids["phones"], path="nonsense"))
    assert ",electronics,phones,new," == stored.path


def test_a_plain_insert_says_its_place_by_its_path(open_store):
    store = open_store(Pathed)
    plant(store, Pathed, {"company": {"eng": {}}})
    assert ",new," == store.insert(Pathed(name="new")).path
    assert ",company,eng,new," == store.insert(Pathed(name="new", path=",company,eng,new,")).path
    for path in (",company,eng,", "company,new", ",company,,new,", ",new", "x", ",company,other,"):
        node = Pathed(name="new", path=path)
        refused(lambda node=node: store.insert(node), "tree-path-invalid")
    lost = Pathed(name="new", path=",nowhere,new,")
    refused(lambda: store.insert(lost), "tree-parent-missing", DataError)
    batch = [Pathed(name="c", path=",a,b,c,"), Pathed(name="a"), Pathed(name="b", path=",a,b,")]
    assert [",a,b,c,", ",a,", ",a,b,"] == [each.path for each in store.insert_many(batch)]
    assert [] == store.verify()


@pytest.mark.parametrize(
    ("model", "update"),
    [
        (Array, {"$set": {"parent_id": None}}),
        (Array, {"$unset": {"parent_id": 1}}),
        (Array, {"$push": {"ancestors": 1}}),
        (Array, {"$set": {"ancestors.0": 1}}),
        (Array, [{"$set": {"parent_id": {"$literal": None}}}]),
        (Array, [{"$replaceWith": {"name": "x"}}]),
        (Listed, {"$push": {"children": ObjectId()}}),
        (Listed, {"$pull": {"children": 1}}),
        (Deep, {"$set": {"whereItIs": {"parent": 2, "above": []}}}),
        (PathedUp, {"$set": {"path": ",x,"}}),
    ],
)
def test_an_update_of_a_place_is_refused_with_the_call_to_use(open_store, model, update):
    store = open_store(model)
    ids = plant(store, model, SHAPE)
    for act in (store.update, store.update_many):
        text = refused(lambda act=act: act(model, {"_id": ids["phones"]}, update), "field-maintained")
        if isinstance(update, dict):
            assert f"store.tree({model.__name__}).move(id, parent)" in text
    assert [] == store.verify()


def test_replace_keeps_the_place_and_refuses_another(open_store):
    store = open_store(Array)
    ids = plant(store, Array, SHAPE)
    stale = store.get(Array, ids["gaming"])
    store.tree(Array).move(ids["laptops"], ids["books"])
    stale.name = "games"
    replaced = store.replace(stale)
    assert ("games", [ids["books"], ids["laptops"]]) == (replaced.name, replaced.ancestors)
    stale.parent_id = ids["books"]
    assert "move" in refused(lambda: store.replace(stale), "tree-replace-moves")
    store = open_store(Listed)
    ids = plant(store, Listed, SHAPE)
    stale = store.get(Listed, ids["books"])
    store.tree(Listed).move(ids["phones"], ids["books"])
    assert [ids["phones"]] == store.replace(stale).children
    assert [] == store.verify()


@pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)
def test_a_plain_delete_refuses_to_leave_children_behind(open_store, model):
    store = open_store(model)
    ids = plant(store, model, SHAPE)
    for act in (store.delete, store.delete_many):
        text = refused(lambda act=act: act(model, {"_id": ids["laptops"]}), "tree-has-children", DataError)
        assert "children='subtree'" in text
    # All of them together leave none.
    assert 2 == store.delete_many(model, {"name": {"$in": ["laptops", "gaming"]}})
    assert ids["phones"] == store.delete(model, ids["phones"]).id
    assert ["computers"] == names(store.tree(model).children(ids["electronics"]))
    assert 3 == store.delete_many(model, {})
    assert [] == store.verify()


def test_a_refused_insert_lists_no_node_a_second_time(open_store):
    store = open_store(Listed)
    ids = plant(store, Listed, {"x": {"p": {}}, "q": {}})
    tree = store.tree(Listed)
    for parent in ("p", "q"):
        with pytest.raises(DuplicateKeyError):
            tree.insert(Listed(id=ids["x"], name="x"), ids[parent])
    tree.insert(Listed(name="y"), ids["q"])
    assert (["y"], []) == (names(tree.children(ids["q"])), names(tree.children(ids["p"])))
    assert [] == store.verify()


@pytest.mark.parametrize("model", [Pathed, PathedUp], ids=lambda model: model.__name__)
def test_siblings_have_different_segments(open_store, database, model):
    store = open_store(model)
    tree = store.tree(model)
    ids = plant(store, model, {"r": {"a": {"x": {}}, "b": {"x2": {}}}})
    for act in (
        lambda: tree.insert(model(name="a"), ids["r"]),
        lambda: store.insert(model(name="r")),
        lambda: tree.rename(ids["b"], "a"),
        lambda: store.insert_many([model(name="c"), model(name="c")]),
    ):
        assert "siblings" in refused(act, "tree-segment-taken", DataError)
    assert [] == store.verify()
    # The server refuses it of other programs too; nodes without a path are no duplicates of each other.
    raw = database[model.__treadle__.collection]
    raw.insert_many([{"name": "no path"}, {"name": "no path"}, {"name": "empty", "path": ""}])
    with pytest.raises(DuplicateKeyError):
        raw.insert_one({"name": "r", "path": ",r,"})


# -- what an insert costs ----------------------------------------------------------------------------


def test_one_insert_costs_the_same_in_a_tree_of_any_size(heard):
    """A bump of the parent, the insert, the commit; nothing that all inserts share."""
    database, listener = heard
    store = Store(database, [Array])
    store.setup()
    ids = plant(store, Array, SHAPE)
    costs = []
    for _ in range(2):
        listener.clear()
        store.tree(Array).insert(Array(name="x"), ids["phones"])
        costs.append(listener.names)
        store.insert_many([Array(name=f"{n}", parent_id=ids["phones"]) for n in range(300)])
    assert [["findAndModify", "insert", "commitTransaction"]] * 2 == costs
    assert isinstance(listener, CommandLog)


class Renamed(Document, collection="renamed", version=2, tree=AncestorArray("parent_id", "ancestors")):
    id: int
    parent_id: int | None = None
    ancestors: list[int] = []
    title: str = ""


@migration(Renamed, from_version=1, fields=("name", "title"))
def rename_title(document: dict[str, Any]) -> dict[str, Any]:
    document["title"] = document.pop("name", "")
    return document


def test_an_insert_looks_for_outdated_nodes_only_where_a_migration_changes_places(heard):
    database, listener = heard
    store = Store(database, [Renamed])
    store.setup()
    store.tree(Renamed).insert(Renamed(id=3))
    database["renamed"].insert_one({"_id": 1, "parent_id": None, "ancestors": [], "name": "old"})
    listener.clear()
    assert [1] == store.tree(Renamed).insert(Renamed(id=2), 1).ancestors
    assert ["findAndModify", "insert", "commitTransaction"] == listener.names
    # A move evaluates what follows from a node, and upgrades it first.
    assert [3] == store.tree(Renamed).move(1, 3).ancestors
    assert "old" == store.get(Renamed, 1).title
    assert [] == store.verify()


# -- bulk loads --------------------------------------------------------------------------------------


def bushy(model: Any, size: int, width: int) -> list[Any]:
    """Nodes that say their places in the way of their representation, parents first."""
    nodes = [model(name="0")]
    for number in range(1, size):
        parent, node = nodes[(number - 1) // width], model(name=str(number))
        if model is Listed:
            parent.children = [node.id, *parent.children]
        elif model is Pathed:
            node.path = f"{parent.path or ',0,'}{number},"
        else:
            node.parent_id = parent.id
        nodes.append(node)
    return nodes


@pytest.mark.parametrize("model", FOUR, ids=lambda model: model.__name__)
def test_a_batch_may_come_in_any_order_and_over_several_commits(open_store, model, constants):
    constants(tree_check_max=1)
    store = open_store(model, limits=Limits(insert_max=4))
    nodes = bushy(model, 23, 2)
    lists = {node.name: list(node.children) for node in nodes} if model is Listed else {}
    assert [each.id for each in nodes[::-1]] == [each.id for each in store.insert_many(nodes[::-1])]
    assert ["0", "2", "6", "14"] == names(store.tree(model).path(nodes[14].id))
    assert lists == ({each.name: each.children for each in store.find(model)} if lists else {})
    assert [] == store.verify()
    if model in (Array, Parented):
        # What cannot be is refused before the first piece.
        bad = [model(name=str(number)) for number in range(9)]
        bad[8].parent_id = ObjectId()
        refused(lambda: store.insert_many(bad), "tree-parent-missing", DataError)
        assert 23 == store.count(model)


def test_a_deep_load_goes_in_pieces(heard, constants):
    """Each commit holds no more ancestors than the server's cache takes; each node finds its parent."""
    database, listener = heard
    constants(tree_flat_max=5, tree_ancestors_max=60)
    store = Store(database, [Array])
    store.setup()
    chain = bushy(Array, 30, 1)
    listener.clear()
    stored = store.insert_many(chain[::-1])
    assert [each.id for each in chain[::-1]] == [each.id for each in stored]
    assert [each.id for each in chain[:29]] == store.get(Array, chain[29].id).ancestors
    # 435 ancestors in all.
    assert 8 <= listener.names.count("commitTransaction") <= 12
    listener.clear()
    store.insert_many([Array(name=f"x{number}", parent_id=chain[29].id) for number in range(10)])
    assert 5 == listener.names.count("commitTransaction")
    assert [] == store.verify()


@pytest.mark.parametrize("case", ["two", "itself", "lists"])
def test_a_batch_with_a_cycle_changes_nothing(open_store, case):
    model: Any = Listed if case == "lists" else Parented
    store = open_store(model)
    one, two, three = model(name="1"), model(name="2"), model(name="3")
    if case == "lists":
        one.children, two.children = [two.id], [one.id]
    else:
        one.parent_id, two.parent_id = two.id, one.id
        three.parent_id = three.id if case == "itself" else one.id
    assert "no cycles" in refused(lambda: store.insert_many([three, one, two]), "tree-cycle")
    assert 0 == store.count(model)


def test_a_list_names_new_nodes_once(open_store):
    store = open_store(Listed)
    known, twice = store.insert(Listed(name="known")), Listed(name="twice")
    for bad in (
        [Listed(name="x", children=[known.id])],
        [Listed(name="x", children=[ObjectId()])],
        [Listed(name="x", children=[twice.id]), Listed(name="z", children=[twice.id]), twice],
    ):
        refused(lambda bad=bad: store.insert_many(bad), "tree-child-unknown")
    assert 1 == store.count(Listed)


# -- places in child lists ---------------------------------------------------------------------------


@pytest.mark.quick
def test_an_index_says_where_in_the_list_a_node_goes(open_store):
    store = open_store(Listed)
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
    assert ([], []) == (names(tree.children(ids["s"])), store.verify())


def test_a_random_history_of_indexes_gives_the_order_of_a_list(open_store):
    store = open_store(Listed)
    tree, chance = store.tree(Listed), random.Random(27)
    lists: dict[Any, list[Any]] = {store.insert(Listed(name=name)).id: [] for name in "pq"}
    for step in range(60):
        parent, at = chance.choice(list(lists)), chance.choice([None, 0, 1, 3, 2**40])
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
    assert lists == {parent: [each.id for each in tree.children(parent)] for parent in lists}
    assert [] == store.verify()


def test_racing_writers_lose_no_child(server, database):
    uri = server.uri.replace("/?", f"/{database.name}?")
    stores = [Store.open(uri, [Listed]) for _ in range(3)]
    stores[0].setup()
    ids = plant(stores[0], Listed, {"r": {"a": {}, "b": {}, "c": {}}})

    def work(store: Store, seed: int) -> None:
        chance = random.Random(seed)
        for count in range(8):
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
    ("model", "at"),
    [(Array, 0), (Pathed, 0), (Parented, 0), *((Listed, at) for at in (-1, 1.0, True, "first"))],
)
def test_an_index_that_means_nothing_is_refused(open_store, model, at):
    store = open_store(model)
    tree, ids = store.tree(model), plant(store, model, {"r": {"a": {}}})
    refused(lambda: tree.insert(model(name="b"), ids["r"], at=at), "tree-order")
    refused(lambda: tree.move(ids["a"], ids["r"], at=at), "tree-order")
    refused(lambda: tree.move(ids["a"], None, at=0), "tree-order")
    assert ["a"] == names(tree.children(ids["r"]))


def test_nested_fields_under_other_stored_names(open_store, database):
    store = open_store(Deep)
    for number in (1, 2, 3):
        store.tree(Deep).insert(Deep(id=number, name=f"{number}"), number - 1 or None)
    assert {"parent": 2, "above": [1, 2]} == database["deep"].find_one({"_id": 3})["whereItIs"]
    assert [1] == store.insert(Deep(id=4, name="4", where_it_is=Place(parent=1))).where_it_is.above
