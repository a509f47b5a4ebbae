"""Parent Reference: one write per move, `$graphLookup` for the rest."""

from __future__ import annotations

from typing import Any

import pytest
from bson import ObjectId

from tests.patterns.tree.forest import Array, Listed, Parented, names, plant, tree_of
from treadle import DataError, Limits, Store, UsageError
from treadle.patterns.tree import reads

SHAPE = {"r": {"a": {"a1": {"a2": {}}, "a3": {}}, "b": {}}, "s": {}}


@pytest.fixture
def store(run):
    made = run.store([Parented])
    made.setup()
    return made


def test_a_move_writes_one_node(heard):
    database, listener = heard
    store = Store(database, [Parented])
    store.setup()
    ids = plant(store, Parented, SHAPE)
    listener.clear()
    store.tree(Parented).move(ids["a"], ids["b"])
    # What movers share, the new parent, the node.
    assert 3 == listener.names.count("findAndModify")
    assert {"findAndModify", "find", "aggregate", "commitTransaction"} == set(listener.names)
    assert ["r", "b", "a", "a1"] == names(store.tree(Parented).ancestors(ids["a2"]))


@pytest.mark.quick
def test_plain_writes_are_looked_after(store):
    ids = plant(store, Parented, SHAPE)
    assert ids["b"] == store.insert(Parented(name="new", parent_id=ids["b"])).parent_id
    with pytest.raises(DataError) as missing:
        store.insert(Parented(name="lost", parent_id=ObjectId()))
    assert "tree-parent-missing" == missing.value.code
    with pytest.raises(UsageError, match=r"store.tree\(Parented\).move\(id, parent\)"):
        store.update(Parented, ids["r"], {"$set": {"parent_id": ids["a2"]}})
    with pytest.raises(DataError, match="children"):
        store.delete(Parented, ids["a"])
    node = Parented(name="own parent")
    node.parent_id = node.id
    with pytest.raises(UsageError, match="no cycles"):
        store.insert(node)
    assert [] == store.verify()


def stages(explained: Any) -> list[str]:
    """The names of all stages in a server's explanation."""
    if isinstance(explained, list):
        return [name for each in explained for name in stages(each)]
    if not isinstance(explained, dict):
        return []
    own = [explained["stage"]] if isinstance(explained.get("stage"), str) else []
    return (
        own
        + [key for key in explained if key.startswith("$")]
        + [name for each in explained.values() for name in stages(each)]
    )


@pytest.mark.parametrize("model", [Parented, Listed], ids=lambda model: model.__name__)
def test_graph_lookup_goes_by_the_index(run, database, model):
    """`$graphLookup` reads as many keys as there are nodes in the answer, not the collection."""
    store = run.store([model])
    store.setup()
    ids = plant(store, model, SHAPE)
    database[model.__treadle__.collection].insert_many([{"name": "x"} for _ in range(200)])
    tree = tree_of(Store(database, [model]).graph.entry(model))
    stream = run(reads.descendants(tree, ids["a"]))
    (pipeline,) = stream.read.arguments
    command = {"aggregate": model.__treadle__.collection, "pipeline": pipeline, "cursor": {}}
    explained = database.command({"explain": command, "verbosity": "executionStats"})
    assert "$graphLookup" in stages(explained)
    assert "COLLSCAN" not in stages(explained)
    if "totalDocsExamined" in explained["stages"][1]:
        assert 20 > explained["stages"][1]["totalDocsExamined"]
    # The lookup itself asks for children by their parent; that question has its index.
    role = tree.roles.get("parent") or "_id"
    plan = database[model.__treadle__.collection].find({role: {"$in": [ids["a"]]}}).explain()
    assert {"COLLSCAN"}.isdisjoint(stages(plan["queryPlanner"]["winningPlan"]))


def test_descendants_beyond_the_memory_of_graph_lookup_still_stream(store, database):
    """The server gives up at 100 MB; then the levels are asked for batch by batch."""
    ids = plant(store, Parented, SHAPE)
    for number in range(9):
        database["parents"].insert_one({"name": f"{number}" * 12_000_000, "parent_id": ids["b"]})
    tree = store.tree(Parented)
    assert ["0", "1", "2"] == sorted(node.name[:1] for node in tree.descendants(ids["r"]))[:3]
    assert 14 == tree.count(ids["r"])
    with pytest.raises(DataError, match="AncestorArray") as caught:
        list(tree.descendants(ids["r"], sort="name"))
    assert "tree-too-large" == caught.value.code
    assert 15 == tree.remove(ids["r"], children="subtree")


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("model", [Parented, Listed], ids=lambda model: model.__name__)
def test_the_levels_below_the_first_ones_are_all_found(run, model, levels, constants):
    """The deeper levels are asked for in batches, however many `$graphLookup` has found."""
    constants(tree_graph_levels=levels, tree_batch=2)
    store = run.store([model], limits=Limits(find_page=2))
    store.setup()
    ids = plant(store, model, SHAPE)
    tree = store.tree(model)
    assert ["a", "a1", "a2", "a3", "b"] == sorted(names(tree.descendants(ids["r"])))
    for depth in range(5):
        expected = [node.name for node in tree.descendants(ids["r"]) if tree.depth(node.id) <= depth]
        assert sorted(expected) == sorted(names(tree.descendants(ids["r"], max_depth=depth)))


def test_descendants_in_a_cycle_of_raw_writes_come_to_an_end(run, database, constants):
    constants(tree_graph_levels=1)
    store = run.store([Parented])
    store.setup()
    ids = plant(store, Parented, SHAPE)
    database["parents"].update_one({"name": "r"}, {"$set": {"parent_id": ids["a2"]}})
    assert ["a", "a1", "a2", "a3", "b", "r"] == sorted(names(store.tree(Parented).descendants(ids["r"])))


def test_cycles_and_orphans_are_found_and_mended(store, database):
    ids = plant(store, Parented, SHAPE)
    database["parents"].update_one({"name": "r"}, {"$set": {"parent_id": ids["a2"]}})
    database["parents"].update_one({"name": "s"}, {"$set": {"parent_id": ObjectId("f" * 24)}})
    found = {(each.document_id, each.path, each.stored, each.expected) for each in store.verify()}
    assert {
        (ids["r"], "parent_id", ids["a2"], None),
        (ids["s"], "parent_id", ObjectId("f" * 24), None),
    } == found
    assert {"parent-reference"} == {each.pattern for each in store.verify()}
    assert 2 == store.repair()
    assert [] == store.verify()
    assert {"r", "s"} == set(names(store.tree(Parented).roots()))


def test_a_move_into_a_cycle_that_was_there_before_is_refused(store, database):
    """Somebody else's cycle does not block reading upwards."""
    ids = plant(store, Parented, SHAPE)
    database["parents"].update_one({"name": "r"}, {"$set": {"parent_id": ids["a2"]}})
    with pytest.raises(UsageError, match="no cycles"):
        store.tree(Parented).move(ids["a"], ids["a2"])
    assert "s" == store.tree(Parented).move(ids["s"], ids["a"]).name


def test_siblings_come_in_the_order_that_is_asked_for(run):
    for model in (Parented, Array):
        store = run.store([model])
        store.setup()
        top = store.insert(model(name="top"))
        for name in ("b", "c", "a"):
            store.tree(model).insert(model(name=name), top.id)
        tree = store.tree(model)
        assert ["b", "c", "a"] == names(tree.children(top.id))
        assert ["a", "b", "c"] == names(tree.children(top.id, sort="name"))
        assert ["c", "b", "a"] == names(tree.children(top.id, sort=[("name", -1)]))
        assert ["c", "b", "a"] == names(tree.descendants(top.id, sort="-name"))
        store.insert_many([model(name="z"), model(name="y")])
        assert ["top", "z", "y"] == names(tree.roots())
        assert ["z", "y", "top"] == names(tree.roots(sort="-name"))


def test_bad_arguments_are_refused_at_once(store):
    tree = store.tree(Parented)
    for call in (tree.children, tree.descendants, tree.depth, tree.ancestors, tree.path, tree.remove):
        with pytest.raises(UsageError) as caught:
            call({"$ne": None})
        assert "id-invalid" == caught.value.code
    for depth in (-1, 1.5, True, "2"):
        with pytest.raises(UsageError, match="max_depth"):
            tree.descendants(ObjectId(), max_depth=depth)
    with pytest.raises(UsageError, match="'refuse', 'subtree' or 'lift'"):
        tree.remove(ObjectId(), children="all")
    with pytest.raises(UsageError, match="no segment"):
        tree.rename(ObjectId(), "x")
    with pytest.raises(UsageError, match="the tree of Parented"):
        tree.insert(Array(name="x"))
